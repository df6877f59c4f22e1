"""Every algorithm as a literal layer, as a fast path, and as a loop over transitions; episodes end inside the contexts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import Context, InContextTransformer
from icrl_gym.algorithms import Algorithm, discounted_sums, goes_on
from icrl_gym.kernels import LaplacianKernel, LinearKernel, RBFKernel, SoftmaxKernel
from icrl_gym.td_loss import td_loss_by_depth

NAMES = ("td", "td_lambda", "residual_gradient", "average_reward", "monte_carlo")
KERNELS = [RBFKernel(0.7), LaplacianKernel(1.3), LinearKernel(), RBFKernel(0.2) + 0.5 * RBFKernel(3.0)]
GAMMA = 0.9


def episodes(n=12, d=3, seed=0, empty=0):
    """A trajectory that is terminated at 3, truncated at 7, and jumps, without a flag, after 9."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n + 1, d)).cumsum(0) * 0.4
    s, following, r = states[:-1].copy(), states[1:].copy(), rng.normal(size=n)
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[3], truncated[7] = True, True
    for end in (3, 7, 9):
        if end < n:
            following[end] = rng.normal(size=d)
    mask = np.arange(n) < n - empty
    return Context(s, r, following, terminated, truncated, mask)


def numpy_errors(name, kernel, context, alphas, gamma=GAMMA, lam=0.0, ridge=0.0):
    """Coefficients after each layer, one transition and one kernel value at a time."""
    n = int(context.mask.sum())
    s, t, r = context.states[:n], context.next_states[:n], context.rewards[:n].numpy()
    terminated, truncated = context.terminated[:n].numpy(), context.truncated[:n].numpy()

    def k(u, w):
        return float(kernel(u[None], w[None])[0, 0])

    def linked(i):
        return i + 1 < n and not terminated[i] and not truncated[i] and bool((t[i] == s[i + 1]).all())

    g = {"average_reward": 1.0, "monte_carlo": 0.0}.get(name, gamma)
    beta = [0.0 if terminated[i] else g for i in range(n)]

    def kappa(j, w):
        return k(s[j], w) - (beta[j] * k(t[j], w) if name == "residual_gradient" else 0.0)

    y = list(r)
    if name == "average_reward":
        y = [value - np.mean(r) for value in r]
    if name == "monte_carlo":
        for i in reversed(range(n)):
            y[i] = r[i] + (gamma * y[i + 1] if linked(i) else 0.0)
    if name == "residual_gradient":
        ridge = ridge * np.mean([kappa(i, s[i]) - beta[i] * kappa(i, t[i]) for i in range(n)])
    change = np.array([[kappa(j, s[i]) - beta[i] * kappa(j, t[i]) for j in range(n)] for i in range(n)])
    c, path = np.zeros(n), []
    for alpha in alphas:
        delta = y - change @ c
        trace = np.zeros(n)
        for j in range(n):
            weight, i = 1.0, j
            while True:
                trace[j] += weight * delta[i]
                if not linked(i):
                    break
                weight, i = weight * gamma * lam, i + 1
        c = c + alpha * (trace - ridge * n * c)
        path.append((c.copy(), y - change @ c))

    def value(w):
        return sum(c[j] * kappa(j, w) for j in range(n))

    return path, value, g


def transformer_of(name, kernel, **options):
    return InContextTransformer(kernel, gamma=GAMMA, algorithm=name, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("empty", [0, 2])
def test_layers_are_the_loop_and_the_literal_pass(name, kernel, empty):
    context = episodes(empty=empty)
    transformer = transformer_of(name, kernel, step_sizes=[0.9, 0.5, 0.3])
    value = transformer.condition(context)
    path, expected, g = numpy_errors(
        name, kernel, context, transformer.layer_steps(context).tolist(), lam=0.9 if name == "td_lambda" else 0.0
    )
    for layer, (_, delta) in enumerate(path, 1):
        np.testing.assert_allclose(value.td_errors[layer, context.mask], delta, atol=1e-12)
    queries = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    answers = value(queries)
    np.testing.assert_allclose(answers, [expected(w) for w in queries], atol=1e-12)
    assert float(value.offset) == pytest.approx(-g * expected(torch.zeros(3).double()), abs=1e-12)
    literal = transformer.read_out(transformer(transformer.embed(context, queries)))
    torch.testing.assert_close(literal, answers + value.offset, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["td", "residual_gradient", "average_reward", "monte_carlo"])
def test_a_ridge_is_a_decay_of_the_coefficients(name):
    context = episodes(empty=1)
    transformer = transformer_of(name, RBFKernel(0.7), step_sizes=[0.9, 0.5, 0.3], ridge=0.02)
    value = transformer.condition(context)
    alphas = transformer.layer_steps(context).tolist()
    path, expected, _ = numpy_errors(name, RBFKernel(0.7), context, alphas, ridge=0.02)
    np.testing.assert_allclose(value.td_errors[-1, context.mask], path[-1][1], atol=1e-12)
    queries = torch.zeros(2, 3).double() + torch.tensor([[0.1], [0.7]])
    np.testing.assert_allclose(value(queries), [expected(w) for w in queries], atol=1e-12)
    literal = transformer.read_out(transformer(transformer.embed(context, queries)))
    torch.testing.assert_close(literal, value(queries) + value.offset, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("landmarks", [None, 12])
def test_many_layers_end_at_the_fixed_point_and_it_solves_the_system(name, landmarks):
    kernel, context, ridge = LaplacianKernel(1.0), episodes(), 0.05
    limit = transformer_of(name, kernel, n_layers=math.inf, ridge=ridge, n_landmarks=landmarks)
    value = limit.condition(context)
    lam = 0.9 if name == "td_lambda" else 0.0
    if not landmarks or name != "residual_gradient":  # whose next states are no landmarks here
        _, expected, _ = numpy_errors(name, kernel, context, [0.1] * 1500, lam=lam, ridge=ridge)
        np.testing.assert_allclose(value(context.states), [expected(w) for w in context.states], atol=1e-6)
    if name != "td_lambda":
        deep = transformer_of(name, kernel, step_sizes=1.0, n_layers=2000, ridge=ridge, n_landmarks=landmarks)
        torch.testing.assert_close(deep.condition(context)(context.states), value(context.states), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("acceleration", ["none", "conjugate"])
def test_a_context_without_a_transition_has_the_value_zero(name, acceleration):
    if acceleration == "conjugate" and not Algorithm(name).positive:
        return
    transformer = transformer_of(name, RBFKernel(0.7), n_layers=3, acceleration=acceleration)
    queries = torch.ones(2, 3).double()
    for context in (Context.empty(3), Context(**{**vars(episodes()), "mask": torch.zeros(12, dtype=torch.bool)})):
        value = transformer.condition(context)
        literal = transformer.read_out(transformer(transformer.embed(context, queries)))
        assert value(queries).tolist() == literal.tolist() == [0.0, 0.0] and float(value.offset) == 0.0


def test_lambda_0_is_td_and_gamma_0_makes_td_residual_gradient_and_monte_carlo_one():
    context, kernel = episodes(), RBFKernel(0.5)
    steps = {"step_sizes": [0.7, 0.4]}
    queries = context.states + 0.1
    td = transformer_of("td", kernel, **steps).condition(context)(queries)
    torch.testing.assert_close(
        transformer_of("td_lambda", kernel, trace_decay=0.0, **steps).condition(context)(queries), td
    )
    same = [
        InContextTransformer(kernel, gamma=0.0, algorithm=name, **steps).condition(context)(queries)
        for name in ("td", "residual_gradient", "monte_carlo", "td_lambda")
    ]
    for other in same[1:]:
        torch.testing.assert_close(other, same[0])


def test_lambda_1_ends_at_the_values_of_the_returns_where_every_state_is_its_own_feature():
    # One-hot states and the linear kernel: TD(1)'s fixed point of a terminated episode are its returns.
    n = 6
    rewards = np.arange(1.0, n + 1)
    states = np.eye(n + 1)
    context = Context(states[:-1], rewards, states[1:], np.arange(n) == n - 1)
    options = {"n_layers": math.inf, "ridge": 1e-12}
    returns = [sum(GAMMA**k * rewards[i + k] for k in range(n - i)) for i in range(n)]
    for name, extra in (
        ("td_lambda", {"trace_decay": 1.0}),
        ("td", {}),
        ("monte_carlo", {}),
        ("residual_gradient", {}),
    ):
        value = transformer_of(name, LinearKernel(), **options, **extra).condition(context)
        np.testing.assert_allclose(value(states[:-1]), returns, rtol=1e-6)


def test_average_reward_values_solve_the_differential_bellman_equation():
    # A cycle of three states: v_i = r_i - mean + v_{i+1}, up to a constant.
    rewards = np.array([3.0, 0.0, 0.0])
    states = np.eye(3)
    context = Context(states, rewards, states[[1, 2, 0]], np.zeros(3, bool))
    value = transformer_of("average_reward", LinearKernel(), step_sizes=0.5, n_layers=400).condition(context)
    v = value(states).numpy()
    np.testing.assert_allclose(v - v[0], [0.0, -2.0, -1.0], atol=1e-8)
    assert float(value.td_errors[-1].abs().max()) < 1e-8 and float(value.shift) == 0.0


@pytest.mark.parametrize("name", ["residual_gradient", "monte_carlo"])
@pytest.mark.parametrize("landmarks", [None, 5])
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_conjugate_layers_are_literal_and_fast_and_end_at_the_fixed_point(name, landmarks, ridge):
    context = episodes(empty=2)
    options = {"acceleration": "conjugate", "ridge": ridge, "n_landmarks": landmarks, "value_shift": True}
    queries = context.states + 0.3
    for depth in (0, 1, 2, 5):
        transformer = transformer_of(name, RBFKernel(0.7), n_layers=depth, **options)
        value = transformer.condition(context)
        prompt = transformer.embed(context, queries)
        assert prompt.tokens.shape == (12, 8, 13)
        literal = transformer.read_out(transformer(prompt))
        torch.testing.assert_close(literal, value(queries) + value.offset, rtol=0, atol=1e-9)
        assert value.td_errors.shape == (depth + 1, 12) and (value.td_errors[:, ~context.mask] == 0).all()
    if ridge:
        deep = transformer_of(name, RBFKernel(0.7), n_layers=40, **options).condition(context)
        limit = transformer_of(
            name, RBFKernel(0.7), n_layers=math.inf, ridge=ridge, n_landmarks=landmarks, value_shift=True
        ).condition(context)
        torch.testing.assert_close(deep(queries), limit(queries), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["residual_gradient", "monte_carlo"])
@pytest.mark.parametrize("seed", range(4))
def test_conjugate_layers_beyond_the_rank_of_their_kernel_stay_where_they_are(name, seed):
    rng = np.random.default_rng(seed)
    context = Context(rng.normal(size=(9, 3)), rng.normal(size=9), rng.normal(size=(9, 3)), np.zeros(9, bool))
    queries = rng.normal(size=(4, 3))

    def layers(n_layers):
        return transformer_of(name, RBFKernel("median"), n_layers=n_layers, acceleration="conjugate", n_landmarks=3)

    value = layers(10).condition(context)
    prompt = layers(10).embed(context, queries)
    literal = layers(10).read_out(layers(10)(prompt))
    torch.testing.assert_close(literal, value(queries) + value.offset, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(value(queries), layers(3).condition(context)(queries), rtol=1e-6, atol=1e-6)


def test_conjugate_layers_are_scipy_s_conjugate_gradient():
    from scipy.sparse.linalg import cg

    context, depth = episodes(), 4
    transformer = transformer_of(
        "residual_gradient", RBFKernel(0.7), n_layers=depth, acceleration="conjugate", ridge=1e-3
    )
    problem, path, _ = transformer.coefficients_by_depth(context)
    # Coordinates of functions in which <f, f> is the sum of squares: A = D D^T, w = D^T c.
    features = np.linalg.cholesky(problem.matrix.numpy())
    matrix = features.T @ features + 1e-3 * np.trace(problem.matrix) * np.eye(12)
    solution, _ = cg(matrix, features.T @ context.rewards.numpy(), maxiter=depth, rtol=0.0)
    np.testing.assert_allclose(features.T @ path[-1].numpy(), solution, rtol=1e-9)


def test_more_conjugate_layers_come_closer_in_the_norm_of_the_system():
    context = episodes(n=30)
    transformer = transformer_of("residual_gradient", RBFKernel(0.7), n_layers=25, acceleration="conjugate", ridge=1e-4)
    problem, path, errors = transformer.coefficients_by_depth(context)
    ridge = 1e-4 * problem.matrix.trace()
    matrix = problem.matrix + ridge * torch.eye(30)
    away = path - torch.linalg.solve(matrix, problem.targets)
    distance = (away @ problem.matrix * (away @ matrix)).sum(-1)
    assert (distance.diff() <= 1e-9 * distance[0]).all() and distance[-1] < 1e-2 * distance[0]
    # It is the distance from the least of squared errors and ridge together.
    loss = errors.square().sum(-1) + ridge * (path * (path @ problem.matrix)).sum(-1)
    torch.testing.assert_close(loss - distance, (loss - distance)[:1].expand(26), rtol=1e-6, atol=0)


def test_batches_are_loops():
    contexts = Context.stack([episodes(seed=s, empty=s) for s in range(3)])
    for name in NAMES:
        for acceleration in ("none", "conjugate") if Algorithm(name).positive else ("none",):
            for landmarks in (None, 4):
                transformer = transformer_of(
                    name, RBFKernel(0.7), n_layers=3, acceleration=acceleration, n_landmarks=landmarks
                )
                many = transformer.condition(contexts)
                asked = torch.ones(3, 2, 3).double() * 0.2
                for b in range(3):
                    one = transformer.condition(contexts[b])
                    torch.testing.assert_close(many(asked)[b], one(asked[b]))
                    torch.testing.assert_close(many.td_errors[b], one.td_errors)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "residual_gradient", "step_sizes": [0.9, 0.5]},
        {"algorithm": "residual_gradient", "n_layers": 2, "acceleration": "conjugate", "ridge": 1e-3},
        {"algorithm": "td_lambda", "step_sizes": [0.9, 0.5]},
        {"algorithm": "monte_carlo", "step_sizes": [0.9, 0.5], "value_shift": True},
        {"algorithm": "td", "step_sizes": [0.9, 0.5], "value_shift": True},
    ],
)
def test_losses_by_depth_are_of_the_discounted_td_errors(options):
    batch = Context.stack([episodes(seed=s) for s in range(2)])
    asked = Context.stack([episodes(seed=s + 5) for s in range(2)])
    transformer = InContextTransformer(RBFKernel(0.7), gamma=GAMMA, **options)
    inside, outside = td_loss_by_depth(transformer, batch, asked)
    value = transformer.condition(batch)
    for transitions, losses in ((batch, inside), (asked, outside)):
        bootstrap = GAMMA * ~transitions.terminated * value(transitions.next_states)
        errors = transitions.rewards + bootstrap - value(transitions.states)
        expected = errors.square().sum(-1) / transitions.rewards.square().sum(-1)
        torch.testing.assert_close(losses[:, -1], expected)


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=0, max_size=40),
    st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_discounted_sums_are_the_recursion(steps, decay):
    values = torch.tensor([v for v, _ in steps], dtype=torch.float64)
    follows = torch.tensor([f for _, f in steps], dtype=torch.bool)
    if len(steps):
        follows[-1] = False
    expected, following = [0.0] * len(steps), 0.0
    for i in reversed(range(len(steps))):
        following = float(values[i]) + (decay * following if bool(follows[i]) else 0.0)
        expected[i] = following
    np.testing.assert_allclose(discounted_sums(values, follows, decay), expected, atol=1e-12)


def test_a_trajectory_goes_on_only_where_it_does():
    assert goes_on(episodes(empty=1)).tolist() == [i not in (3, 7, 9, 10, 11) for i in range(12)]
    assert goes_on(Context.empty(2)).shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "td", "trace_decay": 0.5}, "trace_decay belongs to algorithm='td_lambda'"),
        ({"algorithm": "td_lambda", "trace_decay": 1.5}, r"must lie in \[0, 1\], got 1.5"),
        ({"algorithm": "td", "acceleration": "conjugate"}, "positive semi-definite system"),
        ({"algorithm": "monte_carlo", "acceleration": "conjugate", "step_sizes": 1.0}, "no step_sizes"),
        ({"algorithm": "monte_carlo", "acceleration": "conjugate", "n_layers": math.inf}, "finite n_layers"),
        ({"algorithm": "average_reward", "value_shift": True}, "leave value_shift out"),
        ({"algorithm": "td_lambda", "ridge": 0.1}, "ridge with traces"),
    ],
)
def test_arguments_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        InContextTransformer(RBFKernel(1.0), **{"n_layers": 3, **options})


def test_the_residual_gradient_needs_a_positive_definite_kernel():
    with pytest.raises(ValueError, match="needs a positive definite kernel"):
        InContextTransformer(SoftmaxKernel(1.0), n_layers=3, algorithm="residual_gradient")


@pytest.mark.parametrize("name", ["td", "td_lambda", "residual_gradient", "average_reward"])
def test_with_the_linear_kernel_they_are_linear_attention_with_wang_et_al_s_matrices(name):
    # Z <- Z + (1/n) P Z M (Z^T Q Z) on tokens [phi; gamma phi'; r], one trajectory without an end.
    rng = np.random.default_rng(4)
    n, d, gamma, lam, steps = 8, 3, GAMMA, 0.6, (0.3, 0.2, 0.1)
    path = rng.normal(size=(n + 1, d))
    rewards, query = rng.normal(size=n), rng.normal(size=d)
    g = 1.0 if name == "average_reward" else gamma
    given = rewards - rewards.mean() if name == "average_reward" else rewards
    z = np.zeros((2 * d + 1, n + 1))
    z[:d, :n], z[d : 2 * d, :n], z[-1, :n], z[:d, n] = path[:-1].T, g * path[1:].T, given, query
    p = np.zeros((2 * d + 1, 2 * d + 1))
    p[-1, -1] = 1.0
    identity, zero = np.eye(d), np.zeros((d, d))
    q = np.zeros_like(p)
    second = -identity if name == "residual_gradient" else zero
    q[: 2 * d, : 2 * d] = np.block([[-identity, identity], [-second, second]])
    mask = np.diag([1.0] * n + [0.0])
    if name == "td_lambda":
        for j in range(n):
            for i in range(j, n):
                mask[i, j] = (gamma * lam) ** (i - j)
    for step in steps:
        z = z + step / n * p @ z @ mask @ (z.T @ q @ z)
    transformer = InContextTransformer(
        LinearKernel(), steps, gamma, "length", algorithm=name, trace_decay=lam if name == "td_lambda" else None
    )
    context = Context(path[:-1], rewards, path[1:], np.zeros(n, bool))
    value = transformer.condition(context)
    np.testing.assert_allclose(value(query[None]), [-z[-1, -1]], rtol=1e-10)
    np.testing.assert_allclose(value.td_errors[-1], z[-1, :n], rtol=1e-10)
