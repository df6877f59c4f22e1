"""The experiments of He et al. 2026, each a function from a config to a report: ``icrl-gym reproduce NAME``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from icrl_gym.experiments.config import ReproduceConfig
from icrl_gym.experiments.offset import offset
from icrl_gym.experiments.report import Report
from icrl_gym.experiments.synthetic import synthetic
from icrl_gym.experiments.transfer import cross_domain, linear, noise, temperature

__all__ = ["EXPERIMENTS", "Report", "ReproduceConfig", "reproduce"]

EXPERIMENTS: dict[str, Callable[[ReproduceConfig], Report]] = {
    "noise": noise,
    "cross-domain": cross_domain,
    "temperature": temperature,
    "linear": linear,
    "synthetic": synthetic,
    "offset": offset,
}
"""By the name that the command line gives them, in the order of ``reproduce all``."""


def reproduce(config: ReproduceConfig) -> list[Report]:
    """Run one experiment, or all, and write each one's folder.

    Args:
        config: The settings.

    Returns:
        The reports, in the order run.

    Raises:
        ValueError: Settings that cannot work.
        ImportError: Minari is missing, for what needs Meta-World's data.
    """
    for setting in ("seeds", "jobs"):
        if getattr(config, setting) < 1:
            raise ValueError(f"--{setting} must be at least 1, got {getattr(config, setting)}.")
    reports = []
    for name in EXPERIMENTS if config.name == "all" else [config.name]:
        start = time.perf_counter()
        report = EXPERIMENTS[name](config)
        report.write(Path(config.out) / name, asdict(config))
        reports.append(report)
        print(f"\n{report.markdown()}\n{name} ({time.perf_counter() - start:.0f} s): {report.verdict}\n", flush=True)
    if config.name == "all":
        from icrl_gym.runs import write_whole

        parts = [f"## {r.name}\n\n{r.verdict}\n\n{r.markdown()}" for r in reports]
        parts = [
            part + "".join(f"\n![{f}]({r.name}/{f}.png)\n" for f in r.figures)
            for part, r in zip(parts, reports, strict=True)
        ]
        write_whole(Path(config.out) / "results.md", "# Reproduced\n\n" + "\n".join(parts))
    return reports
