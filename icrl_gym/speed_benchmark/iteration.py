"""Where an iteration of PPO goes: processor time a step of its parts, with the in-context critic and with SB3's learned one."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from icrl_gym.critic import InContextCritic
from icrl_gym.critic_choices import CriticName
from icrl_gym.speed_benchmark.measured import Measured, Settings
from icrl_gym.speed_benchmark.ppo import ENVIRONMENTS, one_run
from icrl_gym.speed_benchmark.timing import spread

__all__ = ["PartTimer", "iteration"]

_PARTS: dict[str, list[tuple[type, str]]] = {
    "environments": [(DummyVecEnv, "step_wait")],
    "critic: values": [(InContextCritic, "forward")],
    "critic: conditioning": [(InContextCritic, "evaluate"), (InContextCritic, "evaluate_folds")],
    "PPO's update": [(PPO, "train")],
}
_REST = "the rest of collecting"


class PartTimer:
    """Times functions without the time of other timed ones that they call, in processor time of their thread.

    Attributes:
        seconds: By part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []  # what timed calls within each open one have taken

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to a part.

        Args:
            part: The name.
            function: Called in one thread only.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.thread_time() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole

        return call

    @contextlib.contextmanager
    def watching(self, parts: dict[str, list[tuple[type, str]]], rest: str) -> Iterator[None]:
        """Time methods of classes as long as the context lasts; what is none of them goes to ``rest``."""
        with contextlib.ExitStack() as stack:
            for part, methods in parts.items():
                for owner, name in methods:
                    stack.enter_context(mock.patch.object(owner, name, self.timed(part, getattr(owner, name))))
            start = time.thread_time()
            yield
            whole = time.thread_time() - start
            self.seconds[rest] = whole - sum(self.seconds.values())


def iteration(settings: Settings) -> list[Measured]:
    """Microseconds of processor time a step; the first round warms up."""
    steps = settings.size(settings.total_timesteps, 1024)
    rows = []
    for env in ENVIRONMENTS[:1] if settings.quick else ENVIRONMENTS:
        taken: dict[CriticName, dict[str, list[float]]] = {"in-context": {}, "mlp": {}}
        for index in range(min(settings.rounds, 3) + 1):
            for critic in list(taken) if index % 2 else list(reversed(taken)):
                timer = PartTimer()
                with mock.patch.object(PPO, "learn", timer.watching(_PARTS, _REST)(PPO.learn)):
                    one_run(env, critic, steps)
                for part, seconds in timer.seconds.items() if index else ():
                    taken[critic].setdefault(part, []).append(seconds / steps)
        for part in [*_PARTS, _REST]:
            per_critic = {str(critic): parts[part] for critic, parts in taken.items() if part in parts}
            ours = per_critic.get("in-context", [0.0])
            rows.append(
                Measured(
                    "iteration", f"PPO on {env}: {part}", "MlpPolicy's, in seconds", spread([1e6 * value for value in ours]),
                    "us a step", seconds={critic: spread(values).median for critic, values in per_critic.items()},
                    note=f"processor time of the main thread, {steps:,} steps",
                )
            )  # fmt: skip
    return rows
