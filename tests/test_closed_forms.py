"""Value functions against what is known in closed form: kernel ridge regression, Gaussian processes, linear systems."""

import math

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge

from icrl_gym import Context, InContextTransformer
from icrl_gym.kernels import ExponentialKernel, LaplacianKernel, LinearKernel, MaternKernel, RBFKernel
from icrl_gym.value_function import reward_center


def random_context(n=20, d=3, seed=0, end=0.2, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    states, next_states = (scale * torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(2))
    rewards = torch.randn(n, generator=g, dtype=torch.float64)
    return Context(states, rewards, next_states, torch.rand(n, generator=g) < end)


def chain(n=6, gamma=0.9, copies=1):
    """A chain 0 -> 1 -> ... -> n-1 -> end with one-hot states, and its exact values."""
    states = torch.eye(n, dtype=torch.float64)
    next_states = torch.roll(states, -1, 0)
    rewards = torch.arange(1.0, n + 1, dtype=torch.float64)
    terminated = torch.arange(n) == n - 1
    transition = np.diag(np.ones(n - 1), 1)
    exact = np.linalg.solve(np.eye(n) - gamma * transition, rewards.numpy())
    one = Context(states, rewards, next_states, terminated)
    return Context.cat([one] * copies), states, exact


@pytest.mark.parametrize("ridge", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize(
    "kernel, name, options",
    [
        (RBFKernel(0.5), "rbf", {"gamma": 1.0}),
        (LinearKernel(), "linear", {}),
        (ExponentialKernel(2.0), None, {}),
    ],
)
def test_without_discount_infinite_depth_is_kernel_ridge_regression(kernel, name, options, ridge):
    context, asked = random_context(), torch.randn(9, 3, dtype=torch.float64)
    n = len(context)
    if name is None:
        name = "precomputed"
        fit = np.exp(context.states.numpy() @ context.states.numpy().T / 2)
        ask = np.exp(asked.numpy() @ context.states.numpy().T / 2)
    else:
        fit, ask = context.states.numpy(), asked.numpy()
    model = KernelRidge(alpha=ridge * n, kernel=name, **options).fit(fit, context.rewards.numpy())
    value = InContextTransformer(kernel, gamma=0.0, n_layers=math.inf, ridge=ridge).condition(context)
    np.testing.assert_allclose(value(asked), model.predict(ask), atol=1e-9)
    assert float(value.offset) == 0.0


@pytest.mark.parametrize(
    "kernel, peer",
    [
        (RBFKernel(0.7), gpytorch.kernels.RBFKernel()),
        (LaplacianKernel(0.8), gpytorch.kernels.MaternKernel(nu=0.5)),
        (MaternKernel(0.8), gpytorch.kernels.MaternKernel(nu=1.5)),
    ],
)
def test_without_discount_infinite_depth_is_the_mean_of_a_gaussian_process(kernel, peer):
    context, asked, ridge = random_context(), torch.randn(9, 3, dtype=torch.float64), 1e-2
    noise = ridge * len(context)
    peer.lengthscale = math.sqrt(0.7) if isinstance(kernel, RBFKernel) else 0.8

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), peer

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = noise
    model = Exact(context.states, context.rewards, likelihood).double().eval()
    peer.lengthscale = math.sqrt(0.7) if isinstance(kernel, RBFKernel) else 0.8
    likelihood.noise = noise
    with torch.no_grad():
        expected = model(asked).mean
    value = InContextTransformer(kernel, gamma=0.0, n_layers=math.inf, ridge=ridge).condition(context)
    np.testing.assert_allclose(value(asked), expected, atol=1e-6)


@pytest.mark.parametrize("value_shift", [False, True])
@pytest.mark.parametrize("copies", [1, 3])
def test_a_tabular_chain_reaches_its_exact_values(value_shift, copies):
    context, states, exact = chain(copies=copies)
    # Duplicated rows make the system singular but for the ridge.
    options = {"kernel": LinearKernel(), "gamma": 0.9, "value_shift": value_shift}
    fixed = InContextTransformer(n_layers=math.inf, ridge=1e-12, **options).condition(context)
    np.testing.assert_allclose(fixed(states), exact, rtol=1e-6)
    assert float(fixed.td_errors[-1].abs().max()) < 1e-6
    deep = InContextTransformer(step_sizes=1.0, n_layers=300, **options).condition(context)
    np.testing.assert_allclose(deep(states), exact, rtol=1e-6)
    landmarks = InContextTransformer(n_layers=math.inf, ridge=1e-12, n_landmarks=6, **options)
    np.testing.assert_allclose(landmarks.condition(context, landmarks=states)(states), exact, rtol=1e-6)


def test_bootstrapping_past_the_end_of_the_chain_misses_its_values():
    context, states, exact = chain()
    wrong = Context(context.states, context.rewards, context.next_states, torch.zeros(6, dtype=torch.bool))
    value = InContextTransformer(LinearKernel(), gamma=0.9, n_layers=math.inf, ridge=1e-12).condition(wrong)
    assert np.abs(value(states).numpy() - exact).min() > 1.0


@pytest.mark.parametrize("value_shift", [False, True])
def test_more_layers_come_closer_to_the_fixed_point(value_shift):
    # Next states near their states: a contiguous window of one policy, on which TD converges.
    g = torch.Generator().manual_seed(0)
    path = torch.cumsum(0.5 * torch.randn(31, 2, generator=g, dtype=torch.float64), 0)
    context = Context(path[:-1], path[:-1].sin().sum(-1), path[1:], torch.zeros(30, dtype=torch.bool))
    options = {"kernel": LaplacianKernel(1.0), "gamma": 0.9, "value_shift": value_shift}
    limit = InContextTransformer(n_layers=math.inf, ridge=0.0, **options).condition(context)(path)
    distance = [
        float((InContextTransformer(step_sizes=1.0, n_layers=n, **options).condition(context)(path) - limit).norm())
        for n in (1, 10, 100, 1000, 4000)
    ]
    assert distance == sorted(distance, reverse=True)
    assert distance[-1] < 1e-3 * distance[0]


@pytest.mark.parametrize("kernel", [RBFKernel(1.0), LaplacianKernel("median"), MaternKernel(2.0)])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99])
def test_the_fixed_point_through_landmarks_solves_its_system(kernel, gamma):
    context, asked, rho = random_context(40), torch.randn(5, 3, dtype=torch.float64), 1e-3
    value = InContextTransformer(kernel, gamma=gamma, n_layers=math.inf, ridge=rho, n_landmarks=7).condition(context)
    k = kernel.adapted(context.states)
    z, s, s_next = value.centers, context.states, context.next_states
    k_zs, k_zz = k(z, s).numpy(), k(z, z).numpy()
    k_s_next = k(z, s_next).numpy().T * ~context.terminated.numpy()[:, None]
    n = len(context)
    system = k_zs @ (k_zs.T - gamma * k_s_next) / n + rho * k_zz
    c = np.linalg.solve(system, k_zs @ context.rewards.numpy() / n)
    np.testing.assert_allclose(value.coefficients, c, rtol=1e-6)
    np.testing.assert_allclose(value(asked), k(asked, z).numpy() @ c, atol=1e-9)
    # All states as landmarks: the exact fixed point, up to where the ridge sits.
    full = InContextTransformer(kernel, gamma=gamma, n_layers=math.inf, ridge=1e-10)
    through = InContextTransformer(kernel, gamma=gamma, n_layers=math.inf, ridge=1e-10, n_landmarks=40)
    np.testing.assert_allclose(through.condition(context)(asked), full.condition(context)(asked), atol=1e-4)


def test_duplicated_landmarks_do_no_harm():
    context = random_context(30)
    doubled = torch.cat([context.states[:5]] * 2)
    transformer = InContextTransformer(RBFKernel(1.0), gamma=0.9, n_layers=math.inf)
    once = transformer.condition(context, landmarks=context.states[:5])
    twice = transformer.condition(context, landmarks=doubled)
    np.testing.assert_allclose(twice(context.states), once(context.states), atol=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_the_value_shift_is_exact(gamma):
    context = random_context(15)
    rewards, constant = reward_center(context, torch.tensor(gamma, dtype=torch.float64))
    assert float(rewards.sum()) == pytest.approx(0.0, abs=1e-12)
    weight = 1 - gamma * ~context.terminated
    torch.testing.assert_close(rewards, context.rewards - constant * weight)
    # V = U + C has the TD errors of U, term by term.
    by_hand = Context(context.states, rewards, context.next_states, context.terminated)
    for options in ({"n_layers": 12, "step_sizes": 0.5}, {"n_layers": math.inf}):
        shifted = InContextTransformer(RBFKernel(1.0), gamma=gamma, value_shift=True, **options).condition(context)
        plain = InContextTransformer(RBFKernel(1.0), gamma=gamma, **options).condition(by_hand)
        torch.testing.assert_close(shifted(context.states), plain(context.states) + constant)
        torch.testing.assert_close(shifted.td_errors, plain.td_errors)
        torch.testing.assert_close(shifted.offset, plain.offset)


def test_no_constant_fits_endless_undiscounted_rewards():
    context = random_context(5, end=0.0)
    rewards, constant = reward_center(context, torch.tensor(1.0, dtype=torch.float64))
    assert float(constant) == 0.0
    torch.testing.assert_close(rewards, context.rewards)


def test_a_constant_reward_needs_no_layer():
    g = torch.Generator().manual_seed(0)
    states = torch.randn(9, 2, generator=g, dtype=torch.float64)
    context = Context(states, torch.full((9,), 3.0).double(), states.flip(0), torch.zeros(9, dtype=torch.bool))
    value = InContextTransformer(RBFKernel(1.0), [], 0.99, value_shift=True).condition(context)
    np.testing.assert_allclose(value(100 * states), 300.0)


@pytest.mark.parametrize(
    "options", [{"step_sizes": [1.0] * 3}, {"n_layers": math.inf}, {"n_layers": math.inf, "n_landmarks": 4}]
)
def test_an_empty_context_has_the_value_zero(options):
    transformer = InContextTransformer(RBFKernel("median"), gamma=0.9, value_shift=True, **options)
    nothing = [
        Context.empty(3),
        Context(torch.zeros(4, 3), torch.zeros(4), torch.zeros(4, 3), [False] * 4, mask=[False] * 4),
    ]
    for context in nothing:
        value = transformer.condition(context)
        assert (value(torch.randn(5, 3)) == 0).all() and float(value.offset) == 0.0


def test_a_system_without_unique_solution_says_so():
    context, _, _ = chain(copies=2)
    transformer = InContextTransformer(LinearKernel(), gamma=0.9, n_layers=math.inf, ridge=0.0)
    with pytest.raises(FloatingPointError, match=r"not unique with ridge=0.*Set a positive ridge"):
        transformer.condition(context)


def test_the_median_distance_is_that_of_numpy():
    context = random_context(11)  # 55 pairs: an odd number, so that all medians agree
    pairs = [np.linalg.norm(a - b) for i, a in enumerate(context.states.numpy()) for b in context.states.numpy()[:i]]
    kernel = RBFKernel("median").adapted(context.states)
    assert float(kernel.temperature) == pytest.approx(np.median(pairs) ** 2)
