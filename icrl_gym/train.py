"""Training runs: PPO with the in-context critic, or with SB3's learned one, on any Meta-World task or Gymnasium id."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ProgressBarCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat, make_output_format
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize
from torch.utils.tensorboard import SummaryWriter

from icrl_gym.callbacks import InContextCallback
from icrl_gym.callbacks.cross_fit import require_other_environments
from icrl_gym.callbacks.prior import Prior
from icrl_gym.context import Context
from icrl_gym.critic_choices import CRITICS, CriticConfig, CriticName, ZeroValuePolicy
from icrl_gym.evaluation import EvaluationCallback, evaluation_seed
from icrl_gym.plots import learning_curves
from icrl_gym.policy import InContextActorCriticPolicy
from icrl_gym.runs import Episode, RunFolder, load_contexts, versions
from icrl_gym.wrappers import RollingContext

__all__ = ["CriticConfig", "RunOptions", "TrainConfig", "TrainingRun", "train"]


@dataclass
class RunOptions:
    """What `icrl-gym train` and `icrl-gym benchmark` have in common."""

    total_timesteps: int = 60_000
    """Environment steps, over all environments."""
    n_envs: int | None = None
    """Environments side by side; default 4, or as many more as several tasks need to have equally many each."""
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
    context_rollouts: int = 2
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
    """A Meta-World task (several, separated by spaces or commas: one run over all of them, one context a task), or a Gymnasium id."""
    critic: CriticName = "in-context"
    """The in-context critic, which is never trained; SB3's learned value network (mlp); the value zero (none); the paper's 20 layers
    (paper); or sb3-contrib's recurrent PPO (recurrent)."""
    cross_fit: bool = False
    """Take advantages from values that, for each environment, are fitted on what the others met in the same rollout as well."""
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
            self.n_envs = n_tasks * math.ceil(4 / n_tasks)
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
        return self.critic + "+cross-fit" * self.cross_fit + "+prior" * bool(self.prior)


def train(config: TrainConfig) -> Path:
    """Run (or resume) one training run.

    Args:
        config: The settings.

    Returns:
        The run's folder; see :mod:`icrl_gym.runs` for what is in it.

    Raises:
        ValueError: Settings that cannot work, before anything is written.
        FileNotFoundError: Nothing to resume.
        FloatingPointError: The critic's layers diverge; the newest checkpoint stays.
    """
    run = TrainingRun(config)
    run.learn()
    return run.folder.path


class TrainingRun:
    """One training run, ready to learn.

    Everything that can be wrong with the settings is found here, before the first step.

    Args:
        config: The settings.
        given: With ``config.resume``, the names of the settings that were given beside it; they must be those of the run.
            None: those that are not the default.

    Raises:
        ValueError: Settings that cannot work.
        FileNotFoundError: Nothing to resume.
    """

    def __init__(self, config: TrainConfig, given: Collection[str] | None = None) -> None:
        self.checkpoint: Path | None = None
        if config.resume is not None:
            self.folder, config = _resumed(config, given)
            self.checkpoint = self.folder.checkpoints[-1] if self.folder.checkpoints else None
            if (
                self.checkpoint is None
                and self.folder.finished
                and self.folder.status["timesteps"] < config.total_timesteps
            ):
                # From its beginning instead, it would throw its results away.
                raise ValueError(
                    f"the finished run in {str(self.folder.path)!r} has no checkpoints any more, so it cannot be made longer; "
                    f"start a new one."
                )
        else:
            stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
            self.folder = RunFolder(config.run_dir or Path("runs") / f"{config.label()}-{stamp}")
            _require_writable(self.folder.path)
            if self.folder.path.exists() and any(p.name != ".lock" for p in self.folder.path.iterdir()):
                raise ValueError(
                    f"--run-dir {str(self.folder.path)!r} is not empty. Take another, or go on with that run: "
                    f"--resume {shlex.quote(str(self.folder.path))}."
                )
        _validate(config)
        torch.set_num_threads(config.torch_threads)
        self.config = config
        self.done = self.folder.finished and self.folder.status.get("timesteps", 0) >= config.total_timesteps
        if not self.done:
            self.prior = _prior(config)
            self.env = make_training_env(config)
            try:
                if self.prior is not None:
                    Prior(self.prior).check(spaces.flatdim(self.env.observation_space), len(config.env))
                self.model = self._make_model()
            except BaseException:
                self.env.close()
                raise

    def learn(self) -> None:
        """Train to the end, with checkpoints on the way; an interrupted run leaves one to resume from."""
        if self.done:
            return
        with self.folder.lock():
            self._learn()

    def _learn(self) -> None:
        config, model, folder = self.config, self.model, self.folder
        folder.sweep()
        folder.write_config(dataclasses.asdict(config))
        command = shlex.join(["icrl-gym", *sys.argv[1:]])
        folder.update_status(
            status="running",
            command=command,
            versions=versions(),
            seed=config.seed,
            started=_now(),
            timesteps=model.num_timesteps,
        )
        folder.drop_episodes_after(model.num_timesteps)
        folder.drop_evaluations_after(model.num_timesteps)
        model.set_logger(_logger(folder.path, model.num_timesteps, config.verbose))
        start, steps_before = time.perf_counter(), model.num_timesteps
        parts: list[BaseCallback] = []
        if CRITICS[config.critic].in_context:
            parts.append(InContextCallback(verbose=config.verbose, cross_fit=config.cross_fit, prior=self.prior))
        interruption = _Interruption()
        recorder = _RunCallback(folder, config.checkpoint_freq, interruption)
        evaluation = EvaluationCallback(
            folder,
            functools.partial(make_evaluation_env, config),
            config.eval_freq or 1,
            config.eval_episodes,
            _resolve(config.env)[1],
            evaluation_seed(config.seed),
            lambda: interruption.asked,
        )
        # Evaluation before the checkpoint of the same step, so that one that is resumed from has its evaluation.
        parts += [evaluation] if config.eval_freq else []
        parts += [recorder, _progress(config)]
        try:
            with interruption:
                model.learn(
                    config.total_timesteps - model.num_timesteps,
                    callback=CallbackList(parts),
                    reset_num_timesteps=False,
                )
            if interruption.asked:
                raise KeyboardInterrupt
        except BaseException as error:
            # Between two steps the environments can be asked for their contexts; a second Ctrl-C comes anywhere.
            if isinstance(error, KeyboardInterrupt) and not interruption.forced:
                recorder.flush()
                folder.save_checkpoint(model)
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error}"
            folder.update_status(status=reason, ended=_now(), timesteps=model.num_timesteps)
            raise
        finally:
            evaluation.close()
            for output in model.logger.output_formats:
                output.close()
        seconds = time.perf_counter() - start - evaluation.seconds
        folder.finish(folder.save_checkpoint(model))
        self.env.close()
        episodes = folder.read_episodes()
        points = [e.timesteps for e in episodes], [e.episode_return for e in episodes]
        learning_curves(
            {f"PPO, {config.variant} critic": [points]}, folder.path / "learning_curve.png", " + ".join(config.env)
        )
        folder.update_status(
            status="finished",
            ended=_now(),
            timesteps=model.num_timesteps,
            steps_per_second=round((model.num_timesteps - steps_before) / seconds, 1),
        )

    def _make_model(self) -> OnPolicyAlgorithm:
        config = self.config
        if self.checkpoint is not None:
            try:
                model = self._load(self.checkpoint)
            except Exception as error:
                raise ValueError(
                    f"the checkpoint {str(self.checkpoint)!r} cannot be read ({type(error).__name__}: {error}). "
                    f"Delete that folder to go on from the one before it."
                ) from error
            # Loading starts every generator from the run's own seed again; going on must not replay its first goals and noise.
            words = np.random.SeedSequence([config.seed, model.num_timesteps]).generate_state(1)
            model.set_random_seed(int(words[0]) >> 1)
            return model
        options: dict[str, Any] = {
            name: getattr(config, name)
            for name in (
                "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "learning_rate", "ent_coef", "clip_range",
                "use_sde", "seed", "device",
            )
        }  # fmt: skip
        several = isinstance(self.env.observation_space, spaces.Dict)
        if config.critic == "mlp":
            return PPO("MultiInputPolicy" if several else "MlpPolicy", self.env, **options)
        if config.critic == "none":
            return PPO(ZeroValuePolicy, self.env, **options)
        if config.critic == "recurrent":
            return _recurrent_ppo()("MultiInputLstmPolicy" if several else "MlpLstmPolicy", self.env, **options)
        choice = CRITICS[config.critic]
        critic = (config.critic_options if choice.takes_options else choice.options).critic_kwargs()
        if len(config.env) > 1:
            critic["n_tasks"] = len(config.env)
        return PPO(InContextActorCriticPolicy, self.env, policy_kwargs={"critic_kwargs": critic}, **options)

    def _load(self, checkpoint: Path) -> OnPolicyAlgorithm:
        if CRITICS[self.config.critic].in_context:
            for index, context in enumerate(load_contexts(checkpoint / "contexts.npz")):
                self.env.env_method("load_context", context, indices=index)
        if self.config.normalize:
            self.env = VecNormalize.load(str(checkpoint / "vecnormalize.pkl"), _bare(self.env))
        algorithm = _recurrent_ppo() if self.config.critic == "recurrent" else PPO
        return algorithm.load(checkpoint / "model.zip", env=self.env, device=self.config.device)


def _recurrent_ppo() -> Any:
    try:
        from sb3_contrib import RecurrentPPO
    except ImportError:
        raise ImportError(
            "--critic recurrent is sb3-contrib's RecurrentPPO, which is not installed: pip install sb3-contrib."
        ) from None
    return RecurrentPPO


def _prior(config: TrainConfig) -> Context | None:
    """The transitions of the data sets that a run begins with; those of several tasks with the one-hot of theirs."""
    if not config.prior:
        return None
    contexts = [Context.from_minari(name, root=config.root) for name in config.prior]
    n_tasks = len(config.env)
    if n_tasks == 1:
        return contexts[0]
    widths = {context.n_features for context in contexts}
    if len(widths) > 1:
        raise ValueError(
            f"--prior: the states of these data sets have {', '.join(map(str, sorted(widths)))} entries, and the tasks of one run "
            f"have equally many. Take data sets of the tasks of --env."
        )
    return Context.cat([_with_code(context, task, n_tasks) for task, context in enumerate(contexts)])


def _with_code(context: Context, task: int, n_tasks: int) -> Context:
    """A context of one task, with the one-hot of the task at the end of its states."""
    code = torch.eye(n_tasks, dtype=context.states.dtype)[task].expand(len(context), n_tasks)
    states, next_states = (torch.cat([part, code], -1) for part in (context.states, context.next_states))
    return Context(states, context.rewards, next_states, context.terminated, context.truncated, context.mask)


def make_training_env(config: TrainConfig) -> VecEnv:
    """The vector environment of a run: environments, rolling contexts for an in-context critic, VecNormalize.

    Raises:
        ValueError: An unknown name, or an environment that PPO or the critic cannot take.
    """
    choice = CRITICS[config.critic]
    assert config.n_envs is not None
    length: int | None = None
    if choice.in_context:
        length = config.context_rollouts * config.n_steps
        if choice.context_length is not None:
            length = max(1, choice.context_length // config.n_envs)
    env = _make_env(config, config.n_envs, config.seed, length)
    supported = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(env.action_space, supported):
        env.close()
        raise ValueError(f"PPO cannot act in {config.env[0]}: its action space is {env.action_space}, expected one of Box, Discrete, "
                         f"MultiDiscrete, MultiBinary.")  # fmt: skip
    space = env.observation_space
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    if any(is_image_space(part) for part in parts):
        env.close()
        raise ValueError(
            f"what {config.env[0]} shows is an image, {space}: every critic wants vectors. Encode it in a wrapper first."
        )
    return _normalized(config, env)


def make_evaluation_env(config: TrainConfig, most: int = 5) -> VecEnv:
    """The vector environment that a run is evaluated in: other seeds and goals than those of training, whatever the critic.

    Args:
        config: The settings of the run.
        most: Environments side by side, of one task; several tasks have one each.

    Returns:
        At most ``most`` environments in this process, with VecNormalize that takes no statistics of its own.
    """
    n_tasks = len(config.env)
    n_envs = n_tasks if n_tasks > 1 else min(most, config.eval_episodes)
    config = dataclasses.replace(config, vec_env="dummy")
    env = _normalized(config, _make_env(config, n_envs, evaluation_seed(config.seed), None))
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    return env


def _make_env(config: TrainConfig, n_envs: int, seed: int, context_length: int | None) -> VecEnv:
    vec_env_cls = _SubprocVecEnv if config.vec_env == "subproc" else DummyVecEnv
    kind, names = _resolve(config.env)
    limit = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    if kind == "metaworld":
        from icrl_gym import metaworld

        options: dict[str, Any] = {"context_length": context_length, **limit}
        return metaworld.make_vec_env(list(names), n_envs, seed, vec_env_cls=vec_env_cls, **options)
    wrapper: dict[str, Any] = {}
    if context_length is not None:
        wrapper = {"wrapper_class": RollingContext, "wrapper_kwargs": {"length": context_length}}
    return make_vec_env(names[0], n_envs, seed, vec_env_cls=vec_env_cls, env_kwargs=limit, **wrapper)


def _normalized(config: TrainConfig, env: VecEnv) -> VecEnv:
    if not config.normalize:
        return env
    return VecNormalize(env, norm_obs=isinstance(env.observation_space, spaces.Box), gamma=config.gamma)


def _bare(env: VecEnv) -> VecEnv:
    return env.venv if isinstance(env, VecNormalize) else env


def _resolve(names: tuple[str, ...]) -> tuple[Literal["metaworld", "gymnasium"], tuple[str, ...]]:
    """Which library an environment's name belongs to, and its full name."""
    if len(names) == 1 and names[0].split(":")[-1] in gym.registry:
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
                f"Several environments in one run must be Meta-World tasks."
            ) from None
        raise error


def _validate(config: TrainConfig) -> None:
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
        for name in ("cross_fit", "prior"):
            if getattr(config, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} belongs to an in-context critic, and --critic {config.critic} is none; leave it out."
                )
    if config.cross_fit:
        require_other_environments(config.n_envs // len(config.env), len(config.env))
    if config.prior and len(config.prior) != len(config.env):
        raise ValueError(
            f"--prior takes one data set for each task, in the order of --env: expected {len(config.env)}, got {len(config.prior)} "
            f"({' '.join(config.prior)})."
        )
    if config.critic == "recurrent":
        _recurrent_ppo()
    config.critic_options.critic_kwargs()
    try:
        torch.device("cpu" if config.device == "auto" else config.device)
    except RuntimeError:
        raise ValueError(
            f'--device must be "auto", "cpu", "cuda" or another of torch\'s, got {config.device!r}.'
        ) from None


def _require_writable(path: Path) -> None:
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--run-dir {str(path)!r}: {str(there)!r} is not a folder that can be written to.")


def _resumed(wanted: TrainConfig, given: Collection[str] | None) -> tuple[RunFolder, TrainConfig]:
    """The folder and the stored settings of a run to go on with."""
    assert wanted.resume is not None
    folder = RunFolder(wanted.resume)
    stored = folder.config
    try:
        stored["critic_options"] = CriticConfig(**stored["critic_options"])
        stored["env"], stored["prior"] = tuple(stored["env"]), tuple(stored.get("prior", ()))
        config = TrainConfig(**stored)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{str(folder.path / 'config.json')!r} is not what `icrl-gym train` writes there ({type(error).__name__}: {error})."
        ) from None
    settings, stored_settings, defaults = _flat(wanted), _flat(config), _flat(TrainConfig())
    if given is None:
        given = [name for name, value in settings.items() if value != defaults[name]]
    for name in sorted(set(given) - {"resume", "total_timesteps"}):
        if settings[name] != stored_settings[name]:
            raise ValueError(
                f"--resume takes the settings of the run itself; --{name.replace('_', '-')} is {stored_settings[name]!r} "
                f"there and cannot become {settings[name]!r}. Start a new run for that."
            )
    if "total_timesteps" in given:
        if wanted.total_timesteps < config.total_timesteps:
            raise ValueError(
                f"--total-timesteps can be raised, not lowered: the run in {str(folder.path)!r} has {config.total_timesteps:,}, "
                f"got {wanted.total_timesteps:,}."
            )
        config.total_timesteps = wanted.total_timesteps
    return folder, config


def _flat(config: TrainConfig) -> dict[str, Any]:
    """Settings by the names that they have on the command line."""
    settings = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    return {**settings, **dataclasses.asdict(settings.pop("critic_options"))}


class _Interruption:
    """Ctrl-C asks a training to stop after the step it is in; a second one stops it at once.

    An exception in the middle of a step would leave worker processes with answers that nobody has read, so their contexts
    could not be asked for any more.

    Attributes:
        asked: There was a first one.
        forced: There was a second one.
    """

    def __init__(self) -> None:
        self.asked = self.forced = False
        self._before: Any = None

    def __enter__(self) -> _Interruption:
        # Only the main thread may set handlers; elsewhere a KeyboardInterrupt comes as it always does.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.forced = True
            raise KeyboardInterrupt
        self.asked = True


def _deaf_to_interrupts(make_env: Callable[[], gym.Env]) -> gym.Env:
    # Ctrl-C reaches every process of a terminal; workers must live until the main one has their contexts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return make_env()


class _SubprocVecEnv(SubprocVecEnv):
    def __init__(self, env_fns: list[Callable[[], gym.Env]], start_method: str | None = None) -> None:
        super().__init__([functools.partial(_deaf_to_interrupts, make) for make in env_fns], start_method)


class _RunCallback(BaseCallback):
    """Episodes into the table, checkpoints on the way."""

    def __init__(self, folder: RunFolder, checkpoint_freq: int, interruption: _Interruption) -> None:
        super().__init__()
        self.folder, self.checkpoint_freq, self.interruption = folder, checkpoint_freq, interruption
        self._episodes: list[Episode] = []
        self._next = 0

    def _on_training_start(self) -> None:
        self._next = self.num_timesteps + self.checkpoint_freq

    def _on_rollout_start(self) -> None:
        # Here and not at the rollout's end: the update of the last rollout is in the model now.
        if self.model.num_timesteps >= self._next:
            self._next = self.model.num_timesteps + self.checkpoint_freq
            self.flush()
            self.folder.save_checkpoint(self.model)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            episode = info.get("episode")
            if episode is not None:
                success = info.get("is_success")
                self._episodes.append(
                    Episode(
                        self.num_timesteps,
                        float(episode["r"]),
                        int(episode["l"]),
                        None if success is None else float(success),
                    )
                )
        return not self.interruption.asked

    def _on_rollout_end(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Write the episodes that have ended."""
        self.folder.append_episodes(self._episodes)
        self._episodes = []


class _Lines(BaseCallback):
    """A line now and then, where there is no terminal for a bar."""

    def __init__(self, total_timesteps: int, label: str, n_lines: int = 10) -> None:
        super().__init__()
        self.total, self.label, self.every = total_timesteps, label, max(1, total_timesteps // n_lines)
        self._next = 0
        self._start = (0.0, 0)

    def _on_training_start(self) -> None:
        self._next = self.num_timesteps + self.every
        self._start = (time.perf_counter(), self.num_timesteps)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self.num_timesteps < self._next:
            return
        self._next += self.every
        speed = (self.num_timesteps - self._start[1]) / (time.perf_counter() - self._start[0])
        recent = [info["r"] for info in self.model.ep_info_buffer or ()]
        average = f"{np.mean(recent):10.1f}" if recent else "    (none)"
        print(
            f"{self.num_timesteps:9,d} of {self.total:,d} steps   mean return {average}   {speed:5.0f} steps/s   {self.label}",
            flush=True,
        )


def _progress(config: TrainConfig) -> BaseCallback:
    # The bar goes to stdout. Several runs side by side (`icrl-gym benchmark`) would draw over each other's.
    if sys.stdout.isatty() and multiprocessing.parent_process() is None:
        try:
            return ProgressBarCallback()
        except ImportError:
            print('no progress bar: pip install "icrl-gym[progress]" for one.')
    return _Lines(config.total_timesteps, config.label())


def _logger(path: Path, timesteps: int, verbose: int) -> Logger:
    formats = [make_output_format("csv", str(path), f"_{timesteps}")]
    board = make_output_format("tensorboard", str(path / "tensorboard"))
    assert isinstance(board, TensorBoardOutputFormat)
    if timesteps:
        # What a killed run wrote after its last checkpoint is hidden: those steps are played again.
        board.writer.close()
        board.writer = SummaryWriter(log_dir=str(path / "tensorboard"), purge_step=timesteps + 1)
    formats.append(board)
    if verbose:
        formats.append(make_output_format("stdout", str(path)))
    return Logger(str(path), formats)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def final_return(episodes: list[Episode], n: int = 100) -> float:
    """The mean return of the last ``n`` episodes; NaN without any."""
    last = [e.episode_return for e in episodes[-n:]]
    return float(np.mean(last)) if last else math.nan
