"""Meta-World's fifty tasks by name, made so that Gymnasium, Stable-Baselines3 and `RollingContext` can use them.

Meta-World's own environments declare an observation space that their observations leave, ignore the seed that `reset`
is given, and offer several tasks only as a Gymnasium vector environment, which Stable-Baselines3 does not take. Here
every environment is a plain `gymnasium.Env` with float32 observations in an unbounded space, the goal visible in the
last three entries, goals drawn from a seed, and a success flag that Stable-Baselines3 logs. `docs/metaworld.md` has the
recipes.

Source:
    Yu et al. 2020, "Meta-World: A Benchmark and Evaluation for Multi-Task and Meta Reinforcement Learning" (CoRL);
    McLean et al. 2025, "Meta-World+: An Improved, Standardized, RL Benchmark" (the v3 tasks, 50 goals a task).
"""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym
import metaworld
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import TimeLimit
from metaworld.policies import ENV_POLICY_MAP
from metaworld.sawyer_xyz_env import SawyerXYZEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

__all__ = [
    "MAX_EPISODE_STEPS",
    "PAPER_DOMAINS",
    "TASKS",
    "MetaWorldEnv",
    "ScriptedExpert",
    "TaskOneHot",
    "make_env",
    "make_vec_env",
    "resolve_task",
]

TASKS: tuple[str, ...] = tuple(sorted(metaworld.MT1.ENV_NAMES))
"""The names of the fifty v3 tasks."""

PAPER_DOMAINS: tuple[str, ...] = (
    "pick-place-v3",
    "pick-place-wall-v3",
    "shelf-place-v3",
    "plate-slide-v3",
    "button-press-v3",
)
"""The five domains of the paper's experiments."""

MAX_EPISODE_STEPS = 500
"""The limit inside Meta-World's base environment: no wrapper can make an episode longer."""

_STATE_SIZE = 39  # hand, gripper, two objects; the same one step earlier; the goal
_MAX_SEED = 2**32  # Meta-World seeds NumPy's legacy generator, which takes 32 bits


def resolve_task(name: str) -> str:
    """Returns the full name of a Meta-World task, however the user spelled it.

    Args:
        name: A task's name with or without `-v3`, in any case, with hyphens, underscores or spaces.

    Returns:
        One of `TASKS`.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: If there is no such task; the message names the closest ones.

    Example:
        >>> resolve_task("Button_Press")
        'button-press-v3'
        >>> resolve_task("buton-press")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: unknown Meta-World task 'buton-press'; did you mean 'button-press-v3', ...
    """
    if not isinstance(name, str):
        raise TypeError(f"a Meta-World task is named by a string, such as 'reach-v3'; received {type(name).__name__}")
    wanted = "-".join(name.strip().lower().replace("_", " ").replace("-", " ").split())
    for candidate in (wanted, f"{wanted}-v3"):
        if candidate in TASKS:
            return candidate
    # Without the suffix on both sides, so that "-v3" makes no two names look alike.
    stems = {task.removesuffix("-v3"): task for task in TASKS}
    stem = wanted.rsplit("-v", 1)[0] if wanted[-1:].isdigit() else wanted
    close = [stems[match] for match in difflib.get_close_matches(stem, stems, n=3, cutoff=0.5)]
    hint = f"did you mean {', '.join(map(repr, close))}?" if close else "icrl_gym.metaworld.TASKS lists all fifty"
    raise ValueError(f"unknown Meta-World task {name!r}; {hint}")


class MetaWorldEnv(gym.Env[np.ndarray, np.ndarray]):
    """One Meta-World task with honest spaces, reproducible goals and a success flag.

    - Observations are float32 in an unbounded box; rewards are Python floats.
    - The goal is one of the task's fifty, drawn at each `reset` by the environment's generator, which the constructor's
      `seed` starts and `reset(seed=...)` restarts.
    - `info["is_success"]` is True from the episode's first success on (Stable-Baselines3 logs it as
      `rollout/success_rate`); Meta-World's own `info["success"]`, the success of this very step, stays.

    It is an environment that owns Meta-World's (`sawyer`), not a wrapper around it: Stable-Baselines3's checker looks
    through wrappers, finds Meta-World's `compute_reward` and takes the environment for a goal-conditioned one.

    Args:
        name: A task's name, see `resolve_task`.
        seed: Determines the task's fifty goals and starts the generator that draws from them.
        max_episode_steps: Steps until an episode is truncated, at most 500.
        goals: `"per_reset"` draws a goal at every reset; `"fixed"` draws one, once, and keeps it whatever seed `reset`
            is given (Stable-Baselines3 passes one when an algorithm has a seed).
        terminate_on_success: Ends an episode (terminated) at its first success. Meta-World's convention is not to.
        render_mode: `"human"`, `"rgb_array"`, `"depth_array"` or None.
        camera_name: One of Meta-World's cameras, such as `"corner2"`.

    Raises:
        ValueError: If the task is unknown, `max_episode_steps` is not in 1 ... 500, `seed` is not in 0 ... 2^32 - 1, or
            `goals` is not one of the two words.

    Source:
        Yu et al. 2020; Meta-World+ (McLean et al. 2025), the MT1 setting.

    Example:
        >>> env = MetaWorldEnv("drawer-close", seed=1)
        >>> observation, _ = env.reset()
        >>> observation.dtype, observation in env.observation_space
        (dtype('float32'), True)
        >>> again, _ = env.reset()
        >>> bool((observation == again).all())  # another goal
        False
    """

    metadata = SawyerXYZEnv.metadata

    def __init__(
        self,
        name: str,
        seed: int = 0,
        *,
        max_episode_steps: int = MAX_EPISODE_STEPS,
        goals: Literal["per_reset", "fixed"] = "per_reset",
        terminate_on_success: bool = False,
        render_mode: Literal["human", "rgb_array", "depth_array"] | None = None,
        camera_name: str | None = None,
    ) -> None:
        self.task_name = resolve_task(name)
        if not 1 <= max_episode_steps <= MAX_EPISODE_STEPS:
            raise ValueError(
                f"max_episode_steps must be in 1 ... {MAX_EPISODE_STEPS}, Meta-World's own limit, which no wrapper can "
                f"raise; received {max_episode_steps}"
            )
        if goals not in ("per_reset", "fixed"):
            raise ValueError(f'goals must be "per_reset" or "fixed"; received {goals!r}')
        if not 0 <= seed < _MAX_SEED:
            raise ValueError(f"seed must be in 0 ... 2**32 - 1; received {seed}")

        benchmark = metaworld.MT1(self.task_name, seed=int(seed))
        # From the class, not through `gym.make`: Meta-World's registrations hold lambdas, so their specs do not pickle,
        # and their goals are drawn by a generator that no argument of `reset` can restart.
        self.sawyer: SawyerXYZEnv = benchmark.train_classes[self.task_name](
            render_mode=render_mode, camera_name=camera_name
        )
        self._limited = TimeLimit(self.sawyer, max_episode_steps)
        self._tasks = tuple(benchmark.train_tasks)
        self._goals = goals
        self._terminate_on_success = terminate_on_success
        self._started = False
        self._succeeded = False
        self.goal_index: int | None = None
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (_STATE_SIZE,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32, seed=int(seed))
        super().reset(seed=int(seed))
        if goals == "fixed":
            self._draw_goal()

    def _draw_goal(self) -> None:
        self.goal_index = int(self.np_random.integers(len(self._tasks)))
        self.sawyer.set_task(self._tasks[self.goal_index])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode, with a newly drawn goal unless goals are fixed.

        Args:
            seed: Restarts the draw: the same seed gives the same goals from here on. None goes on drawing.
            options: Passed through; Meta-World uses none.

        Returns:
            The first observation, float32 of shape (39,), and its info.
        """
        super().reset(seed=seed)
        if self._goals == "per_reset":
            self._draw_goal()
        self._started = True
        self._succeeded = False
        observation, info = self._limited.reset(options=options)
        return np.array(observation, np.float32), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Takes one step.

        Args:
            action: Hand movement and gripper effort, four numbers in [-1, 1].

        Returns:
            Observation (float32, shape (39,)), reward, terminated, truncated and info with `"is_success"`.

        Raises:
            gymnasium.error.ResetNeeded: Before the first `reset`.
        """
        if not self._started:
            raise gym.error.ResetNeeded("call reset() before the first step()")
        observation, reward, terminated, truncated, info = self._limited.step(action)
        success = bool(info.get("success", False))
        self._succeeded = self._succeeded or success
        if self._terminate_on_success and success:
            terminated = True
        info = {**info, "is_success": self._succeeded}
        return np.array(observation, np.float32), float(reward), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """Returns Meta-World's picture of the scene, or shows it, as `render_mode` says."""
        return self.sawyer.render()

    def close(self) -> None:
        """Frees the simulator and its window."""
        self.sawyer.close()


class TaskOneHot(gym.ObservationWrapper[np.ndarray, np.ndarray, np.ndarray], RecordConstructorArgs):
    """Appends a task's one-hot code to the observation, as its last entries.

    Args:
        env: An environment with one-dimensional Box observations.
        task_index: Which of the tasks this environment is, from 0.
        n_tasks: How many tasks there are: the length of the code.

    Raises:
        ValueError: If `task_index` is outside 0 ... `n_tasks` - 1, or the observations are not one-dimensional.

    Example:
        >>> env = TaskOneHot(gym.make("Pendulum-v1"), task_index=1, n_tasks=3)
        >>> env.reset(seed=0)[0][-3:]
        array([0., 1., 0.], dtype=float32)
    """

    def __init__(self, env: gym.Env, task_index: int, n_tasks: int) -> None:
        RecordConstructorArgs.__init__(self, task_index=task_index, n_tasks=n_tasks)
        gym.ObservationWrapper.__init__(self, env)
        if not 0 <= task_index < n_tasks:
            raise ValueError(f"task_index must be in 0 ... n_tasks - 1; received {task_index} with n_tasks {n_tasks}")
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"expected one-dimensional Box observations; received {space}: flatten them first")
        self._code = np.zeros(n_tasks, space.dtype)
        self._code[task_index] = 1
        self.observation_space = gym.spaces.Box(
            np.concatenate([space.low, np.zeros_like(self._code)]),
            np.concatenate([space.high, np.ones_like(self._code)]),
            dtype=space.dtype.type,
        )

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Returns the observation with the code at its end."""
        return np.concatenate([observation, self._code])


def make_env(
    name: str,
    seed: int | None = 0,
    *,
    max_episode_steps: int = MAX_EPISODE_STEPS,
    goals: Literal["per_reset", "fixed"] = "per_reset",
    context_length: int | None = None,
    on_reset: Literal["keep", "clear"] = "keep",
    task_index: int | None = None,
    n_tasks: int | None = None,
    terminate_on_success: bool = False,
    render_mode: Literal["human", "rgb_array", "depth_array"] | None = None,
    camera_name: str | None = None,
) -> gym.Env:
    """Makes one Meta-World task, its goal visible, its goals reproducible from `seed`.

    The layers, inside out: Meta-World, its time limit, `MetaWorldEnv`, `TaskOneHot`, `RollingContext`; the last two
    only when asked for.

    Args:
        name: A task's name, see `resolve_task`.
        seed: Determines the task's fifty goals and the order in which they are drawn. None takes one from the system.
        max_episode_steps: Steps until an episode is truncated, at most 500.
        goals: `"per_reset"` draws one of the fifty goals at every reset; `"fixed"` keeps the first.
        context_length: Wraps the environment in `icrl_gym.wrappers.RollingContext` of this length. None: no wrapper.
        on_reset: What the context does at a reset, `"keep"` or `"clear"`. With `"keep"` and goals drawn per reset, a
            context mixes several goals; the goal is part of each state, so that they can be told apart.
        task_index: With `n_tasks`, appends the one-hot code of this task to the observation.
        n_tasks: How many tasks the code has room for.
        terminate_on_success: Ends an episode at its first success.
        render_mode: `"human"`, `"rgb_array"`, `"depth_array"` or None.
        camera_name: One of Meta-World's cameras, such as `"corner2"`.

    Returns:
        An environment with float32 observations of 39 entries (and the code) and actions in [-1, 1]^4.

    Raises:
        ValueError: If the task is unknown, `max_episode_steps` is not in 1 ... 500, `seed` is not in 0 ... 2^32 - 1,
            only one of `task_index` and `n_tasks` is given, or an option is not one of its words.

    Source:
        Yu et al. 2020; Meta-World+ (McLean et al. 2025), the MT1 setting.

    Example:
        >>> env = make_env("reach", seed=3, max_episode_steps=2)
        >>> first, _ = env.reset(seed=7)
        >>> _ = env.step(np.zeros(4, np.float32))
        >>> _, reward, terminated, truncated, info = env.step(np.zeros(4, np.float32))
        >>> terminated, truncated, info["is_success"]
        (False, True, False)
        >>> bool((env.reset(seed=7)[0] == first).all())
        True
    """
    if (task_index is None) != (n_tasks is None):
        raise ValueError(f"give task_index and n_tasks together; received {task_index} and {n_tasks}")
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    env: gym.Env = MetaWorldEnv(
        name,
        seed,
        max_episode_steps=max_episode_steps,
        goals=goals,
        terminate_on_success=terminate_on_success,
        render_mode=render_mode,
        camera_name=camera_name,
    )
    if task_index is not None and n_tasks is not None:
        env = TaskOneHot(env, task_index, n_tasks)
    if context_length is not None:
        from icrl_gym.wrappers import RollingContext

        env = RollingContext(env, length=context_length, on_reset=on_reset)
    return env


def _make_monitored_env(name: str, seed: int, monitor_path: str | None, options: dict[str, Any]) -> gym.Env:
    """One worker's environment; a function of the module, so that worker processes import it by name."""
    return Monitor(make_env(name, seed, **options), monitor_path)


def make_vec_env(
    names: str | Sequence[str],
    n_envs: int | None = None,
    seed: int | None = 0,
    *,
    vec_env_cls: Callable[..., VecEnv] = DummyVecEnv,
    monitor_dir: str | os.PathLike[str] | None = None,
    max_episode_steps: int = MAX_EPISODE_STEPS,
    goals: Literal["per_reset", "fixed"] = "per_reset",
    context_length: int | None = None,
    on_reset: Literal["keep", "clear"] = "keep",
    terminate_on_success: bool = False,
    render_mode: Literal["human", "rgb_array", "depth_array"] | None = None,
    camera_name: str | None = None,
    vec_env_kwargs: dict[str, Any] | None = None,
) -> VecEnv:
    """Makes a Stable-Baselines3 vector environment of one or several Meta-World tasks.

    Environment i is task i modulo the number of tasks. With several tasks, the task's one-hot code is the end of each
    observation. Every environment gets a seed of its own, so no two share their goals.

    Args:
        names: One task's name, or several.
        n_envs: How many environments; a multiple of the number of tasks, and that number if None.
        seed: Determines the environments' seeds, by `numpy.random.SeedSequence(seed).spawn(n_envs)`.
        vec_env_cls: `DummyVecEnv` or `SubprocVecEnv`; what workers get are factories, never environments.
        monitor_dir: Where each environment's `Monitor` writes its episodes as `<i>.monitor.csv`. None: no file.
        max_episode_steps: See `make_env`; likewise the options from here on.
        goals: See `make_env`.
        context_length: See `make_env`.
        on_reset: See `make_env`.
        terminate_on_success: See `make_env`.
        render_mode: See `make_env`.
        camera_name: See `make_env`.
        vec_env_kwargs: Further arguments of `vec_env_cls`, such as `{"start_method": "spawn"}`.

    Returns:
        The vector environment, each environment inside a `Monitor`.

    Raises:
        ValueError: If there is no name, a name is unknown or given twice, or `n_envs` is not a positive multiple of the
            number of tasks; and whatever `make_env` raises.

    Source:
        Yu et al. 2020; Meta-World+ (McLean et al. 2025), the MT1 and multi-task settings.

    Example:
        >>> venv = make_vec_env(["reach", "drawer-close"], seed=1)
        >>> venv.reset()[:, -2:]
        array([[1., 0.],
               [0., 1.]], dtype=float32)
        >>> venv.close()
    """
    tasks = [resolve_task(name) for name in ([names] if isinstance(names, str) else names)]
    if not tasks:
        raise ValueError("expected at least one Meta-World task; received an empty list")
    twice = sorted({task for task in tasks if tasks.count(task) > 1})
    if twice:
        raise ValueError(f"each task once, please; received {twice[0]!r} twice: n_envs makes several of each")
    if n_envs is None:
        n_envs = len(tasks)
    if n_envs < 1 or n_envs % len(tasks):
        raise ValueError(
            f"n_envs must be a positive multiple of the number of tasks, {len(tasks)}, so that each has equally many "
            f"environments; received {n_envs}"
        )
    if monitor_dir is not None:
        os.makedirs(monitor_dir, exist_ok=True)
    options: dict[str, Any] = {
        "max_episode_steps": max_episode_steps,
        "goals": goals,
        "context_length": context_length,
        "on_reset": on_reset,
        "terminate_on_success": terminate_on_success,
        "render_mode": render_mode,
        "camera_name": camera_name,
    }
    factories: list[Callable[[], gym.Env]] = []
    for i, child in enumerate(np.random.SeedSequence(seed).spawn(n_envs)):
        task_index = i % len(tasks)
        code = {"task_index": task_index, "n_tasks": len(tasks)} if len(tasks) > 1 else {}
        monitor_path = None if monitor_dir is None else os.path.join(monitor_dir, str(i))
        env_seed = int(child.generate_state(1)[0])
        factories.append(
            functools.partial(_make_monitored_env, tasks[task_index], env_seed, monitor_path, {**options, **code})
        )
    return vec_env_cls(factories, **(vec_env_kwargs or {}))


class ScriptedExpert:
    """Meta-World's scripted policy of a task, with Gaussian noise on its actions.

    The action is `clip(a + noise * e, -1, 1)` with a the script's action and e standard normal.

    Args:
        name: A task's name, see `resolve_task`.
        noise: The standard deviation of the noise, in units of the action (whose range is [-1, 1]).
        seed: Starts the noise.

    Raises:
        ValueError: If the task is unknown or `noise` is negative or not finite.

    Source:
        Yu et al. 2020, the scripted policies that come with the benchmark.

    Example:
        >>> env = make_env("drawer-close", seed=0)
        >>> expert = ScriptedExpert("drawer-close", noise=0.1, seed=0)
        >>> observation, _ = env.reset()
        >>> expert(observation).shape
        (4,)
    """

    def __init__(self, name: str, noise: float = 0.0, seed: int = 0) -> None:
        if not 0 <= noise < np.inf:
            raise ValueError(f"noise must be a finite number of at least 0; received {noise}")
        self.name = resolve_task(name)
        self.noise = float(noise)
        self._policy: Any = ENV_POLICY_MAP[self.name]()  # type: ignore[abstract]
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """Returns the action for one observation.

        Args:
            observation: Shape (39,), or longer: a task's code at the end is ignored.

        Returns:
            The action, float32 of shape (4,), within [-1, 1].
        """
        with warnings.catch_warnings():
            # The scripts ask for more than an action of 1 on purpose, and warn about it at almost every step.
            warnings.filterwarnings("ignore", message="Constant\\(s\\) may be too high", category=UserWarning)
            action = self._policy.get_action(np.asarray(observation, np.float64)[:_STATE_SIZE])
        noisy = np.asarray(action, np.float64) + self.noise * self._rng.standard_normal(4)
        return np.clip(noisy, -1.0, 1.0).astype(np.float32)
