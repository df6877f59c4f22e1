"""The settings that every experiment shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["SEMI_GRADIENT", "ExperimentName", "ReproduceConfig"]

SEMI_GRADIENT = "-semi-gradient"

ExperimentName = Literal["noise", "cross-domain", "temperature", "linear", "synthetic", "offset", "all"]


@dataclass
class ReproduceConfig:
    """Run an experiment of He et al. 2026 and say whether what is measured agrees with the paper; a killed run goes on."""

    name: Annotated[ExperimentName, tyro.conf.Positional]
    """Which experiment."""
    quick: bool = False
    """A minute or two, to see that it runs; its numbers say little."""
    semi_gradient: bool = False
    """Pretrain as TD does, with constant bootstrap targets, instead of by the gradient of the loss (on Meta-World's data)."""
    seeds: int = 3
    """Repetitions."""
    jobs: int = 2
    """Processes."""
    out: str = "reproduced"
    """Where to: a folder for each experiment, and cells/ with what is finished of its grid."""
    docs: str | None = None
    """Also write a page of all that stands finished in --out, with tables and figures, into this folder."""
    root: str | None = None
    """Where the datasets are (None: Minari's own folder)."""

    def __post_init__(self) -> None:
        """Make a quick run quick."""
        if self.quick:
            self.seeds = min(self.seeds, 2)
            self.root = self.root or str(Path(self.out) / "datasets")

    def size(self, full: int, quick: int) -> int:
        """One of two sizes."""
        return quick if self.quick else full

    def label(self, name: str) -> str:
        """The folder of an experiment."""
        return f"{name}{SEMI_GRADIENT}" if self.semi_gradient else name

    @property
    def cache(self) -> Path:
        """The folder of finished cells."""
        return Path(self.out) / "cells"
