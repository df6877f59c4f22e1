"""Recordings: what a learning PPO saw, once, so that any critic can be tried on it afterwards.

A recording is one ``.npz`` file without pickles. T = rollouts x ``n_steps`` steps of E environments:

states, next_states     (T, E, d)     raw; the next state is the last one of its episode where that ends
rewards                 (T, E)        raw
terminated, truncated   (T, E)
actions                 (T, E, ...)   before clipping
seen                    (T+1, E, d)   observations as the policy got them: normalized, with the statistics of that step
seen_rewards            (T, E)        likewise
seen_last               (m, d)        likewise the last observations of the m episodes that ended, in the order of np.argwhere
learned_values, learned_advantages    (T, E)   of the learned critic, from PPO's own buffer
obs_mean, obs_var, reward_var         (R+1, d), (R+1, d), (R+1,)   VecNormalize's statistics when each rollout starts, and at the end
rollouts                (c,)          those with a truth
steps, envs             (c, S)        where in the rollout its states are
values, action_values   (c, S, K)     returns from them: samples of V(s) and of Q(s, a)
policies                (c, P)        the parameters of the policy of those rollouts
config                  JSON
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize, unwrap_vec_normalize

from icrl_gym.callbacks.view import PolicyView
from icrl_gym.context import Context
from icrl_gym.critic_benchmark.snapshots import Snapshot, capture, require_restorable
from icrl_gym.critic_benchmark.truth import monte_carlo, policy_actor
from icrl_gym.metaworld import MAX_EPISODE_STEPS, MetaWorldEnv
from icrl_gym.train_envs import make_training_env
from icrl_gym.train_settings import TrainConfig

__all__ = ["Recorder", "Recording", "RecordingConfig", "RecordingOptions", "record"]

LAG = 16
"""Steps between two states whose difference of values is looked at."""

_ARRAYS = (
    "states", "next_states", "rewards", "terminated", "truncated", "actions", "seen", "seen_rewards", "seen_last",
    "learned_values", "learned_advantages", "obs_mean", "obs_var", "reward_var", "rollouts", "steps", "envs", "values",
    "action_values", "policies",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """What all recordings of a benchmark have in common."""

    total_timesteps: int = 60_000
    """Environment steps of the recorded PPO, over all environments; the last rollout is completed."""
    n_envs: int = 4
    """Environments side by side."""
    n_steps: int = 512
    """Steps of each environment in a rollout."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation."""
    truth_rollouts: int = 6
    """Rollouts, spread over the run, at which true values are measured."""
    truth_states: int = 64
    """States of each of them; an even number, in pairs 16 steps apart."""
    truth_repeats: int = 4
    """Returns for each value; a multiple of 4 also tells how far they can be trusted."""
    truth_horizon: int = 150
    """Steps of each return."""


@dataclass(frozen=True)
class RecordingConfig(RecordingOptions):
    """What is recorded: one run of PPO with Stable-Baselines3's own policy and critic.

    In the shapes of a recording, c, S, K and H are ``truth_rollouts``, ``truth_states``, ``truth_repeats`` and ``truth_horizon``.

    Attributes:
        task: A Meta-World task or a Gymnasium id.
        seed: Of the run.
    """

    task: str
    seed: int = 0

    @property
    def n_rollouts(self) -> int:
        """R, the rollouts of the run."""
        return -(-self.total_timesteps // (self.n_envs * self.n_steps))

    @property
    def chosen(self) -> list[int]:
        """The rollouts whose values are measured; never the first, before which no transition was seen."""
        last = self.n_rollouts - 1
        spread = np.linspace(max(1, last // 8), last, self.truth_rollouts)
        return sorted({round(float(k)) for k in spread})

    @property
    def file_name(self) -> str:
        """Tells recordings of other settings apart."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        task = self.task.replace("/", "_").replace(":", "_")
        return f"{task}-seed{self.seed}-{digest}.npz"

    def validate(self) -> None:
        """Say what cannot work.

        Raises:
            ValueError: With what was given and what was expected.
        """
        for name, least in (
            ("total_timesteps", 1), ("n_envs", 1), ("n_steps", 2 * LAG), ("truth_rollouts", 1), ("truth_states", 2),
            ("truth_repeats", 1), ("truth_horizon", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}.")
        for name in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"--{name.replace('_', '-')} must lie in [0, 1], got {getattr(self, name)}.")
        if self.n_rollouts < 2:
            raise ValueError(
                f"--total-timesteps {self.total_timesteps} is one rollout of {self.n_envs} x {self.n_steps} steps, and a critic needs "
                f"one before the one that it is judged on; take at least {self.n_envs * self.n_steps + 1}."
            )
        pairs = self.n_envs * (self.n_steps - LAG)
        if self.truth_states % 2 or self.truth_states > pairs:
            raise ValueError(
                f"--truth-states must be even (states come in pairs that are {LAG} steps apart) and at most {pairs} here, "
                f"got {self.truth_states}."
            )

    def training(self) -> TrainConfig:
        """The run as `icrl-gym train` would make it, its rolling context long enough for all of it."""
        # "in-context" for the environments alone, which then record raw transitions; the policy is Stable-Baselines3's.
        return TrainConfig(
            env=(self.task,), critic="in-context", seed=self.seed, total_timesteps=self.total_timesteps, n_envs=self.n_envs,
            n_steps=self.n_steps, gamma=self.gamma, gae_lambda=self.gae_lambda, context_rollouts=self.n_rollouts,
            batch_size=int(np.gcd(64, self.n_envs * self.n_steps)),
        )  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """A recording in memory; the module's own text says what each array is."""

    config: RecordingConfig
    states: np.ndarray
    next_states: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    actions: np.ndarray
    seen: np.ndarray
    seen_rewards: np.ndarray
    seen_last: np.ndarray
    learned_values: np.ndarray
    learned_advantages: np.ndarray
    obs_mean: np.ndarray
    obs_var: np.ndarray
    reward_var: np.ndarray
    rollouts: np.ndarray
    steps: np.ndarray
    envs: np.ndarray
    values: np.ndarray
    action_values: np.ndarray
    policies: np.ndarray

    def save(self, file: Path) -> None:
        """Write the file, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".partial_{os.getpid()}_{file.name}")
        config = np.array(json.dumps(dataclasses.asdict(self.config)))
        with partial.open("wb") as stream:
            np.savez_compressed(stream, config=config, **{name: getattr(self, name) for name in _ARRAYS})
        os.replace(partial, file)

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: The file is something else.
        """
        try:
            # Opened here: NumPy leaves a file open that is no archive.
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                config = RecordingConfig(**json.loads(str(arrays["config"])))
                return cls(config, **{name: arrays[name] for name in _ARRAYS})
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{str(file)!r} is not a recording of this version ({type(error).__name__}: {error}); delete it to record again."
            ) from None

    @property
    def ends(self) -> np.ndarray:
        """(T, E): the episode ended here, either way."""
        return np.asarray(self.terminated | self.truncated)

    def rollout(self, k: int) -> slice:
        """The steps of rollout k."""
        n = self.config.n_steps
        return slice(k * n, (k + 1) * n)

    def reward_scale(self, k: int) -> float:
        """What rewards were divided by when rollout k started."""
        return float(np.sqrt(self.reward_var[k] + 1e-8))

    def view(self, k: int) -> PolicyView:
        """The policy's view of raw transitions, with the statistics of the start of rollout k (R: the end of the run)."""
        d = self.states.shape[-1]
        normalize = VecNormalize(DummyVecEnv([lambda: _Spaces(d)]), gamma=self.config.gamma)
        rms: Any = normalize.obs_rms
        rms.mean, rms.var = self.obs_mean[k], self.obs_var[k]
        normalize.ret_rms.var = self.reward_var[k]
        return PolicyView(normalize)

    def transitions(self, env: int, first: int, last: int) -> Context:
        """The raw transitions of an environment from one step to another, as a rolling context keeps them."""
        rows = slice(max(0, first), last)
        return Context(
            self.states[rows, env].astype(np.float64),
            self.rewards[rows, env],
            self.next_states[rows, env].astype(np.float64),
            self.terminated[rows, env],
            self.truncated[rows, env],
        )


class _Spaces(gym.Env):
    """Spaces alone: what VecNormalize asks of an environment that nobody steps."""

    def __init__(self, d: int) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (d,), np.float32)
        self.action_space = spaces.Discrete(1)


class Recorder(BaseCallback):
    """Records a run of an on-policy algorithm and measures values at some of its rollouts.

    Its environments are in this process, each with a :class:`~icrl_gym.wrappers.RollingContext` as long as the run.

    Args:
        config: What is recorded.
    """

    def __init__(self, config: RecordingConfig) -> None:
        super().__init__()
        self.config = config
        self._seen: list[np.ndarray] = []
        self._seen_rewards: list[np.ndarray] = []
        self._seen_last: list[np.ndarray] = []
        self._statistics: list[tuple[np.ndarray, np.ndarray, float]] = []
        self._of_rollouts: dict[str, list[np.ndarray]] = {
            name: [] for name in ("actions", "learned_values", "learned_advantages")
        }
        self._truth: dict[str, list[np.ndarray]] = {
            name: [] for name in ("steps", "envs", "values", "action_values", "policies")
        }
        self._rollout = -1
        self._step = 0
        self._wanted: list[tuple[int, int]] = []
        self._kept: dict[tuple[int, int], tuple[Snapshot, np.ndarray]] = {}
        self._view: PolicyView | None = None

    @property
    def _normalize(self) -> VecNormalize:
        normalize = unwrap_vec_normalize(self.training_env)
        assert normalize is not None
        return normalize

    def _on_rollout_start(self) -> None:
        self._rollout, self._step = self._rollout + 1, 0
        self._take_statistics()
        chosen = self._rollout in self.config.chosen
        self._wanted = self._draw() if chosen else []
        self._kept = {}
        if chosen:
            self._view = PolicyView(self.training_env)
        self._keep()

    def _on_step(self) -> bool:
        local = self.locals
        self._seen.append(np.array(local["obs_tensor"].numpy(force=True), np.float32))
        # A copy: SB3 adds the value of the last observation to the rewards of time limits.
        self._seen_rewards.append(np.array(local["rewards"], np.float32))
        self._seen_last += [
            np.array(info["terminal_observation"], np.float32)
            for info, done in zip(local["infos"], local["dones"], strict=True)
            if done
        ]
        self._step += 1
        self._keep()
        return True

    def _on_rollout_end(self) -> None:
        model: Any = self.model
        buffer = model.rollout_buffer
        for name, array in (
            ("actions", buffer.actions),
            ("learned_values", buffer.values),
            ("learned_advantages", buffer.advantages),
        ):
            self._of_rollouts[name].append(np.array(array))
        if self._rollout in self.config.chosen:
            self._measure(buffer.actions)

    def _on_training_end(self) -> None:
        self._take_statistics()
        assert self.model._last_obs is not None
        self._seen.append(np.array(self.model._last_obs, np.float32))

    def _take_statistics(self) -> None:
        normalize = self._normalize
        rms: Any = normalize.obs_rms
        self._statistics.append((rms.mean.copy(), rms.var.copy(), float(normalize.ret_rms.var)))

    def _draw(self) -> list[tuple[int, int]]:
        """Which states of the rollout: pairs of the same environment, LAG steps apart."""
        config = self.config
        rng = np.random.default_rng([config.seed, self._rollout, 0])
        wanted: list[tuple[int, int]] = []
        for index in rng.permutation(config.n_envs * (config.n_steps - LAG)):
            step, env = divmod(int(index), config.n_envs)
            pair = [(step, env), (step + LAG, env)]
            if not set(pair) & set(wanted):
                wanted += pair
            if len(wanted) == config.truth_states:
                return wanted
        # Too few places for pairs without a state in common: the rest one by one.
        rest = [(s, e) for s in range(config.n_steps) for e in range(config.n_envs) if (s, e) not in set(wanted)]
        return wanted + rest[: config.truth_states - len(wanted)]

    def _keep(self) -> None:
        for step, env in self._wanted:
            if step == self._step:
                one = self._inner_envs[env]
                context = one.get_wrapper_attr("context_snapshot")(0)
                self._kept[step, env] = capture(one), np.array(context.observation)

    @property
    def _inner_envs(self) -> list[gym.Env]:
        vec_env: Any = self.training_env.unwrapped
        if not isinstance(vec_env, DummyVecEnv):
            raise ValueError(f"a recorder needs environments in its own process (DummyVecEnv), got {vec_env}.")
        return vec_env.envs

    def _measure(self, actions: np.ndarray) -> None:
        config, policy, view = self.config, self.model.policy, self._view
        assert view is not None
        space = self.training_env.action_space
        kept = [self._kept[place] for place in self._wanted]
        taken = np.stack([np.asarray(actions)[place] for place in self._wanted])
        if isinstance(space, spaces.Box):
            taken = np.clip(taken.reshape(-1, *space.shape), space.low, space.high)
        elif isinstance(space, spaces.Discrete):
            taken = taken.astype(np.int64).reshape(-1)
        actor, n_noise = policy_actor(policy, view.states)  # type: ignore[arg-type]
        value, action_value = monte_carlo(
            [snapshot for snapshot, _ in kept],
            np.stack([observation for _, observation in kept]),
            taken,
            actor,
            n_noise,
            gamma=config.gamma,
            horizon=config.truth_horizon,
            n_repeats=config.truth_repeats,
            rng=np.random.default_rng([config.seed, self._rollout, 1]),
        )
        parameters = torch.nn.utils.parameters_to_vector(policy.parameters()).numpy(force=True)
        for name, array in (
            ("steps", np.array([step for step, _ in self._wanted])),
            ("envs", np.array([env for _, env in self._wanted])),
            ("values", value),
            ("action_values", action_value),
            ("policies", parameters),
        ):
            self._truth[name].append(array)
        self._kept = {}
        print(
            f"{config.task} seed {config.seed}: values measured at rollout {self._rollout + 1} of {config.n_rollouts}",
            flush=True,
        )

    def recording(self) -> Recording:
        """What was recorded, after the run.

        Raises:
            ValueError: The environments recorded fewer steps than the algorithm made (values that were not finite).
        """
        contexts = [snapshot.context for snapshot in self.training_env.env_method("context_snapshot")]
        n_steps = self.config.n_rollouts * self.config.n_steps
        if any(len(context) != n_steps for context in contexts):
            raise ValueError(
                f"{self.config.task} recorded {min(map(len, contexts))} of {n_steps} steps: some observations or rewards were not "
                f"finite, and a recording has no place for holes."
            )

        def raw(name: str, dtype: Any) -> np.ndarray:
            return np.stack([getattr(context, name).numpy() for context in contexts], 1).astype(dtype)

        d = contexts[0].n_features
        last = np.array(self._seen_last, np.float32).reshape(-1, d)
        return Recording(
            self.config,
            states=raw("states", np.float32),
            next_states=raw("next_states", np.float32),
            rewards=raw("rewards", np.float64),
            terminated=raw("terminated", np.bool_),
            truncated=raw("truncated", np.bool_),
            seen=np.array(self._seen),
            seen_rewards=np.array(self._seen_rewards),
            seen_last=last,
            obs_mean=np.array([mean for mean, _, _ in self._statistics]),
            obs_var=np.array([var for _, var, _ in self._statistics]),
            reward_var=np.array([var for _, _, var in self._statistics]),
            rollouts=np.array(self.config.chosen),
            **{name: np.concatenate(arrays) for name, arrays in self._of_rollouts.items()},
            **{name: np.stack(arrays) for name, arrays in self._truth.items()},
        )


def record(config: RecordingConfig, folder: Path | str) -> Path:
    """Run PPO once and keep what it saw; a recording that is there is kept.

    Args:
        config: What to record.
        folder: Where to.

    Returns:
        The file.

    Raises:
        ValueError: Settings that cannot work, or an environment whose state cannot be restored.
    """
    file = Path(folder) / config.file_name
    if file.is_file():
        return file
    config.validate()
    training = config.training()
    env = make_training_env(training)
    try:
        _require_usable(env, config)
        model = PPO(
            "MlpPolicy", env, n_steps=config.n_steps, batch_size=training.batch_size, n_epochs=training.n_epochs,
            gamma=config.gamma, gae_lambda=config.gae_lambda, learning_rate=training.learning_rate,
            ent_coef=training.ent_coef, clip_range=training.clip_range, seed=config.seed, device="cpu",
        )  # fmt: skip
        recorder = Recorder(config)
        model.learn(config.total_timesteps, callback=recorder)
        recorder.recording().save(file)
    finally:
        env.close()
    return file


def _require_usable(env: Any, config: RecordingConfig) -> None:
    space = env.observation_space
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ValueError(
            f"the critic benchmark records vectors (one-dimensional Box observations), and {config.task} has {space}; flatten them."
        )
    if not isinstance(env.action_space, (spaces.Box, spaces.Discrete)):
        raise ValueError(f"the critic benchmark acts in Box and Discrete action spaces, got {env.action_space}.")
    first = env.unwrapped.envs[0]
    if isinstance(first.unwrapped, MetaWorldEnv):  # restores exactly, as the tests see to
        if config.truth_horizon > MAX_EPISODE_STEPS:
            raise ValueError(
                f"--truth-horizon must be at most {MAX_EPISODE_STEPS} in Meta-World, whose episodes are no longer; "
                f"got {config.truth_horizon}."
            )
        return
    # A copy: the run's own environments must not be moved.
    trial = make_training_env(dataclasses.replace(config.training(), n_envs=1))
    try:
        inner: Any = trial.unwrapped
        require_restorable(inner.envs[0])
    finally:
        trial.close()
