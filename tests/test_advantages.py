"""Advantage centering: against a loop, and against what an offset-free critic gives a real PPO update."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from icrl_gym.callbacks import AdvantageCenteringCallback, ContextSyncCallback
from icrl_gym.wrappers import RollingContext
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList

from icrl_gym import InContextActorCriticPolicy
from icrl_gym.advantages import center, generalized_advantages, offset_effect


def stretches(seed, n_steps=64, n_envs=3):
    """A random rollout with terminations and time limits, some of them together in one environment."""
    generator = np.random.default_rng(seed)
    ends = generator.random((n_steps, n_envs)) < 0.1
    terminated = ends & (generator.random((n_steps, n_envs)) < 0.5)
    return generator, terminated, ends


def sb3_advantages(rewards, values, last_values, terminated, ends, gamma, gae_lambda, terminal_values):
    """The advantages of SB3's own buffer, fed as `collect_rollouts` feeds it."""
    n_steps, n_envs = rewards.shape
    space = gym.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(n_steps, space, space, gae_lambda=gae_lambda, gamma=gamma, n_envs=n_envs)
    starts = np.ones(n_envs, bool)
    for t in range(n_steps):
        reward = rewards[t] + gamma * terminal_values[t] * (ends[t] & ~terminated[t])
        zeros = np.zeros((n_envs, 1), np.float32)
        buffer.add(zeros, zeros, reward, starts, torch.as_tensor(values[t]), torch.zeros(n_envs))
        starts = ends[t]
    buffer.compute_returns_and_advantage(torch.as_tensor(last_values), ends[-1])
    return buffer.advantages


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    b=st.floats(-10, 10),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_centering_equals_the_advantages_of_the_offset_free_values(seed, b, gamma, gae_lambda):
    generator, terminated, ends = stretches(seed)
    rewards, values, terminal_values = (generator.normal(size=ends.shape) for _ in range(3))
    last = generator.normal(size=ends.shape[1])
    arguments = (terminated, ends, gamma, gae_lambda)
    free = sb3_advantages(rewards, values, last, *arguments, terminal_values)
    literal = sb3_advantages(rewards, values + b, last + b, *arguments, terminal_values + b)
    exact, centered = center(literal, b, *arguments)
    np.testing.assert_allclose(exact, free, atol=2e-4)  # SB3 keeps float32
    np.testing.assert_allclose(centered, free - free.mean(), atol=2e-4)


def test_subtracting_the_mean_alone_leaves_a_pattern_behind():
    # The measurement of the field report: 64 steps, c = 10, two terminal states leave a deviation of about 3.
    terminated = np.zeros((64, 1), bool)
    terminated[[20, 40]] = True
    effect = offset_effect(10.0, terminated, terminated, gamma=0.99, gae_lambda=0.95)
    assert (effect - effect.mean()).std() > 2.0
    no_end = np.zeros((64, 1), bool)
    assert 0.2 < offset_effect(10.0, no_end, no_end, 0.99, 0.95).std() < 1.0


def test_the_effect_has_the_closed_forms_of_a_single_stretch():
    gamma, gae_lambda, c, k = 0.99, 0.95, 10.0, 7
    x = gamma * gae_lambda
    no_end, end = np.zeros((k, 1), bool), np.zeros((k, 1), bool)
    end[-1] = True
    bootstrapped = c * (1 - gamma) * (1 - x**k) / (1 - x)
    terminal = c * (1 - gamma) * (1 - x ** (k - 1)) / (1 - x) + c * x ** (k - 1)
    assert offset_effect(c, no_end, no_end, gamma, gae_lambda)[0, 0] == pytest.approx(bootstrapped)
    assert offset_effect(c, no_end, end, gamma, gae_lambda)[0, 0] == pytest.approx(bootstrapped)
    assert offset_effect(c, end, end, gamma, gae_lambda)[0, 0] == pytest.approx(terminal)


def test_an_offset_a_step_is_that_of_each_task():
    _, terminated, ends = stretches(3, n_envs=2)
    each = np.broadcast_to([2.0, -5.0], ends.shape)
    together = offset_effect(each, terminated, ends, 0.9, 0.8)
    for env, b in enumerate((2.0, -5.0)):
        alone = offset_effect(b, terminated[:, [env]], ends[:, [env]], 0.9, 0.8)
        np.testing.assert_allclose(together[:, [env]], alone)


@pytest.mark.parametrize("n", [0, 1, 2, 100])
def test_no_spread_is_no_problem(n):
    flat = np.zeros((n, 1), bool)
    exact, centered = center(np.full((n, 1), 3.0), 0.0, flat, flat, 0.99, 0.95)
    assert exact.shape == centered.shape == (n, 1)
    np.testing.assert_array_equal(centered, 0.0)
    np.testing.assert_array_equal(exact, 3.0)


def test_advantages_are_discounted_sums_of_td_errors():
    delta = np.array([[1.0], [2.0], [4.0]])
    ends = np.array([[False], [True], [False]])
    np.testing.assert_allclose(generalized_advantages(delta, ends, 0.5, 0.5), [[1.5], [2.0], [4.0]])


class Corridor(gym.Env):
    """A noisy walk that terminates at its right end, is cut after seven steps, and pays well: a large offset."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.t = self.np_random.normal(), 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        self.position += float(np.clip(action[0], -1, 1)) + self.np_random.normal()
        return self._observation(), 5.0 + self.position, self.position > 2.5, self.t >= 7, {}

    def _observation(self):
        return np.array([self.position, self.t / 7], np.float32)


class MeanSubtraction(BaseCallback):
    """The wrong way: what advantage normalization does anyway."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        advantages = self.model.rollout_buffer.advantages
        advantages -= advantages.mean()


def updated(offset, centering):
    """Two PPO updates, the second with a context; the parameters, the offset and how the episodes ended."""
    model = PPO(
        InContextActorCriticPolicy,
        RollingContext(Corridor(), length=256),
        n_steps=128,
        batch_size=32,
        n_epochs=4,
        gamma=0.9,
        seed=3,
        device="cpu",
        policy_kwargs={"critic_kwargs": {"offset": offset, "temperature": 1.0, "kernel": "rbf", "algorithm": "td"}},
    )
    model.learn(256, callback=CallbackList([ContextSyncCallback(), centering]))
    parameters = torch.cat([p.detach().flatten() for p in model.policy.parameters()])
    return parameters, float(model.policy.critic.offset), centering


def test_one_ppo_update_with_centering_equals_that_of_the_offset_free_critic():
    literal, b, centering = updated("centered", AdvantageCenteringCallback())
    free, no_b, _ = updated("removed", AdvantageCenteringCallback())
    wrong, _, _ = updated("centered", MeanSubtraction())
    assert abs(b) > 1.0 and no_b == 0.0
    assert centering.terminated.any() and (centering.ends & ~centering.terminated).any()
    assert (literal - free).abs().max() < 1e-6
    assert (wrong - free).abs().max() > 1e-4
