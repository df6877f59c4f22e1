"""Figures, drawn with matplotlib where it is installed (the extra `plots`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["binned", "depth_figure", "learning_curves", "new_figure"]

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
    partial = file.with_name(f".partial_{file.name}")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(file)


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
