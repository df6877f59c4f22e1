"""Kernels against scikit-learn and their formulas, near the diagonal, far from the origin, and under masks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern
from sklearn.metrics.pairwise import linear_kernel, rbf_kernel

from icrl_gym.distances import euclidean
from icrl_gym.kernels import (
    ExponentialKernel,
    LaplacianKernel,
    LinearKernel,
    MaternKernel,
    NystromKernel,
    RBFKernel,
    ReLUKernel,
    SoftmaxKernel,
    SumKernel,
    make_kernel,
    median_distance,
    spread_rows,
)

ALL = [
    RBFKernel(0.5),
    LaplacianKernel(0.5),
    MaternKernel(0.5),
    ExponentialKernel(0.5),
    SoftmaxKernel(0.5),
    ReLUKernel(),
    LinearKernel(),
    LinearKernel(per_feature=True),
    RBFKernel(0.1) + 2.0 * MaternKernel(3.0),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def states(n, d=4, seed=0, dtype=torch.float64, batch=()):
    return torch.randn(*batch, n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("d", [1, 4, 40])
@pytest.mark.parametrize(
    "kernel, peer",
    [
        (RBFKernel(0.7), RBF(math.sqrt(0.7))),
        (LaplacianKernel(0.7), Matern(0.7, nu=0.5)),
        (MaternKernel(0.7), Matern(0.7, nu=1.5)),
        (LinearKernel(), DotProduct(sigma_0=0.0)),
    ],
)
def test_kernels_are_those_of_scikit_learn(kernel, peer, d, dtype):
    u, w = states(7, d, dtype=dtype), states(5, d, seed=1, dtype=dtype)
    np.testing.assert_allclose(
        kernel(u, w), peer(u.double().numpy(), w.double().numpy()), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_of_inner_products(dtype):
    u, w = states(7, dtype=dtype), states(5, seed=1, dtype=dtype)
    inner = u.double().numpy() @ w.double().numpy().T
    expected = {
        ExponentialKernel(2.0): np.exp(inner / 2),
        SoftmaxKernel(2.0): np.exp(inner / 2) / np.exp(inner / 2).sum(0),
        ReLUKernel(): np.maximum(inner, 0),
        LinearKernel(): inner,
        LinearKernel(per_feature=True): inner / 4,
    }
    for kernel, value in expected.items():
        np.testing.assert_allclose(kernel(u, w), value, rtol=TOLERANCE[dtype] * 10, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.config()["name"])
def test_batches_are_loops_and_masks_are_rows_of_zeros(kernel):
    u, w = states(6, batch=(2, 3)), states(5, seed=1, batch=(2, 3))
    mask = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    together = kernel(u, w, mask)
    for i in range(2):
        for j in range(3):
            alone = kernel(u[i, j][mask[i, j]], w[i, j])
            torch.testing.assert_close(together[i, j][mask[i, j]], alone)
            assert (together[i, j][~mask[i, j]] == 0).all()


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.config()["name"])
def test_what_a_masked_key_holds_does_not_matter(kernel):
    u, w, mask = states(4), states(3, seed=1), torch.tensor([True, True, False, True])
    junk = u.clone()
    junk[2] = 1e200
    torch.testing.assert_close(kernel(junk, w, mask), kernel(u, w, mask))


@pytest.mark.parametrize("kernel", [k for k in ALL if k.positive_definite], ids=lambda k: k.config()["name"])
def test_positive_definite_kernels_are(kernel):
    gram = kernel(states(20), states(20))
    torch.testing.assert_close(gram, gram.T)
    assert float(torch.linalg.eigvalsh(gram)[0]) > -1e-9 * float(gram.abs().max())


@pytest.mark.parametrize("kernel", [RBFKernel, LaplacianKernel, MaternKernel, ExponentialKernel, SoftmaxKernel])
def test_kernels_are_differentiable_in_their_temperature(kernel):
    u, w = states(4), states(3, seed=1)
    temperature = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: kernel(t)(u, w), (temperature,))
    # As a buffer of a kernel, trained in place; the diagonal has a finite gradient too.
    instance = kernel(0.8)
    instance.temperature.requires_grad_()
    instance(u, u).sum().backward()
    assert torch.isfinite(instance.temperature.grad)
    assert not list(instance.parameters())


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("shift", [0.0, 1.0, 1e6])
def test_exact_near_the_diagonal_and_far_from_the_origin(d, shift):
    # Enough pairs for the product form; the truth in extended precision.
    keys = states(300, d) + shift
    near = keys[:100] + 1e-7 * states(100, d, seed=2)
    asked = torch.cat([near, keys[:20], states(100, d, seed=3) + shift])
    wide = np.asarray(keys.numpy()[:, None, :], np.longdouble) - np.asarray(asked.numpy()[None], np.longdouble)
    distance = np.sqrt((wide**2).sum(-1))
    np.testing.assert_allclose(euclidean(keys, asked), distance.astype(float), rtol=2e-11, atol=0)
    truth = np.exp(-distance).astype(float)
    np.testing.assert_allclose(LaplacianKernel(1.0)(keys, asked), truth, rtol=1e-9)
    assert (np.diag(LaplacianKernel(1.0)(keys, asked)[:20, 100:120]) == 1.0).all()
    assert (LaplacianKernel(1.0)(near[:1], keys[:1]) < 1.0).all()


def test_far_from_the_origin_in_single_precision():
    base = states(8, dtype=torch.float32).round(decimals=2)
    far = base + 4096.0
    moved = far - 4096.0  # what single precision left of the states
    torch.testing.assert_close(RBFKernel(0.5)(far, far), RBFKernel(0.5)(moved, moved))


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 40),
    m=st.integers(1, 40),
    d=st.integers(16, 60),
    scale=st.floats(1e-3, 1e6),
    shift=st.floats(-1e6, 1e6),
)
def test_distances_by_products_are_distances_by_differences(n, m, d, scale, shift):
    repeat = -(-(2**19) // (n * m * d))  # enough queries for the product form
    keys = scale * states(n, d) + shift
    asked = torch.cat([scale * states(m, d, seed=1) + shift] * repeat + [keys])
    expected = torch.cdist(keys, asked, compute_mode="donot_use_mm_for_euclid_dist")
    np.testing.assert_allclose(euclidean(keys, asked), expected, rtol=1e-10, atol=0)


def test_distances_of_a_batch_and_of_broadcast_keys():
    keys, asked = states(64, 40, batch=(1,)), states(300, 40, seed=1, batch=(3,))
    asked[1, :64] = keys[0]
    expected = torch.cdist(keys, asked, compute_mode="donot_use_mm_for_euclid_dist")
    np.testing.assert_allclose(euclidean(keys, asked), expected, rtol=1e-10)


def test_the_median_temperature_takes_its_scale_from_the_context():
    u = states(30)
    scale = median_distance(u)
    torch.testing.assert_close(RBFKernel("median").adapted(u).temperature, scale**2)
    torch.testing.assert_close(LaplacianKernel("median").adapted(u).temperature, scale)
    torch.testing.assert_close(median_distance(7 * u), 7 * scale)
    both = (RBFKernel("median") + LaplacianKernel(2.0)).adapted(u)
    torch.testing.assert_close(both(u, u), RBFKernel(scale**2)(u, u) + LaplacianKernel(2.0)(u, u))
    fixed = RBFKernel(1.0)
    assert fixed.adapted(u) is fixed


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_context_without_different_states_has_a_finite_scale(n):
    same = torch.ones(n, 3).double()
    assert float(median_distance(same)) == 1.0
    assert torch.isfinite(RBFKernel("median").adapted(same)(same, same)).all()


def test_nystrom_equals_the_base_on_its_landmarks_and_is_of_low_rank():
    for base in (RBFKernel(2.0), LinearKernel(), ExponentialKernel(3.0)):
        z, u = states(6), states(25, seed=1)
        kernel = NystromKernel(base, z)
        torch.testing.assert_close(kernel(z, z), base(z, z), atol=1e-8, rtol=1e-8)
        inverse = np.linalg.pinv(base(z, z).numpy(), rcond=1e-10, hermitian=True)
        np.testing.assert_allclose(kernel(u, u), base(u, z).numpy() @ inverse @ base(z, u).numpy(), atol=1e-8)
        assert int(torch.linalg.matrix_rank(kernel(u, u), tol=1e-8)) <= 6
        torch.testing.assert_close(kernel.features(u) @ kernel.features(z).T, kernel(u, z))
    with pytest.raises(ValueError, match="landmarks need a positive definite kernel"):
        NystromKernel(SoftmaxKernel(1.0), states(3))


def test_kernels_of_a_batch_have_a_temperature_each():
    u = torch.stack([states(9), 3 * states(9)])
    kernel = RBFKernel("median").adapted(u)
    assert kernel.temperature.shape == (2,)
    torch.testing.assert_close(kernel(u, u)[0], kernel(u, u)[1])
    assert "temperature" in repr(kernel)


@pytest.mark.parametrize("kernel", [*ALL, RBFKernel("median")], ids=lambda k: k.config()["name"])
def test_a_kernel_is_built_again_from_its_configuration(kernel):
    again = make_kernel(**kernel.config())
    torch.testing.assert_close(again(states(4), states(3)), kernel(states(4), states(3)))
    assert repr(again) == repr(kernel)


def test_names_with_a_plus_between_them_are_a_sum():
    u, w = states(7), states(5, seed=1)
    kernel = make_kernel("laplacian+linear", 0.7)
    torch.testing.assert_close(kernel(u, w), LaplacianKernel(0.7)(u, w) + u @ w.T / 4)
    assert kernel.positive_definite
    torch.testing.assert_close(make_kernel(**kernel.config())(u, w), kernel(u, w), rtol=0, atol=0)
    adapted = make_kernel("laplacian+linear").adapted(u)
    torch.testing.assert_close(adapted(u, w), LaplacianKernel(median_distance(u))(u, w) + u @ w.T / 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "laplacian+warp"}, "unknown kernel 'warp'"),
        ({"name": "relu+linear", "temperature": 1.0}, "has no temperature"),
        ({"name": "rbf+linear", "per_feature": True}, "takes no per_feature"),
        ({"name": "rbf+sum"}, "needs kernels"),
    ],
)
def test_a_sum_by_name_that_cannot_be_says_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_kernel(**arguments)


def test_sums_of_sums_are_flat():
    kernel = 0.5 * (RBFKernel(1.0) + 2.0 * LinearKernel()) + ReLUKernel()
    assert [type(k).__name__ for k in kernel.kernels] == ["RBFKernel", "LinearKernel", "ReLUKernel"]
    assert kernel.weights.tolist() == [0.5, 1.0, 1.0]
    assert not kernel.positive_definite


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_out_of_range_says_so(temperature):
    with pytest.raises(ValueError, match="temperature must be positive and finite, got"):
        RBFKernel(temperature)


def test_other_wrong_arguments_say_so():
    with pytest.raises(ValueError, match="a positive number or \"median\", got 'mean'"):
        RBFKernel("mean")
    with pytest.raises(ValueError, match="unknown kernel 'gaussian'; expected one of rbf, laplacian"):
        make_kernel("gaussian")
    with pytest.raises(ValueError, match="relu kernel has no temperature"):
        make_kernel("relu", 1.0)
    with pytest.raises(ValueError, match="at least one kernel"):
        SumKernel([])
    with pytest.raises(ValueError, match="expected 2 positive weights"):
        SumKernel([RBFKernel(1.0), RBFKernel(2.0)], [1.0])


def test_kernels_are_the_pairwise_ones_of_scikit_learn():
    u, w = states(7), states(5, seed=1)
    np.testing.assert_allclose(RBFKernel(0.7)(u, w), rbf_kernel(u, w, gamma=1 / 1.4), rtol=1e-12)
    np.testing.assert_allclose(LinearKernel()(u, w), linear_kernel(u, w), rtol=1e-12, atol=1e-15)
    both = (0.25 * RBFKernel(0.7) + 3.0 * LinearKernel())(u, w)
    np.testing.assert_allclose(both, 0.25 * rbf_kernel(u, w, gamma=1 / 1.4) + 3 * linear_kernel(u, w), rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_softmax_attention_sums_to_one_over_the_keys_that_exist(scale):
    # At scale 100 the exponentials alone would overflow.
    u, w, mask = scale * states(6), scale * states(5, seed=1), torch.tensor([True, False, True, True, False, True])
    attention = SoftmaxKernel(0.5)(u, w, mask)
    torch.testing.assert_close(attention.sum(0), torch.ones(5).double())
    torch.testing.assert_close(attention[mask], SoftmaxKernel(0.5)(u[mask], w))
    assert (SoftmaxKernel(0.5)(u, w, torch.zeros(6, dtype=torch.bool)) == 0).all()


def true_values(kernel, distance):
    x = math.sqrt(3) * distance / np.longdouble(1.5)
    return {
        RBFKernel: np.exp(-(distance**2) / 3),
        LaplacianKernel: np.exp(-distance / np.longdouble(1.5)),
        MaternKernel: (1 + x) * np.exp(-x),
    }[type(kernel)]


@pytest.mark.parametrize("step", [1e-9, 1e-5, 1e-3])
@pytest.mark.parametrize(
    "kernel", [RBFKernel(1.5), LaplacianKernel(1.5), MaternKernel(1.5)], ids=lambda k: type(k).__name__
)
def test_next_to_the_diagonal_what_is_lost_is_rounding(kernel, step):
    u = states(6)
    near = u + step
    wide = np.asarray(u.numpy()[:, None], np.longdouble) - np.asarray(near.numpy()[None], np.longdouble)
    distance = np.sqrt((wide**2).sum(-1))
    np.testing.assert_allclose(kernel(u, near), true_values(kernel, distance).astype(float), rtol=1e-14, atol=0)
    if isinstance(kernel, LaplacianKernel):  # the one with a cusp there: 1 - k is the distance itself
        lost = 1 - np.diag(kernel(u, near))
        np.testing.assert_allclose(lost, -np.expm1(-np.diag(distance) / 1.5).astype(float), rtol=0, atol=3e-16)
        assert (lost > 0).all()


@pytest.mark.parametrize("dtype, far", [(torch.float64, 1e6), (torch.float32, 1e4)])
@pytest.mark.parametrize(
    "kernel", [RBFKernel(0.5), LaplacianKernel(0.5), MaternKernel(0.5)], ids=lambda k: type(k).__name__
)
def test_far_from_the_origin_all_the_precision_that_the_states_have_is_kept(kernel, dtype, far):
    moved = states(9, dtype=dtype) + far
    back = moved - far  # exactly what the shift left of the states
    torch.testing.assert_close(kernel(moved, moved), kernel(back, back), rtol=TOLERANCE[dtype] / 10, atol=0)
    assert (kernel(moved, moved).diagonal() == 1).all()


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.config()["name"])
@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan, 1e200])
@pytest.mark.parametrize("d", [3, 40])
def test_a_masked_key_may_be_anything(kernel, junk, d):
    # With 40 features, enough pairs for distances by products.
    u, w = 0.1 * states(128, d), 0.1 * states(128, d, seed=1)
    mask = torch.arange(128) % 5 != 2
    spoiled = u.masked_fill(~mask.unsqueeze(-1), junk)
    values = kernel(spoiled, w, mask)
    assert (values[~mask] == 0).all()
    torch.testing.assert_close(values[mask], kernel(u[mask], w), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 9, 30])
def test_the_median_distance_is_the_lower_one_of_two_in_the_middle(n):
    u = states(n)
    u[-1] = u[0]  # a distance of zero, which does not count
    pairs = [np.linalg.norm(u[i] - u[j]) for i in range(n) for j in range(i)]
    positive = [p for p in pairs if p > 0]
    expected = np.quantile(positive, 0.5, method="lower") if positive else 1.0
    assert float(median_distance(u)) == pytest.approx(expected)
    mask = torch.arange(n + 3) < n
    spoiled = torch.cat([u, torch.full((3, 4), math.inf)])
    assert float(median_distance(spoiled, mask)) == pytest.approx(expected)


def test_the_median_distance_of_many_states_is_that_of_some_of_them():
    u = states(2000)
    chosen = u[spread_rows(2000, 512)].numpy()
    pairs = np.linalg.norm(chosen[:, None] - chosen[None], axis=-1)[np.triu_indices(512, 1)]
    assert float(median_distance(u)) == pytest.approx(np.quantile(pairs, 0.5, method="lower"))
    assert float(median_distance(u)) == pytest.approx(float(median_distance(u, most=2000)), rel=0.02)


@pytest.mark.parametrize("base", [RBFKernel(2.0), LinearKernel(), LaplacianKernel(1.0) + RBFKernel(1.0)])
def test_a_landmark_twice_or_one_that_does_not_exist_changes_nothing(base):
    z, u = states(5), states(8, seed=1)
    once = NystromKernel(base, z)(u, u)
    torch.testing.assert_close(NystromKernel(base, torch.cat([z, z, z[:2]]))(u, u), once, atol=1e-9, rtol=1e-9)
    # In single precision the directions that duplicates add would be noise, if they were not cut off.
    single = NystromKernel(base, torch.cat([z, z, z[:2]]).float())(u.float(), u.float())
    torch.testing.assert_close(single.double(), once, atol=1e-5, rtol=1e-4)
    mask = torch.arange(8) < 5
    torch.testing.assert_close(
        NystromKernel(base, torch.cat([z, 1e3 * u[:3]]), mask)(u, u), once, atol=1e-12, rtol=1e-10
    )
    assert float(torch.linalg.eigvalsh(once)[0]) > -1e-10
    # Never more than the base kernel: what the landmarks leave out is positive semi-definite as well.
    assert float(torch.linalg.eigvalsh(base(u, u) - once)[0]) > -1e-9


def test_kernels_add_to_kernels_only():
    kernel = RBFKernel(1.0)
    for wrong in (lambda: kernel + 1.0, lambda: 1.0 + kernel, lambda: kernel * LinearKernel(), lambda: kernel * kernel):
        with pytest.raises(TypeError, match="unsupported operand type"):
            wrong()
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected 1 positive weights"):
            weight * kernel


@pytest.mark.parametrize(
    "config, message",
    [
        ({"name": "rbf", "temprature": 0.1}, "the rbf kernel takes no temprature"),
        ({"name": "linear", "weights": [1.0]}, "the linear kernel takes no weights"),
        ({"name": "sum"}, "the sum kernel needs kernels"),
        ({"name": "sum", "kernels": [{"name": "relu"}], "temperature": 2.0}, "sum kernel has no temperature"),
        ({"name": "sum", "kernels": []}, "at least one kernel"),
        ({"name": "sum", "kernels": [{"name": "nystrom"}]}, "unknown kernel 'nystrom'"),
    ],
)
def test_a_configuration_is_taken_whole_or_not_at_all(config, message):
    with pytest.raises(ValueError, match=message):
        make_kernel(**config)


@pytest.mark.parametrize("n, most", [(0, 4), (1, 4), (4, 4), (5, 4), (100, 7), (16_384, 256)])
def test_spread_rows_are_one_of_each_stretch(n, most):
    rows = spread_rows(n, most).tolist()
    count = min(n, most)
    assert len(rows) == count
    assert all(i * n // count <= row < (i + 1) * n // count for i, row in enumerate(rows))


@pytest.mark.parametrize("episode", [16, 32, 60, 64, 128, 500])
def test_spread_rows_meet_episodes_of_a_fixed_length_at_many_steps(episode):
    # With a constant stride of 64, episodes of 64 steps would be met at one and the same step 256 times.
    phases = set((spread_rows(16_384, 256) % episode).tolist())
    assert len(phases) > 0.9 * min(episode, 100)
