"""VectorRollingContext: a rolling context for each environment of a gymnasium.vector environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from icrl_gym.wrappers.rolling_context import ContextSnapshot, OnReset, TransitionRecorder

from icrl_gym.context import Context

__all__ = ["VectorRollingContext"]


class VectorRollingContext(gym.vector.VectorWrapper, RecordConstructorArgs):
    """Keeps the newest transitions of each environment of a vector environment, in all three autoreset modes.

    The rows are those that :class:`~icrl_gym.wrappers.RollingContext` would have recorded around each environment alone:
    the next state is the episode's own last one, never the first of the next episode, and the step that only resets (in
    next-step mode) is no transition.

    Args:
        env: A vector environment that declares its autoreset mode.
        length: How many transitions are kept for each environment.
        on_reset: See :class:`~icrl_gym.wrappers.RollingContext`.

    Raises:
        ValueError: A space that does not flatten, an argument out of its range, or no declared autoreset mode.
        TypeError: A single environment.

    Example:
        >>> envs = VectorRollingContext(gym.make_vec("CartPole-v1", num_envs=2), length=100)
        >>> _ = envs.reset(seed=0)
        >>> _ = envs.step(envs.action_space.sample())
        >>> envs.contexts
        (Context(n=1, d=4), Context(n=1, d=4))
        >>> envs.close()
    """

    def __init__(
        self, env: gym.vector.VectorEnv[Any, Any, Any], length: int = 1024, on_reset: OnReset = "keep"
    ) -> None:
        if not isinstance(env, gym.vector.VectorEnv):
            raise TypeError(
                f"VectorRollingContext wraps a vector environment, got {env}. Use RollingContext for a single one."
            )
        RecordConstructorArgs.__init__(self, length=length, on_reset=on_reset)
        gym.vector.VectorWrapper.__init__(self, env)
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ValueError(
                f"{env} does not declare its autoreset mode: expected a gymnasium.vector.AutoresetMode in "
                f'metadata["autoreset_mode"], got {mode!r}. Set it to what the environment does.'
            )
        self._mode = mode
        self._recorders = tuple(
            TransitionRecorder(env.single_observation_space, length, on_reset) for _ in range(env.num_envs)
        )
        self._ended = np.zeros(env.num_envs, bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments (those of ``options["reset_mask"]``, if given)."""
        chosen = None if options is None else options.get("reset_mask")
        mask = np.ones(self.num_envs, bool) if chosen is None else np.array(chosen, bool)
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]  # lists of seeds are allowed
        rows = list(iterate(self.env.observation_space, observations))
        for index in np.flatnonzero(mask):
            self._recorders[index].reset(rows[index])
        self._ended[mask] = False
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments and record their transitions."""
        result = self.env.step(actions)
        observations, rewards, terminated, truncated, infos = result
        rows = list(iterate(self.env.observation_space, observations))
        ends = np.logical_or(terminated, truncated)
        for index, recorder in enumerate(self._recorders):
            if self._ended[index]:
                if self._mode is AutoresetMode.NEXT_STEP:
                    recorder.reset(rows[index])
                continue  # DISABLED: an environment that has ended waits for its reset
            if ends[index] and self._mode is AutoresetMode.SAME_STEP:
                last = infos["final_obs"][index]
                recorder.step(last, rewards[index], bool(terminated[index]), bool(truncated[index]))
                recorder.reset(rows[index])
            else:
                recorder.step(rows[index], rewards[index], bool(terminated[index]), bool(truncated[index]))
        if self._mode is AutoresetMode.SAME_STEP:
            ends = np.zeros_like(ends)
        # Only next-step mode has just reset what had ended before; a disabled one stays ended.
        self._ended = ends & ~self._ended if self._mode is AutoresetMode.NEXT_STEP else ends | self._ended
        return result

    @property
    def contexts(self) -> tuple[Context, ...]:
        """The newest transitions of each environment, oldest first: copies, in float64."""
        return tuple(recorder.buffer.context() for recorder in self._recorders)

    @property
    def n_refused(self) -> int:
        """Observations and rewards that were not finite, over all environments."""
        return sum(recorder.n_refused for recorder in self._recorders)

    def context_snapshots(self, newest: int | None = None) -> tuple[ContextSnapshot, ...]:
        """See :meth:`~icrl_gym.wrappers.RollingContext.context_snapshot`, of each environment."""
        return tuple(recorder.snapshot(newest) for recorder in self._recorders)

    def clear_contexts(self) -> None:
        """Forget every transition."""
        for recorder in self._recorders:
            recorder.buffer.clear()
