"""What an experiment leaves behind: a table, figures, TensorBoard events, and a verdict in words."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from icrl_gym.plots import save_figure
from icrl_gym.runs import versions, write_whole
from icrl_gym.statistics import bootstrap_interval
from icrl_gym.tables import markdown_table

__all__ = ["Report", "interval", "mean_curve"]


@dataclass
class Report:
    """The outcome of an experiment.

    Attributes:
        name: Of the experiment.
        claim: What the paper says.
        finding: What was measured, in words.
        agrees: Whether the finding is the claim; None where the paper claims nothing.
        rows: The table, one dictionary a row, all with the same keys.
        figures: From a name to a matplotlib figure (None without matplotlib).
        scalars: From a TensorBoard tag to (step, value) pairs.
        summary: A short table for where the whole one is too long to read; may be empty.
    """

    name: str
    claim: str
    finding: str
    agrees: bool | None
    rows: list[dict[str, Any]]
    figures: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    summary: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The claim, the finding, and whether they agree."""
        if self.agrees is None:
            return f"{self.claim} Measured: {self.finding}"
        return f"The paper: {self.claim} Measured: {self.finding} {'They agree.' if self.agrees else 'They differ.'}"

    def markdown(self) -> str:
        """The table in Markdown."""
        return markdown_table(self.rows)

    def write(self, folder: Path, config: dict[str, Any]) -> None:
        """Write everything into a folder: whole files, the verdict last."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.json", json.dumps({**config, "versions": versions()}, indent=2) + "\n")
        table = io.StringIO()
        writer = csv.DictWriter(table, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(folder / "table.csv", table.getvalue())
        write_whole(folder / "table.md", self.markdown())
        if self.summary:
            write_whole(folder / "summary.md", markdown_table(self.summary))
        for name, figure in self.figures.items():
            if figure is not None:
                for kind in ("png", "pdf"):
                    save_figure(figure, folder / f"{name}.{kind}")
        board = SummaryWriter(str(folder / "tensorboard"))
        for tag, points in self.scalars.items():
            for step, value in points:
                board.add_scalar(tag, value, step)
        board.close()
        write_whole(folder / "verdict.md", self.verdict + "\n")


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95% bootstrap interval (percentile) of the values that are no NaN; NaN bounds for fewer than two of them."""
    array = np.asarray(values, float)
    array = array[~np.isnan(array)]
    mean = float(array.mean()) if len(array) else float("nan")
    if not np.isfinite(array).all():
        return mean, float(array.min()), float(array.max())
    return mean, *bootstrap_interval(array.tolist())


def mean_curve(curves: Sequence[Sequence[float]]) -> np.ndarray:
    """The mean (k,) of several curves of k points over those that are no NaN, point by point; NaN where all are."""
    # torch: NumPy warns of a point where all are NaN.
    return torch.tensor(curves, dtype=torch.float64).nanmean(0).numpy()
