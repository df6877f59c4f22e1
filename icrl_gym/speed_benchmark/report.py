"""``speed.json``, ``speed.md`` and ``speed.png``: what was measured, beside what was meant to be."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from icrl_gym.plots import new_figure, save_figure
from icrl_gym.runs import write_whole
from icrl_gym.speed_benchmark.measured import Measured
from icrl_gym.speed_benchmark.scaling import Curve
from icrl_gym.tables import markdown_table

__all__ = ["write_report"]


def write_report(rows: Sequence[Measured], curves: Sequence[Curve], about: Mapping[str, Any], folder: Path) -> str:
    """Write the results.

    Args:
        rows: At least one row or one curve.
        curves: For the figure; none, no figure.
        about: Versions, threads and settings.
        folder: Where to; it is made.

    Returns:
        The tables, in Markdown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "about": dict(about),
        "rows": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows],
        "scaling": [dataclasses.asdict(curve) for curve in curves],
    }
    write_whole(folder / "speed.json", json.dumps(_without_nan(data), indent=2) + "\n")
    text = ""
    if rows:
        text += markdown_table([_line(row) for row in rows])
    if curves:
        fitted = [
            {"against": c.variable, "what": c.label, "from": c.points[0], "to": c.points[-1], "exponent": round(c.exponent, 2)}
            for c in curves
        ]  # fmt: skip
        text += ("\n" if text else "") + markdown_table(fitted)
        _figure(curves, folder / "speed.png")
    about_text = ", ".join(f"{name} {value}" for name, value in about.items() if not isinstance(value, dict))
    text += f"\nMedians of alternating rounds, with their quartiles in brackets. {about_text}.\n"
    write_whole(folder / "speed.md", text)
    return text


def _line(row: Measured) -> dict[str, str]:
    value = row.value
    if math.isnan(value.median):
        shown = ""
    elif value.low == value.high:
        shown = f"{_short(value.median)} {row.unit}"
    else:
        shown = f"{_short(value.median)} [{_short(value.low)}, {_short(value.high)}] {row.unit}"
    return {
        "row": row.row,
        "what": row.what,
        "against": row.against,
        "goal": "" if row.goal is None else f"{row.goal.kind} {row.goal.value:,g}",
        "measured": shown,
        "reached": row.verdict,
        "seconds": ", ".join(f"{name} {_time(seconds)}" for name, seconds in row.seconds.items()),
        "difference": ", ".join(f"{size:.1e} ({name})" for name, size in row.differences.items()),
        "note": row.note,
    }


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _without_nan(data: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and math.isnan(data) else data


def _figure(curves: Sequence[Curve], file: Path) -> None:
    names = {"n": "transitions n", "L": "layers L", "d": "features d"}
    variables = [name for name in names if any(curve.variable == name for curve in curves)]
    figure = new_figure(4.4 * len(variables), 4.2)
    if figure is None:
        return
    for axes, variable in zip(figure.subplots(1, len(variables), squeeze=False)[0], variables, strict=True):
        for curve in curves:
            if curve.variable == variable:
                (line,) = axes.plot(
                    curve.points, curve.seconds, marker="o", label=f"{curve.label}: {variable}^{curve.exponent:.2f}"
                )
                axes.fill_between(curve.points, curve.low, curve.high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(names[variable])
        axes.set_ylabel("seconds")
        axes.legend(fontsize=7)
        axes.grid(which="both", alpha=0.2)
    save_figure(figure, file)
