"""What the policy sees of what the wrapper recorded: VecNormalize's statistics, applied late."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from icrl_gym.algorithms import goes_on
from icrl_gym.context import Context

__all__ = ["PolicyView", "begin_statistics", "is_unread"]


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
        self._reward_scale = 1.0
        if self.normalize is None:
            return
        self._reward_scale = float(np.sqrt(self.normalize.ret_rms.var))
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
            return _as_float32(raw)
        if raw.shape[-1:] != self._mean.shape:
            raise ValueError(
                f"VecNormalize normalizes {self._mean.size} features and RollingContext recorded {raw.shape[-1]}: another layer "
                f"changes observations in between. Put RollingContext outside of it, inside of the vector environment."
            )
        return _as_float32(np.clip((raw - self._mean) / self._scale, -self._bound, self._bound))

    def rewards(self, rewards: npt.ArrayLike) -> np.ndarray:
        """Raw rewards in the units of the algorithm's returns."""
        raw = np.asarray(rewards)
        return raw if self.normalize is None else np.asarray(self.normalize.normalize_reward(raw))

    def measures_like(self, other: PolicyView) -> bool:
        """Whether the statistics are those of another view: what it brought to the policy's coordinates still holds."""
        return (
            np.array_equal(self._mean, other._mean)
            and np.array_equal(self._scale, other._scale)
            and self._reward_scale == other._reward_scale
        )

    def context(self, context: Context) -> Context:
        """A raw context as the policy would have seen it."""
        rewards = self.rewards(context.rewards.numpy()).astype(np.float64)
        return Context(
            self.states(context.states.numpy()).astype(np.float64),
            rewards,
            self.states(context.next_states.numpy()).astype(np.float64),
            context.terminated,
            context.truncated,
            # In SB3's buffer, which is float32, a larger reward is infinite.
            context.mask.numpy() & (np.abs(rewards) <= np.finfo(np.float32).max),
            context.weights,
        )


def is_unread(normalize: VecNormalize) -> bool:
    """Whether VecNormalize is to take statistics and has seen no step yet (the first observations it may have)."""
    # It counts from a small number on, so that nothing is divided by zero.
    return normalize.training and float(normalize.ret_rms.count) < 1.0


def begin_statistics(normalize: VecNormalize, context: Context) -> None:
    """Let VecNormalize take its statistics from raw transitions, as if it had seen them.

    Its reward statistics are those of discounted sums of the rewards so far; where a transition does not go on from the one
    before, a new sum begins.

    Args:
        normalize: Changed in place.
        context: Raw transitions, oldest first.
    """
    states, rewards = context.states.numpy(), context.rewards.numpy()
    if normalize.norm_obs:
        space, statistics, start = normalize.observation_space, normalize.obs_rms, 0
        spaces_of = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        for key, part in spaces_of.items():
            size = spaces.flatdim(part)
            rms = statistics.get(key) if isinstance(statistics, dict) else statistics
            if rms is not None:
                rms.update(states[:, start : start + size].reshape(len(states), *(part.shape or ())))
            start += size
    follows = np.roll(goes_on(context).numpy(), 1)  # the last one never goes on, so the first one never follows
    returns = np.zeros(len(rewards))
    for index, reward in enumerate(rewards):
        returns[index] = reward + (normalize.gamma * returns[index - 1] if follows[index] else 0.0)
    normalize.ret_rms.update(returns)


def _as_float32(states: np.ndarray) -> np.ndarray:
    """States as every SB3 policy reads them, bit for bit; what does not fit is 0 there too."""
    with np.errstate(over="ignore"):
        return np.nan_to_num(states.astype(np.float32), posinf=0.0, neginf=0.0)


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
