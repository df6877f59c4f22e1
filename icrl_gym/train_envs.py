"""The environments of a run: those that it trains in, and those that it is evaluated in."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from icrl_gym.critic_choices import CRITICS
from icrl_gym.evaluation import evaluation_seed
from icrl_gym.train_settings import TrainConfig, resolve_envs
from icrl_gym.wrappers import RollingContext

__all__ = ["make_evaluation_env", "make_training_env", "without_normalization"]


def make_training_env(config: TrainConfig) -> VecEnv:
    """The vector environment of a run: environments, rolling contexts for an in-context critic, VecNormalize.

    Raises:
        ValueError: An unknown name, or an environment that PPO or the critic cannot take.
    """
    choice = CRITICS[config.critic]
    assert config.n_envs is not None
    length: int | None = None
    if choice.in_context:
        length = config.context_rollouts * config.n_steps
        if choice.context_length is not None:
            length = max(1, choice.context_length // config.n_envs)
    env = _make_env(config, config.n_envs, config.seed, length)
    supported = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(env.action_space, supported):
        env.close()
        raise ValueError(f"PPO cannot act in {config.env[0]}: its action space is {env.action_space}, expected one of Box, Discrete, "
                         f"MultiDiscrete, MultiBinary.")  # fmt: skip
    space = env.observation_space
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    if any(is_image_space(part) for part in parts):
        env.close()
        raise ValueError(
            f"what {config.env[0]} shows is an image, {space}: every critic wants vectors. Encode it in a wrapper first."
        )
    return _normalized(config, env)


def make_evaluation_env(config: TrainConfig, most: int = 5) -> VecEnv:
    """The vector environment that a run is evaluated in: other seeds and goals than those of training, whatever the critic.

    Args:
        config: The settings of the run.
        most: Environments side by side, of one task; several tasks have one each.

    Returns:
        At most ``most`` environments in this process, with VecNormalize that takes no statistics of its own.
    """
    n_tasks = len(config.env)
    n_envs = n_tasks if n_tasks > 1 else min(most, config.eval_episodes)
    config = dataclasses.replace(config, vec_env="dummy")
    env = _normalized(config, _make_env(config, n_envs, evaluation_seed(config.seed), None))
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    return env


def _make_env(config: TrainConfig, n_envs: int, seed: int, context_length: int | None) -> VecEnv:
    vec_env_cls = _SubprocVecEnv if config.vec_env == "subproc" else DummyVecEnv
    kind, names = resolve_envs(config.env)
    limit = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    if kind == "metaworld":
        from icrl_gym import metaworld

        options: dict[str, Any] = {"context_length": context_length, **limit}
        return metaworld.make_vec_env(list(names), n_envs, seed, vec_env_cls=vec_env_cls, **options)
    wrapper: dict[str, Any] = {}
    if context_length is not None:
        wrapper = {"wrapper_class": RollingContext, "wrapper_kwargs": {"length": context_length}}
    return make_vec_env(names[0], n_envs, seed, vec_env_cls=vec_env_cls, env_kwargs=limit, **wrapper)


def _normalized(config: TrainConfig, env: VecEnv) -> VecEnv:
    if not config.normalize:
        return env
    return VecNormalize(env, norm_obs=isinstance(env.observation_space, spaces.Box), gamma=config.gamma)


def without_normalization(env: VecEnv) -> VecEnv:
    """The environments inside VecNormalize, where they are inside one."""
    return env.venv if isinstance(env, VecNormalize) else env


def _deaf_to_interrupts(make_env: Callable[[], gym.Env]) -> gym.Env:
    # Ctrl-C reaches every process of a terminal; workers must live until the main one has their contexts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return make_env()


class _SubprocVecEnv(SubprocVecEnv):
    def __init__(self, env_fns: list[Callable[[], gym.Env]], start_method: str | None = None) -> None:
        super().__init__([functools.partial(_deaf_to_interrupts, make) for make in env_fns], start_method)
