"""Rows about whole training runs: the in-context critic, SB3's learned one, and no critic at all, in turn."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from unittest import mock

import torch
from stable_baselines3.common.callbacks import BaseCallback

from icrl_gym.critic import InContextCritic
from icrl_gym.critic_choices import CriticName
from icrl_gym.policy import InContextActorCriticPolicy
from icrl_gym.runs import RunFolder
from icrl_gym.speed_benchmark.measured import Goal, Measured, Settings
from icrl_gym.speed_benchmark.timing import ratio_of, spread
from icrl_gym.train import TrainConfig, train

__all__ = ["ENVIRONMENTS", "one_run", "ppo"]

_CRITICS = ("in-context", "mlp", "none")
_GOALS = {"Pendulum-v1": 1.3, "reach-v3": 1.1}

ENVIRONMENTS = tuple(_GOALS)
"""One whose steps cost next to nothing, and one whose steps are most of a run; the first is tried where it is to be quick."""


class _Idle(BaseCallback):
    """Stands where InContextCallback does, and leaves the critic alone."""

    def _on_training_start(self) -> None:
        assert isinstance(self.model.policy, InContextActorCriticPolicy)
        self.model.policy.critic.is_synced = True

    def _on_step(self) -> bool:
        return True


def ppo(settings: Settings) -> list[Measured]:
    """Steps per second over MlpPolicy's, of `icrl-gym train`'s defaults.

    "No critic" has the in-context policy with every value zero and no callback: what is possible at best.
    """
    steps = 1024 if settings.quick else settings.total_timesteps
    rounds = min(settings.rounds, 5)
    rows = []
    for env in ENVIRONMENTS[:1] if settings.quick else ENVIRONMENTS:
        speeds: dict[str, list[float]] = {critic: [] for critic in _CRITICS}
        for index in range(rounds + 1):
            for critic in _CRITICS if index % 2 else reversed(_CRITICS):
                speed = _speed(env, critic, steps)
                if index:  # the first round warms up imports and caches
                    speeds[critic].append(speed)
        medians = {critic: 1.0 / spread(values).median for critic, values in speeds.items()}
        for critic, name in (("in-context", "the in-context critic"), ("none", "no critic at all, the best possible")):
            rows.append(
                Measured(
                    "ppo", f"PPO on {env}, {name}", "MlpPolicy, in steps per second", ratio_of(speeds[critic], speeds["mlp"]),
                    "x faster", Goal("at least", _GOALS[env]) if critic == "in-context" else None, medians,
                    note=f"{rounds} runs of {steps:,} steps each; seconds are those of a step",
                )
            )  # fmt: skip
    return rows


def _speed(env: str, critic: str, steps: int) -> float:
    """Steps per second of one run."""
    with contextlib.ExitStack() as stack:
        if critic == "none":
            idle = mock.patch("icrl_gym.train.InContextCallback", lambda verbose, **options: _Idle(verbose))
            zero = mock.patch.object(InContextCritic, "forward", lambda _, obs: torch.zeros(len(obs), 1))
            stack.enter_context(idle)
            stack.enter_context(zero)
        return one_run(env, "mlp" if critic == "mlp" else "in-context", steps)


def one_run(env: str, critic: CriticName, steps: int) -> float:
    """Steps per second of one run of `icrl-gym train`'s defaults, which leaves nothing behind.

    Args:
        env: The environment's name.
        critic: The critic's.
        steps: How many.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        run = TrainConfig(
            env=(env,), critic=critic, total_timesteps=steps, torch_threads=torch.get_num_threads(), checkpoint_freq=10**9,
            run_dir=f"{folder}/run",
        )  # fmt: skip
        return float(RunFolder(train(run)).status["steps_per_second"])
