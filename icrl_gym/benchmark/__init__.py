"""Critics side by side: environments x critics x seeds, in parallel, resumable, with a table and learning curves."""

from __future__ import annotations

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from icrl_gym.benchmark.report import write_report
from icrl_gym.critic_choices import CRITICS, CriticConfig, CriticName, VariantName
from icrl_gym.parallel import WorkerDiedError, completed, in_own_process
from icrl_gym.runs import FolderInUseError, RunFolder
from icrl_gym.train import RunOptions, TrainConfig, TrainingRun, final_return, train

__all__ = ["BenchmarkConfig", "benchmark"]


@dataclass
class BenchmarkConfig(RunOptions):
    """Compare critics on environments over seeds; finished runs are kept, unfinished ones resumed."""

    envs: tuple[str, ...] = ("Pendulum-v1",)
    """Meta-World tasks or Gymnasium ids, each an experiment of its own; tasks joined by commas are one experiment."""
    critics: tuple[VariantName, ...] = ("in-context", "mlp")
    """What to compare (docs/benchmark.md); settings of the critic are those of in-context, whatever is added to it."""
    prior: tuple[str, ...] = ()
    """For in-context+prior: a Minari data set for each of --envs, in the same order; joined by commas where tasks are."""
    seeds: int = 3
    """Runs of each critic on each environment, with seeds 0, 1, ..."""
    jobs: int = 2
    """Runs at a time, each in a process of its own."""
    out: str = "runs/benchmark"
    """Where runs, tables and figures go."""
    report_only: bool = False
    """Run nothing; report what has finished."""

    def runs(self) -> list[TrainConfig]:
        """The settings of every run."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunOptions)}
        if self.eval_freq is None:
            shared["eval_freq"] = max(1, self.total_timesteps // 6)
        configs = []
        for env, data in zip(self.envs, self.prior or ("",) * len(self.envs), strict=True):
            for seed in range(self.seeds):
                for variant in self.critics:
                    name, *added = variant.split("+")
                    critic = cast(CriticName, name)
                    prior = (data,) if "prior" in added else ()
                    config = TrainConfig(
                        **shared, env=(env,), critic=critic, cross_fit="frozen" not in added, prior=prior, seed=seed
                    )
                    config.run_dir = str(Path(self.out) / "runs" / _file_name(config.label()))
                    if not CRITICS[critic].takes_options:
                        config.critic_options = CriticConfig()
                    configs.append(config)
        return configs


def benchmark(config: BenchmarkConfig) -> Path:
    """Run what is missing, then write the report: ``results.md``, ``results.csv`` and figures (:mod:`icrl_gym.benchmark.report`).

    Args:
        config: The settings.

    Returns:
        The folder of the results.

    Raises:
        ValueError: Settings that cannot work, or a folder with runs of other settings.
        FloatingPointError: A critic's layers diverge.
        FolderInUseError: Another process is at work on one of the runs.
        WorkerDiedError: A run's process was killed; the same command goes on from the run's newest checkpoint.
        RuntimeError: A run failed otherwise. Whichever it was, the others went on to their ends, and the report names it.
    """
    for name in ("seeds", "jobs"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}.")
    for name in ("envs", "critics"):
        given = getattr(config, name)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"--{name} needs at least one name, and each once; got {' '.join(given) or 'none'}.")
    with_prior = [name for name in config.critics if "+prior" in name]
    if len(config.prior) != (len(config.envs) if with_prior else 0):
        raise ValueError(
            f"--prior takes one data set for each of --envs where --critics has one with +prior, and none otherwise; got "
            f"{len(config.prior)} for {len(config.envs)} and {' '.join(config.critics)}."
        )
    configs = config.runs()
    missing: dict[str, TrainConfig] = {}
    tried = set()
    for run in configs:
        folder = RunFolder(str(run.run_dir))
        if not folder.started:
            if (run.env, run.variant) not in tried and not config.report_only:
                # Made once here: what is wrong is said before anything runs.
                tried.add((run.env, run.variant))
                TrainingRun(dataclasses.replace(run, vec_env="dummy")).env.close()
            missing[run.label()] = run
            continue
        _require_same(run, folder)
        if not folder.finished and not config.report_only:
            missing[run.label()] = TrainConfig(resume=run.run_dir)
    out = Path(config.out)
    if config.report_only:
        if not any(RunFolder(str(run.run_dir)).finished for run in configs):
            raise ValueError(
                f"--report-only: no run of these has finished in {config.out!r}; leave the option out to make them."
            )
        print(write_report(out, config.envs, config.critics, configs), end="")
        return out
    print(f"{len(configs)} runs, {len(configs) - len(missing)} finished before, {len(missing)} to go")
    failures = _run_all(missing, config.jobs)
    print(write_report(out, config.envs, config.critics, configs), end="")
    for label, failure in failures.items():
        if isinstance(failure, FloatingPointError | FolderInUseError | WorkerDiedError):
            raise type(failure)(f"{label}: {failure}")
        raise RuntimeError(f"{label} failed; the same command tries it again") from failure
    return out


def _file_name(label: str) -> str:
    return label.replace("/", "_").replace(":", "_").replace(",", "+")


def _require_same(run: TrainConfig, folder: RunFolder) -> None:
    # A run made before a setting existed had its default.
    defaults, wanted = (json.loads(json.dumps(dataclasses.asdict(c))) for c in (TrainConfig(), run))
    stored = {**defaults, **folder.config}
    stored["critic_options"] = {**defaults["critic_options"], **stored["critic_options"]}
    free = {"resume", "run_dir", "checkpoint_freq", "verbose", "root"}
    if not CRITICS[run.critic].in_context:
        free |= {"context_rollouts", "critic_options"}  # it has none
    if not CRITICS[run.critic].cross_fits:
        free.add("cross_fit")
    for name, value in wanted.items():
        if name not in free and stored[name] != value:
            raise ValueError(
                f"{folder.path} holds a run with --{name.replace('_', '-')} {stored[name]!r}, not {value!r}. "
                f"Take another --out, or delete that run."
            )


def _run_all(runs: dict[str, TrainConfig], jobs: int) -> dict[str, Exception]:
    """Train each of ``runs``, which have their labels as keys; what failed, by label."""
    failures: dict[str, Exception] = {}
    if not runs:
        return failures
    calls = {label: (train, run) for label, run in runs.items()}
    with ThreadPoolExecutor(min(jobs, len(runs))) as pool:
        for done, (label, future) in enumerate(completed(in_own_process, calls, pool, jobs), 1):
            try:
                folder = RunFolder(future.result())
            except Exception as error:
                failures[label] = error
                print(f"{done:3d} of {len(runs)}   {label} failed: {error}", flush=True)
                continue
            speed = folder.status.get("steps_per_second", math.nan)
            print(f"{done:3d} of {len(runs)}   {label:45s} final return {final_return(folder.read_episodes()):10.1f}   "
                  f"{speed:6.0f} steps/s", flush=True)  # fmt: skip
    return failures
