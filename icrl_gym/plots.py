"""Learning curves as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

__all__ = ["binned", "learning_curves"]


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
        file: The PNG to write.
        title: Of the figure.
        ylabel: Of the vertical axis.
        n_bins: Episodes are averaged within so many equal stretches of steps.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
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
