"""Critics side by side: environments x critics x seeds, in parallel, resumable, with a table and learning curves."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icrl_gym.parallel import completed, spawned
from icrl_gym.plots import learning_curves
from icrl_gym.runs import RunFolder, write_whole
from icrl_gym.statistics import bootstrap_interval
from icrl_gym.tables import markdown_table
from icrl_gym.train import CriticConfig, CriticName, RunOptions, TrainConfig, TrainingRun, final_return, train

__all__ = ["BenchmarkConfig", "benchmark"]


@dataclass
class BenchmarkConfig(RunOptions):
    """Compare critics on environments over seeds; finished runs are kept, unfinished ones resumed."""

    envs: tuple[str, ...] = ("Pendulum-v1",)
    """Meta-World tasks or Gymnasium ids, each an experiment of its own; tasks joined by commas are one experiment."""
    critics: tuple[CriticName, ...] = ("in-context", "mlp")
    """What to compare."""
    seeds: int = 3
    """Runs of each critic on each environment, with seeds 0, 1, ..."""
    jobs: int = 2
    """Runs at a time, each in a process of its own."""
    out: str = "runs/benchmark"
    """Where runs, table and figures go."""

    def runs(self) -> list[TrainConfig]:
        """The settings of every run."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunOptions)}
        configs = []
        for env in self.envs:
            for seed in range(self.seeds):
                for critic in self.critics:
                    config = TrainConfig(**shared, env=(env,), critic=critic, seed=seed)
                    config.run_dir = str(Path(self.out) / "runs" / _file_name(config.label()))
                    if critic == "mlp":
                        config.critic_options = CriticConfig()
                    configs.append(config)
        return configs


def benchmark(config: BenchmarkConfig) -> Path:
    """Run what is missing, then write ``results.csv``, ``results.md`` and ``curves_<env>.png``.

    Args:
        config: The settings.

    Returns:
        The folder of the results.

    Raises:
        ValueError: Settings that cannot work, or a folder with runs of other settings.
        FloatingPointError: A critic's layers diverge.
        RuntimeError: A run failed; the others went on to their ends.
    """
    for name in ("seeds", "jobs"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}.")
    configs = config.runs()
    missing: dict[str, TrainConfig] = {}
    tried = set()
    for run in configs:
        folder = RunFolder(str(run.run_dir))
        if not (folder.path / "config.json").is_file():
            if (run.env, run.critic) not in tried:
                # Made once here: what is wrong is said before anything runs.
                tried.add((run.env, run.critic))
                TrainingRun(dataclasses.replace(run, vec_env="dummy")).env.close()
            missing[run.label()] = run
            continue
        _require_same(run, folder)
        if not folder.finished:
            if not folder.checkpoints:
                shutil.rmtree(folder.path)
            missing[run.label()] = TrainConfig(resume=run.run_dir) if folder.checkpoints else run
    print(f"{len(configs)} runs, {len(configs) - len(missing)} finished before, {len(missing)} to go")
    _run_all(missing, config.jobs)
    return _report(config, configs)


def _file_name(label: str) -> str:
    return label.replace("/", "_").replace(":", "_").replace(",", "+")


def _require_same(run: TrainConfig, folder: RunFolder) -> None:
    # A run made before a setting existed had its default.
    stored, wanted = {**dataclasses.asdict(TrainConfig()), **folder.config}, dataclasses.asdict(run)
    for name, value in wanted.items():
        value = list(value) if isinstance(value, tuple) else value
        if name not in ("resume", "run_dir", "checkpoint_freq", "verbose") and stored[name] != value:
            raise ValueError(
                f"{folder.path} holds a run with --{name.replace('_', '-')} {stored[name]!r}, not {value!r}. "
                f"Take another --out, or delete that run."
            )


def _run_all(runs: dict[str, TrainConfig], jobs: int) -> None:
    """Train each of ``runs``, which have their labels as keys."""
    if not runs:
        return
    failures: dict[str, Exception] = {}
    calls = {label: (run,) for label, run in runs.items()}
    with ProcessPoolExecutor(min(jobs, len(runs)), **spawned()) as pool:
        for done, (label, future) in enumerate(completed(train, calls, pool, jobs), 1):
            try:
                folder = RunFolder(future.result())
            except Exception as error:
                failures[label] = error
                print(f"{done:3d} of {len(runs)}   {label} failed: {error}", flush=True)
                continue
            speed = folder.status.get("steps_per_second", math.nan)
            print(f"{done:3d} of {len(runs)}   {label:45s} final return {final_return(folder.read_episodes()):10.1f}   "
                  f"{speed:6.0f} steps/s", flush=True)  # fmt: skip
    for label, failure in failures.items():
        if isinstance(failure, FloatingPointError):
            raise FloatingPointError(f"{label}: {failure}")
        raise RuntimeError(f"{label} failed; the same command tries it again") from failure


def _report(config: BenchmarkConfig, configs: list[TrainConfig]) -> Path:
    out = Path(config.out)
    header = [
        "env",
        "critic",
        "seeds",
        "timesteps",
        "final return",
        "95% low",
        "95% high",
        "by seed",
        "success",
        "steps/s",
    ]
    rows: list[list[str]] = []
    for env in config.envs:
        curves: dict[str, list[tuple[list[int], list[float]]]] = {}
        for critic in config.critics:
            names = TrainConfig(env=(env,)).env
            folders = [RunFolder(str(run.run_dir)) for run in configs if run.env == names and run.critic == critic]
            tables = [folder.read_episodes() for folder in folders]
            curves[critic] = [([e.timesteps for e in t], [e.episode_return for e in t]) for t in tables]
            finals = [final_return(table) for table in tables]
            low, high = bootstrap_interval(finals)
            successes = [e.success for table in tables for e in table[-100:] if e.success is not None]
            speed = float(np.mean([folder.status.get("steps_per_second", math.nan) for folder in folders]))
            rows.append(
                [
                    env, critic, str(len(finals)), str(config.total_timesteps), f"{np.mean(finals):.1f}", f"{low:.1f}", f"{high:.1f}",
                    " / ".join(f"{value:.0f}" for value in finals), f"{np.mean(successes):.2f}" if successes else "", f"{speed:.0f}",
                ]
            )  # fmt: skip
        learning_curves(curves, out / f"curves_{_file_name(env)}.png", env)
    table = io.StringIO()
    csv.writer(table).writerows([header, *rows])
    write_whole(out / "results.csv", table.getvalue())
    markdown = markdown_table([dict(zip(header, row, strict=True)) for row in rows])
    note = "Final return: mean of the last 100 episodes of a run; interval: bootstrap over seeds (percentile)."
    write_whole(out / "results.md", f"{markdown}\n{note}\n")
    print(markdown, end="")
    return out
