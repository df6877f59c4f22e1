"""The experiments of He et al. 2026, each a function from a config to a report: ``icrl-gym reproduce NAME``."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from icrl_gym.experiments.all_domains import all_domains
from icrl_gym.experiments.any_context import any_context
from icrl_gym.experiments.boyan import boyan
from icrl_gym.experiments.config import SEMI_GRADIENT, ReproduceConfig
from icrl_gym.experiments.offset import offset
from icrl_gym.experiments.report import Report
from icrl_gym.experiments.synthetic import synthetic
from icrl_gym.experiments.transfer import cross_domain, linear, noise, temperature
from icrl_gym.runs import write_whole

__all__ = ["EXPERIMENTS", "Report", "ReproduceConfig", "reproduce", "write_page"]

EXPERIMENTS: dict[str, Callable[[ReproduceConfig], Report]] = {
    "noise": noise,
    "cross-domain": cross_domain,
    "temperature": temperature,
    "linear": linear,
    "synthetic": synthetic,
    "offset": offset,
    "boyan": boyan,
    "all-domains": all_domains,
    "any-context": any_context,
}
"""By the name that the command line gives them, in the order of ``reproduce all``."""

BEYOND = ("all-domains", "any-context")
"""What goes beyond the paper and takes longer: asked for by name, and not part of ``reproduce all``."""

_BEGIN, _END = "<!-- reproduced: begin -->", "<!-- reproduced: end -->"


def reproduce(config: ReproduceConfig) -> list[Report]:
    """Run one experiment, or all, and write each one's folder.

    Args:
        config: The settings.

    Returns:
        The reports, in the order run.

    Raises:
        ValueError: Settings that cannot work, or no Ray cluster at the address.
        ImportError: Minari is missing, for what needs Meta-World's data; or Ray, if it is asked for.
    """
    for setting in ("seeds", "jobs"):
        if getattr(config, setting) < 1:
            raise ValueError(f"--{setting} must be at least 1, got {getattr(config, setting)}.")
    config.workers.check()  # what is wrong is said before anything runs
    reports = []
    paper = [name for name in EXPERIMENTS if name not in BEYOND]
    for name in paper if config.name == "all" else [config.name]:
        start = time.perf_counter()
        report = EXPERIMENTS[name](config)
        report.write(Path(config.out) / config.label(name), asdict(config))
        reports.append(report)
        print(f"\n{report.markdown()}\n{name} ({time.perf_counter() - start:.0f} s): {report.verdict}\n", flush=True)
    if config.page is not None:
        print(f"written: {write_page(Path(config.out), config.page)}")
    return reports


def write_page(out: Path, docs: Path, most_rows: int = 60) -> Path:
    """Write a page of every experiment that stands finished in a folder, with its figures and tables beside it.

    Written is what stands between two marks, comments of the page; all else on it is somebody's own and stays. A page
    without the marks gets them at its end.

    Args:
        out: The folder of :func:`reproduce`.
        docs: Where ``results.md`` goes, and ``results/`` with tables and figures.
        most_rows: A table of more rows is only linked to, below its summary.

    Returns:
        The page.
    """
    (docs / "results").mkdir(parents=True, exist_ok=True)
    parts = ["Made by `icrl-gym reproduce`; what is written between these marks by hand is lost.\n"]
    order = list(EXPERIMENTS)

    def place(folder: Path) -> tuple[int, str]:
        name = folder.name.removesuffix(SEMI_GRADIENT)
        return (order.index(name) if name in order else len(order)), folder.name

    for folder in sorted((verdict.parent for verdict in out.glob("*/verdict.md")), key=place):
        label = folder.name
        config = json.loads((folder / "config.json").read_text())
        options = " --semi-gradient" if config["semi_gradient"] else ""
        parts.append(
            f"## {label}\n\n    icrl-gym reproduce {label.removesuffix(SEMI_GRADIENT)}{options} --seeds {config['seeds']}\n"
        )
        parts.append((folder / "verdict.md").read_text())
        table, summary = (folder / "table.md").read_text(), folder / "summary.md"
        if table.count("\n") <= most_rows:
            parts.append(table)
        elif summary.is_file():
            parts.append(summary.read_text())
        shutil.copyfile(folder / "table.csv", docs / "results" / f"{label}.csv")
        parts.append(f"Table: [{label}.csv](results/{label}.csv)\n")
        for figure in sorted(folder.glob("*.png")):
            shutil.copyfile(figure, docs / "results" / f"{label}_{figure.name}")
            parts.append(f"![{label}](results/{label}_{figure.name})\n")
    page = docs / "results.md"
    before, after = _own_text(page)
    write_whole(page, f"{before}{_BEGIN}\n\n" + "\n".join(parts) + f"\n{_END}{after}")
    return page


def _own_text(page: Path) -> tuple[str, str]:
    """What stands on a page before and after the marks."""
    text = page.read_text() if page.is_file() else "# Results\n\n"
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        return before, after
    # One mark alone does not say what was written by hand: nothing is thrown away.
    return text.rstrip() + "\n\n", "\n"
