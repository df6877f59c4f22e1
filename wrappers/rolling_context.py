"""RollingContext: records the transitions of an environment, for a critic that is conditioned on them."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, NamedTuple, SupportsFloat, get_args

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from icrl_gym.wrappers.flattening import flattener

from icrl_gym.context import Context, TransitionBuffer

__all__ = ["ContextSnapshot", "OnReset", "RollingContext", "TransitionRecorder"]

OnReset = Literal["keep", "clear"]


class ContextSnapshot(NamedTuple):
    """What one environment has recorded, in one piece: one message from a worker process.

    Attributes:
        context: The transitions, oldest first.
        observation: (d,) float64, the flattened observation that the agent acts on next; None before the first reset.
        n_refused: Observations and rewards that were not finite, since the environment was made.
        length: How many transitions the context can hold.
        n_changes: A number that moves whenever the context does.
    """

    context: Context
    observation: np.ndarray | None
    n_refused: int
    length: int
    n_changes: int


class TransitionRecorder:
    """Turns the resets and steps of one environment into transitions; what both wrappers share.

    Args:
        space: The observation space.
        length: How many transitions are kept.
        on_reset: ``"keep"`` or ``"clear"``.

    Raises:
        ValueError: A space that does not flatten, or an argument out of its range.
    """

    def __init__(self, space: gym.Space[Any], length: int, on_reset: OnReset) -> None:
        if on_reset not in get_args(OnReset):
            raise ValueError(f"RollingContext: on_reset must be one of {get_args(OnReset)}, got {on_reset!r}.")
        self.flatten, size, dtype = flattener(space)
        self.buffer = TransitionBuffer(length, size, dtype)
        self.on_reset = on_reset
        self.state: np.ndarray | None = None
        self.state_is_finite = True
        self.episode_is_open = False
        self.n_refused = 0

    def reset(self, observation: Any) -> None:
        """A new episode begins with this observation."""
        if self.episode_is_open:
            # A reset without an end: a time limit outside of the wrapper. The next row does not go on from the last.
            self.buffer.cut()
        if self.on_reset == "clear":
            self.buffer.clear()
        self.state = self.flatten(observation)
        self.state_is_finite = self._check(_all_finite(self.state))
        self.episode_is_open = False

    def step(self, observation: Any, reward: SupportsFloat, terminated: bool, truncated: bool) -> None:
        """The environment went on to this observation."""
        next_state = self.flatten(observation)
        value = float(reward)
        finite = _all_finite(next_state)
        state, usable = self.state, self.state_is_finite
        if not (finite and math.isfinite(value)):
            # Counted where it came from: the transition that starts at a bad observation is dropped without a second count.
            self._check(False)
            usable = False
        if usable and state is not None:
            self.buffer.add(state, value, next_state, terminated, truncated)
        else:
            # A hole in the record: the last row's successor was dropped.
            self.buffer.skip()
        self.state, self.state_is_finite = next_state, finite
        self.episode_is_open = not (terminated or truncated)

    def snapshot(self, newest: int | None = None) -> ContextSnapshot:
        """See :meth:`RollingContext.context_snapshot`."""
        observation = None if self.state is None else self.state.astype(np.float64)
        return ContextSnapshot(
            self.buffer.context(newest), observation, self.n_refused, self.buffer.capacity, self.buffer.n_changes
        )

    def _check(self, finite: bool) -> bool:
        if not finite:
            self.n_refused += 1
            if self.n_refused == 1:
                warnings.warn(
                    "RollingContext: an observation or reward was NaN or infinite; its transitions are left out of the context. "
                    "`n_refused` counts such events from here on.",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return finite


def _all_finite(values: np.ndarray) -> bool:
    # `.all()` takes several times as long for a vector of some dozen entries; a sum of squares may overflow.
    return 0 not in np.isfinite(values).tobytes()


class RollingContext(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Keeps the newest transitions of an environment and changes nothing that passes through.

    Put it outside of every wrapper that changes observations or rewards, so that it records what the agent sees, and
    inside of vector environments. Its methods can be called through any number of wrappers and through worker processes:
    ``vec_env.env_method("context_snapshot")``.

    Args:
        env: Any environment whose observations flatten to a vector.
        length: How many transitions are kept, the newest ones.
        on_reset: ``"keep"``: the context rolls on over episodes; it may hold transitions of several goals, and values are
            those of the mixture where the observation does not tell the goals apart. ``"clear"``: it holds the present
            episode only, for tasks that change from episode to episode without a sign in the observation.

    Raises:
        ValueError: A space of images or without a fixed size; an argument out of its range; an environment that already has
            a RollingContext.
        TypeError: A vector environment.

    Source: He et al. 2026, section 3 (the context).

    Example:
        >>> env = RollingContext(gym.make("CartPole-v1"), length=100)
        >>> _ = env.reset(seed=0)
        >>> for _ in range(5):
        ...     _ = env.step(env.action_space.sample())
        >>> env.context
        Context(n=5, d=4)
    """

    def __init__(self, env: gym.Env[Any, Any], length: int = 1024, on_reset: OnReset = "keep") -> None:
        if isinstance(env, gym.vector.VectorEnv):
            raise TypeError(
                f"RollingContext wraps one environment, got the vector environment {env}. Wrap each of its environments inside "
                f"the function that makes it (make_vec_env(..., wrapper_class=RollingContext)), or use VectorRollingContext."
            )
        layer: Any = env
        while isinstance(layer, gym.Wrapper):
            if isinstance(layer, RollingContext):
                raise ValueError(
                    f"this environment already has a RollingContext (length {layer.length}): {env}. Use one, outside of every "
                    f"wrapper that changes observations."
                )
            layer = layer.env
        RecordConstructorArgs.__init__(self, length=length, on_reset=on_reset)
        gym.Wrapper.__init__(self, env)
        self._recorder = TransitionRecorder(env.observation_space, length, on_reset)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; the last transition is marked as cut if its episode had not ended."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._recorder.reset(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record the transition."""
        result = self.env.step(action)
        observation, reward, terminated, truncated, _ = result
        self._recorder.step(observation, reward, bool(terminated), bool(truncated))
        return result

    @property
    def context(self) -> Context:
        """The newest transitions, oldest first: copies, in float64."""
        return self._recorder.buffer.context()

    @property
    def length(self) -> int:
        """How many transitions are kept."""
        return self._recorder.buffer.capacity

    @property
    def n_refused(self) -> int:
        """Observations and rewards that were not finite, since the environment was made."""
        return self._recorder.n_refused

    def context_snapshot(self, newest: int | None = None) -> ContextSnapshot:
        """Everything that a critic needs of this environment, in one call.

        Args:
            newest: Only so many of the newest transitions; default all.
        """
        return self._recorder.snapshot(newest)

    def clear_context(self) -> None:
        """Forget every transition."""
        self._recorder.buffer.clear()

    def load_context(self, context: Context) -> None:
        """Put earlier transitions (of a resumed run, of another policy, of a data set) in place of what was recorded.

        Args:
            context: One context of flattened states, oldest first; the newest ``length`` of them are kept.

        Raises:
            ValueError: States of another size, or a batch of contexts.
        """
        self._recorder.buffer.clear()
        self._recorder.buffer.extend(context)
