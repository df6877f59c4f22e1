"""Figures, drawn with matplotlib where it is installed (the extra `plots`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from icrl_gym.statistics import bootstrap_interval

__all__ = [
    "binned",
    "depth_figure",
    "learning_curves",
    "new_figure",
    "performance_profiles",
    "save_figure",
    "task_curves",
]

INSTALL = 'pip install "icrl-gym[plots]"'


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that size in inches; None, and a warning, without matplotlib."""
    # Imported here, because that takes a second, and by its object-oriented interface: pyplot would keep every figure, and
    # its backend, for the whole process.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn(f"no figures without matplotlib; {INSTALL} brings it.", stacklevel=3)
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, file: Path) -> None:
    """Write a figure, whole or not at all.

    Args:
        figure: Of matplotlib.
        file: Its suffix says the format, such as ``.png`` (at 120 dots an inch) or ``.pdf``; its folder exists.

    Raises:
        ValueError: A suffix that matplotlib has no format for.
    """
    kind = file.suffix.removeprefix(".").lower()
    partial = file.with_name(f".partial_{file.name}")
    # Without the date in it, the same numbers give the same file.
    figure.savefig(partial, dpi=120, format=kind, metadata={"CreationDate": None} if kind == "pdf" else None)
    partial.replace(file)


def binned(timesteps: npt.ArrayLike, values: npt.ArrayLike, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean value in each bin of timesteps; NaN in a bin without any.

    Args:
        timesteps: (m,)
        values: (m,)
        edges: (k+1,), ascending.

    Returns:
        (k,)
    """
    index = np.digitize(np.asarray(timesteps, float), edges[1:-1], right=True)
    values = np.asarray(values, float)
    counts = np.bincount(index, minlength=len(edges) - 1)
    sums = np.bincount(index, weights=values, minlength=len(edges) - 1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def learning_curves(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    file: Path,
    title: str = "",
    ylabel: str = "episode return",
    n_bins: int = 25,
) -> None:
    """Draw returns against environment steps: a thin line a seed and a bold one for their mean.

    Args:
        curves: From a label to one (timesteps, values) pair a seed; values of single episodes.
        file: The PNG to write; not without matplotlib, which is an extra.
        title: Of the figure.
        ylabel: Of the vertical axis.
        n_bins: Episodes are averaged within so many equal stretches of steps.
    """
    figure = new_figure(6, 4)
    if figure is None:
        return
    axes = figure.add_subplot()
    last = max((float(np.max(t)) for seeds in curves.values() for t, _ in seeds if np.size(t)), default=1.0)
    edges = np.linspace(0.0, last, n_bins + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    for color, (label, seeds) in enumerate(curves.items()):
        lines = np.array([binned(t, v, edges) for t, v in seeds if np.size(t)])
        if not len(lines):
            continue
        if len(lines) > 1:
            for line in lines:
                seen = np.isfinite(line)
                axes.plot(middle[seen], line[seen], color=f"C{color}", alpha=0.3, linewidth=1)
        together = np.ma.masked_invalid(lines).mean(0).filled(np.nan)
        seen = np.isfinite(together)
        name = f"{label} ({len(lines)} seeds)" if len(lines) > 1 else label
        axes.plot(middle[seen], together[seen], color=f"C{color}", linewidth=2, marker=".", label=name)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    if axes.lines:
        axes.legend()
    save_figure(figure, file)


def task_curves(
    curves: Mapping[str, Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]], file: Path, ylabel: str
) -> bool:
    """Draw learning curves of all tasks in one figure: the mean over seeds, in a band of its 95% bootstrap intervals.

    Args:
        curves: From a task to a label to one (timesteps, values) pair a seed. Seeds of one label are compared at those timesteps
            that all of them have, or if there is none, in 25 equal stretches.
        file: The PNG to write; not without matplotlib, which is an extra.
        ylabel: Of the vertical axes.

    Returns:
        Whether it was drawn.
    """
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = new_figure(4.2 * columns, 3.1 * rows + 0.4)
    if figure is None:
        return False
    from matplotlib.ticker import EngFormatter

    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axes, (task, labels) in zip(grid, curves.items(), strict=False):
        for color, (label, seeds) in enumerate(labels.items()):
            seeds = [(t, v) for t, v in seeds if np.size(t)]
            if not seeds:
                continue
            points, values = _aligned(seeds)
            low, high = np.array([bootstrap_interval(column) for column in values.T.tolist()]).T
            (handles[label],) = axes.plot(points, values.mean(0), color=f"C{color}", marker=".", label=label)
            if len(seeds) > 1:
                axes.fill_between(points, low, high, color=f"C{color}", alpha=0.2, linewidth=0)
        axes.set_title(task, fontsize=9)
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylabel(ylabel)
    for axes in grid[len(curves) :]:
        axes.set_visible(False)
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), 3 * columns)
        )
    save_figure(figure, file)
    return True


def performance_profiles(
    thresholds: npt.ArrayLike,
    curves: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]],
    file: Path,
    xlabel: str,
) -> bool:
    """Draw the fraction of runs with a score above each threshold.

    Args:
        thresholds: (k,)
        curves: From a label to (fractions, lower ends, upper ends), each (k,).
        file: The PNG to write; not without matplotlib, which is an extra.
        xlabel: What the score is.

    Returns:
        Whether it was drawn.

    Source: Agarwal et al. 2021, section 4.2.
    """
    figure = new_figure(5.5, 3.8)
    if figure is None:
        return False
    axes = figure.add_subplot()
    for color, (label, (fractions, low, high)) in enumerate(curves.items()):
        axes.step(thresholds, fractions, where="post", color=f"C{color}", label=label)
        axes.fill_between(thresholds, low, high, step="post", color=f"C{color}", alpha=0.15, linewidth=0)
    axes.set_xlabel(f"score: {xlabel}")
    axes.set_ylabel("fraction of runs with a larger score")
    axes.set_ylim(0, 1.02)
    if curves:
        axes.legend()
    save_figure(figure, file)
    return True


def _aligned(
    seeds: Sequence[tuple[Sequence[float], Sequence[float]]], n_bins: int = 25
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The curves of seeds at points that all of them have: (k,) and (seeds, k)."""
    shared = sorted(set.intersection(*(set(t) for t, _ in seeds)))
    if len(shared) > 1 or (shared and all(len(t) == 1 for t, _ in seeds)):
        rows = [[dict(zip(t, v, strict=True))[point] for point in shared] for t, v in seeds]
        return np.array(shared, float), np.array(rows, float)
    edges = np.linspace(0.0, max(max(t) for t, _ in seeds), n_bins + 1)
    lines = np.array([binned(t, v, edges) for t, v in seeds])
    seen = np.isfinite(lines).all(0)
    return ((edges[1:] + edges[:-1]) / 2)[seen], lines[:, seen]


def depth_figure(curve: Mapping[float, float]) -> Any:
    """A figure of root mean square TD error against depth.

    Args:
        curve: From the number of layers (``math.inf`` for the fixed point) to the error.

    Returns:
        A matplotlib ``Figure``; None without matplotlib, which is an extra.
    """
    figure = new_figure(5, 3.5)
    if figure is None:
        return None
    axes = figure.add_subplot()
    finite = [depth for depth in curve if math.isfinite(depth)]
    axes.plot(finite, [curve[depth] for depth in finite], marker="o", label="layers")
    if math.inf in curve:
        axes.axhline(curve[math.inf], linestyle="--", color="C1", label="fixed point")
        axes.legend()
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel("depth (layers)")
    axes.set_ylabel("in-context TD error (rms)")
    axes.set_ylim(bottom=0)
    return figure
