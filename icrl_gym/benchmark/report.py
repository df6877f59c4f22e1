"""The report of a benchmark: tables, aggregates over tasks, learning curves and performance profiles."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from icrl_gym.plots import binned, performance_profiles, task_curves
from icrl_gym.runs import Episode, EvaluationEpisode, RunFolder, write_whole
from icrl_gym.statistics import (
    Scores,
    bootstrap_interval,
    interquartile_mean,
    normalized,
    performance_profile,
    probability_of_improvement,
    stratified_interval,
    time_average,
)
from icrl_gym.tables import markdown_table, with_interval
from icrl_gym.train import TrainConfig

__all__ = ["RunResult", "read_result", "write_report"]

_SCORES = ("AUC", "final return", "success")
_NOTE = """AUC: the mean return over the training, by trapezoids between {what}. Final return and success: of {final}.
Brackets: 95% bootstrap intervals over seeds (percentile method); none with a single seed.
"""
_AGGREGATE_NOTE = """Over {n}{left_out}. IQM: interquartile mean over tasks and seeds. AUC is in units of the mean AUC of `{reference}`
on each task, whose score is 1 (where that is negative, m, the score is 1 + (x - m) / |m|). P(> {reference}): how likely a run beats
one of `{reference}` on the same task, by AUC, averaged over tasks; a tie counts half. Brackets: 95% intervals of a stratified
bootstrap, which resamples the seeds of each task (Agarwal et al. 2021).
"""


@dataclass(frozen=True)
class RunResult:
    """What one finished run says.

    Attributes:
        timesteps: Of its learning curve's points.
        returns: Mean return at each of them.
        auc: The mean of the curve over the training.
        final_return: Its end.
        success: Success rate at its end; NaN where the environment does not say.
        success_by_task: The same by task.
        steps_per_second: Of the training, without evaluations.
    """

    timesteps: list[float]
    returns: list[float]
    auc: float
    final_return: float
    success: float
    success_by_task: dict[str, float]
    steps_per_second: float


def read_result(folder: RunFolder) -> RunResult:
    """The result of a run: from its evaluations, or without any from its training episodes (the last 100 are its end).

    Args:
        folder: Of a finished run.

    Returns:
        The result; NaN where there is nothing to tell from.

    Raises:
        ValueError: The run had evaluations, and they are not there or not readable.
    """
    speed = float(folder.status.get("steps_per_second", math.nan))
    evaluations = folder.read_evaluations()
    if folder.config.get("eval_freq") and not evaluations:
        raise ValueError(f"{str(folder.path / 'evaluations.csv')!r} holds no evaluation, and the run had some.")
    if evaluations:
        times = sorted({row.timesteps for row in evaluations})
        returns = [_mean(row.episode_return for row in evaluations if row.timesteps == t) for t in times]
        last = [row for row in evaluations if row.timesteps == times[-1]]
        by_task = {task: _success([row for row in last if row.task == task]) for task in {row.task: 0 for row in last}}
        return RunResult(
            [float(t) for t in times],
            returns,
            time_average(times, returns),
            returns[-1],
            _success(last),
            by_task,
            speed,
        )
    episodes = folder.read_episodes()
    if not episodes:
        return RunResult([], [], math.nan, math.nan, math.nan, {}, speed)
    edges = np.linspace(0.0, max(e.timesteps for e in episodes), 26)
    line = binned([e.timesteps for e in episodes], [e.episode_return for e in episodes], edges)
    seen = np.isfinite(line)
    middle, line = ((edges[1:] + edges[:-1]) / 2)[seen], line[seen]
    last_episodes = episodes[-100:]
    return RunResult(
        middle.tolist(),
        line.tolist(),
        time_average(middle, line),
        _mean(e.episode_return for e in last_episodes),
        _success(last_episodes),
        {},
        speed,
    )


def write_report(out: Path, envs: Sequence[str], critics: Sequence[str], runs: Sequence[TrainConfig]) -> str:
    """Write ``results.csv``, ``results.md``, ``learning_curves.png`` and ``performance_profile.png``.

    Args:
        out: The folder of the benchmark.
        envs: Its experiments, in the order of the report.
        critics: Its critics, likewise.
        runs: The settings of all its runs; those that have not finished are named in the report.

    Returns:
        The report in Markdown.
    """
    results: dict[tuple[str, str], list[RunResult]] = {(env, critic): [] for env in envs for critic in critics}
    missing: list[str] = []
    unreadable: list[str] = []
    evaluated = all(run.eval_freq for run in runs)
    for run in runs:
        folder = RunFolder(str(run.run_dir))
        if not folder.finished:
            missing.append(f"- {run.label()}: {_state(folder)}")
            continue
        env = next(env for env in envs if TrainConfig(env=(env,)).env == run.env)
        try:
            results[env, run.variant].append(read_result(folder))
        except ValueError as error:
            unreadable.append(f"- {run.label()}: {error}")
    rows = [_row(env, critic, found) for (env, critic), found in results.items() if found]
    parts = []
    for named, what in ((missing, "have not finished"), (unreadable, "cannot be read")):
        if named:
            parts.append(
                f"**{len(named)} of {len(runs)} runs {what}** and are left out below:\n\n" + "\n".join(named) + "\n"
            )
    if rows:
        note = _NOTE.format(
            what="evaluations on held-out goals" if evaluated else "stretches of training episodes",
            final="the last evaluation" if evaluated else "the last 100 training episodes",
        )
        parts += [markdown_table([_shown(row) for row in rows]), note]
        by_task = _by_task(results)
        if by_task:
            parts += ["Success by task, of experiments with several:\n", markdown_table(by_task)]
        aggregates = _aggregates(results, envs, critics, out)
        if aggregates:
            parts += aggregates
        if task_curves(
            {env: {c: [(r.timesteps, r.returns) for r in results[env, c]] for c in critics} for env in envs},
            out / "learning_curves.png",
            "return on held-out goals" if evaluated else "episode return",
        ):
            parts.append(
                "![Mean return against environment steps, with bootstrap intervals over seeds](learning_curves.png)\n"
            )
    report = "\n".join(parts)
    table = io.StringIO()
    writer = csv.DictWriter(table, _CSV_HEADER, extrasaction="ignore")
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in row.items()} for row in rows)
    write_whole(out / "results.csv", table.getvalue())
    write_whole(out / "results.md", report)
    return report


_HEADER = ["env", "critic", "seeds", "AUC", "final return", "success", "steps/s"]
_CSV_HEADER = [
    "env",
    "critic",
    "seeds",
    *(f"{name}{end}" for name in _SCORES for end in ("", " low", " high", " by seed")),
    "steps/s",
]


def _row(env: str, critic: str, found: Sequence[RunResult]) -> dict[str, Any]:
    """What one critic reached on one experiment, as numbers."""
    row: dict[str, Any] = {"env": env, "critic": critic, "seeds": len(found)}
    for name, values in zip(_SCORES, _by_seed(found), strict=True):
        row[name] = float(np.mean(values))
        row[f"{name} low"], row[f"{name} high"] = _interval(values)
        row[f"{name} by seed"] = " / ".join(f"{value:.6g}" for value in values)
    speeds = [result.steps_per_second for result in found if math.isfinite(result.steps_per_second)]
    row["steps/s"] = round(float(np.mean(speeds))) if speeds else ""
    return row


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the table in Markdown."""
    shown = {name: row[name] for name in _HEADER}
    for name in _SCORES:
        digits = 2 if name == "success" else 1
        shown[name] = with_interval(row[name], row[f"{name} low"], row[f"{name} high"], digits)
    return shown


def _interval(values: Sequence[float]) -> tuple[float, float]:
    return bootstrap_interval(values) if np.isfinite(values).all() else (math.nan, math.nan)


def _by_seed(found: Sequence[RunResult]) -> list[list[float]]:
    return [[r.auc for r in found], [r.final_return for r in found], [r.success for r in found]]


def _by_task(results: Mapping[tuple[str, str], Sequence[RunResult]]) -> list[dict[str, Any]]:
    rows = []
    for (env, critic), found in results.items():
        tasks = found[0].success_by_task if found else {}
        if len(tasks) > 1:
            for task in tasks:
                values = [result.success_by_task.get(task, math.nan) for result in found]
                interval = with_interval(float(np.mean(values)), *_interval(values), 2)
                rows.append({"experiment": env, "task": task, "critic": critic, "success": interval})
    return rows


def _aggregates(
    results: Mapping[tuple[str, str], Sequence[RunResult]], envs: Sequence[str], critics: Sequence[str], out: Path
) -> list[str]:
    """Over the tasks on which every critic that has runs at all has some: others would compare critics on different tasks."""
    reference = "mlp" if "mlp" in critics else critics[0]
    areas = {key: [r.auc for r in found if math.isfinite(r.auc)] for key, found in results.items()}
    critics = [critic for critic in critics if any(areas[env, critic] for env in envs)]
    if reference not in critics:
        return [
            f"No aggregates: `{reference}`, whose scores are their unit, has no finished run with an episode in it.\n"
        ]
    tasks = [env for env in envs if all(areas[env, critic] for critic in critics)]
    if not tasks:
        return ["No aggregates: on no task has every critic a finished run with an episode in it.\n"]
    scores: dict[str, Scores] = {
        critic: [normalized(areas[env, critic], float(np.mean(areas[env, reference]))) for env in tasks]
        for critic in critics
    }
    rows = []
    for critic in critics:
        success = [[r.success for r in results[env, critic] if math.isfinite(r.success)] for env in tasks]
        row: dict[str, Any] = {"critic": critic, "runs": sum(np.size(task) for task in scores[critic])}
        row["IQM of AUC"] = _aggregate(interquartile_mean, scores[critic])
        row["IQM of success"] = _aggregate(interquartile_mean, success)
        better = (
            "" if critic == reference else _aggregate(probability_of_improvement, scores[critic], scores[reference])
        )
        row[f"P(> {reference})"] = better
        rows.append(row)
    taus = np.linspace(*_range(scores), 101)
    curves = {}
    for critic, values in scores.items():
        low, high = stratified_interval(lambda s: performance_profile(s, taus), values)
        curves[critic] = (performance_profile(values, taus), low, high)
    over = f"{len(tasks)} tasks" if len(tasks) > 1 else "one task"
    others = [env for env in envs if env not in tasks]
    left_out = f", without {', '.join(others)}, where not every critic has a finished run" if others else ""
    parts = [markdown_table(rows), _AGGREGATE_NOTE.format(n=over, left_out=left_out, reference=reference)]
    if len({row["runs"] for row in rows}) > 1:
        parts.append("Critics have unequal numbers of runs here: seeds are missing.\n")
    if performance_profiles(taus, curves, out / "performance_profile.png", f"AUC / mean AUC of {reference}"):
        parts.append("![Fraction of runs with a normalized AUC above each threshold](performance_profile.png)\n")
    return parts


def _range(scores: Mapping[str, Scores]) -> tuple[float, float]:
    values = np.concatenate([np.ravel(task) for tasks in scores.values() for task in tasks])
    values = values[np.isfinite(values)]
    return (min(0.0, float(values.min())), 1.05 * float(values.max())) if values.size else (0.0, 1.0)


def _aggregate(statistic: Callable[..., float], *scores: Scores) -> str:
    value = statistic(*scores)
    if math.isnan(value):
        return ""
    low, high = stratified_interval(statistic, *scores)
    return with_interval(value, float(low), float(high), 2)


def _state(folder: RunFolder) -> str:
    if not folder.started:
        return "not started"
    status = folder.status
    return f"{status.get('status', 'not started')}, {status.get('timesteps', 0):,} steps at its last start or end"


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _success(rows: Sequence[Episode] | Sequence[EvaluationEpisode]) -> float:
    known = [row.success for row in rows if row.success is not None]
    return float(np.mean(known)) if known else math.nan
