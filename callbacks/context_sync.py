"""ContextSyncCallback: conditions the critic on what the environments have recorded, at the start of every rollout."""

from __future__ import annotations

import time

import numpy as np
import torch
from icrl_gym.callbacks.rollout import require_in_context_policy, wrappers_of
from icrl_gym.callbacks.view import PolicyView
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from icrl_gym.context import Context
from icrl_gym.policy import InContextActorCriticPolicy

__all__ = ["ContextSyncCallback"]


class ContextSyncCallback(BaseCallback):
    """Keeps the critic's context up to date: pull, bring to the policy's view, check, condition.

    At the start of a rollout the contexts of all environments are pooled. They hold transitions from before the rollout
    only, so that its TD errors are out-of-sample, and stay frozen until the next one, so that SB3 gets the same values
    while collecting and in the update. Before the first transition the value is zero.

    Args:
        verbose: 1 says once that the values of the first rollout are zero.

    Raises:
        TypeError: The policy is not an :class:`~icrl_gym.policy.InContextActorCriticPolicy`.
        ValueError: An environment has no :class:`~icrl_gym.wrappers.RollingContext`; the critic was given another gamma
            than the algorithm's; something outside RollingContext changes observations.

    Source: DESIGN of this package (``docs/architecture.md``).
    """

    model: OnPolicyAlgorithm

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.n_refused = 0
        self.context_fill = 0.0
        self.seconds = 0.0
        self._said_zero = False

    def _init_callback(self) -> None:
        require_in_context_policy(self)
        require_rolling_context(self.training_env)
        self.policy.critic.match_gamma(float(self.model.gamma))

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        start = time.perf_counter()
        env = self.training_env
        snapshots = env.env_method("context_snapshot")
        view = PolicyView(env)
        self._check_observations(view, [snapshot.observation for snapshot in snapshots])
        context = view.context(Context.cat([snapshot.context for snapshot in snapshots]))
        self.policy.critic.condition(context)
        self.policy.critic.is_synced = True
        self.n_refused = sum(snapshot.n_refused for snapshot in snapshots)
        self.context_fill = len(context) / sum(snapshot.length for snapshot in snapshots)
        if not len(context) and self.verbose and not self._said_zero:
            print("InContextCallback: no transitions yet; the critic's value is zero in the first rollout.")
            self._said_zero = True
        self.seconds = time.perf_counter() - start

    def _on_training_end(self) -> None:
        self.policy.critic.is_synced = False

    @property
    def policy(self) -> InContextActorCriticPolicy:
        """The policy, with its critic."""
        policy = self.model.policy
        assert isinstance(policy, InContextActorCriticPolicy)
        return policy

    def _check_observations(self, view: PolicyView, recorded: list[np.ndarray | None]) -> None:
        last = self.model._last_obs
        assert last is not None
        with torch.no_grad():
            seen = self.policy.critic_states(obs_as_tensor(last, self.policy.device)).cpu().numpy()
        for index, observation in enumerate(recorded):
            expected = None if observation is None else np.nan_to_num(view.states(observation), posinf=0.0, neginf=0.0)
            if (
                expected is None
                or expected.shape != seen[index].shape
                or not np.allclose(expected, seen[index], rtol=1e-5, atol=1e-5)
            ):
                raise ValueError(
                    f"environment {index}: the policy's observation {_short(seen[index])} is not the one that RollingContext "
                    f"recorded, {_short(expected)} in the policy's units. Something outside RollingContext changes "
                    f"observations (vector layers: {' of '.join(wrappers_of(self.training_env))}). Put RollingContext outside "
                    f"of every wrapper that changes observations; of the vector wrappers, VecNormalize alone is understood."
                )


def require_rolling_context(env: VecEnv) -> None:
    """Say before the first step that an environment has no rolling context.

    Raises:
        ValueError: At least one environment has none.
    """
    if not env.has_attr("context_snapshot"):
        raise ValueError(
            "the in-context critic reads its transitions from a RollingContext around each environment, and there is none. "
            "Wrap each single environment: make_vec_env(env_id, n_envs, wrapper_class=RollingContext, "
            "wrapper_kwargs=dict(length=1024))."
        )


def _short(state: np.ndarray | None) -> str:
    if state is None:
        return "none"
    head = np.array2string(state[:4], precision=4, separator=", ")
    return head if len(state) <= 4 else f"{head[:-1]}, ...] ({len(state)} entries)"
