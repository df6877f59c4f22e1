"""Cost against the number of transitions, of layers and of features, with fitted exponents."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from icrl_gym.kernels import LaplacianKernel
from icrl_gym.speed_benchmark.measured import Settings
from icrl_gym.speed_benchmark.problems import random_context, random_states
from icrl_gym.speed_benchmark.timing import side_by_side, spread
from icrl_gym.transformer import InContextTransformer

__all__ = ["Curve", "exponent", "scaling"]


@dataclass(frozen=True)
class Curve:
    """One line of the figure.

    Attributes:
        variable: ``"n"``, ``"L"`` or ``"d"``.
        label: What was timed.
        points: The values of the variable.
        seconds: A median for each.
        low: The lower quartile.
        high: The upper quartile.
        exponent: Of a power law through the upper half of the points, where what grows outweighs what does not.
    """

    variable: str
    label: str
    points: list[float]
    seconds: list[float]
    low: list[float]
    high: list[float]
    exponent: float


def scaling(settings: Settings) -> list[Curve]:
    """Conditioning and 2,048 values, against n, L and d; the other two stay at n = 512, L = 20 and d = 39."""
    n, layers, d, m = settings.size(512, 64), 20, settings.n_features, settings.size(2048, 64)
    grow_n = [128, 256, 512, 1024, 2048] if not settings.quick else [32, 64, 128]
    grow_l = [5, 10, 20, 50, 100, 200, 400] if not settings.quick else [5, 10, 20]
    grow_d = [4, 8, 16, 32, 64, 128, 256] if not settings.quick else [4, 8, 16]

    def layered(n: int, layers: float, d: int, landmarks: int | None = None) -> Callable[[], object]:
        transformer = InContextTransformer(LaplacianKernel(d**0.5), n_layers=layers, n_landmarks=landmarks)
        return functools.partial(transformer.condition, random_context(n, d))

    def values(n: int, d: int) -> Callable[[], object]:
        transformer = InContextTransformer(LaplacianKernel(d**0.5), n_layers=layers)
        return functools.partial(transformer.condition(random_context(n, d)), random_states(m, d))

    few = settings.size(256, 16)
    through = grow_n if settings.quick else [*grow_n, 8192, 32768]
    return [
        _curve("n", f"conditioning, {layers} layers", grow_n, lambda x: layered(x, layers, d), settings),
        _curve("n", "conditioning, fixed point", grow_n, lambda x: layered(x, math.inf, d), settings),
        _curve("n", f"conditioning, fixed point, {few} landmarks", through, lambda x: layered(x, math.inf, d, few), settings),
        _curve("n", f"{m} values", grow_n, lambda x: values(x, d), settings),
        _curve("L", f"conditioning, n = {n}", grow_l, lambda x: layered(n, x, d), settings),
        _curve("d", f"conditioning, {layers} layers, n = {n}", grow_d, lambda x: layered(n, layers, x), settings),
        _curve("d", f"{m} values, n = {n}", grow_d, lambda x: values(n, x), settings),
    ]  # fmt: skip


def exponent(points: Sequence[float], seconds: Sequence[float]) -> float:
    """The power p of seconds = a points^p, by least squares of the logarithms over the upper half of the points (two at least).

    Example:
        >>> round(exponent([1, 2, 4, 8], [5.0, 3.0, 12.0, 48.0]), 6)
        2.0
    """
    half = min(len(points) // 2, len(points) - 2)
    return float(np.polyfit(np.log(points[half:]), np.log(seconds[half:]), 1)[0])


def _curve(
    variable: str, label: str, points: list[int], make: Callable[[int], Callable[[], object]], settings: Settings
) -> Curve:
    taken = side_by_side({str(x): make(x) for x in points}, min(settings.rounds, 5), 0.005)
    spreads = [spread(taken[str(x)]) for x in points]
    medians = [s.median for s in spreads]
    return Curve(
        variable, label, [float(x) for x in points], medians, [s.low for s in spreads], [s.high for s in spreads],
        exponent(points, medians),
    )  # fmt: skip
