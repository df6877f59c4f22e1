"""The settings that every experiment shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from icrl_gym.parallel import Backend, Workers

__all__ = ["SEMI_GRADIENT", "ExperimentName", "ReproduceConfig"]

SEMI_GRADIENT = "-semi-gradient"

ExperimentName = Literal[
    "noise",
    "cross-domain",
    "temperature",
    "linear",
    "synthetic",
    "offset",
    "boyan",
    "all-domains",
    "any-context",
    "all",
]


@dataclass
class ReproduceConfig:
    """Run an experiment of He et al. 2026 and say whether what is measured agrees with the paper; a killed run goes on."""

    name: Annotated[ExperimentName, tyro.conf.Positional]
    """Which experiment."""
    quick: bool = False
    """To see that it runs, with numbers that say little: on two cores half a minute to three an experiment, four or five for `all`."""
    semi_gradient: bool = False
    """Pretrain as TD does, with constant bootstrap targets, instead of by the gradient of the loss (on Meta-World's data)."""
    long_contexts: bool = False
    """Of any-context: also contexts of 2,048 transitions, which take an hour."""
    seeds: int = 3
    """Repetitions."""
    jobs: int = 2
    """Processes; with --backend ray and no --address, the CPUs of the Ray that is started."""
    backend: Backend = "processes"
    """Where the cells of a grid are computed: processes of this machine, or tasks on the nodes of a Ray cluster."""
    address: str | None = None
    """Of the Ray cluster, HOST:PORT or auto (None: a Ray of this machine alone)."""
    out: str = "reproduced"
    """Where to: a folder for each experiment, and cells/ with what is finished of its grid."""
    docs: str | None = None
    """Where results.md goes, a page of all that stands finished in --out, with tables and figures (None: `all` writes it into docs,
    a quick one into --out, and a single experiment writes none)."""
    root: str | None = None
    """Where the datasets are (None: Minari's own folder)."""

    def __post_init__(self) -> None:
        """Make a quick run quick."""
        if self.quick:
            self.seeds = min(self.seeds, 2)
            # Those beyond the paper take longer episodes, and a data set is of one length.
            beyond = self.name in ("all-domains", "any-context")
            self.root = self.root or str(Path(self.out) / ("datasets-beyond" if beyond else "datasets"))

    def size(self, full: int, quick: int) -> int:
        """One of two sizes."""
        return quick if self.quick else full

    def label(self, name: str) -> str:
        """The folder of an experiment."""
        return f"{name}{SEMI_GRADIENT}" if self.semi_gradient else name

    @property
    def page(self) -> Path | None:
        """The folder of the page of results, if one is to be written."""
        if self.docs is not None:
            return Path(self.docs)
        # The numbers of a quick run say little, and must not take the place of those that stand in docs.
        return None if self.name != "all" else Path(self.out if self.quick else "docs")

    @property
    def workers(self) -> Workers:
        """Where cells are computed.

        Raises:
            ValueError: Settings that contradict each other.
        """
        return Workers(self.jobs, self.backend, self.address)

    @property
    def cache(self) -> Path:
        """The folder of finished cells."""
        return Path(self.out) / "cells"
