"""A prior stands in the window until recorded transitions fill it; values against a critic conditioned by hand."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from icrl_gym.callbacks import InContextCallback
from icrl_gym.callbacks.prior import Prior
from icrl_gym.callbacks.view import begin_statistics
from icrl_gym.wrappers import ContextSnapshot, RollingContext
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from icrl_gym import Context, InContextActorCriticPolicy, InContextCritic

GAMMA = 0.9


class Drift(gym.Env):
    """A noisy walk around a far origin that pays its position."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self):
        return (5.0 + self.x).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.normal(size=2)
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        self.x = 0.8 * self.x + 0.5 * self.np_random.normal(size=2)
        return self.observe(), float(self.x[0]), bool(self.x[1] > 1.5), self.t >= 9, {}


def recorded(n=60, seed=5):
    env = RollingContext(Drift(), n)
    env.reset(seed=seed)
    for _ in range(n):
        if any(env.step(env.action_space.sample())[2:4]):
            env.reset()
    return env.context


def make(normalize=False, length=16, **options):
    env = DummyVecEnv([lambda: RollingContext(Drift(), length)] * 2)
    if normalize:
        env = VecNormalize(env, gamma=GAMMA)
    options = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "gamma": GAMMA, "seed": 0, "device": "cpu", **options}
    return PPO(InContextActorCriticPolicy, env, policy_kwargs={"critic_kwargs": {"n_landmarks": None}}, **options)


class Look(InContextCallback):
    """What the critic held when each rollout began."""

    def __init__(self, **options):
        super().__init__(monitor=False, **options)
        self.contexts, self.values, self.observations = [], [], []

    def _on_rollout_start(self):
        super()._on_rollout_start()
        self.contexts.append(self.sync._before)
        critic = self.model.policy.critic
        seen = torch.as_tensor(np.asarray(self.model._last_obs))
        self.observations.append(seen)
        self.values.append((critic(seen).ravel() - float(critic.offset)).numpy())


def test_the_first_rollout_s_values_are_those_of_the_prior():
    prior, callback = recorded(), Look(prior=recorded())
    model = make()
    model.learn(16, callback=callback)
    hand = InContextCritic(2, gamma=GAMMA, n_landmarks=None)
    hand.condition(prior[-32:])
    expected = (hand(callback.observations[0]).ravel() - float(hand.offset)).numpy()
    np.testing.assert_allclose(callback.values[0], expected, rtol=1e-5)
    assert np.abs(callback.values[0]).min() > 1e-3


def test_the_newest_of_prior_and_recorded_are_the_window_until_it_is_full():
    prior, callback = recorded(), Look(prior=recorded())
    model = make()
    model.learn(64, callback=callback)
    assert [len(w.filling) for w in callback.contexts] == [32, 16, 0, 0]
    assert callback.contexts[1].filling == prior[-16:]
    # From then on the critic is what it is without a prior.
    snapshots = callback.contexts[3].snapshots
    hand = InContextCritic(2, gamma=GAMMA, n_landmarks=None)
    recorded_ones = Context.cat([snapshot.context for snapshot in snapshots])
    weights = [0.1 ** ((len(s.context) - 1 - i) / s.length) for s in snapshots for i in range(len(s.context))]
    hand.condition(recorded_ones.weighted(weights))
    expected = (hand(callback.observations[3]).ravel() - float(hand.offset)).numpy()
    np.testing.assert_allclose(callback.values[3], expected, rtol=1e-5)


def test_a_fresh_normalizer_begins_with_the_prior_s_statistics_and_then_goes_its_own_way():
    prior = recorded()[-32:]
    callback, model = Look(prior=recorded()), make(normalize=True)
    normalize = model.get_vec_normalize_env()
    kept = []
    begin = callback._on_rollout_start

    def keep():
        begin()
        kept.append((normalize.obs_rms.copy(), normalize.ret_rms.copy(), normalize.get_original_obs()))

    callback._on_rollout_start = keep
    model.learn(64, callback=callback)
    observations, returns, first = kept[0]
    states = np.vstack([first, prior.states.numpy()])  # those of the reset, once, and the prior's
    np.testing.assert_allclose(observations.mean, states.mean(0), rtol=1e-4)
    np.testing.assert_allclose(observations.var, states.var(0), rtol=1e-3)
    sums, total, last = [], 0.0, None
    for i in range(32):
        goes_on = last is not None and not prior.terminated[last] and not prior.truncated[last]
        total, last = float(prior.rewards[i]) + (GAMMA * total if goes_on else 0.0), i
        sums.append(total)
    np.testing.assert_allclose(returns.var, np.var(sums), rtol=1e-2)
    # The policy's first observations, and the prior, are in the same coordinates.
    scaled = (first - observations.mean) / np.sqrt(observations.var + normalize.epsilon)
    np.testing.assert_allclose(callback.observations[0], scaled, rtol=1e-4, atol=1e-5)
    assert np.isfinite(callback.values[0]).all() and np.abs(callback.values[0]).min() > 1e-4
    # Once: later counts grow by what was played alone (16 steps a rollout).
    counts = [float(rms.count) for rms, _, _ in kept]
    np.testing.assert_allclose(np.diff(counts), 16, atol=4)  # and the observations that resets show


@pytest.mark.parametrize("how", ["frozen", "used"])
def test_statistics_that_are_there_are_left_alone(how):
    model = make(normalize=True)
    normalize = model.get_vec_normalize_env()
    if how == "frozen":
        normalize.training = False
    else:
        model.learn(16, callback=InContextCallback(monitor=False))
    before = float(normalize.ret_rms.count)
    model.learn(16, callback=InContextCallback(monitor=False, prior=recorded()), reset_num_timesteps=how == "frozen")
    assert float(normalize.ret_rms.count) - before == pytest.approx(0 if how == "frozen" else 16)


def test_statistics_of_dictionaries_are_taken_part_by_part():
    class Two(gym.Env):
        action_space = gym.spaces.Discrete(2)
        observation_space = gym.spaces.Dict(
            {"a": gym.spaces.Box(-9, 9, (2,), np.float32), "b": gym.spaces.Box(-9, 9, (1,), np.float32)}
        )

        def reset(self, *, seed=None, options=None):
            return {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}, {}

    normalize = VecNormalize(DummyVecEnv([Two]), norm_obs_keys=["b"])
    states = np.arange(30.0).reshape(10, 3)
    begin_statistics(normalize, Context(states, np.ones(10), states, np.ones(10, bool)))
    np.testing.assert_allclose(normalize.obs_rms["b"].mean, states[:, 2].mean(0, keepdims=True), rtol=1e-3)
    assert set(normalize.obs_rms) == {"b"}


def test_each_task_has_its_own_room():
    def of(task, n, first):
        states = np.column_stack([first + np.arange(n), np.tile(np.eye(2)[task], (n, 1))])
        return Context(states, np.zeros(n), states, np.zeros(n, bool))

    prior = Prior(Context.cat([of(0, 10, 0), of(1, 10, 100)]))
    prior.check(3, 2)
    snapshots = [
        ContextSnapshot(of(task, n, 0), np.array([0.0, *np.eye(2)[task]]), 0, 5, n)
        for task, n in ((0, 2), (1, 5), (1, 4))
    ]
    filling = prior.filling(snapshots, 2)
    assert filling.states[:, 0].tolist() == [7.0, 8.0, 9.0, 109.0]


def test_what_a_user_gets_wrong():
    with pytest.raises(TypeError, match="prior must be a Context of raw transitions, got str"):
        Prior("icrl_gym/reach-v3/low-v0")
    with pytest.raises(ValueError, match="got a batch"):
        InContextCallback(prior=Context.stack([recorded(), recorded()]))
    with pytest.raises(ValueError, match="holds no transition"):
        InContextCallback(prior=Context.empty(2))
    wide = np.zeros((4, 3))
    with pytest.raises(ValueError, match=r"states of prior have 3 entries.*flattened, have 2"):
        make().learn(16, callback=InContextCallback(prior=Context(wide, np.zeros(4), wide, np.zeros(4, bool))))
    with pytest.raises(ValueError, match="one-hot of the task, and those of 4 of 4 transitions are not"):
        Prior(Context(wide, np.zeros(4), wide, np.zeros(4, bool))).check(3, 2)
