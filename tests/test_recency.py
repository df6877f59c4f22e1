"""Weights of transitions, and weights by age: weight 2 is a transition that is there twice, and weight 0 one that is not there."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.kernel_ridge import KernelRidge

from icrl_gym import Context, InContextCritic, InContextTransformer
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.algorithms import goes_on
from icrl_gym.convergence import check_convergence
from icrl_gym.kernels import LaplacianKernel, LinearKernel, RBFKernel, spread_rows
from icrl_gym.learned import LearnedTransformer
from icrl_gym.metrics import standardization
from icrl_gym.recency import aged

KERNEL = LaplacianKernel(1.0) + 0.2 * LinearKernel()
WITHOUT_TRACES = ["td", "residual_gradient", "average_reward"]


def random_context(n=9, d=2, seed=0, chain=False):
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n + 1, d, generator=g, dtype=torch.float64)
    following = states[1:] if chain else torch.randn(n, d, generator=g, dtype=torch.float64)
    ended = torch.rand(n, generator=g) < 0.2
    return Context(states[:n], torch.randn(n, generator=g, dtype=torch.float64), following, ended)


def repeated(context, times):
    return context[torch.arange(len(context)).repeat_interleave(torch.tensor(times))]


def options(algorithm):
    return {} if algorithm == "average_reward" else {"value_shift": True}


@pytest.mark.parametrize("algorithm", WITHOUT_TRACES)
@pytest.mark.parametrize("normalization", ["row_sum", "length", "none"])
@pytest.mark.parametrize("ridge", [0.0, 0.05])
@settings(max_examples=10, deadline=None)
@given(times=st.lists(st.integers(0, 3), min_size=6, max_size=6).filter(any), seed=st.integers(0, 99))
def test_a_weight_is_how_often_a_transition_is_there(algorithm, normalization, ridge, times, seed):
    context = random_context(6, seed=seed)
    transformer = InContextTransformer(
        KERNEL, 0.1, 0.9, normalization, n_layers=8, algorithm=algorithm, ridge=ridge, **options(algorithm)
    )
    asked = random_context(4, seed=100).states
    counted, there = context.weighted(times), repeated(context, times)
    expected = transformer.condition(there, most_growth=math.inf)
    got = transformer.condition(counted, most_growth=math.inf)
    torch.testing.assert_close(got(asked), expected(asked), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.offset, expected.offset, rtol=1e-9, atol=1e-9)
    literal = transformer(transformer.embed(counted, asked), most_growth=math.inf)
    torch.testing.assert_close(transformer.read_out(literal) - got.offset, got(asked), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", WITHOUT_TRACES)
@pytest.mark.parametrize("n_landmarks", [None, 4])
def test_the_fixed_point_of_weights_is_that_of_repeated_transitions(algorithm, n_landmarks):
    context, times = random_context(), [1, 3, 2, 0, 1, 1, 5, 1, 2]
    transformer = InContextTransformer(
        KERNEL, None, 0.9, n_layers=math.inf, algorithm=algorithm, ridge=1e-3, **options(algorithm)
    )
    landmarks = None if n_landmarks is None else context.states[:n_landmarks]
    asked = random_context(5, seed=7).states
    expected = transformer.condition(repeated(context, times), landmarks)(asked)
    torch.testing.assert_close(transformer.condition(context.weighted(times), landmarks)(asked), expected)


@pytest.mark.parametrize("algorithm", ["residual_gradient", "monte_carlo"])
@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_conjugate_layers_end_at_the_weighted_fixed_point(algorithm, ridge):
    context = random_context(12).weighted(torch.linspace(0.1, 2.0, 12))
    layers = InContextTransformer(
        KERNEL, None, 0.9, n_layers=40, algorithm=algorithm, acceleration="conjugate", ridge=ridge
    )
    limit = InContextTransformer(KERNEL, None, 0.9, n_layers=math.inf, algorithm=algorithm, ridge=ridge)
    asked = random_context(5, seed=7).states
    value = layers.condition(context)
    torch.testing.assert_close(value(asked), limit.condition(context)(asked), rtol=1e-6, atol=1e-6)
    literal = layers.read_out(layers(layers.embed(context, asked)))
    torch.testing.assert_close(literal, value(asked) + value.offset, rtol=1e-6, atol=1e-6)
    # Each layer is best for the weighted squares, so they cannot rise; the plain squares may.
    weighted = (value.td_errors.square() * context.weights).sum(-1)
    if not ridge:
        assert (weighted.diff() <= 1e-9 * weighted[0]).all()


@pytest.mark.parametrize("n_landmarks", [None, 5])
@pytest.mark.parametrize("trace_decay", [0.0, 0.8, 1.0])
def test_weighted_td_lambda_solves_its_equation(n_landmarks, trace_decay):
    context, gamma, rho = random_context(10, chain=True), 0.9, 1e-2
    weights = torch.linspace(0.2, 1.0, 10, dtype=torch.float64)
    context = context.weighted(weights)
    z = context.states if n_landmarks is None else context.states[:n_landmarks]
    transformer = InContextTransformer(
        RBFKernel(1.0), None, gamma, n_layers=math.inf, algorithm="td_lambda", trace_decay=trace_decay, ridge=rho
    )
    value = transformer.condition(context, None if n_landmarks is None else z)
    # sum_i w_i (traced error)_i k(z, s_i) = rho n (k(z, z) c), with traces summed in a loop.
    delta = (
        context.rewards + gamma * (~context.terminated).double() * value(context.next_states) - value(context.states)
    )
    follows, traced = goes_on(context).tolist(), delta.tolist()
    assert sum(follows) > 4
    for i in range(len(traced) - 2, -1, -1):
        if follows[i]:
            traced[i] += gamma * trace_decay * traced[i + 1]
    kernel = RBFKernel(1.0)
    given_ = kernel(z, context.states) @ (weights * torch.tensor(traced, dtype=torch.float64))
    torch.testing.assert_close(given_, rho * weights.sum() * (kernel(z, z) @ value.coefficients), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("n_layers", [1, 5, 20])
def test_weighted_traces_are_the_same_literally(n_layers):
    context = random_context(8, chain=True).weighted(torch.linspace(2.0, 0.1, 8))
    transformer = InContextTransformer(
        KERNEL, 0.7, 0.9, n_layers=n_layers, algorithm="td_lambda", trace_decay=0.7, value_shift=True
    )
    asked = random_context(3, seed=5).states
    value = transformer.condition(context)
    torch.testing.assert_close(
        transformer.read_out(transformer(transformer.embed(context, asked))), value(asked) + value.offset
    )


def test_weighted_monte_carlo_is_weighted_kernel_ridge_regression():
    context, rho = random_context(10), 1e-2
    weights = torch.linspace(0.2, 1.0, 10, dtype=torch.float64)
    transformer = InContextTransformer(RBFKernel(1.0), None, 0.9, n_layers=math.inf, algorithm="monte_carlo", ridge=rho)
    asked = random_context(5, seed=7).states
    # Nothing goes on, so that returns are rewards.
    peer = KernelRidge(alpha=rho * float(weights.sum()), kernel="rbf", gamma=0.5)
    peer.fit(context.states.numpy(), context.rewards.numpy(), sample_weight=weights.numpy())
    value = transformer.condition(context.weighted(weights))(asked)
    np.testing.assert_allclose(value, peer.predict(asked.numpy()), rtol=1e-8)


def test_learned_matrices_read_weights_too():
    context = random_context(6).weighted([0.1, 0.5, 1.0, 1.0, 2.0, 3.0])
    construction = InContextTransformer(LinearKernel(), [0.3] * 3, 0.9)
    learned = LearnedTransformer(construction, n_features=2)
    asked = random_context(4, seed=5).states
    value = construction.condition(context)
    torch.testing.assert_close(learned.values(context, asked), value(asked) + value.offset)


def test_the_check_of_convergence_counts_weights():
    context, times = random_context(8), [1, 4, 2, 1, 1, 3, 1, 2]
    for ridge in (0.0, 1e-2):
        transformer = InContextTransformer(KERNEL, 0.5, 0.9, n_layers=5, ridge=ridge)
        one = check_convergence(transformer, context.weighted(times))
        other = check_convergence(transformer, repeated(context, times))
        torch.testing.assert_close(one.top_eigenvalue, other.top_eigenvalue, rtol=1e-2, atol=0)
        torch.testing.assert_close(one.safe_ridge, other.safe_ridge, rtol=1e-4, atol=1e-6)


def test_an_adaptive_transformer_says_that_it_takes_no_weights():
    with pytest.raises(ValueError, match="counts every transition alike"):
        AdaptiveTransformer().condition(random_context().weighted(torch.linspace(1, 2, 9)))


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0, -1.0], "not negative; 1 of 2"), ([math.nan, 1.0], "finite"), ([1.0], "shape")],
)
def test_weights_that_are_none_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        random_context(2).weighted(weights)


def test_weights_of_zero_are_empty_places_and_all_fields_travel():
    context = random_context(3).weighted([0.0, 1.0, 2.0])
    assert context.mask.tolist() == [False, True, True]
    assert context.is_weighted
    assert not random_context(3).is_weighted
    stacked = Context.stack([context, random_context(5)])
    assert stacked.weights.tolist() == [[0, 1, 2, 0, 0], [1, 1, 1, 1, 1]]
    assert Context.cat([context, random_context(1)]).weights.tolist() == [0, 1, 2, 1]
    assert stacked.to(dtype=torch.float32).weights.dtype == torch.float32
    assert torch.equal(stacked[..., :2].weights, stacked.weights[:, :2])


def test_standardization_by_weights_is_that_of_repeated_states():
    states, times = random_context(5).states, [1, 3, 0, 2, 1]
    many = states[torch.arange(5).repeat_interleave(torch.tensor(times))]
    for got, expected in zip(
        standardization(states, torch.tensor(times, dtype=torch.float64)),
        (many.mean(0, keepdim=True), many.std(0, correction=0, keepdim=True)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@given(n=st.integers(2, 400), most=st.integers(1, 40), seed=st.integers(0, 20))
def test_landmarks_lie_as_dense_as_the_weight(n, most, seed):
    weights = torch.rand(n, generator=torch.Generator().manual_seed(seed)) + 0.05
    rows = spread_rows(n, most, None, weights)
    assert (rows.diff() > 0).all() and len(rows) <= most
    assert 0 <= int(rows.min()) <= int(rows.max()) < n
    if n <= most:
        assert rows.tolist() == list(range(n))
        return
    # One of each stretch of equal weight: what lies before a row is within a stretch of its share, but for rows met twice.
    stretch, twice = float(weights.sum()) / most, most - len(rows)
    for stop in (n // 3, n // 2, n):
        count = int((rows < stop).sum())
        assert -1.001 - twice <= count - float(weights[:stop].sum()) / stretch <= 1.001


def test_aged_is_geometric_in_the_part_of_the_window():
    context = random_context(5)
    weights = aged(context, 10, 0.1).weights
    np.testing.assert_allclose(weights, [0.1 ** (age / 10) for age in (4, 3, 2, 1, 0)], rtol=1e-12)
    np.testing.assert_allclose(aged(context, 10, 0.1, age=10).weights, 0.1 * weights, rtol=1e-12)
    assert aged(context, 10, 1.0) is context


@pytest.mark.parametrize("oldest", [0.0, -1.0, 1.5, math.nan])
def test_an_oldest_weight_outside_of_its_range_is_refused(oldest):
    with pytest.raises(ValueError, match="oldest_weight must lie in"):
        InContextCritic(3, oldest_weight=oldest)


def test_the_default_critic_forgets_and_layers_do_not():
    assert InContextCritic(3).oldest_weight == 0.1
    assert InContextCritic(3, n_layers=5).oldest_weight == 1.0
    assert InContextCritic(3, transformer=InContextTransformer(KERNEL, 1.0, n_layers=5)).oldest_weight == 1.0


def test_a_critic_values_what_counts_more():
    """Two rewards at one state: the value of a short chain follows the weights."""
    states = torch.zeros(2, 1, dtype=torch.float64)
    context = Context(states, [0.0, 1.0], states + 1, [True, True], weights=[0.25, 0.75])
    critic = InContextCritic(1, gamma=0.9, offset="removed")
    critic.condition(context)
    assert float(critic(torch.zeros(1, 1))) == pytest.approx(0.75, abs=1e-6)
