"""Training runs: PPO with the in-context critic, or with SB3's learned one, on any Meta-World task or Gymnasium id."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import sys
import time
from collections.abc import Collection
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat, make_output_format
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize
from torch.utils.tensorboard import SummaryWriter

from icrl_gym.callbacks import InContextCallback
from icrl_gym.callbacks.prior import Prior
from icrl_gym.context import Context
from icrl_gym.critic_choices import CRITICS, CriticConfig, ZeroValuePolicy, recurrent_ppo
from icrl_gym.evaluation import EvaluationCallback, evaluation_seed
from icrl_gym.plots import learning_curves
from icrl_gym.policy import InContextActorCriticPolicy
from icrl_gym.runs import Episode, FolderInUseError, RunFolder, load_contexts, versions
from icrl_gym.train_callbacks import Interruption, RunCallback, progress_callback
from icrl_gym.train_envs import make_evaluation_env, make_training_env, without_normalization
from icrl_gym.train_settings import RunOptions, TrainConfig, flat_settings, require_writable, resolve_envs, validate

__all__ = ["CriticConfig", "RunOptions", "TrainConfig", "TrainingRun", "final_return", "train"]


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
        self._resumes = config.resume is not None
        if self._resumes:
            self.folder, config = _resumed(config, given)
            self.checkpoint = self.folder.checkpoints[-1] if self.folder.checkpoints else None
            if self.checkpoint is None and not self.folder.finished:
                print(f"no checkpoint in {self.folder.path} yet: the run begins again from its first step.")
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
            require_writable(self.folder.path)
            if self.folder.holds_files:
                path = str(self.folder.path)
                rest = (
                    f"go on with that run: --resume {shlex.quote(path)}"
                    if self.folder.started
                    else "delete what is there, which is no run (it has no config.json)"
                )
                raise ValueError(f"--run-dir {path!r} is not empty. Take another, or {rest}.")
        validate(config)
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
        """Train to the end, with checkpoints on the way; an interrupted run leaves one to resume from.

        Raises:
            FolderInUseError: Another process is at work in the folder, or was since this run was made.
        """
        if self.done:
            return
        with self.folder.lock():
            self._require_untouched()
            self._learn()

    def _require_untouched(self) -> None:
        """What this run was made from must be what is there now that the folder is its own."""
        newest = self.folder.checkpoints[-1] if self.folder.checkpoints else None
        if newest != self.checkpoint or self.folder.started != self._resumes:
            raise FolderInUseError(
                f"another process has worked in {str(self.folder.path)!r} since this one read it; give the command again."
            )

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
        folder.forget_after(model.num_timesteps)
        model.set_logger(_logger(folder.path, model.num_timesteps, config.verbose))
        start, steps_before = time.perf_counter(), model.num_timesteps
        parts: list[BaseCallback] = []
        if CRITICS[config.critic].in_context:
            cross_fit = config.cross_fit and CRITICS[config.critic].cross_fits
            parts.append(InContextCallback(verbose=config.verbose, cross_fit=cross_fit, prior=self.prior))
        interruption = Interruption()
        recorder = RunCallback(folder, config.checkpoint_freq, interruption)
        evaluation = EvaluationCallback(
            folder,
            functools.partial(make_evaluation_env, config),
            config.eval_freq or 1,
            config.eval_episodes,
            resolve_envs(config.env)[1],
            evaluation_seed(config.seed),
            lambda: interruption.asked,
        )
        # Evaluation before the checkpoint of the same step, so that one that is resumed from has its evaluation.
        parts += [evaluation] if config.eval_freq else []
        parts += [recorder, progress_callback(config)]
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
        trained = model.num_timesteps - steps_before
        # Killed after its last step, a run has nothing left to time.
        speed = {"steps_per_second": round(trained / seconds, 1)} if trained else {}
        folder.update_status(status="finished", ended=_now(), timesteps=model.num_timesteps, **speed)

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
            return recurrent_ppo()("MultiInputLstmPolicy" if several else "MlpLstmPolicy", self.env, **options)
        choice = CRITICS[config.critic]
        critic = (config.critic_options if choice.takes_options else choice.options).critic_kwargs()
        if len(config.env) > 1:
            critic["n_tasks"] = len(config.env)
        model = PPO(InContextActorCriticPolicy, self.env, policy_kwargs={"critic_kwargs": critic}, **options)
        policy = model.policy
        assert isinstance(policy, InContextActorCriticPolicy)
        # A checkpoint is loaded with these: a run goes on with the defaults that it began with, whatever a later version's are.
        model.policy_kwargs["critic_kwargs"] = policy.critic_kwargs = policy.critic.settings
        return model

    def _load(self, checkpoint: Path) -> OnPolicyAlgorithm:
        if CRITICS[self.config.critic].in_context:
            for index, context in enumerate(load_contexts(checkpoint / "contexts.npz")):
                self.env.env_method("load_context", context, indices=index)
        if self.config.normalize:
            self.env = VecNormalize.load(str(checkpoint / "vecnormalize.pkl"), without_normalization(self.env))
        algorithm = recurrent_ppo() if self.config.critic == "recurrent" else PPO
        return algorithm.load(checkpoint / "model.zip", env=self.env, device=self.config.device)


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
    return Context(
        states, context.rewards, next_states, context.terminated, context.truncated, context.mask, context.weights
    )


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
    settings, stored_settings, defaults = flat_settings(wanted), flat_settings(config), flat_settings(TrainConfig())
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
