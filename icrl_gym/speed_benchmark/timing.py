"""Timings that can be compared: side by side in one process, in turn, so that a machine whose speed drifts is fair to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Spread", "ratio_of", "side_by_side", "spread"]


@dataclass(frozen=True)
class Spread:
    """The middle of alternating rounds.

    Attributes:
        median: Of all rounds.
        low: Their lower quartile.
        high: Their upper quartile.
    """

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """The median and the quartiles of rounds.

    Args:
        values: One a round, at least one.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
        Spread(median=3.0, low=2.0, high=4.0)
    """
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(float(median), float(low), float(high))


def side_by_side(
    calls: Mapping[str, Callable[[], object]], rounds: int, least_seconds: float = 0.02
) -> dict[str, list[float]]:
    """Seconds a call of each function in each round.

    Every function is called once before the clock starts. In a round each has its turn, in the opposite order from the round before;
    a fast one is called so often in its turn that it takes ``least_seconds``.

    Args:
        calls: What to time, by name.
        rounds: How many rounds.
        least_seconds: Of one turn.

    Returns:
        By name, seconds a call: one entry a round, the rounds of all in the same order.

    Raises:
        ValueError: Fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"expected at least one round, got {rounds}.")
    repeats = {name: _repeats(call, least_seconds) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in list(calls) if index % 2 else reversed(list(calls)):
            call, count = calls[name], repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                call()
            taken[name].append((time.perf_counter() - start) / count)
    return taken


def ratio_of(above: list[float], below: list[float]) -> Spread:
    """The ratio of two functions' times, round by round."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def _repeats(call: Callable[[], object], least_seconds: float) -> int:
    call()
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    return max(1, int(np.ceil(least_seconds / max(once, 1e-9))))
