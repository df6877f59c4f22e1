"""Rows about RollingContext: what it adds to a step of an environment that does nothing itself."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

from icrl_gym.speed_benchmark.measured import Goal, Measured, Settings
from icrl_gym.speed_benchmark.timing import spread
from icrl_gym.wrappers import RollingContext

__all__ = ["Trivial", "wrapper"]


class Trivial(gym.Env[np.ndarray, int]):
    """An environment whose step costs next to nothing.

    Args:
        n_features: d.
    """

    def __init__(self, n_features: int = 39) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (n_features,), np.float32)
        self.action_space: gym.Space[Any] = gym.spaces.Discrete(2)
        self._observation = np.zeros(n_features, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The observation zero."""
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The same observation, reward 1, no end."""
        return self._observation, 1.0, False, False, {}


def wrapper(settings: Settings) -> list[Measured]:
    """Microseconds a step that the wrapper adds, at a short and a long length."""
    steps = settings.size(20_000, 1_000)
    lengths = (64, 65_536)
    envs: dict[int, gym.Env[Any, Any]] = {0: Trivial(settings.n_features)}
    envs.update({length: RollingContext(Trivial(settings.n_features), length) for length in lengths})
    for env in envs.values():
        env.reset()
        _step(env, max(steps, 70_000) if not settings.quick else steps)  # a full ring, and all of its memory touched
    taken: dict[int, list[float]] = {length: [] for length in envs}
    for index in range(settings.rounds):
        for length in list(envs) if index % 2 else reversed(list(envs)):
            taken[length].append(_step(envs[length], steps))
    rows = []
    for length in lengths:
        added = [1e6 * (a - b) / steps for a, b in zip(taken[length], taken[0], strict=True)]
        rows.append(
            Measured(
                "wrapper", f"a step with RollingContext, length {length:,}, {settings.n_features} features", "without it",
                spread(added), "us a step", Goal("at most", 5.0),
                {"with": spread(taken[length]).median / steps, "without": spread(taken[0]).median / steps},
            )
        )  # fmt: skip
    return rows


def _step(env: gym.Env[Any, Any], steps: int) -> float:
    step = env.step
    start = time.perf_counter()
    for _ in range(steps):
        step(0)
    return time.perf_counter() - start
