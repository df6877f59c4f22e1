"""Critics out of sample: any setting tried on recorded rollouts of a learning PPO, against values measured by Monte Carlo.

A run of PPO is recorded once for each task and seed, together with the true values and advantages at some of its states
(:mod:`~icrl_gym.critic_benchmark.recording`, :mod:`~icrl_gym.critic_benchmark.truth`); after that, a critic takes seconds to
score (:mod:`~icrl_gym.critic_benchmark.scores`).
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from icrl_gym.critic_benchmark.recording import Recording, RecordingConfig, RecordingOptions, record
from icrl_gym.critic_benchmark.report import write_report
from icrl_gym.critic_benchmark.scores import as_cell, score_cell
from icrl_gym.critic_benchmark.settings import DEFAULT_SETTINGS, LEARNED, TRUTH, ZERO, Setting, read_settings
from icrl_gym.experiments.grid import run_grid
from icrl_gym.parallel import Workers, completed

__all__ = [
    "CriticBenchmarkConfig",
    "Recording",
    "RecordingConfig",
    "RecordingOptions",
    "Setting",
    "critic_benchmark",
    "record",
]


@dataclass(frozen=True)
class CriticBenchmarkConfig(RecordingOptions):
    """Score settings of the critic on recorded rollouts, against values measured by Monte Carlo; what is finished is kept."""

    tasks: tuple[str, ...] = ("reach-v3", "drawer-close-v3")
    """Meta-World tasks or Gymnasium ids, a recording each."""
    seeds: int = 1
    """Recordings of each task, with seeds 0, 1, ..."""
    settings: str | None = None
    """A JSON file of critics to try (None: a list of about thirty). The learned critic and the value zero always are."""
    jobs: int = 2
    """Processes."""
    record_only: bool = False
    """Make the recordings and score nothing."""
    out: str = "runs/critic-benchmark"
    """Where recordings, finished scores, tables and figure go."""

    def recordings(self) -> list[RecordingConfig]:
        """What is to be recorded."""
        shared = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(RecordingOptions)}
        return [RecordingConfig(task, seed, **shared) for task in self.tasks for seed in range(self.seeds)]


def critic_benchmark(config: CriticBenchmarkConfig) -> Path:
    """Record what is missing, score what is new, and write ``scores.csv``, ``scores.md`` and ``scores.png``.

    Args:
        config: The settings.

    Returns:
        The folder of the results.

    Raises:
        ValueError: Settings that cannot work, or an environment whose state cannot be restored.
        FileNotFoundError: There is no such file of settings.
    """
    for name in ("seeds", "jobs"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}.")
    if not config.tasks or len(set(config.tasks)) < len(config.tasks):
        raise ValueError(f"--tasks needs at least one name, and each once; got {config.tasks}.")
    settings = list(DEFAULT_SETTINGS) if config.settings is None else read_settings(Path(config.settings))
    wanted = config.recordings()
    for one in wanted:
        one.validate()
    torch.set_num_threads(1)
    out = Path(config.out)
    folder = out / "recordings"
    _record_all(wanted, folder, config.jobs)
    if config.record_only:
        return folder
    files = {one: folder / one.file_name for one in wanted}
    critics: list[Setting | str] = [TRUTH, LEARNED, ZERO, *settings]
    cells = [as_cell(file, critic) for file in files.values() for critic in critics]
    found = iter(run_grid(score_cell, cells, out / "cells", config.jobs, "critic benchmark"))
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for one in files:
        for critic in critics:
            name = critic if isinstance(critic, str) else critic.name
            results.setdefault(name, {}).setdefault(one.task, []).extend(next(found)["rows"])
    print(write_report(results, out, _notes(config)), end="")
    return out


def _record_all(wanted: list[RecordingConfig], folder: Path, jobs: int) -> None:
    missing = [one for one in wanted if not (folder / one.file_name).is_file()]
    print(f"{len(wanted)} recordings, {len(wanted) - len(missing)} known, {len(missing)} to make", flush=True)
    if jobs == 1 or len(missing) < 2:
        for one in missing:
            record(one, folder)
        return
    workers = Workers(jobs)
    calls = {one: (one, folder) for one in missing}
    with (
        workers.executor(len(missing)) as executor,
        closing(completed(record, calls, executor, workers.at_once(len(missing)))) as ended,
    ):
        for one, future in ended:
            print(f"recorded {one.task} seed {one.seed}: {future.result()}", flush=True)


def _notes(config: CriticBenchmarkConfig) -> str:
    chosen = len(config.recordings()[0].chosen)
    tail = config.gamma**config.truth_horizon
    return (
        f"Means over {len(config.tasks)} tasks x {config.seeds} seeds x {chosen} rollouts of PPO ({config.total_timesteps:,} steps), "
        f"with 95% bootstrap intervals over rollouts and seeds. The truth at {config.truth_states} states of a rollout is the mean of "
        f"{config.truth_repeats} returns of {config.truth_horizon} steps, discounted by {config.gamma:g} (what comes after weighs "
        f"{tail:.2f}), time limits ignored. Advantages are GAE({config.gae_lambda:g}) against Q - V. "
        f"{TRUTH}: what its two halves say that a perfect critic could reach. {LEARNED}: PPO's own critic. "
        f"Of a critic that diverged on a rollout (failed), the correlations count as 0."
    )
