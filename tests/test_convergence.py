"""What is said of convergence, against NumPy's eigenvalues; contexts that make TD diverge, and algorithms that they do not."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import Context, InContextTransformer
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.convergence import certificate, check_convergence
from icrl_gym.kernels import LaplacianKernel, LinearKernel, RBFKernel, SoftmaxKernel

NAMES = ("td", "td_lambda", "residual_gradient", "average_reward", "monte_carlo")
GAMMA = 0.9


def shuffled(n=9, d=3, seed=0, empty=0, dtype=np.float64):
    """Transitions that have nothing to do with each other, two of them terminated."""
    rng = np.random.default_rng(seed)
    terminated = np.arange(n) % 5 == 3
    mask = np.arange(n) < n - empty
    s, t, r = rng.normal(size=(n, d)), rng.normal(size=(n, d)), rng.normal(size=n)
    return Context(s.astype(dtype), r.astype(dtype), t.astype(dtype), terminated, None, mask)


def trajectory(n=12, seed=0, d=2):
    """One window of a random walk, without an end."""
    path = np.random.default_rng(seed).normal(size=(n + 1, d)).cumsum(0)
    return Context(path[:-1], path[1:].sum(-1), path[1:], np.zeros(n, bool))


def numpy_system(transformer, context):
    """W A (n, n) of the transitions that are there and their Gram matrix, one kernel value at a time."""
    n = int(context.mask.sum())
    s, t = context.states[:n], context.next_states[:n]
    ended = (context.terminated | context.truncated)[:n].tolist()
    name, gamma = transformer.algorithm.name, float(transformer.gamma)

    def k(u, w):
        return float(transformer.kernel(u[None], w[None])[0, 0])

    gamma_of = {"average_reward": 1.0, "monte_carlo": 0.0}.get(name, gamma)
    beta = [0.0 if bool(end) else gamma_of for end in context.terminated[:n]]

    def kappa(j, w):
        return k(s[j], w) - (beta[j] * k(t[j], w) if name == "residual_gradient" else 0.0)

    change = np.array([[kappa(j, s[i]) - beta[i] * kappa(j, t[i]) for j in range(n)] for i in range(n)])
    trace = np.eye(n)
    for j in range(n):
        for i in range(j + 1, n):
            if ended[i - 1] or not bool((t[i - 1] == s[i]).all()):
                break
            trace[j, i] = trace[j, i - 1] * gamma * transformer.algorithm.trace_decay
    gram = change if name == "residual_gradient" else np.array([[k(s[j], s[i]) for j in range(n)] for i in range(n)])
    size = np.trace(gram) if name == "residual_gradient" else n
    return trace @ change, gram, transformer.ridge * size


def spectral_radius(matrix):
    return np.abs(np.linalg.eigvals(matrix)).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ridge", [0.0, 0.03])
@pytest.mark.parametrize("empty", [2])
def test_numbers_are_those_of_the_eigenvalues(name, ridge, empty):
    ridge = 0.0 if name == "td_lambda" else ridge
    for seed, context in enumerate([shuffled(empty=empty), trajectory(), shuffled(n=1), shuffled(n=24, d=2)]):
        steps = [1.0, 2.5, 1.5]
        transformer = InContextTransformer(
            LaplacianKernel(0.7), step_sizes=steps, gamma=GAMMA, algorithm=name, ridge=ridge
        )
        found = check_convergence(transformer, context, iterations=120)
        matrix, gram, decay = numpy_system(transformer, context)
        system = matrix + decay * np.eye(len(matrix))
        product, alphas = np.eye(len(matrix)), transformer.layer_steps(context).tolist()
        for alpha in alphas:
            product = (np.eye(len(matrix)) - alpha * system) @ product
        assert float(found.growth) == pytest.approx(spectral_radius(product), rel=0.02), seed
        largest = spectral_radius(np.eye(len(matrix)) - alphas[1] * system)
        assert float(found.layer_growth) == pytest.approx(largest, rel=0.02)
        assert float(found.top_eigenvalue) == pytest.approx(spectral_radius(system), rel=0.02)
        least = scipy.linalg.eigvalsh((gram @ matrix + (gram @ matrix).T) / 2, gram)[0]
        top = float(found.top_eigenvalue)
        assert float(found.least_eigenvalue) == pytest.approx(least, abs=1e-5 * top)
        size = np.trace(gram) if name == "residual_gradient" else len(matrix)
        assert float(found.safe_ridge) == pytest.approx(max(0.0, -least) / size, abs=1e-5 * top / size)


def test_rotating_errors_are_measured_by_their_mean_growth():
    # A cycle with a tabular kernel: the eigenvalues of I - alpha B, 0.5 + 0.45 times the cube roots of 1, are complex but for one.
    states = np.eye(3)
    context = Context(states, np.ones(3), states[[1, 2, 0]], np.zeros(3, bool))
    for step, expected in ((0.5, 0.95), (2.5, abs(1 - 2.5 * (1 - 0.9 * np.exp(2j * np.pi / 3))))):
        transformer = InContextTransformer(LinearKernel(), [step] * 3, GAMMA, "none")
        found = check_convergence(transformer, context, iterations=120)
        assert float(found.layer_growth) == pytest.approx(expected, rel=0.01)
        assert float(found.growth) == pytest.approx(expected**3, rel=0.03)
        assert bool(found.diverges) == (expected > 1)


@pytest.mark.parametrize("name", ["td", "residual_gradient", "monte_carlo"])
def test_through_landmarks_it_is_the_same_where_every_state_is_one(name):
    context = shuffled()
    options = {"step_sizes": 1.0, "n_layers": 4, "gamma": GAMMA, "algorithm": name}
    full = check_convergence(InContextTransformer(RBFKernel(0.3), **options), context, 400)
    landmarks = InContextTransformer(RBFKernel(0.3), n_landmarks=9, **options)
    found = check_convergence(landmarks, context, 400)
    if name != "residual_gradient":  # whose functions are made of next states too
        # The row sums of another matrix divide the steps, so growth is another.
        assert float(found.top_eigenvalue) == pytest.approx(float(full.top_eigenvalue), rel=1e-3)
        assert float(found.least_eigenvalue) == pytest.approx(float(full.least_eigenvalue), abs=1e-5)
    few = check_convergence(InContextTransformer(RBFKernel(0.3), n_landmarks=3, **options), context)
    assert not bool(few.diverges) and (name == "td" or float(few.least_eigenvalue) > -1e-9)


def test_batches_are_loops_and_an_empty_context_has_no_error():
    contexts = Context.stack([shuffled(seed=s, n=6 + s) for s in range(3)])
    transformer = InContextTransformer(RBFKernel(0.7), step_sizes=[1.0, 3.0], gamma=GAMMA, ridge=0.01)
    many = check_convergence(transformer, contexts, 100)
    assert many.growth.shape == (3,) and len(many.describe().splitlines()) == 3
    for b in range(3):
        one = check_convergence(transformer, contexts[b], 100)
        for name in ("growth", "layer_growth", "top_eigenvalue", "least_eigenvalue", "safe_ridge"):
            torch.testing.assert_close(getattr(many, name)[b], getattr(one, name), rtol=1e-3, atol=1e-6)
    for name in NAMES:
        nothing = check_convergence(
            InContextTransformer(RBFKernel(0.7), step_sizes=[1.0], gamma=GAMMA, algorithm=name), Context.empty(2)
        )
        assert float(nothing.growth) == float(nothing.top_eigenvalue) == float(nothing.safe_ridge) == 0.0
    no_layers = InContextTransformer(RBFKernel(0.7), step_sizes=[], gamma=GAMMA)
    assert float(check_convergence(no_layers, shuffled()).growth) == 1.0


def test_equal_states_leave_an_error_that_no_layer_moves():
    context = shuffled()
    twice = Context.cat([context, context])
    found = check_convergence(InContextTransformer(LaplacianKernel(1.0), [1.0] * 3, GAMMA), twice)
    assert float(found.growth) == pytest.approx(1.0) and not bool(found.diverges)
    assert "hardly change" in found.describe()


def test_a_kernel_that_is_not_positive_definite_has_no_norm():
    transformer = InContextTransformer(SoftmaxKernel(1.0), step_sizes=[1.0], gamma=GAMMA)
    found = check_convergence(transformer, shuffled())
    assert math.isnan(float(found.least_eigenvalue)) and math.isfinite(float(found.growth))
    assert math.isinf(certificate(InContextTransformer(SoftmaxKernel(1.0), step_sizes=[1.0], algorithm="monte_carlo")))


def two_centers(gamma=0.99):
    """Two states whose next state lies between them, where their kernels add up to more than at either: K - gamma K' has the
    eigenvalue 1 + m^4 - 2 gamma m for the errors (1, 1), m the kernel over half the distance."""
    temperature = 1 / (-2 * math.log(3**-0.25))
    context = Context([[-1.0], [1.0]], [1.0, 1.0], [[0.0], [0.0]], [False, False])
    return context, RBFKernel(temperature), 1 + 3**-1 - 2 * gamma * 3**-0.25


@pytest.mark.parametrize("step", [0.1, 1.0, 1.9])
def test_two_transitions_make_td_diverge_whatever_the_step(step):
    context, kernel, eigenvalue = two_centers()
    assert eigenvalue < -0.17
    td = InContextTransformer(kernel, step_sizes=step, n_layers=20, gamma=0.99)
    found = check_convergence(td, context)
    assert bool(found.diverges) and float(found.least_eigenvalue) == pytest.approx(eigenvalue, rel=1e-6)
    alpha = float(td.layer_steps(context)[0])
    assert float(found.growth) == pytest.approx((1 - alpha * eigenvalue) ** 20, rel=1e-6)
    words = found.describe()
    assert "The layers diverge" in words and "residual_gradient" in words and "No context" not in words
    # What the layers do is what was said of them: the error, from c* on, grows by this factor.
    deep = InContextTransformer(kernel, step_sizes=step, n_layers=400, gamma=0.99)
    deep = deep.condition(context, most_growth=math.inf).td_errors
    ratio = float(deep[400].norm() / deep[399].norm())
    assert ratio == pytest.approx(1 - alpha * eigenvalue, rel=1e-6) and ratio > 1


def test_the_same_two_transitions_do_no_harm_to_the_others():
    context, kernel, _ = two_centers()
    zero = float(context.rewards.norm())
    options = {"gamma": 0.99, "algorithm": "residual_gradient"}
    for transformer in (
        InContextTransformer(kernel, step_sizes=1.0, n_layers=400, **options),
        InContextTransformer(kernel, n_layers=20, acceleration="conjugate", **options),
        InContextTransformer(kernel, step_sizes=1.0, n_layers=20, **options, ridge=1e-3, value_shift=True),
        AdaptiveTransformer(gamma=0.99),
    ):
        value = transformer.condition(context)
        assert float(value.td_errors[-1].norm()) < 1e-2 * zero
        assert certificate(transformer) == 1.0
    # ... nor, with the ridge that is said to be safe, to TD.
    ridge = float(check_convergence(InContextTransformer(kernel, [1.0], 0.99), context).safe_ridge)
    for factor, diverges in ((1.1, False), (0.9, True)):
        td = InContextTransformer(kernel, step_sizes=0.5, n_layers=20, gamma=0.99, ridge=factor * ridge)
        assert bool(check_convergence(td, context).diverges) == diverges


def test_empty_places_change_no_ridge():
    context, kernel, eigenvalue = two_centers()
    padded = Context.cat([context, context]).weighted([1.0, 1.0, 0.0, 0.0])
    found = check_convergence(InContextTransformer(kernel, step_sizes=[1.0], gamma=0.99), padded)
    assert float(found.safe_ridge) == pytest.approx(-eigenvalue / 2, rel=1e-6)


def test_one_transition_is_enough_where_values_are_linear():
    # Tsitsiklis and Van Roy 1997: a state of feature 1 leads to one of feature 2.
    context = Context([[1.0]], [1.0], [[2.0]], [False])
    assert bool(check_convergence(InContextTransformer(LinearKernel(), [0.1] * 5, GAMMA), context).diverges)
    residual = InContextTransformer(LinearKernel(), [1.0] * 5, GAMMA, algorithm="residual_gradient")
    assert not bool(check_convergence(residual, context).diverges)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_window_of_one_trajectory_is_as_safe_as_its_last_next_state(seed, gamma, ends):
    # <f, T f> >= (1 - gamma) sum_{j <= n} f(s_j)^2 + gamma/2 f(s_1)^2 - gamma/2 f(s_{n+1})^2, without the last term if it ends.
    context = trajectory(n=8, seed=seed)
    context.terminated[-1] = ends
    f_at = np.random.default_rng(seed).normal(size=9)
    beta = gamma * ~context.terminated.numpy()
    form = (f_at[:-1] * (f_at[:-1] - beta * f_at[1:])).sum()
    bound = (1 - gamma) * (f_at[:-1] ** 2).sum() + gamma / 2 * f_at[0] ** 2 - (not ends) * gamma / 2 * f_at[-1] ** 2
    assert form >= bound - 1e-12
    found = check_convergence(InContextTransformer(LaplacianKernel(1.0), [1.0], gamma), context)
    if ends:
        assert float(found.least_eigenvalue) > -1e-6


def test_conjugate_layers_have_the_bound_of_their_condition_number():
    context = shuffled(n=20)
    for name in ("residual_gradient", "monte_carlo"):
        for ridge in (0.0, 1e-3, 0.1):
            transformer = InContextTransformer(
                LaplacianKernel(1.0), n_layers=8, gamma=GAMMA, algorithm=name, acceleration="conjugate", ridge=ridge
            )
            found = check_convergence(transformer, context)
            matrix, _, decay = numpy_system(transformer, context)
            system = matrix + decay * np.eye(20)
            problem, path, errors = transformer.coefficients_by_depth(context)
            away = path.numpy() - np.linalg.solve(system, problem.targets.numpy())
            energy = np.sqrt((away @ matrix * (away @ system)).sum(-1))
            norms = errors.norm(dim=-1)
            assert (norms <= norms[0] * (1 + 1e-12)).all()
            assert (energy[1:] <= energy[:-1] * (1 + 1e-12)).all()
            assert energy[-1] <= float(found.growth) * energy[0] * (1 + 1e-9)
            assert energy[1] <= float(found.layer_growth) * energy[0] * (1 + 1e-9)
            # A ridge in units of the trace bounds the condition number of the residual gradient by 1 + 1 / rho.
            if ridge and name == "residual_gradient":
                root = math.sqrt(1 + 1 / ridge)
                assert float(found.growth) <= min(1.0, 2 * ((root - 1) / (root + 1)) ** 8) + 1e-12


@given(
    st.lists(st.floats(-0.5, 6.0), min_size=0, max_size=12),
    st.sampled_from(["residual_gradient", "monte_carlo"]),
    st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_the_certificate_bounds_every_context(steps, name, seed):
    transformer = InContextTransformer(LaplacianKernel(1.0), steps, GAMMA, algorithm=name)
    promised = certificate(transformer)
    x = np.linspace(0, 1, 20_001)
    dense = np.abs(np.prod([1 - step * x for step in steps], axis=0)).max() if steps else 1.0
    assert dense * (1 - 1e-9) <= promised <= dense * 1.01 and promised >= 1.0
    found = check_convergence(transformer, shuffled(seed=seed, n=seed % 12))
    assert float(found.growth) <= promised * (1 + 1e-9) and found.certificate == promised


def test_what_is_certified_and_what_is_not():
    kernel = RBFKernel(0.1)

    def of(*args, **options):
        return certificate(InContextTransformer(kernel, *args, **options))

    assert of([1.0, 1.9, 0.2], algorithm="residual_gradient") == 1.0
    # A single layer of step 3 triples and turns the top error around, and the next ones take more of it away than that.
    assert of([3.0], algorithm="monte_carlo") == pytest.approx(2.0)
    assert of([3.0, 1.0, 0.9], algorithm="monte_carlo") == 1.0
    assert of([30.0], algorithm="monte_carlo") == pytest.approx(29.0)
    assert of(n_layers=3, algorithm="monte_carlo", acceleration="conjugate") == 1.0
    assert certificate(AdaptiveTransformer()) == 1.0
    assert of([1.0], algorithm="residual_gradient", step_normalization="length") == math.inf
    for name in ("td", "td_lambda", "average_reward"):
        assert of([1.0], algorithm=name) == math.inf
    # Chebyshev steps for eigenvalues in [0.05, 1] of the bound: some above 1, and none of them dangerous together.
    roots = 0.525 + 0.475 * np.cos((2 * np.arange(8) + 1) * np.pi / 16)
    assert of(list(1 / roots), algorithm="residual_gradient") == 1.0


def test_float32_contexts_are_checked_in_float64():
    transformer = InContextTransformer(RBFKernel(0.7), [1.0], GAMMA)
    single = check_convergence(transformer, shuffled(dtype=np.float32))
    assert single.growth.dtype == torch.float64
    torch.testing.assert_close(single.growth, check_convergence(transformer, shuffled()).growth, rtol=1e-4, atol=0)


def test_what_has_no_layers_to_check_says_so():
    limit = InContextTransformer(RBFKernel(0.7), n_layers=math.inf)
    for ask in (certificate, lambda t: check_convergence(t, shuffled())):
        with pytest.raises(ValueError, match="infinite depth has no layers that could diverge"):
            ask(limit)
    with pytest.raises(TypeError, match=r"got an AdaptiveTransformer\. No context"):
        check_convergence(AdaptiveTransformer(), shuffled())
    with pytest.raises(ValueError, match="at least 2, got 1"):
        check_convergence(InContextTransformer(RBFKernel(0.7), [1.0]), shuffled(), 1)
