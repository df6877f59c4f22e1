"""What a rollout buffer does not say: which steps ended an episode, and which of those bootstrap."""

from __future__ import annotations

import numpy as np
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.vec_env import VecEnvWrapper

from icrl_gym.critic import InContextCritic
from icrl_gym.policy import InContextActorCriticPolicy

__all__ = ["RolloutCallback", "flat_observations"]


class RolloutCallback(BaseCallback):
    """A callback that knows, at the end of a rollout, where its episodes ended and how.

    Attributes:
        ends: (n_steps, n_envs) bool: the episode ended at this step, either way.
        terminated: (n_steps, n_envs) bool: it ended and SB3 bootstraps nothing; False at a time limit.
    """

    model: OnPolicyAlgorithm

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)
        self._ends: list[np.ndarray] = []
        self._terminated: list[np.ndarray] = []

    def _init_callback(self) -> None:
        require_in_context_policy(self)

    def _on_rollout_start(self) -> None:
        self._ends, self._terminated = [], []
        self.policy.cross_fitted = None

    def _on_step(self) -> bool:
        ends = np.array(self.locals["dones"], bool)
        terminated = ends.copy()
        for index in ends.nonzero()[0]:
            info = self.locals["infos"][index]
            # The very condition under which SB3 adds gamma V(terminal observation) to the reward.
            bootstraps = info.get("terminal_observation") is not None and info.get("TimeLimit.truncated", False)
            terminated[index] = not bootstraps
        self._ends.append(ends)
        self._terminated.append(terminated)
        return True

    @property
    def ends(self) -> np.ndarray:
        """(n_steps, n_envs) bool: the episode ended at this step, either way."""
        return np.array(self._ends, bool).reshape(-1, self.training_env.num_envs)

    @property
    def terminated(self) -> np.ndarray:
        """(n_steps, n_envs) bool: the episode ended here and nothing is bootstrapped."""
        return np.array(self._terminated, bool).reshape(-1, self.training_env.num_envs)

    @property
    def policy(self) -> InContextActorCriticPolicy:
        """The policy, with its critic."""
        policy = self.model.policy
        assert isinstance(policy, InContextActorCriticPolicy)
        return policy

    @property
    def critic(self) -> InContextCritic:
        """The critic of the policy."""
        return self.policy.critic

    @property
    def buffer(self) -> RolloutBuffer:
        """The rollout buffer of the algorithm."""
        return self.model.rollout_buffer

    def value_offsets(self) -> np.ndarray:
        """(n_steps, n_envs): what the buffer's values of this rollout carry too much, b of each step's task.

        Cross-fitted values carry none.
        """
        shape = self.buffer.values.shape
        if self.policy.cross_fitted is not None:
            return np.zeros(shape)
        if self.critic.n_tasks == 1:
            return np.full(shape, float(self.critic.offset))
        with torch.no_grad():
            states = self.policy.critic_states(flat_observations(self))
            return self.critic.offsets(states).cpu().numpy().reshape(shape)

    def rollout_td_errors(self) -> np.ndarray:
        """(n_steps, n_envs): TD errors of the rollout without the offset, out-of-sample, in float64.

        SB3 has added gamma V(terminal observation) to the rewards of time limits, which is just what their TD errors need.
        """
        buffer, gamma = self.buffer, float(self.model.gamma)
        values = buffer.values.astype(np.float64)
        last = self.policy.cross_fitted  # of the observation after the rollout
        if last is None:
            last = self.locals["values"].detach().cpu().numpy()
        following = np.concatenate([values[1:], last.reshape(1, -1).astype(np.float64)])
        literal = buffer.rewards + gamma * ~self.ends * following - values
        return literal + self.value_offsets() * (1.0 - gamma * ~self.terminated)


def require_in_context_policy(callback: BaseCallback) -> None:
    """Say at once that a callback of this package needs its policy.

    Raises:
        TypeError: The algorithm has no rollout buffer, or its policy is another one.
    """
    model = callback.model
    if not isinstance(model, OnPolicyAlgorithm):
        raise TypeError(
            f"{type(callback).__name__} works with on-policy algorithms (PPO, A2C, TRPO), got {type(model).__name__}."
        )
    if not isinstance(model.policy, InContextActorCriticPolicy):
        raise TypeError(
            f"{type(callback).__name__} needs the in-context critic, and the policy is {type(model.policy).__name__}. "
            f"Build the algorithm with InContextActorCriticPolicy: PPO(InContextActorCriticPolicy, env)."
        )


def flat_observations(callback: RolloutCallback) -> torch.Tensor | dict[str, torch.Tensor]:
    """The observations of the rollout, steps and environments flattened to one dimension, on the policy's device."""
    observations = callback.buffer.observations
    space = callback.policy.observation_space

    def rows(array: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.as_tensor(array.reshape(-1, *shape), device=callback.policy.device)

    if isinstance(observations, dict):
        return {key: rows(array, get_obs_shape(space[key])) for key, array in observations.items()}  # type: ignore[index, arg-type]
    return rows(observations, get_obs_shape(space))  # type: ignore[arg-type]


def wrappers_of(env: object) -> list[str]:
    """The names of a vector environment's layers, outermost first, for an error."""
    names = []
    while isinstance(env, VecEnvWrapper):
        names.append(type(env).__name__)
        env = env.venv
    return [*names, type(env).__name__]
