"""What the policy sees of what the wrapper recorded: VecNormalize's statistics, applied late."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from icrl_gym.context import Context

__all__ = ["PolicyView"]


class PolicyView:
    """Brings raw transitions to the coordinates and reward units of the policy, with the statistics of this moment.

    Context and query must be measured alike: stored rows that were normalized with older statistics would no longer match.

    Args:
        env: The vector environment of the algorithm.

    Raises:
        ValueError: VecNormalize's statistics are not finite (an observation or reward that was not has reached them).
    """

    def __init__(self, env: VecEnv) -> None:
        self.normalize: VecNormalize | None = unwrap_vec_normalize(env)
        self._mean = self._scale = self._bound = np.zeros(())
        if self.normalize is None:
            return
        if self.normalize.norm_obs:
            self._mean, self._scale, self._bound = _affine(self.normalize)
        finite = np.isfinite(self._mean).all() and np.isfinite(self._scale).all()
        if not (finite and np.isfinite(self.normalize.ret_rms.var)):
            raise ValueError(
                "VecNormalize's running statistics are not finite: an observation or reward that was NaN or infinite has "
                "reached them, and every later observation is lost. Keep such values from it, in a wrapper of the environment."
            )

    def states(self, states: npt.ArrayLike) -> np.ndarray:
        """Flattened raw states (..., d) as the policy sees them."""
        raw = np.asarray(states)
        if self.normalize is None or not self.normalize.norm_obs:
            return raw
        normalized = np.clip((raw - self._mean) / self._scale, -self._bound, self._bound)
        # VecNormalize hands float32 to the policy; the context's states must be equal to it bit for bit.
        return normalized.astype(np.float32)

    def rewards(self, rewards: npt.ArrayLike) -> np.ndarray:
        """Raw rewards in the units of the algorithm's returns."""
        raw = np.asarray(rewards)
        return raw if self.normalize is None else self.normalize.normalize_reward(raw)

    def context(self, context: Context) -> Context:
        """A raw context as the policy would have seen it."""
        if self.normalize is None:
            return context
        return Context(
            self.states(context.states.numpy()).astype(np.float64),
            self.rewards(context.rewards.numpy()).astype(np.float64),
            self.states(context.next_states.numpy()).astype(np.float64),
            context.terminated,
            context.truncated,
            context.mask,
        )


def _affine(normalize: VecNormalize) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, scale and clipping bound of each entry of a flattened observation."""
    space = normalize.observation_space
    if not isinstance(space, spaces.Dict):
        rms = normalize.obs_rms
        assert isinstance(rms, RunningMeanStd)
        parts = [(rms.mean.ravel(), rms.var.ravel(), int(np.prod(space.shape or ())), normalize.clip_obs)]
    else:
        parts = []
        assert isinstance(normalize.obs_rms, dict)
        for key, part in space.spaces.items():
            size = spaces.flatdim(part)
            if key in (normalize.norm_obs_keys or ()):
                of_key = normalize.obs_rms[key]
                parts.append((of_key.mean.ravel(), of_key.var.ravel(), size, normalize.clip_obs))
            else:
                parts.append((np.zeros(size), np.full(size, 1.0 - normalize.epsilon), size, np.inf))
    mean = np.concatenate([p[0] for p in parts])
    scale = np.sqrt(np.concatenate([p[1] for p in parts]) + normalize.epsilon)
    bound = np.concatenate([np.full(p[2], p[3]) for p in parts])
    return mean, scale, bound
