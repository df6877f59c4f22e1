"""What one line of the speed table holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from icrl_gym.speed_benchmark.timing import Spread

__all__ = ["Goal", "Measured", "Settings", "missing"]


@dataclass(frozen=True)
class Settings:
    """What every row is measured with.

    Attributes:
        rounds: Alternating rounds.
        quick: Small sizes, to try that everything works.
        n_features: d of the states.
        total_timesteps: Of each PPO run.
    """

    rounds: int = 11
    quick: bool = False
    n_features: int = 39
    total_timesteps: int = 24_576

    def size(self, full: int, quick: int) -> int:
        """A size, or the small one that stands for it."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Goal:
    """What a row is meant to reach.

    Attributes:
        kind: ``"at least"`` or ``"at most"``.
        value: In the row's unit.
    """

    kind: Literal["at least", "at most"]
    value: float

    def reached(self, measured: float) -> bool:
        """Whether a number does."""
        return measured >= self.value if self.kind == "at least" else measured <= self.value


@dataclass(frozen=True)
class Measured:
    """One comparison.

    Attributes:
        row: The name that ``--rows`` takes.
        what: What was timed.
        against: What it was timed against; empty where nothing was.
        value: The number that counts, over the rounds: a ratio unless ``unit`` says otherwise.
        unit: Of ``value``; ``"x faster"``, ``"x the time"``, ``"us a step"``, ...
        goal: None where the row only informs.
        seconds: Median seconds a call, by name.
        differences: Largest absolute difference from the slow twin, by type; empty where there is none.
        note: What a reader has to know besides.
    """

    row: str
    what: str
    against: str
    value: Spread
    unit: str = "x faster"
    goal: Goal | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def verdict(self) -> str:
        """``"yes"``, ``"no"``, or nothing without a goal or a number."""
        if self.goal is None or math.isnan(self.value.median):
            return ""
        return "yes" if self.goal.reached(self.value.median) else "no"


def missing(row: str, what: str, against: str, why: str) -> Measured:
    """A comparison that could not be made here, so that the table says so."""
    return Measured(row, what, against, Spread(math.nan, math.nan, math.nan), note=why)
