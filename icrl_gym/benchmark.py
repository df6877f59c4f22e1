"""Critics side by side: environments x critics x seeds, in parallel, resumable, with a table and learning curves."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import multiprocessing
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icrl_gym.plots import learning_curves
from icrl_gym.runs import RunFolder
from icrl_gym.train import CriticConfig, CriticName, RunOptions, TrainConfig, _validate, final_return, train

__all__ = ["BenchmarkConfig", "benchmark", "bootstrap_interval"]


@dataclass
class BenchmarkConfig(RunOptions):
    """Compare critics on environments over seeds; finished runs are kept, unfinished ones resumed."""

    envs: tuple[str, ...] = ("Pendulum-v1",)
    """Meta-World tasks or Gymnasium ids, each an experiment of its own."""
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
                    config.run_dir = str(Path(self.out) / "runs" / config.label().replace("/", "_").replace(":", "_"))
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
    """
    for name in ("seeds", "jobs"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}.")
    configs = config.runs()
    missing = []
    for run in configs:
        _validate(run)
        folder = RunFolder(str(run.run_dir))
        if not (folder.path / "config.json").is_file():
            missing.append(run)
            continue
        _require_same(run, folder)
        if not folder.finished:
            if folder.checkpoints:
                run = TrainConfig(resume=run.run_dir)
            else:
                shutil.rmtree(folder.path)
            missing.append(run)
    print(f"{len(configs)} runs, {len(configs) - len(missing)} finished before, {len(missing)} to go")
    _run_all(missing, config.jobs)
    return _report(config, configs)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """A 95% bootstrap interval of the mean (percentile method); NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan, math.nan
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    from scipy.stats import bootstrap

    interval = bootstrap(
        (np.asarray(values),), np.mean, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _require_same(run: TrainConfig, folder: RunFolder) -> None:
    stored, wanted = folder.config, dataclasses.asdict(run)
    for name, value in wanted.items():
        value = list(value) if isinstance(value, tuple) else value
        if name not in ("resume", "run_dir", "checkpoint_freq", "verbose") and stored.get(name) != value:
            raise ValueError(
                f"{folder.path} holds a run with --{name.replace('_', '-')} {stored.get(name)!r}, not {value!r}. "
                f"Take another --out, or delete that run."
            )


def _run_all(configs: list[TrainConfig], jobs: int) -> None:
    if not configs:
        return
    # Spawned, not forked: torch and MuJoCo have threads that a fork would not take along.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(configs)), mp_context=context) as pool:
        futures = {pool.submit(train, run): run for run in configs}
        for done, future in enumerate(as_completed(futures), 1):
            folder = RunFolder(future.result())
            speed = folder.status.get("steps_per_second", math.nan)
            print(f"{done:3d} of {len(configs)}   {folder.path.name:45s} final return {final_return(folder.read_episodes()):10.1f}   "
                  f"{speed:6.0f} steps/s", flush=True)  # fmt: skip


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
            folders = [RunFolder(str(run.run_dir)) for run in configs if run.env == (env,) and run.critic == critic]
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
        learning_curves(curves, out / f"curves_{env.replace('/', '_').replace(':', '_')}.png", env)
    table = io.StringIO()
    csv.writer(table).writerows([header, *rows])
    (out / "results.csv").write_text(table.getvalue())
    markdown = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    markdown += ["| " + " | ".join(row) + " |" for row in rows]
    note = "Final return: mean of the last 100 episodes of a run; interval: bootstrap over seeds (percentile)."
    (out / "results.md").write_text("\n".join(markdown) + f"\n\n{note}\n")
    print("\n".join(markdown))
    return out
