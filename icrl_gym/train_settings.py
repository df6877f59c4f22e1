"""Settings of a training run: what `icrl-gym train` and `icrl-gym benchmark` take, and what of it cannot work."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import torch
import tyro

from icrl_gym.critic_choices import CRITICS, CriticConfig, CriticName, recurrent_ppo

__all__ = ["RunOptions", "TrainConfig", "flat_settings", "require_writable", "resolve_envs", "validate"]


@dataclass
class RunOptions:
    """What `icrl-gym train` and `icrl-gym benchmark` have in common."""

    total_timesteps: int = 60_000
    """Environment steps, over all environments."""
    n_envs: int | None = None
    """Environments side by side; default 4 of one task, and equally many, two at least, of each of several."""
    n_steps: int = 512
    """Steps of each environment in a rollout."""
    batch_size: int = 64
    """Minibatch size of the update."""
    n_epochs: int = 10
    """Passes over a rollout in the update."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    clip_range: float = 0.2
    """PPO's clipping range."""
    use_sde: bool = False
    """Exploration noise that depends on the state (gSDE); continuous actions only."""
    normalize: bool = True
    """VecNormalize observations and rewards."""
    max_episode_steps: int | None = None
    """Time limit; default the environment's own (500 in Meta-World)."""
    context_rollouts: int = 8
    """Length of the context: so many rollouts of each environment."""
    critic_options: Annotated[CriticConfig, tyro.conf.arg(name="")] = field(default_factory=CriticConfig)
    vec_env: Literal["dummy", "subproc"] = "dummy"
    """Environments in this process, or a process each."""
    device: str = "cpu"
    """Where the networks are: cpu is faster than a GPU for networks this small."""
    torch_threads: int = 1
    """Threads of torch: more than one rarely helps networks this small."""
    checkpoint_freq: int = 20_000
    """Environment steps between checkpoints."""
    eval_freq: int | None = None
    """Environment steps between evaluations on held-out goals; 0: none. Default: none in train, a sixth of the run in benchmark."""
    eval_episodes: int = 10
    """Episodes of each task in an evaluation."""
    root: str | None = None
    """Where data sets are (None: Minari's own folder)."""
    verbose: int = 0
    """1: SB3's tables."""


@dataclass
class TrainConfig(RunOptions):
    """Train PPO on a Meta-World task or any registered Gymnasium id, and watch TD errors in TensorBoard."""

    env: tuple[str, ...] = ("reach-v3",)
    """A Meta-World task (several, separated by spaces or commas: one run over all of them, one context a task), or
    a Gymnasium id (MODULE:ID imports a module that registers it)."""
    critic: CriticName = "in-context"
    """The in-context critic, which is never trained; SB3's learned value network (mlp); the value zero (none); the paper's 20 layers
    (paper); or sb3-contrib's recurrent PPO (recurrent)."""
    cross_fit: bool = True
    """Take advantages from values that, for each environment, are fitted on what the others met in the same rollout as well; where
    there are at least two environments of each task."""
    prior: tuple[str, ...] = ()
    """A Minari data set whose newest transitions stand in the context until recorded ones fill it; of several tasks one each, in the
    order of --env."""
    seed: int = 0
    """Of environments, networks and actions."""
    run_dir: str | None = None
    """Where to; default runs/<env>-<critic>-seed<seed>-<time>."""
    resume: str | None = None
    """Go on with the run in this folder, from its newest checkpoint, with its own settings. --total-timesteps may be raised."""

    def __post_init__(self) -> None:
        """Take names apart that are separated by commas, and fill in how many environments they need."""
        self.env = tuple(name for names in self.env for name in names.split(",") if name)
        if self.n_envs is None:
            n_tasks = max(len(self.env), 1)
            self.n_envs = n_tasks * max(2, math.ceil(4 / n_tasks))  # cross-fitting takes two of each
        if self.eval_freq is None:
            self.eval_freq = 0
        self.prior = tuple(name for names in self.prior for name in names.split(",") if name)
        if self.root is not None:
            self.root = str(Path(self.root).expanduser().absolute())  # a run may be resumed from elsewhere

    def label(self) -> str:
        """A name for the run."""
        return f"{'+'.join(self.env)}-{self.variant}-seed{self.seed}"

    @property
    def variant(self) -> str:
        """The critic with what is added to it, by the name that `icrl-gym benchmark --critics` takes."""
        frozen = CRITICS[self.critic].cross_fits and not self.cross_fit
        return self.critic + "+frozen" * frozen + "+prior" * bool(self.prior)


def resolve_envs(names: tuple[str, ...]) -> tuple[Literal["metaworld", "gymnasium"], tuple[str, ...]]:
    """Which library an environment's name belongs to, and its full name.

    Args:
        names: One id of Gymnasium, ``"module:Env-v0"`` for one that a module registers when it is imported, or names of
            Meta-World tasks.

    Returns:
        The library, and full names.

    Raises:
        ValueError: Neither knows a name, or its module cannot be imported.
    """
    if len(names) == 1:
        module, _, name = names[0].rpartition(":")
        if module:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ValueError(
                    f"unknown environment {names[0]!r}: {error}. Expected MODULE:ID, where importing the module registers the "
                    f"id; install the package, or put the module's folder on PYTHONPATH."
                ) from None
        if name in gym.registry:
            return "gymnasium", names
    from icrl_gym import metaworld

    try:
        return "metaworld", tuple(metaworld.resolve_task(name) for name in names)
    except ValueError as error:
        if len(names) == 1:
            try:
                gym.spec(names[0])
                return "gymnasium", names
            except (gym.error.Error, ModuleNotFoundError):
                pass
            close = difflib.get_close_matches(names[0], [*gym.registry, *metaworld.TASKS], n=3, cutoff=0.5)
            hint = f"Did you mean {', '.join(close)}? " if close else ""
            raise ValueError(
                f"unknown environment {names[0]!r}: neither a Meta-World task nor a registered Gymnasium id. {hint}"
                f"An id that a module registers is MODULE:ID. Several environments in one run must be Meta-World tasks."
            ) from None
        raise error


def validate(config: TrainConfig) -> None:
    """Say what cannot work, before anything is made.

    Raises:
        ValueError: With what was given, what was expected, and what to do.
    """
    positive = (
        "total_timesteps", "n_envs", "n_steps", "batch_size", "n_epochs", "learning_rate", "context_rollouts",
        "checkpoint_freq", "torch_threads", "clip_range", "eval_episodes",
    )  # fmt: skip
    for name in positive:
        if not getattr(config, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {getattr(config, name)}.")
    if config.eval_freq is not None and config.eval_freq < 0:
        raise ValueError(f"--eval-freq must be at least 0 (no evaluations), got {config.eval_freq}.")
    for name in ("gamma", "gae_lambda"):
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ValueError(f"--{name.replace('_', '-')} must lie in [0, 1], got {getattr(config, name)}.")
    if not config.env:
        raise ValueError("--env needs at least one name.")
    assert config.n_envs is not None
    rollout = config.n_steps * config.n_envs
    if config.batch_size < 2:
        raise ValueError(
            "--batch-size must be at least 2: PPO divides advantages by their deviation within a minibatch."
        )
    if config.batch_size > rollout or rollout % config.batch_size:
        raise ValueError(
            f"--batch-size {config.batch_size} must divide a rollout of n_steps * n_envs = {rollout} steps; take a divisor of it."
        )
    if not CRITICS[config.critic].takes_options and config.critic_options != CriticConfig():
        raise ValueError(f"--critic {config.critic} takes none of the in-context critic's settings; leave them out.")
    if not CRITICS[config.critic].in_context:
        if config.prior:
            raise ValueError(
                f"--prior belongs to an in-context critic, and --critic {config.critic} is none; leave it out."
            )
    if config.prior and len(config.prior) != len(config.env):
        raise ValueError(
            f"--prior takes one data set for each task, in the order of --env: expected {len(config.env)}, got {len(config.prior)} "
            f"({' '.join(config.prior)})."
        )
    if config.critic == "recurrent":
        recurrent_ppo()
    config.critic_options.critic_kwargs()
    try:
        torch.device("cpu" if config.device == "auto" else config.device)
    except RuntimeError:
        raise ValueError(
            f'--device must be "auto", "cpu", "cuda" or another of torch\'s, got {config.device!r}.'
        ) from None


def require_writable(path: Path) -> None:
    """Say before a run that its folder cannot be written to.

    Raises:
        ValueError: It is no folder, or not ours to write to.
    """
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--run-dir {str(path)!r}: {str(there)!r} is not a folder that can be written to.")


def flat_settings(config: TrainConfig) -> dict[str, Any]:
    """Settings by the names that they have on the command line."""
    settings = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    return {**settings, **dataclasses.asdict(settings.pop("critic_options"))}
