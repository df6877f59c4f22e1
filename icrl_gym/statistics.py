"""What a few runs of a few tasks say: intervals over seeds, and aggregates over tasks, from NumPy and SciPy.

The scores of a learner are one array of runs a task, ``[(n_1,), (n_2,), ...]``; tasks may have different numbers of runs.

Source:
    Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (NeurIPS), sections 4.1 to 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "Scores",
    "bootstrap_interval",
    "interquartile_mean",
    "normalized",
    "performance_profile",
    "probability_of_improvement",
    "stratified_interval",
    "stratified_resamples",
    "time_average",
]

Scores = Sequence[npt.ArrayLike]
"""One array of runs' scores a task."""


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


def interquartile_mean(scores: Scores) -> float:
    """The mean of the middle half of all runs of all tasks.

    Of m runs, the ``int(m / 4)`` lowest and as many of the highest are left out.

    Args:
        scores: One array of runs a task.

    Returns:
        The mean; NaN without any run.

    Source: Agarwal et al. 2021, section 4.3.

    Example:
        >>> interquartile_mean([[0.0, 1.0], [2.0, 100.0]])
        1.5
    """
    runs = _together(scores)
    if not runs.size:
        return math.nan
    from scipy.stats import trim_mean

    return float(trim_mean(runs, 0.25))


def probability_of_improvement(scores: Scores, others: Scores) -> float:
    """How likely a run of one learner beats a run of another, averaged over tasks; a tie counts half.

    On each task it is the Mann-Whitney statistic over the number of pairs, ``U / (n m)``.

    Args:
        scores: One array of runs a task.
        others: Likewise, of the other learner.

    Returns:
        The probability; NaN where no task has runs of both. A task without runs of both is left out.

    Raises:
        ValueError: Not the same number of tasks.

    Source: Agarwal et al. 2021, section 4.3.

    Example:
        >>> probability_of_improvement([[1.0, 3.0]], [[2.0, 3.0]])
        0.375
    """
    if len(scores) != len(others):
        raise ValueError(
            f"both learners need the same tasks, got scores of {len(scores)} and of {len(others)}; pass an empty array for a "
            f"task without runs."
        )
    tasks = []
    for mine, theirs in zip(scores, others, strict=True):
        x, y = np.asarray(mine, float)[:, None], np.asarray(theirs, float)
        if x.size and y.size:
            tasks.append(np.mean((x > y) + 0.5 * (x == y)))
    return float(np.mean(tasks)) if tasks else math.nan


def performance_profile(scores: Scores, thresholds: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The fraction of runs with a score above each threshold, averaged over tasks.

    Args:
        scores: One array of runs a task; tasks without runs are left out.
        thresholds: (k,)

    Returns:
        (k,); NaN without any run.

    Source: Agarwal et al. 2021, section 4.2 (the run-score distribution).

    Example:
        >>> performance_profile([[0.2, 0.6], [1.0, 1.0]], [0.0, 0.5, 1.0])
        array([1.  , 0.75, 0.  ])
    """
    taus = np.asarray(thresholds, float)
    tasks = [(np.asarray(runs, float)[:, None] > taus).mean(0) for runs in scores if np.size(runs)]
    return np.mean(tasks, 0) if tasks else np.full(len(taus), np.nan)


def stratified_resamples(scores: Scores, rng: np.random.Generator) -> list[npt.NDArray[np.float64]]:
    """Runs drawn with replacement within each task, as many as it has.

    Args:
        scores: One array of runs a task.
        rng: What draws.

    Returns:
        One array a task.
    """
    arrays = [np.asarray(runs, float) for runs in scores]
    return [runs[rng.integers(len(runs), size=len(runs))] if len(runs) else runs for runs in arrays]


def stratified_interval(
    statistic: Callable[..., float | npt.NDArray[np.float64]],
    *learners: Scores,
    n_resamples: int = 2000,
    seed: int = 0,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A 95% interval of a statistic of some learners' scores, from a bootstrap that resamples the runs of each task.

    Tasks are what they are; only the runs vary. So the interval says what other seeds would have given, not what other tasks.

    Args:
        statistic: A function of the learners' scores; its value may be an array.
        *learners: The scores of each, resampled on their own.
        n_resamples: Draws.
        seed: Of the draws.

    Returns:
        The lower and the upper ends (percentile method), shaped as the statistic; NaN where no task has two runs, because such runs
        say nothing about seeds.

    Source: Agarwal et al. 2021, section 4.1.
    """
    rng = np.random.default_rng(seed)
    draws = [statistic(*(stratified_resamples(scores, rng) for scores in learners)) for _ in range(n_resamples)]
    low, high = (np.asarray(end) for end in np.percentile(np.asarray(draws, float), [2.5, 97.5], axis=0))
    if not any(np.size(runs) > 1 for scores in learners for runs in scores):
        return np.full_like(low, np.nan), np.full_like(high, np.nan)
    return low, high


def time_average(timesteps: npt.ArrayLike, values: npt.ArrayLike) -> float:
    """The area under a learning curve over the steps that it spans (trapezoids): its mean over the training.

    Args:
        timesteps: (k,), ascending.
        values: (k,)

    Returns:
        The mean; the value itself for a single point, NaN for none.

    Example:
        >>> time_average([0, 10, 30], [0.0, 2.0, 2.0])
        1.6666666666666667
    """
    t, v = np.asarray(timesteps, float), np.asarray(values, float)
    if len(t) < 2:
        return float(v[0]) if len(v) else math.nan
    # Written out: NumPy 1.26 and 2 have the rule under different names.
    return float(((v[1:] + v[:-1]) / 2 * np.diff(t)).sum() / (t[-1] - t[0]))


def normalized(values: npt.ArrayLike, reference: float) -> npt.NDArray[np.float64]:
    """Scores in units of a reference, which has the score 1: ``1 + (x - m) / |m|``.

    With a positive reference m that is x / m. With a negative one, as for costs, it still grows with x.

    Args:
        values: (k,)
        reference: m, not zero.

    Returns:
        (k,); NaN for a reference of zero, which is no unit.

    Example:
        >>> normalized([2.0, 6.0], 4.0), normalized([-2.0], -4.0)
        (array([0.5, 1.5]), array([1.5]))
    """
    x = np.asarray(values, float)
    return np.full_like(x, np.nan) if reference == 0 else 1 + (x - reference) / abs(reference)


def _together(scores: Scores) -> npt.NDArray[np.float64]:
    return np.concatenate([np.asarray(runs, float).ravel() for runs in scores]) if len(scores) else np.zeros(0)
