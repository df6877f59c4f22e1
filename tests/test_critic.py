"""The critic by itself: how it measures states, and what it says about depth."""

import math

import numpy as np
import pytest
import torch

from icrl_gym import Context, InContextCritic, InContextTransformer
from icrl_gym.kernels import RBFKernel
from icrl_gym.metrics import standardization


def path(n=200, d=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    states = torch.zeros(n + 1, d, dtype=torch.float64)
    for t in range(n):
        states[t + 1] = 0.9 * states[t] + 0.4 * torch.randn(d, generator=g, dtype=torch.float64)
    return states


def context_of(states, rewards=None):
    rewards = states[:-1].sum(-1).sin() if rewards is None else rewards
    return Context(states[:-1], rewards, states[1:], torch.zeros(len(states) - 1, dtype=torch.bool))


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-7])
def test_features_that_hardly_vary_change_little(noise):
    states = path(d=1)
    g = torch.Generator().manual_seed(1)
    jitter = noise * torch.randn(len(states), 1, generator=g, dtype=torch.float64)
    more = torch.cat([states, torch.full_like(states, 7.0), 7.0 + jitter], 1)
    rewards = states[:-1, 0].sin()
    # A fixed temperature: the test is of the scale, not of the median over more dimensions.
    narrow, wide = (InContextCritic(d, temperature=1.0, gamma=0.9, offset="removed") for d in (1, 3))
    narrow.condition(context_of(states, rewards))
    wide.condition(context_of(more, rewards))
    expected = narrow(states)
    assert float((wide(more) - expected).abs().max()) < 0.01 * float(expected.abs().max())
    # A real change in a feature that was constant counts.
    moved = more.clone()
    moved[:, 1] += 3.0
    assert float((wide(moved) - expected).abs().max()) > 0.1 * float(expected.abs().max())


def test_jitter_among_features_that_vary_stays_jitter():
    states, g = path(d=4), torch.Generator().manual_seed(1)
    jitter = 0.01 * torch.randn(len(states), 2, generator=g, dtype=torch.float64)
    _, scale = standardization(torch.cat([states, jitter], 1), torch.ones(len(states), dtype=torch.bool))
    deviation = states.numpy().std(0)
    np.testing.assert_allclose(scale[0, :4], deviation)
    np.testing.assert_allclose(scale[0, 4:], deviation.max())


def test_standardization_is_that_of_numpy_where_features_vary():
    states = path() * torch.tensor([1.0, 5.0, 0.2]) + 3.0
    mask = torch.rand(len(states), generator=torch.Generator().manual_seed(0)) < 0.7
    mean, scale = standardization(states, mask)
    np.testing.assert_allclose(mean, states[mask].numpy().mean(0, keepdims=True))
    np.testing.assert_allclose(scale, states[mask].numpy().std(0, keepdims=True))


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_context_of_equal_states_has_the_scale_one(n):
    _, scale = standardization(torch.full((n, 3), 5.0).double(), torch.ones(n, dtype=torch.bool))
    assert (scale == 1.0).all()
    critic = InContextCritic(3, gamma=0.9)
    critic.condition(Context(torch.ones(n, 3), torch.ones(n), torch.ones(n, 3), torch.zeros(n, dtype=torch.bool)))
    assert torch.isfinite(critic(torch.randn(5, 3))).all()


def test_units_do_not_matter_when_states_are_standardized():
    states = path()
    one, other = InContextCritic(3, gamma=0.9), InContextCritic(3, gamma=0.9)
    # Within a factor of twenty of the usual deviation, which is what counts as jitter.
    units = torch.tensor([0.3, 3.0, 1.0], dtype=torch.float64)
    rewards = states[:-1].sum(-1).sin()
    one.condition(context_of(states, rewards))
    other.condition(context_of(states * units - 4.0, rewards))
    torch.testing.assert_close(other(states * units - 4.0), one(states))


@pytest.mark.parametrize("options", [{}, {"n_layers": 12, "n_landmarks": None, "kernel": "rbf"}])
def test_the_value_is_that_of_the_transformer_it_holds(options):
    states = path()
    critic = InContextCritic(3, gamma=0.9, standardize=False, **options)
    critic.condition(context_of(states))
    value = critic.transformer.condition(context_of(states))
    torch.testing.assert_close(critic(states).squeeze(-1), value(states) + value.offset)
    torch.testing.assert_close(critic.offsets(states[:4]), value.offset.expand(4))
    # Asked again, row by row, in another order and another type: the same numbers.
    order = torch.randperm(len(states))
    torch.testing.assert_close(critic(states[order]), critic(states)[order], rtol=0, atol=0)
    assert critic(states.float()).dtype == torch.float32
    assert critic(states[:0]).shape == (0, 1)


def test_a_new_context_gives_new_values_of_the_same_observation():
    states = path()
    critic = InContextCritic(3, gamma=0.9)
    critic.condition(context_of(states))
    first = critic(states[:5])
    critic.condition(context_of(states, torch.ones(200)))
    assert (critic(states[:5]) - first).abs().min() > 0.1


def test_depth_curves_start_at_the_rewards_and_end_where_the_critic_does():
    states = path()
    deep = InContextCritic(3, n_layers=10, n_landmarks=None, gamma=0.9, value_shift=False)
    deep.condition(context_of(states))
    curve = deep.td_error_by_depth()
    assert list(curve) == [0, 1, 2, 4, 8, 10]
    rewards = states[:-1].sum(-1).sin()
    assert curve[0] == pytest.approx(float(rewards.square().mean().sqrt()))
    assert curve[10] == pytest.approx(float(deep.value_function.td_errors[-1].square().mean().sqrt()))
    limit = InContextCritic(3, gamma=0.9, n_landmarks=None)
    limit.condition(context_of(states))
    curve = limit.td_error_by_depth()
    centered = limit.value_function.td_errors[0]
    assert curve[0] == pytest.approx(float(centered.square().mean().sqrt()))
    own = limit.value_function.td_errors[-1]
    assert curve[math.inf] == pytest.approx(float(own.square().mean().sqrt()))
    assert InContextCritic(3).td_error_by_depth() != {} and list(InContextCritic(3).parameters()) == []


def test_a_ready_transformer_is_taken_as_it_is():
    transformer = InContextTransformer(RBFKernel(1.0), [0.5, 0.5], gamma=0.7)
    critic = InContextCritic(3, transformer=transformer)
    assert critic.transformer is transformer and critic.gamma == 0.7
    with pytest.raises(ValueError, match=r"gamma=0.9 is not the transformer's"):
        InContextCritic(3, transformer=transformer, gamma=0.9)
    with pytest.raises(ValueError, match="expects one context of states with 3 entries"):
        critic.condition(Context.empty(4))
    with pytest.raises(RuntimeError, match="has no context yet"):
        critic(torch.zeros(1, 3))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_layers": 5, "step_sizes": 0.5, "kernel": "rbf", "temperature": 2.0},
        {"algorithm": "residual_gradient", "acceleration": "conjugate", "n_layers": 4, "n_landmarks": None},
        {"algorithm": "average_reward", "standardize": False, "oldest_weight": 0.5},
        {"transformer": InContextTransformer(RBFKernel(1.0), gamma=0.9, n_layers=3)},
    ],
)
def test_settings_build_the_same_critic(options):
    critic = InContextCritic(2, **options)
    again = InContextCritic(2, **critic.settings)
    assert again.settings == critic.settings
    rng = np.random.default_rng(0)
    path = rng.normal(size=(21, 2))
    context = Context(path[:-1], rng.normal(size=20), path[1:], [False] * 20)
    for each in (critic, again):
        each.condition(context)
    torch.testing.assert_close(again(context.states), critic(context.states), rtol=0, atol=0)
