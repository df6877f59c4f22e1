"""The command `icrl-gym`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Annotated, Union

import gymnasium as gym
import tyro

import icrl_gym
from icrl_gym.benchmark import BenchmarkConfig, benchmark
from icrl_gym.critic_benchmark import CriticBenchmarkConfig, critic_benchmark
from icrl_gym.datasets import CollectConfig, collect
from icrl_gym.experiments import ReproduceConfig, reproduce
from icrl_gym.parallel import DIED, WorkerDiedError
from icrl_gym.plots import INSTALL
from icrl_gym.pretraining import PretrainConfig, pretrain
from icrl_gym.runs import FolderInUseError
from icrl_gym.speed_benchmark import SpeedBenchmarkConfig, speed_benchmark
from icrl_gym.train import TrainConfig, TrainingRun

__all__ = ["main"]

Command = Union[  # noqa: UP007 (tyro reads the union's members and their names from this form)
    Annotated[TrainConfig, tyro.conf.subcommand("train")],
    Annotated[BenchmarkConfig, tyro.conf.subcommand("benchmark")],
    Annotated[CollectConfig, tyro.conf.subcommand("collect")],
    Annotated[PretrainConfig, tyro.conf.subcommand("pretrain")],
    Annotated[ReproduceConfig, tyro.conf.subcommand("reproduce")],
]

DESCRIPTION = """PPO with an in-context critic: a transformer with fixed weights evaluates the policy from recorded transitions, and no
gradient step trains it.

  icrl-gym train                                 PPO on Meta-World's reach-v3
  icrl-gym train --env Pendulum-v1 --gamma 0.9   any registered Gymnasium id
  icrl-gym benchmark --envs Pendulum-v1          the in-context critic beside SB3's learned one
  icrl-gym benchmark critic --tasks reach-v3     settings of the critic on recorded rollouts, against measured values
  icrl-gym benchmark speed --quick               the library's own speed, against slow twins, bare torch and peers
  icrl-gym collect --tasks reach --noise low     scripted experts with noisy actions, as Minari datasets
  icrl-gym pretrain --domain pick-place          step sizes, matrices or an adaptive one's heads, by the TD loss on one domain
  icrl-gym reproduce cross-domain --quick        an experiment of the paper: table, figure, verdict
  tensorboard --logdir runs                      TD errors and everything else"""

# What a user can get wrong at the door; an error from inside a running training keeps its traceback.
USER_ERRORS = (ValueError, TypeError, FileNotFoundError, ImportError, gym.error.Error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for what the user got wrong, 1 for a worker that died and 130 for an interruption."""
    try:
        return _main(arguments)
    except (BrokenProcessPool, WorkerDiedError) as error:
        what = str(error) if isinstance(error, WorkerDiedError) else f"a worker: {DIED}"
        print(f"icrl-gym: error: {what}. What has finished is kept; the same command goes on.", file=sys.stderr)
        return 1


def _main(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments in (["--version"], ["-V"]):
        print(f"icrl-gym {icrl_gym.__version__}")
        return 0
    for option in ("--env", "--tasks", "--noise"):
        arguments = _joined(arguments, option)
    if arguments[:2] == ["benchmark", "critic"]:
        # Two words, where tyro would make `critic` a subcommand that every other `benchmark` had to name as well.
        return _critic_benchmark(arguments[2:])
    if arguments[:2] == ["benchmark", "speed"]:
        return _speed_benchmark(arguments[2:])
    config = tyro.cli(
        Command,
        args=arguments or ["--help"],
        prog="icrl-gym",
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    try:
        if isinstance(config, CollectConfig):
            print("\n".join(collect(config)))
            return 0
        if isinstance(config, PretrainConfig):
            pretrain(config)
            return 0
        if isinstance(config, ReproduceConfig):
            reproduce(config)
            return 0
        if isinstance(config, BenchmarkConfig):
            print(f"results in {benchmark(config)}")
            return 0
        run = TrainingRun(config, _given(arguments))
    except (*USER_ERRORS, FloatingPointError) as error:
        return _user_error(error)
    except KeyboardInterrupt:
        starts_over = isinstance(config, PretrainConfig)
        rest = "starts the training again; recorded data stay" if starts_over else "goes on from here"
        print(f"\ninterrupted; the same command {rest}.", file=sys.stderr)
        return 130
    if run.done:
        print(f"{run.folder.path} finished before, after {run.folder.status['timesteps']:,} steps; nothing to do.")
        return 0
    print(f"{run.config.label()}: results in {run.folder.path}\nwatch it: tensorboard --logdir {run.folder.path}")
    try:
        run.learn()
    except (FloatingPointError, FolderInUseError) as error:
        return _user_error(error)
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with: icrl-gym train --resume {run.folder.path}", file=sys.stderr)
        return 130
    status = run.folder.status
    curve = run.folder.path / "learning_curve.png"
    shown = str(curve) if curve.is_file() else f"no learning_curve.png without matplotlib ({INSTALL})"
    speed = f" at {status['steps_per_second']:.0f} steps/s" if "steps_per_second" in status else ""
    print(f"done: {status['timesteps']:,} steps{speed}; {shown}")
    return 0


def _critic_benchmark(arguments: Sequence[str]) -> int:
    config = tyro.cli(CriticBenchmarkConfig, args=arguments, prog="icrl-gym benchmark critic")
    try:
        print(f"results in {critic_benchmark(config)}")
        return 0
    except USER_ERRORS as error:
        return _user_error(error)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here.", file=sys.stderr)
        return 130


def _speed_benchmark(arguments: Sequence[str]) -> int:
    config = tyro.cli(SpeedBenchmarkConfig, args=arguments, prog="icrl-gym benchmark speed")
    try:
        print(f"results in {speed_benchmark(config)}")
        return 0
    except USER_ERRORS as error:
        return _user_error(error)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the rows that were measured are in {config.out}.", file=sys.stderr)
        return 130


def _given(arguments: Sequence[str]) -> set[str]:
    """The names of the settings that were given, whatever their values: also a default one may contradict a resumed run."""
    names = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    return {name.removeprefix("no_") for name in names}


def _joined(arguments: Sequence[str], option: str) -> list[str]:
    """An option that was given several times, given once: tyro would take the last one and forget the others."""
    joined: list[str] = []
    end: int | None = None  # where the option's next value goes
    taking = False
    for word in arguments:
        name, _, value = word.partition("=")
        if name == option:
            taking = True
            if end is None:
                joined.append(option)
                end = len(joined)
            if not value:
                continue
            word = value
        elif word.startswith("-"):
            taking = False
        if taking and end is not None:
            joined.insert(end, word)
            end += 1
        else:
            joined.append(word)
    return joined


def _user_error(error: BaseException) -> int:
    print("icrl-gym: error: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
