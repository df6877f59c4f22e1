"""Snapshots of environments: a state that was reached once, to start from as often as one likes.

The value of a state is measured by going on from it several times, so the simulator must come back to it exactly.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import mujoco  # type: ignore[import-untyped]
import numpy as np
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.monitor import Monitor

from icrl_gym.metaworld import MetaWorldEnv, make_env
from icrl_gym.wrappers import RollingContext

__all__ = ["CopiedEnv", "MetaWorldState", "Snapshot", "capture", "require_restorable"]

_MODEL_ARRAYS = ("body_pos", "body_quat", "site_pos", "site_quat")
"""What a reset of a Meta-World task moves in the model itself: drawers, doors, boxes and goals."""

_INTEGRATION = int(mujoco.mjtState.mjSTATE_INTEGRATION)  # all that the next step depends on, to the last digit


@runtime_checkable
class Snapshot(Protocol):
    """A state of an environment."""

    def restore(self, env: gym.Env | None) -> gym.Env:
        """An environment in this state, its time limit as far away as after a reset.

        Args:
            env: What an earlier call returned, which may be used again; None: a new one.
        """
        ...


@dataclass(frozen=True)
class MetaWorldState:
    """A state of a Meta-World task: MuJoCo's integration state, what resets move in the model, and the task's own notes.

    Attributes:
        task_name: The task.
        physics: MuJoCo's integration state (positions, velocities, mocap, controls, warm start).
        model: The arrays of the model that resets write.
        notes: Attributes of Meta-World's environment that are plain values, such as the target and the last observation.
        wrapper: Likewise of :class:`~icrl_gym.metaworld.MetaWorldEnv`.
    """

    task_name: str
    physics: np.ndarray
    model: dict[str, np.ndarray]
    notes: dict[str, Any]
    wrapper: dict[str, Any]

    @classmethod
    def of(cls, env: MetaWorldEnv) -> MetaWorldState:
        """The present state of an environment."""
        model, data = env.sawyer.model, env.sawyer.data
        physics = np.empty(mujoco.mj_stateSize(model, _INTEGRATION))
        mujoco.mj_getState(model, data, physics, _INTEGRATION)
        notes = {
            name: copy.deepcopy(value)
            for name, value in vars(env.sawyer).items()
            if _is_plain(value) and not _is_live(value, model, data)
        }
        wrapper = {name: getattr(env, name) for name in ("goal_index", "_started", "_succeeded")}
        return cls(
            env.task_name, physics, {name: getattr(model, name).copy() for name in _MODEL_ARRAYS}, notes, wrapper
        )

    def restore(self, env: gym.Env | None) -> gym.Env:
        """See :meth:`Snapshot.restore`."""
        if env is None:
            env = make_env(self.task_name)
            env.reset()
        inner = env.unwrapped
        assert isinstance(inner, MetaWorldEnv)
        sawyer = inner.sawyer
        for name, array in self.model.items():
            getattr(sawyer.model, name)[:] = array
        # No `mj_forward` afterwards: it would move the solver's warm start, and with it the last digits of all that follows.
        mujoco.mj_setState(sawyer.model, sawyer.data, self.physics, _INTEGRATION)
        vars(sawyer).update(copy.deepcopy(self.notes))
        vars(inner).update(self.wrapper)
        sawyer.curr_path_length = 0
        _set_clock_back(inner._limited)
        return env


@dataclass(frozen=True)
class CopiedEnv:
    """A state of an environment that Python can copy.

    Attributes:
        env: The copy.
    """

    env: gym.Env

    def restore(self, env: gym.Env | None) -> gym.Env:
        """See :meth:`Snapshot.restore`."""
        again = copy.deepcopy(self.env)
        _set_clock_back(again)
        return again


def capture(env: gym.Env) -> Snapshot:
    """The present state of an environment.

    Args:
        env: A Meta-World task of this package, or any environment that ``copy.deepcopy`` copies whole.
    """
    inner = env.unwrapped
    if isinstance(inner, MetaWorldEnv):
        return MetaWorldState.of(inner)
    # What records would be copied with all that it has recorded.
    while isinstance(env, (Monitor, RollingContext)):
        env = env.env
    return CopiedEnv(copy.deepcopy(env))


def require_restorable(env: gym.Env, n_steps: int = 5) -> None:
    """Say early that an environment does not come back to a state: the truth could not be measured in it.

    Args:
        env: An environment to try it with; it is reset and stepped.
        n_steps: So many steps before and after.

    Raises:
        ValueError: The same actions from the same state lead elsewhere, or the environment cannot be copied.
    """
    name = env.spec.id if env.spec is not None else str(env.unwrapped)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(2 * n_steps)]
    env.reset(seed=0)
    for action in actions[:n_steps]:
        env.step(action)
    try:
        again = capture(env).restore(None)
    except Exception as error:
        raise ValueError(
            f"the state of {name} cannot be kept: copying it fails ({type(error).__name__}: {error}). The critic benchmark measures "
            f"values by going on from a state several times; take a Meta-World task, or an environment that copy.deepcopy copies."
        ) from error
    for action in actions[n_steps:]:
        one, other = env.step(action), again.step(action)
        if not (np.array_equal(one[0], other[0]) and one[1:3] == other[1:3]):
            raise ValueError(
                f"the state of {name} cannot be restored: the same actions from a copy lead elsewhere. The critic benchmark measures "
                f"values by going on from a state several times; take a Meta-World task, or an environment that copy.deepcopy copies."
            )
        if one[2] or one[3]:
            break


def _set_clock_back(env: gym.Env) -> None:
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, TimeLimit):
            layer.__dict__["_elapsed_steps"] = 0
        layer = layer.env


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(entry) for entry in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return value is None or isinstance(value, (bool, int, float, str, np.ndarray, np.generic))


def _is_live(value: Any, model: Any, data: Any) -> bool:
    """Whether an array is the simulator's own memory, which moves with it (some tasks keep such a view by mistake or design)."""
    if not isinstance(value, np.ndarray):
        return False
    memory = [getattr(model, name) for name in _MODEL_ARRAYS]
    memory += [data.qpos, data.qvel, data.xpos, data.xquat, data.xipos, data.geom_xpos, data.site_xpos, data.mocap_pos]
    return any(np.may_share_memory(value, array) for array in memory)
