"""Intervals of a mean over seeds, from SciPy's bootstrap."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["bootstrap_interval"]


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """A 95% bootstrap interval of the mean (percentile method); NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan, math.nan
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    # Imported here: it takes most of a second, which no command should wait for that draws no interval.
    from scipy.stats import bootstrap

    interval = bootstrap(
        (np.asarray(values),), np.mean, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(interval.low), float(interval.high)
