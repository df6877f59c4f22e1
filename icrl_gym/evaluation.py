"""Evaluation episodes on held-out goals while a run trains, without any effect on the training."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

from icrl_gym.runs import EvaluationEpisode, RunFolder

__all__ = ["EvaluationCallback", "evaluation_seed", "randomness_untouched"]

_STREAM = 0x45564C  # tells the seeds of evaluation apart from those of training


def evaluation_seed(seed: int) -> int:
    """The seed of a run's evaluation environments: from another stream than those of its training environments.

    Args:
        seed: The run's own.

    Returns:
        An integer of 31 bits, which leaves room for the environments' indices.
    """
    return int(np.random.SeedSequence([seed, _STREAM]).generate_state(1)[0]) >> 1


@contextlib.contextmanager
def randomness_untouched(seed: int | None = None) -> Iterator[None]:
    """Whatever is drawn inside of the block, global generators go on as if it had not been there.

    Args:
        seed: What they start from inside of it; None: as they are.
    """
    python, legacy, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 (environments may draw from NumPy's global generator)
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(tensors)


class EvaluationCallback(BaseCallback):
    """Plays evaluation episodes at fixed intervals, and at the end of the training.

    An evaluation comes between two rollouts, after the update: at the first rollout, then at the first one after each multiple of
    ``frequency``, and when training ends. Actions are deterministic, statistics of VecNormalize are those of the moment and stay
    as they are, and every evaluation starts from the same seed, so that it meets the same goals. Rows go to ``evaluations.csv``;
    ``eval/mean_reward``, ``eval/mean_ep_length`` and ``eval/success_rate`` to the logger, named as SB3's ``EvalCallback`` does.

    Args:
        folder: Where rows go. Evaluations that it holds are not played again.
        make_env: Makes the environments, before the first evaluation: as wrapped as those of training, each in a Monitor.
        frequency: Environment steps from one evaluation to the next.
        n_episodes: Episodes of each task in an evaluation.
        tasks: Names of the tasks; environment i plays task i modulo their number.
        seed: Of the environments.
        stopped: Asked at every step; an evaluation that it stops leaves nothing.

    Attributes:
        seconds: Spent on evaluations so far.
    """

    def __init__(
        self,
        folder: RunFolder,
        make_env: Callable[[], VecEnv],
        frequency: int,
        n_episodes: int,
        tasks: tuple[str, ...],
        seed: int,
        stopped: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.folder, self.make_env, self.frequency = folder, make_env, frequency
        self.n_episodes, self.tasks, self.seed, self.stopped = n_episodes, tasks, seed, stopped
        self.seconds = 0.0
        self.env: VecEnv | None = None
        self._last = -1

    def _on_training_start(self) -> None:
        self._last = max((row.timesteps for row in self.folder.read_evaluations()), default=-1)

    def _on_rollout_start(self) -> None:
        # Here and not at the rollout's end: the update of the last rollout is in the model now.
        if self.model.num_timesteps // self.frequency > self._last // self.frequency:
            self._evaluate()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        if self.model.num_timesteps > self._last and not self.stopped():
            self._evaluate()

    def close(self) -> None:
        """Close the environments."""
        if self.env is not None:
            self.env.close()
            self.env = None

    def _evaluate(self) -> None:
        start = time.perf_counter()
        with randomness_untouched(self.seed):
            if self.env is None:
                self.env = self.make_env()
            if isinstance(self.env, VecNormalize):
                sync_envs_normalization(self.training_env, self.env)
            rows = self._play(self.env)
        self.seconds += time.perf_counter() - start
        if rows is None:
            return
        self.folder.append_evaluation(rows)
        self._last = self.model.num_timesteps
        self.logger.record("eval/mean_reward", float(np.mean([row.episode_return for row in rows])))
        self.logger.record("eval/mean_ep_length", float(np.mean([row.length for row in rows])))
        successes = [row.success for row in rows if row.success is not None]
        if successes:
            self.logger.record("eval/success_rate", float(np.mean(successes)))
        self.logger.record("time/total_timesteps", self.model.num_timesteps, exclude="tensorboard")
        self.logger.dump(self.model.num_timesteps)

    def _play(self, env: VecEnv) -> list[EvaluationEpisode] | None:
        """The episodes of one evaluation; None if it was stopped."""
        timesteps, n_tasks = self.model.num_timesteps, len(self.tasks)
        ended: list[tuple[int, int, dict[str, Any]]] = []

        def after_step(local: dict[str, Any], _: dict[str, Any]) -> None:
            if self.stopped():
                raise _Stopped
            index, info = local["i"], local["info"]
            if local["done"] and "episode" in info:
                ended.append((int(local["episode_counts"][index]), index, info))

        env.seed(self.seed)
        training = self.model.policy.training
        try:
            evaluate_policy(
                self.model, env, self.n_episodes * n_tasks, deterministic=True, callback=after_step, warn=False
            )
        except _Stopped:
            return None
        finally:
            self.model.policy.set_training_mode(training)
        # In the order of the goals, not in that of the episodes' ends.
        ended.sort(key=lambda entry: entry[:2])
        return [
            EvaluationEpisode(
                timesteps,
                number,
                self.tasks[index % n_tasks],
                float(info["episode"]["r"]),
                int(info["episode"]["l"]),
                None if info.get("is_success") is None else float(info["is_success"]),
            )
            for number, (_, index, info) in enumerate(ended)
        ]


class _Stopped(Exception):
    """The user wants the training to end."""
