"""Cross-fitting against a critic conditioned by hand for each environment, and GAE by a loop."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from icrl_gym.callbacks import AdvantageCenteringCallback, ContextSyncCallback, CrossFitCallback, InContextCallback
from icrl_gym.callbacks.cross_fit import deal, recorded_since
from icrl_gym.wrappers import RollingContext
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from icrl_gym import Context, InContextActorCriticPolicy, InContextCritic

GAMMA, LAMBDA = 0.9, 0.8


class Log(gym.Env):
    """A noisy walk that pays its position, writes down what happens, and ends by a time limit or by terminating.

    Of several tasks, the one-hot of its own is the end of the observation.
    """

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, limit=7, task=None, n_tasks=0, bad=()):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2 + n_tasks,), np.float32)
        self.code = np.eye(n_tasks)[task] if n_tasks else np.zeros(0)
        self.limit, self.scale, self.bad = limit, 1.0 if task is None else 1.0 + 10.0 * task, bad
        self.log, self.resets = [], 0

    def observe(self):
        return np.concatenate([self.x, self.code]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x, self.resets = 0, self.np_random.normal(size=2), self.resets + 1
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        before = self.observe()
        self.x = 0.8 * self.x + 0.5 * self.np_random.normal(size=2)
        reward = np.nan if len(self.log) in self.bad else self.scale * float(self.x[0])
        ends = bool(self.x[1] > 0.9), self.t >= self.limit
        self.log.append((before, reward, self.observe(), *ends))
        return self.observe(), reward, *ends, {}


def make(algorithm=PPO, n_envs=3, n_steps=16, length=24, critic=None, normalize=False, envs=None, **options):
    envs = envs or [{"limit": 7}] * n_envs
    env = DummyVecEnv([lambda kw=kw: RollingContext(Log(**kw), length) for kw in envs])
    if normalize:
        env = VecNormalize(env, gamma=GAMMA)
    kind = {"batch_size": 8, "n_epochs": 2} if algorithm is PPO else {}
    kwargs = {"critic_kwargs": {"n_landmarks": None, **(critic or {})}}
    options = {"n_steps": n_steps, "gamma": GAMMA, "gae_lambda": LAMBDA, "seed": 0, "device": "cpu", **kind, **options}
    return algorithm(InContextActorCriticPolicy, env, policy_kwargs=kwargs, **options)


def logs(model):
    return [env.unwrapped.log for env in model.get_env().unwrapped.envs]


def context_of(rows):
    states, rewards, following, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
    return Context(states.astype(float), rewards.astype(float), following.astype(float), terminated, truncated)


class Keep(ContextSyncCallback):
    """Keeps a copy of the frozen buffer before anything rewrites it."""

    def _on_rollout_end(self):
        super()._on_rollout_end()
        buffer = self.buffer
        self.frozen = {n: getattr(buffer, n).copy() for n in ("values", "advantages", "returns", "rewards")}


def by_hand(model, critic, n_steps=16, length=24, leak=False):
    """Values without offset and advantages of the last rollout, one environment and one step after the other.

    leak: the wrong way, with the environment's own rollout in its context.
    """
    n_envs = len(logs(model))
    values, advantages = np.zeros((n_steps, n_envs)), np.zeros((n_steps, n_envs))
    for env, log in enumerate(logs(model)):
        hand = InContextCritic(len(log[0][0]), gamma=GAMMA, **critic)
        parts, weights = [], []
        for other, rows in enumerate(logs(model)):
            start = max(0, len(rows) - length)
            stop = len(rows) if other != env or leak else len(rows) - n_steps
            parts += rows[start:stop]
            # By age when the rollout has ended, whatever of it is held out.
            ages = [len(rows) - 1 - step for step in range(start, stop)]
            weights += [hand.oldest_weight ** (age / length) for age in ages]
        hand.condition(context_of(parts).weighted(weights))

        def v(state, hand=hand):
            state = torch.as_tensor(state, dtype=torch.float64).reshape(1, -1)
            return float(hand(state)) - float(hand.offsets(state))

        advantage = 0.0
        for t in reversed(range(n_steps)):
            state, reward, following, terminated, truncated = log[len(log) - n_steps + t]
            values[t, env] = v(state)
            delta = reward + (0.0 if terminated else GAMMA * v(following)) - values[t, env]
            advantage = delta + (0.0 if terminated or truncated else GAMMA * LAMBDA * advantage)
            advantages[t, env] = advantage
    return values, advantages


def rollout_of(model, total, **options):
    """Train, and keep what the last rollout left in the buffer, in (n_steps, n_envs)."""
    sync = Keep()
    callback = InContextCallback(**options)
    callback.callbacks[0] = callback.sync = sync
    if callback.cross_fit is not None:
        callback.cross_fit.sync = sync
    kept = {}
    centering = callback.centering._on_rollout_end

    def keep():
        centering()
        kept.update({n: getattr(callback.centering.buffer, n).copy() for n in ("values", "advantages", "returns")})
        kept["errors"] = callback.centering.rollout_td_errors()

    callback.centering._on_rollout_end = keep
    model.learn(total, callback=callback)
    return kept, sync.frozen


LITERAL = {"n_landmarks": None, "kernel": "rbf", "value_shift": False}


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize("critic", [LITERAL, {"n_landmarks": None, "n_layers": 8}, {"offset": "removed"}])
@pytest.mark.parametrize("n_rollouts", [1, 4])
def test_values_and_advantages_are_those_of_a_loop(algorithm, critic, n_rollouts):
    model = make(algorithm, critic=critic)
    kept, frozen = rollout_of(model, 48 * n_rollouts, cross_fit=True)
    rows = [row for log in logs(model) for row in log[-16:]]
    assert any(row[3] for row in rows) and any(row[4] and not row[3] for row in rows)
    values, advantages = by_hand(model, critic)
    np.testing.assert_allclose(kept["values"], values, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(kept["advantages"], advantages - advantages.mean(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(kept["returns"], advantages + values, rtol=1e-4, atol=1e-4)
    # The wrong ways: the frozen values; a critic that has seen the environment's own rollout.
    assert np.abs(frozen["values"] - values).max() > 0.05
    assert np.abs(by_hand(model, critic, leak=True)[0] - values).max() > 0.05


def test_the_offset_of_every_fold_is_taken_out_exactly():
    kept = {
        offset: rollout_of(make(critic={**LITERAL, "offset": offset}), 48, cross_fit=True)[0]
        for offset in ("centered", "removed")
    }
    for name in ("values", "advantages", "returns", "errors"):
        np.testing.assert_allclose(kept["centered"][name], kept["removed"][name], rtol=1e-5, atol=1e-5)


def test_td_errors_are_those_of_the_cross_fitted_values():
    model = make(critic=LITERAL)
    kept, _ = rollout_of(model, 144, cross_fit=True)
    _, advantages = by_hand(model, LITERAL)
    ends = np.array([[row[3] or row[4] for row in log[-16:]] for log in logs(model)]).T
    following = np.vstack([advantages[1:], np.zeros((1, 3))])
    np.testing.assert_allclose(kept["errors"], advantages - GAMMA * LAMBDA * ~ends * following, rtol=1e-3, atol=1e-4)


def test_several_tasks_are_fitted_on_environments_of_the_same_one():
    critic = {**LITERAL, "n_tasks": 2, "ridge": 1e-2}  # contexts this short need one that is large enough
    envs = [{"task": task, "n_tasks": 2} for task in (0, 1, 0, 1)]
    model = make(critic=critic, envs=envs)
    kept, _ = rollout_of(model, 128, cross_fit=True)
    values, advantages = by_hand(model, critic)
    np.testing.assert_allclose(kept["values"], values, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(kept["advantages"], advantages - advantages.mean(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_tasks", [1, 2])
def test_an_environment_that_is_alone_keeps_the_frozen_values_or_says_so(n_tasks):
    tasks = {1: [{}], 2: [{"task": task, "n_tasks": 2} for task in (0, 1, 1)]}[n_tasks]
    options = {"critic": {**LITERAL, "n_tasks": n_tasks, "ridge": 1e-2}, "envs": tasks}
    kept, frozen = rollout_of(make(**options), 48 * len(tasks), cross_fit=True)
    np.testing.assert_array_equal(kept["values"], frozen["values"])
    sync = ContextSyncCallback()
    of_tasks = " of each of the 2 tasks" if n_tasks == 2 else ""
    with pytest.raises(ValueError, match=f"at least 2 environments{of_tasks}; got 1"):
        make(**options).learn(48, callback=[sync, CrossFitCallback(sync)])


def test_raw_transitions_are_measured_with_the_statistics_of_the_rollout_s_end():
    model = make(normalize=True, critic=LITERAL)
    seen = {}

    class Look(AdvantageCenteringCallback):
        def _on_rollout_end(self):
            normalize, buffer = self.model.get_vec_normalize_env(), self.buffer
            seen.update(
                values=buffer.values.copy(), observations=buffer.observations.copy(), rms=normalize.obs_rms.copy(),
                scale=float(np.sqrt(normalize.ret_rms.var + normalize.epsilon)), eps=normalize.epsilon,
            )  # fmt: skip
            super()._on_rollout_end()

    callback = InContextCallback(cross_fit=True)
    callback.callbacks[2] = Look()
    model.learn(144, callback=callback)
    envs = model.get_env().unwrapped.envs
    for env in range(3):
        rows, weights = [], []
        for other, wrapped in enumerate(envs):
            log = wrapped.unwrapped.log
            start = max(0, len(log) - 24)
            stop = len(log) if other != env else len(log) - 16
            rows += log[start:stop]
            weights += [0.1 ** ((len(log) - 1 - step) / 24) for step in range(start, stop)]
        raw = context_of(rows)

        def norm(states):
            scaled = (states.numpy() - seen["rms"].mean) / np.sqrt(seen["rms"].var + seen["eps"])
            return np.clip(scaled, -10, 10)

        hand = InContextCritic(2, gamma=GAMMA, **LITERAL)
        rewards = np.clip(raw.rewards.numpy() / seen["scale"], -10, 10)
        given = Context(norm(raw.states), rewards, norm(raw.next_states), raw.terminated, raw.truncated)
        hand.condition(given.weighted(weights))
        expected = hand(torch.from_numpy(seen["observations"][:, env]).double()).numpy().ravel() - float(hand.offset)
        np.testing.assert_allclose(seen["values"][:, env], expected, rtol=1e-3, atol=1e-4)


def test_without_it_nothing_changes_and_a_model_may_go_on_without():
    kept, frozen = rollout_of(make(), 96, cross_fit=False)
    np.testing.assert_array_equal(kept["values"], frozen["values"])
    model = make()
    model.learn(96, callback=InContextCallback(cross_fit=True))
    assert model.policy.cross_fitted is not None
    values = model.rollout_buffer.values
    model.learn(48, callback=InContextCallback(cross_fit=False), reset_num_timesteps=False)
    assert model.policy.cross_fitted is None and values is not model.rollout_buffer.values


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_update_and_a_saved_model_have_the_critic_s_own_values(tmp_path, clip):
    model = make(clip_range_vf=clip)
    model.learn(144, callback=InContextCallback(cross_fit=True))
    assert all(bool(torch.isfinite(p).all()) for p in model.policy.parameters())
    asked = torch.zeros(1, 2)
    own = float(model.policy.predict_values(asked).detach())
    model.save(tmp_path / "model.zip")
    loaded = PPO.load(tmp_path / "model.zip", device="cpu")
    assert float(loaded.policy.predict_values(asked).detach()) == pytest.approx(own, rel=1e-6)
    assert loaded.policy.cross_fitted is None


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_reward_that_is_not_finite_stops_nothing_and_no_transition_leaks():
    envs = [{"bad": (20, 22, 37)}, {}, {}]
    model = make(envs=envs)
    with pytest.warns(RuntimeWarning, match="left out of the context"):
        kept, _ = rollout_of(model, 144, cross_fit=True)
    assert all(np.isfinite(kept[name]).all() for name in ("values", "advantages", "returns"))
    env = model.get_env().unwrapped.envs[0]
    before, now = env.context_snapshot(), None
    log = list(env.unwrapped.log)
    env.reset()
    for _ in range(6):
        env.step(env.action_space.sample())
    now = env.context_snapshot()
    recorded = recorded_since(before, now, 6)
    assert now.context[24 - recorded :] == context_of(env.unwrapped.log[len(log) :]) and len(now.context) == 24
    env.unwrapped.bad = range(len(env.unwrapped.log), 1000)
    for _ in range(5):
        env.step(env.action_space.sample())
    assert recorded_since(now, env.context_snapshot(), 5) <= 1  # a reset's mark at most, and a duplicate then
    env.clear_context()
    assert recorded_since(now, env.context_snapshot(), 5) == 0


def test_environments_are_dealt_evenly_by_task():
    assert deal([0] * 3) == [[0], [1], [2]]
    assert deal([0] * 10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert deal([0, 1, 1, 0, 0], 2) == [[0, 1, 4], [2, 3]]


def test_what_a_user_gets_wrong():
    with pytest.raises(ValueError, match="n_folds must be at least 2"):
        CrossFitCallback(ContextSyncCallback(), n_folds=1)
    # Never given to `learn`, so that it has seen nothing.
    without = CallbackList([CrossFitCallback(ContextSyncCallback())])
    with pytest.raises(RuntimeError, match="ContextSyncCallback has seen no whole rollout"):
        model = make()
        model.policy.critic.is_synced = True
        model.policy.critic.condition(Context.empty(2))
        model.learn(48, callback=without)
