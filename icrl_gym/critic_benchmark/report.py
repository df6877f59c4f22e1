"""Tables and figure of the critic benchmark: means over tasks, seeds and rollouts, with bootstrap intervals."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from icrl_gym.critic_benchmark.scores import SCORES
from icrl_gym.critic_benchmark.settings import LEARNED, TRUTH
from icrl_gym.plots import new_figure, save_figure
from icrl_gym.runs import write_whole
from icrl_gym.tables import markdown_table, with_interval

__all__ = ["Rows", "summarize", "write_report"]

Rows = Sequence[Mapping[str, float]]
"""The scores of one setting on one task: a row a rollout, all recordings of the task one after the other."""

_MEASURES = (*SCORES, "over_learned")


def summarize(results: Mapping[str, Mapping[str, Rows]]) -> list[dict[str, Any]]:
    """A row a setting and task, and one over all tasks, sorted by the advantages over all tasks.

    Args:
        results: By setting, then by task.

    Returns:
        Of each measure the mean, and the ends of its 95% interval: tasks count alike, and within each the rollouts of all seeds are
        resampled. ``over_learned`` is the correlation of the advantages minus that of the learned critic, rollout by rollout.
        Rollouts on which a measure is not defined are left out of it.
    """
    rows = []
    for setting, by_task in results.items():
        groups = {"all": list(by_task)} if len(by_task) > 1 else {}
        groups.update({task: [task] for task in by_task})
        for group, tasks in groups.items():
            row: dict[str, Any] = {"setting": setting, "task": group, "rollouts": sum(len(by_task[t]) for t in tasks)}
            for measure in _MEASURES:
                scores = [_defined(by_task[task], results[LEARNED][task], measure) for task in tasks]
                mean = _mean(scores)
                low, high = _interval(scores)
                row.update({measure: mean, f"{measure}_low": low, f"{measure}_high": high})
            row["failed"] = int(sum(r["failed"] for task in tasks for r in by_task[task]))
            row["seconds"] = float(np.mean([r["seconds"] for task in tasks for r in by_task[task]]))
            rows.append(row)
    first = {row["setting"]: row["advantage"] for row in reversed(rows)}  # of the first row of each setting
    # The truth is what the others are measured by, not one of them.
    return sorted(
        rows,
        key=lambda row: (
            row["setting"] != TRUTH,
            -math.inf if math.isnan(first[row["setting"]]) else -first[row["setting"]],
            row["setting"],
        ),
    )


def write_report(results: Mapping[str, Mapping[str, Rows]], folder: Path, notes: str) -> str:
    """Write ``scores.csv``, ``scores.md`` and ``scores.png``.

    Args:
        results: See :func:`summarize`.
        folder: Where to.
        notes: What was measured, for the end of the page.

    Returns:
        The table over all tasks, in Markdown.
    """
    rows = summarize(results)
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "scores.csv", table.getvalue())
    tasks = list(next(iter(results.values())))
    total = [row for row in rows if row["task"] == ("all" if len(tasks) > 1 else tasks[0])]
    markdown = markdown_table([_shown(row) for row in total])
    page = f"# Critics out of sample\n\n{markdown}\n{notes}\n"
    if len(tasks) > 1:
        by_task = {(row["setting"], row["task"]): row for row in rows}
        for measure in ("advantage", "difference", "value"):
            cells = [
                {"setting": row["setting"], **{t: _cell(by_task[row["setting"], t], measure) for t in tasks}}
                for row in total
            ]
            page += f"\n## {measure.capitalize()}, by task\n\n{markdown_table(cells)}"
    write_whole(folder / "scores.md", page)
    _draw(total, folder / "scores.png")
    return markdown


def _defined(rows: Rows, learned: Rows, measure: str) -> np.ndarray:
    if measure == "over_learned":
        values = np.array([mine["advantage"] - theirs["advantage"] for mine, theirs in zip(rows, learned, strict=True)])
    else:
        values = np.array([row[measure] for row in rows], float)
    return np.asarray(values[~np.isnan(values)])


def _mean(scores: Sequence[Any]) -> float:
    tasks = [float(np.mean(task)) for task in scores if np.size(task)]
    return float(np.mean(tasks)) if tasks else math.nan


def _interval(scores: Sequence[Any], n_resamples: int = 2000) -> tuple[float, float]:
    """The 95% interval of :func:`_mean`, resampled within each task; NaN where no task has two values."""
    tasks = [np.asarray(task) for task in scores if np.size(task)]
    if all(len(task) < 2 for task in tasks):
        return math.nan, math.nan
    # All draws at once: `statistics.stratified_interval` takes any statistic, one draw after the other, and there are thousands
    # of intervals here.
    rng = np.random.default_rng(0)
    draws = np.mean([task[rng.integers(len(task), size=(n_resamples, len(task)))].mean(-1) for task in tasks], 0)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "advantage": "advantage",
        "over_learned": "over learned",
        "difference": "16-step difference",
        "value": "value",
        "error": "error",
        "error_scaled": "scaled error",
    }
    cells = {label: _cell(row, measure) for measure, label in names.items()}
    return {"critic": row["setting"], **cells, "failed": row["failed"], "seconds": row["seconds"]}


def _cell(row: Mapping[str, Any], measure: str) -> str:
    return with_interval(row[measure], row[f"{measure}_low"], row[f"{measure}_high"], digits=3)


def _draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    figure = new_figure(9, 1.2 + 0.24 * len(rows))
    if figure is None:
        return
    place = np.arange(len(rows))[::-1]
    axes = figure.subplots(1, 2, sharey=True)
    for axis, measure, label in (
        (axes[0], "advantage", "correlation of advantages"),
        (axes[1], "difference", "correlation of 16-step differences of values"),
    ):
        mean, low, high = (
            np.array([row[name] for row in rows], float) for name in (measure, f"{measure}_low", f"{measure}_high")
        )
        seen = ~np.isnan(mean)
        axis.plot(mean[seen], place[seen], "o", color="C0", markersize=4)
        axis.hlines(place[seen], low[seen], high[seen], color="C0", linewidth=1)
        learned = [float(m) for m, row in zip(mean, rows, strict=True) if row["setting"] == LEARNED]
        if learned and not math.isnan(learned[0]):
            axis.axvline(learned[0], color="C1", linewidth=1, linestyle="--")
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(place, [row["setting"] for row in rows], fontsize=8)
    save_figure(figure, file)
