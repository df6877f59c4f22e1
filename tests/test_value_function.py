"""Infinite depth and the value shift against NumPy's solver, and where neither has an answer."""

import math

import numpy as np
import pytest
import torch

from icrl_gym import Context, InContextTransformer
from icrl_gym.kernels import ExponentialKernel, LaplacianKernel, LinearKernel, MaternKernel, RBFKernel
from icrl_gym.linear_solve import require_solved


def random_context(n=12, d=3, seed=0, fill=1.0, end=0.25):
    g = torch.Generator().manual_seed(seed)
    states, next_states = (torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(2))
    rewards = torch.randn(n, generator=g, dtype=torch.float64)
    terminated, mask = torch.rand(n, generator=g) < end, torch.rand(n, generator=g) < fill
    return Context(states, rewards, next_states, terminated, mask=mask)


def laplacian(u, w):
    return np.exp(-np.sqrt(((u[:, None] - w[None]) ** 2).sum(-1)) / 1.5)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("fill", [0.5, 1.0])
@pytest.mark.parametrize("offset", ["centered", "removed"])
@pytest.mark.parametrize("value_shift", [False, True])
def test_infinite_depth_solves_the_system_of_the_transitions_that_are_present(gamma, fill, offset, value_shift):
    context, rho = random_context(fill=fill, seed=4), 1e-2
    present = context.mask.numpy()
    s, s_next = context.states.numpy()[present], context.next_states.numpy()[present]
    r, ended = context.rewards.numpy()[present], context.terminated.numpy()[present]
    assert ended.any() and not ended.all() and (fill == 1.0 or not present.all())
    weight = np.where(ended, 1.0, 1.0 - gamma)
    constant = r.sum() / weight.sum() if value_shift else 0.0
    r = r - constant * weight
    system = (
        laplacian(s, s) - gamma * np.where(ended[:, None], 0.0, laplacian(s_next, s)) + rho * len(s) * np.eye(len(s))
    )
    c = np.linalg.solve(system, r)
    asked = np.random.default_rng(0).standard_normal((5, 3))
    value = InContextTransformer(
        LaplacianKernel(1.5), gamma=gamma, n_layers=math.inf, ridge=rho, offset=offset, value_shift=value_shift
    ).condition(context)
    np.testing.assert_allclose(value.coefficients[context.mask], c, rtol=1e-10)
    assert (value.coefficients[~context.mask] == 0).all()
    np.testing.assert_allclose(value(asked), laplacian(asked, s) @ c + constant, atol=1e-10)
    expected = -gamma * float(laplacian(np.zeros((1, 3)), s)[0] @ c) if offset == "centered" else 0.0
    assert float(value.offset) == pytest.approx(expected, abs=1e-12)
    # What is left at the fixed point is what the ridge holds back.
    np.testing.assert_allclose(value.td_errors[:, context.mask], [r, rho * len(s) * c], atol=1e-10)


def sampled_process(n_samples=400, n_states=5):
    """Samples of a process with loops and random ends, and the exact values of the process that they make up."""
    rng = np.random.default_rng(0)
    here, there = rng.integers(n_states, size=n_samples), rng.integers(n_states, size=n_samples)
    rewards, ended = rng.standard_normal(n_samples) + here, rng.random(n_samples) < 0.2
    counts, transition, mean = np.zeros(n_states), np.zeros((n_states, n_states)), np.zeros(n_states)
    for i, j, r, e in zip(here, there, rewards, ended, strict=True):
        counts[i] += 1
        mean[i] += r
        transition[i, j] += not e
    exact = np.linalg.solve(np.eye(n_states) - 0.9 * transition / counts[:, None], mean / counts)
    one_hot = np.eye(n_states)
    return Context(one_hot[here], rewards, one_hot[there], ended), one_hot, exact


@pytest.mark.parametrize("value_shift", [False, True])
@pytest.mark.parametrize(
    "options, tolerance",
    [
        ({"n_layers": 600, "step_sizes": 1.0}, 1e-8),
        ({"n_layers": math.inf, "ridge": 1e-10}, 1e-6),
        ({"n_layers": math.inf, "ridge": 1e-10, "n_landmarks": 60}, 1e-6),
    ],
)
def test_a_table_of_random_transitions_reaches_the_exact_values_of_its_averages(value_shift, options, tolerance):
    context, one_hot, exact = sampled_process()
    value = InContextTransformer(LinearKernel(), gamma=0.9, value_shift=value_shift, **options).condition(context)
    np.testing.assert_allclose(value(one_hot), exact, rtol=tolerance)


def test_values_agree_with_and_without_the_shift_where_the_problem_can_be_solved():
    # A walk from state to state that ends: as many equations as values, whatever the shift.
    g = torch.Generator().manual_seed(0)
    path = torch.randn(9, 2, generator=g, dtype=torch.float64)
    rewards = torch.randn(8, generator=g, dtype=torch.float64)
    context = Context(path[:-1], rewards, path[1:], torch.arange(8) == 7)
    exact, value = [], 0.0
    for reward in reversed(rewards.tolist()):
        value = reward + 0.9 * value
        exact.insert(0, value)
    for shift in (False, True):
        transformer = InContextTransformer(
            MaternKernel(1.0), gamma=0.9, n_layers=math.inf, ridge=0.0, value_shift=shift
        )
        np.testing.assert_allclose(transformer.condition(context)(path[:-1]), exact, rtol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"step_sizes": 0.5, "n_layers": 5},
        {"n_layers": math.inf},
        {"step_sizes": 0.5, "n_layers": 5, "n_landmarks": 2},
        {"n_layers": math.inf, "n_landmarks": 2},
    ],
)
def test_a_last_transition_to_zero_is_no_transition_to_the_empty_place_behind_it(options):
    context = random_context(3, 2, end=0.0)
    context.next_states[-1] = 0.0
    transformer = InContextTransformer(RBFKernel(1.0), gamma=0.9, **options)
    alone = transformer.condition(context)
    padded = transformer.condition(Context.stack([context, random_context(6, 2)]))
    torch.testing.assert_close(padded(context.states)[0], alone(context.states))
    torch.testing.assert_close(padded.td_errors[0, :, :3], alone.td_errors)
    empty = Context.stack([context, random_context(6, 2)])[0]
    torch.testing.assert_close(transformer.condition(empty)(context.states), alone(context.states))


@pytest.mark.parametrize(
    "kernel, n, d",
    [(LinearKernel(), 10, 2), (LinearKernel(), 8, 3), (RBFKernel(50.0), 30, 2), (ExponentialKernel(2.0), 30, 1)],
)
def test_a_system_that_only_rounding_makes_regular_is_refused(kernel, n, d):
    # No state twice, so no pivot is exactly zero; the coefficients would be of order 1e16.
    context = random_context(n, d)
    with pytest.raises(FloatingPointError, match=r"not unique with ridge=0 .*Set a positive ridge"):
        InContextTransformer(kernel, gamma=0.9, n_layers=math.inf, ridge=0.0).condition(context)
    with pytest.raises(FloatingPointError, match="not unique"):
        both = Context.stack([random_context(1, d), context])
        InContextTransformer(kernel, gamma=0.9, n_layers=math.inf, ridge=0.0).condition(both)
    solved = InContextTransformer(kernel, gamma=0.9, n_layers=math.inf, ridge=1e-4).condition(context)
    assert float(solved(context.states).abs().max()) < 1e3


def test_a_solution_that_rounding_outweighs_is_none_whatever_its_residual():
    # The residual is zero here, as it may be by chance; a solution of 1e20 to a right side of one rests on no digit of the matrix.
    matrix = torch.diag(torch.tensor([1.0, 1e-20], dtype=torch.float64))
    right = torch.ones(2, dtype=torch.float64)
    solution = torch.tensor([1.0, 1e20], dtype=torch.float64)
    with pytest.raises(FloatingPointError, match="not unique"):
        require_solved(matrix, solution, right, right, right, 0.0, math.inf)
    fair = torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64))
    require_solved(fair, torch.linalg.solve(fair, right), right, right, right, 0.0, math.inf)


def test_a_regular_system_without_ridge_is_solved():
    context = random_context(20)
    value = InContextTransformer(LaplacianKernel(1.0), gamma=0.9, n_layers=math.inf, ridge=0.0).condition(context)
    assert float(value.td_errors[-1].abs().max()) < 1e-12
    zero = Context(context.states, torch.zeros(20), context.next_states, context.terminated)
    still = InContextTransformer(LaplacianKernel(1.0), gamma=0.9, n_layers=math.inf, ridge=0.0).condition(zero)
    assert (still(context.states) == 0).all()


@pytest.mark.parametrize("n_landmarks", [None, 6])
def test_infinite_depth_in_single_precision(n_landmarks):
    context = random_context(40)
    transformer = InContextTransformer(LaplacianKernel(1.0), gamma=0.95, n_layers=math.inf, n_landmarks=n_landmarks)
    single, double = transformer.condition(context.to(dtype=torch.float32)), transformer.condition(context)
    assert single(context.states).dtype == single.td_errors.dtype == torch.float32
    np.testing.assert_allclose(single(context.states), double(context.states), atol=1e-4)


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(4, 2), torch.zeros(4, 4), [[0.0]]])
@pytest.mark.parametrize("options", [{"n_layers": 2}, {"n_layers": math.inf}])
def test_states_of_another_length_say_so(options, wrong):
    transformer = InContextTransformer(RBFKernel(1.0), **options)
    message = r"expected states of shape \(\.\.\., m, 3\) like those of the context, got \("
    with pytest.raises(ValueError, match=message):
        transformer.condition(random_context(4))(wrong)
    with pytest.raises(ValueError, match=message):
        transformer.embed(random_context(4), wrong)
