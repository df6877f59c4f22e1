"""The literal forward pass, the fast path and a plain loop of kernel TD: three ways to one answer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import Context, InContextTransformer
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
)

# The largest error allowed, as a part of the largest value (and of 1 where values are smaller).
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}

KERNELS = {
    "rbf": RBFKernel(0.7),
    "laplacian": LaplacianKernel(1.3),
    "matern": MaternKernel(1.3),
    "exponential": ExponentialKernel(2.0),
    "softmax": SoftmaxKernel(2.0),
    "relu": ReLUKernel(),
    "linear": LinearKernel(),
    "sum": SumKernel([RBFKernel(0.1), LaplacianKernel(2.0)], [1.0, 0.5]),
    "median": RBFKernel("median"),
}


def random_context(n, d=3, seed=0, dtype=torch.float64, batch=(), fill=1.0, end=0.3):
    g = torch.Generator().manual_seed(seed)
    states, next_states = (torch.randn(*batch, n, d, generator=g, dtype=dtype) for _ in range(2))
    rewards = torch.randn(*batch, n, generator=g, dtype=dtype)
    terminated = torch.rand(*batch, n, generator=g) < end
    mask = torch.rand(*batch, n, generator=g) < fill
    return Context(states, rewards, next_states, terminated, mask=mask)


def queries(m=4, d=3, seed=1, dtype=torch.float64):
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kernel_value(name, u, w, present):
    """k(u, w), in NumPy; softmax needs all the keys that are present."""
    squared, inner = float(((u - w) ** 2).sum()), float((u * w).sum())
    distance = math.sqrt(squared)
    if name == "rbf":
        return math.exp(-squared / 1.4)
    if name == "laplacian":
        return math.exp(-distance / 1.3)
    if name == "matern":
        x = math.sqrt(3) * distance / 1.3
        return (1 + x) * math.exp(-x)
    if name == "exponential":
        return math.exp(inner / 2)
    if name == "softmax":
        return math.exp(inner / 2) / sum(math.exp(float((key * w).sum()) / 2) for key in present)
    if name == "relu":
        return max(inner, 0.0)
    if name == "linear":
        return inner
    if name == "sum":
        return math.exp(-squared / 0.2) + 0.5 * math.exp(-distance / 2.0)
    if name == "median":
        pairs = sorted(float(np.linalg.norm(a - b)) for i, a in enumerate(present) for b in present[:i])
        pairs = [p for p in pairs if p > 0]
        scale = pairs[(len(pairs) - 1) // 2] if pairs else 1.0
        return math.exp(-squared / (2 * scale**2))
    raise AssertionError(name)


def loop(name, context, points, step, n_layers, gamma, normalization, shift):
    """Kernel TD(0) written out: V at points, its value at the origin, and the TD errors of every depth."""
    present = np.flatnonzero(context.mask.numpy())
    s, r = context.states.numpy()[present], context.rewards.numpy()[present].copy()
    s_next, ended = context.next_states.numpy()[present], context.terminated.numpy()[present]
    n, constant = len(s), 0.0
    if shift and n:
        weight = [1 - gamma * (0 if e else 1) for e in ended]
        constant = r.sum() / sum(weight)
        r = r - constant * np.array(weight)
    every = [*s, *s_next, *points, np.zeros(context.n_features)]
    table = np.array([[kernel_value(name, key, w, s) for w in every] for key in s]).reshape(n, len(every))
    here, there, asked, origin = table[:, :n], table[:, n : 2 * n], table[:, 2 * n : -1], table[:, -1]
    if normalization == "row_sum":
        largest = max((sum(abs(here[j, i]) for i in range(n)) for j in range(n)), default=1.0)
        alpha = step / (largest if largest > 0 else 1.0)
    else:
        alpha = step / max(n, 1) if normalization == "length" else step
    c, errors = np.zeros(n), []
    for _ in range(n_layers + 1):
        delta = np.zeros(n)
        for i in range(n):
            value = sum(c[j] * here[j, i] for j in range(n))
            following = 0.0 if ended[i] else sum(c[j] * there[j, i] for j in range(n))
            delta[i] = r[i] + gamma * following - value
        errors.append(delta)
        c = c + alpha * delta
    c = c - alpha * errors[-1]  # the last errors are what the layers leave, not what they still use
    return c @ asked + constant, float(c @ origin), np.array(errors)


def close(actual, expected, dtype=torch.float64):
    expected = np.asarray(expected)
    bound = TOLERANCE[dtype] * max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("normalization", ["row_sum", "length", "none"])
@pytest.mark.parametrize(("n_layers", "n"), [(0, 7), (1, 1), (2, 0), (2, 7), (15, 7)])
def test_literal_pass_fast_path_and_loop_agree(name, normalization, n_layers, n):
    check_against_loop(name, normalization, n_layers, n)


@pytest.mark.parametrize("name", KERNELS)
def test_they_agree_after_fifty_layers(name):
    check_against_loop(name, "row_sum", 50, 7)


def check_against_loop(name, normalization, n_layers, n):
    context, asked, gamma = random_context(n, fill=0.8, seed=n), queries(), 0.9
    step = 0.05 if normalization == "none" else 0.5
    for value_shift in (False, True):
        value, at_origin, errors = loop(name, context, asked.numpy(), step, n_layers, gamma, normalization, value_shift)
        # Deep passes are slow when taken literally: both offsets where they are short, one each where they are long.
        for offset in ("centered", "removed") if n_layers <= 2 else ("removed" if value_shift else "centered",):
            transformer = InContextTransformer(
                KERNELS[name], step, gamma, normalization, n_layers=n_layers, value_shift=value_shift, offset=offset
            )
            fast = transformer.condition(context)
            tokens = transformer(transformer.embed(context, asked))
            b = -gamma * at_origin if offset == "centered" else 0.0
            close(fast(asked), value)
            close(fast.offset, b)
            close(transformer.read_out(tokens), value + b)
            close(fast.td_errors[:, context.mask], errors)
            close(tokens[0, -1, :-1][context.mask], errors[-1])
            assert (fast.td_errors[:, ~context.mask] == 0).all()


@pytest.mark.parametrize("name", [n for n, k in KERNELS.items() if k.positive_definite])
@pytest.mark.parametrize("n_layers", [0, 1, 15])
def test_literal_pass_and_fast_path_agree_through_landmarks(name, n_layers):
    context, asked = random_context(30, batch=(2,), fill=0.7), queries()
    transformer = InContextTransformer(KERNELS[name], 0.8, 0.9, n_layers=n_layers, n_landmarks=5, value_shift=True)
    fast = transformer.condition(context)
    assert fast.centers.shape == (2, 5, 3)
    literal = transformer.read_out(transformer(transformer.embed(context, asked)))
    close(fast(asked) + fast.offset.unsqueeze(-1), literal)
    # Against the kernel written down: k(s, Z) k(Z, Z)^+ k(Z, s').
    one = context[0]
    kernel = KERNELS[name].adapted(one.states, one.mask)
    z = fast.centers[0]
    inverse = np.linalg.pinv(kernel(z, z).numpy(), rcond=1e-10, hermitian=True)

    def nystrom(u, w):
        return kernel(z, u).numpy().T @ inverse @ kernel(z, w).numpy()

    present = one.mask.numpy()
    s, s_next = one.states[one.mask], one.next_states[one.mask]
    rewards = one.rewards.numpy()[present]
    weight = 1 - 0.9 * ~one.terminated.numpy()[present]
    constant = rewards.sum() / weight.sum()
    delta, c = rewards - constant * weight, np.zeros(len(s))
    difference = nystrom(s, s) - 0.9 * nystrom(s, s_next) * ~one.terminated.numpy()[present]
    # alpha from the transformer's own first step; everything after it is checked.
    if n_layers:
        alpha = 0.8 / float(transformer._normalizer(NystromKernel(kernel, z), one.states, one.mask, None, one.weights))
        for _ in range(n_layers):
            c, delta = c + alpha * delta, delta - alpha * difference.T @ delta
    close(fast(asked)[0], c @ nystrom(s, asked) + constant)


def test_the_step_through_landmarks_is_bounded_by_the_top_eigenvalue():
    context = random_context(60)
    transformer = InContextTransformer(KERNELS["rbf"], 1.0, n_layers=1, n_landmarks=8)
    kernel = NystromKernel(KERNELS["rbf"], transformer.condition(context).centers)
    top = float(torch.linalg.eigvalsh(kernel(context.states, context.states))[-1])
    normalizer = float(transformer._normalizer(kernel, context.states, context.mask, None, context.weights))
    assert top <= normalizer * (1 + 1e-9)
    assert normalizer < 10 * top


@pytest.mark.parametrize("n_layers", [1, 4, 20])
def test_the_linear_kernel_is_the_construction_of_wang_et_al(n_layers):
    n, d, gamma, alpha = 9, 4, 0.8, 0.3
    context, asked = random_context(n, d, end=0.0), queries(5, d)
    phi, phi_next, rewards = context.states.numpy(), context.next_states.numpy(), context.rewards.numpy()
    q = np.zeros((2 * d + 1, 2 * d + 1))
    q[:d, :d], q[:d, d : 2 * d] = -alpha * np.eye(d), alpha * np.eye(d)
    p = np.zeros((2 * d + 1, 2 * d + 1))
    p[-1, -1] = 1.0
    m = np.diag([1.0] * n + [0.0])
    answers = []
    for query in asked.numpy():
        z = np.zeros((2 * d + 1, n + 1))
        z[:d, :n], z[d : 2 * d, :n], z[-1, :n], z[:d, n] = phi.T, gamma * phi_next.T, rewards, query
        for _ in range(n_layers):
            z = z + p @ z @ m @ z.T @ q @ z / n
        answers.append(-z[-1, n])
    transformer = InContextTransformer(LinearKernel(), alpha, gamma, "length", n_layers=n_layers)
    close(transformer.read_out(transformer(transformer.embed(context, asked))), answers)
    fast = transformer.condition(context)
    close(fast(asked), answers)
    assert float(fast.offset) == 0.0


def test_the_explicit_matrices_are_those_of_the_design():
    d, gamma = 2, 0.9
    transformer = InContextTransformer(RBFKernel(1.0), [0.5, 0.25], gamma, n_features=d)
    assert len(transformer.layers) == 2
    for layer, step in zip(transformer.layers, (0.5, 0.25), strict=True):
        s = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
        s_next = torch.tensor([[0.0, 0, 1, 0, 0], [0, 0, 0, 1, 0]])
        last = torch.zeros(5, 5)
        last[4, 4] = 1.0
        for actual, expected in (
            (layer.value_head.key, s), (layer.value_head.query, s), (layer.value_head.value, -step * last),
            (layer.bootstrap_head.key, s), (layer.bootstrap_head.query, s_next),
            (layer.bootstrap_head.value, gamma * step * last),
        ):  # fmt: skip
            torch.testing.assert_close(actual, expected.double())


def test_layers_write_the_last_row_only_and_the_query_reaches_nothing():
    context = random_context(6)
    transformer = InContextTransformer(RBFKernel("median"), 0.5, 0.9, n_layers=3)
    prompt = transformer.embed(context, queries(2))
    assert prompt.tokens.shape == (2, 7, 7) and prompt.keys.shape == prompt.bootstrap.shape == (2, 7)
    assert not prompt.keys[:, -1].any()
    torch.testing.assert_close(prompt.bootstrap[0, :-1], ~context.terminated)
    tokens = transformer(prompt)
    torch.testing.assert_close(tokens[:, :-1], prompt.tokens[:, :-1], rtol=0, atol=0)
    torch.testing.assert_close(tokens[0, :, :-1], tokens[1, :, :-1], rtol=0, atol=0)


def test_wrong_ways_give_other_answers():
    context, asked = random_context(8, fill=0.7, seed=5), queries()
    transformer = InContextTransformer(RBFKernel(1.0), 0.5, 0.9, n_layers=10)
    prompt = transformer.embed(context, asked)
    right = transformer.read_out(transformer(prompt))
    prompts = {
        "the query among the keys": type(prompt)(prompt.tokens, prompt.keys | (torch.arange(9) == 8), prompt.bootstrap),
        "empty places among the keys": type(prompt)(prompt.tokens, torch.arange(9).expand(4, 9) < 8, prompt.bootstrap),
        "bootstrapping past the end": type(prompt)(prompt.tokens, prompt.keys, torch.ones_like(prompt.bootstrap)),
        "ignoring the context": type(prompt)(prompt.tokens, torch.zeros_like(prompt.keys), prompt.bootstrap),
    }
    for what, wrong in prompts.items():
        assert (transformer.read_out(transformer(wrong)) - right).abs().max() > 1e-3, what


def test_batches_are_loops():
    context, asked = random_context(7, batch=(2, 3), fill=0.6), queries()
    for options in (
        {"n_layers": 8, "step_sizes": 0.5},
        {"n_layers": math.inf},
        {"n_layers": math.inf, "n_landmarks": 3},
    ):
        transformer = InContextTransformer(RBFKernel("median"), gamma=0.9, value_shift=True, **options)
        together = transformer.condition(context)
        assert together(asked).shape == (2, 3, 4)
        for i in range(2):
            for j in range(3):
                alone = transformer.condition(context[i, j])
                close(together(asked)[i, j], alone(asked))
                close(together.offset[i, j], alone.offset)


@pytest.mark.parametrize("name", KERNELS)
def test_single_precision(name):
    context, asked = random_context(7, dtype=torch.float32), queries(dtype=torch.float32)
    transformer = InContextTransformer(KERNELS[name], 0.5, 0.9, n_layers=15)
    literal = transformer.read_out(transformer(transformer.embed(context, asked)))
    fast = transformer.condition(context)
    double = transformer.condition(context.to(dtype=torch.float64))
    assert literal.dtype == fast(asked).dtype == torch.float32
    close(fast(asked), double(asked), torch.float32)
    close(literal - fast.offset, double(asked), torch.float32)


# Properties

contexts = st.builds(
    random_context,
    n=st.integers(1, 12),
    d=st.just(3),
    seed=st.integers(0, 1000),
    fill=st.sampled_from([0.5, 1.0]),
    end=st.sampled_from([0.0, 0.3, 1.0]),
)
transformers = st.sampled_from(
    [
        InContextTransformer(kernel, 0.5, 0.9, n_layers=n_layers) if n_layers < math.inf
        else InContextTransformer(kernel, gamma=0.9, n_layers=math.inf, ridge=1e-2)
        for kernel in (RBFKernel("median"), LaplacianKernel(1.0), SoftmaxKernel(1.0), LinearKernel())
        for n_layers in (3, 20, math.inf)
    ]
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(context=contexts, transformer=transformers, seed=st.integers(0, 100))
def test_the_order_of_transitions_changes_nothing(context, transformer, seed):
    order = torch.randperm(len(context), generator=torch.Generator().manual_seed(seed))
    close(transformer.condition(context[order])(queries()), transformer.condition(context)(queries()))


@settings(deadline=None, max_examples=40)
@given(
    context=contexts,
    transformer=transformers,
    padding=st.integers(1, 9),
    junk=st.sampled_from([0.0, 1e30, math.nan, math.inf]),
)
def test_padding_changes_nothing_whatever_it_holds(context, transformer, padding, junk):
    def padded(tensor):
        extra = torch.full((padding, *tensor.shape[1:]), junk, dtype=torch.float64)
        return torch.cat([tensor, extra if tensor.is_floating_point() else extra.bool()])

    mask = torch.cat([context.mask, torch.zeros(padding, dtype=torch.bool)])
    longer = Context(
        padded(context.states),
        padded(context.rewards),
        padded(context.next_states),
        padded(context.terminated),
        mask=mask,
    )
    close(transformer.condition(longer)(queries()), transformer.condition(context)(queries()))
    if not transformer.infinite:
        literal = transformer.read_out(transformer(transformer.embed(longer, queries())))
        close(literal, transformer.read_out(transformer(transformer.embed(context, queries()))))


@settings(deadline=None, max_examples=40)
@given(context=contexts, transformer=transformers, factor=st.sampled_from([-3.0, 0.0, 2.0, 1e3]))
def test_values_are_linear_in_the_rewards(context, transformer, factor):
    scaled = Context(
        context.states, factor * context.rewards, context.next_states, context.terminated, mask=context.mask
    )
    close(transformer.condition(scaled)(queries()), factor * transformer.condition(context)(queries()).numpy())


def test_the_discount_of_a_call_is_the_one_that_counts():
    # One transformer a discount, conditioned in turn: nothing is left over from the call before.
    context, asked = random_context(9), queries()
    for gamma in (0.0, 0.9, 0.5, 0.99):
        transformer = InContextTransformer(RBFKernel(0.7), 0.5, 0.1, n_layers=15)
        transformer.condition(context)
        transformer.gamma.fill_(gamma)
        expected, _, _ = loop("rbf", context, asked.numpy(), 0.5, 15, gamma, "row_sum", False)
        close(transformer.condition(context)(asked), expected)


def test_a_query_far_from_a_few_rows_has_the_value_worked_out_by_hand():
    # Three rows near 10 and a query at the origin, among 97 empty places.
    states = torch.zeros(100, 1, dtype=torch.float64)
    states[:3, 0] = torch.tensor([9.0, 10.0, 11.0])
    rewards = torch.zeros(100, dtype=torch.float64)
    rewards[:3] = torch.tensor([1.0, 2.0, 4.0])
    mask = torch.arange(100) < 3
    context = Context(states, rewards, states, torch.ones(100, dtype=torch.bool), mask=mask)
    value = InContextTransformer(RBFKernel(50.0), [1.0], 0.9, "length").condition(context)
    by_hand = sum(r * math.exp(-(s**2) / 100) for r, s in ((1, 9), (2, 10), (4, 11))) / 3
    assert float(value([[0.0]])) == pytest.approx(by_hand, abs=1e-12)


# At the door


def test_layers_that_diverge_name_the_layer_the_norm_and_the_remedy():
    context = random_context(20)
    transformer = InContextTransformer(ExponentialKernel(0.5), 50.0, 0.9, "none", n_layers=400)
    message = r'after layer \d+ of 400 \(the largest before it was \d\.\d+e\+\d+\)\. Use step_normalization="row_sum"'
    with pytest.raises(FloatingPointError, match=message):
        transformer.condition(context, most_growth=math.inf)
    with pytest.raises(FloatingPointError, match=message):
        transformer(transformer.embed(context, queries()), most_growth=math.inf)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"step_sizes": [1.0], "gamma": 1.01}, r"gamma must lie in \[0, 1\], got 1.01"),
        ({"step_sizes": [1.0], "gamma": math.nan}, r"gamma must lie in \[0, 1\]"),
        ({}, "expected one step size a layer"),
        ({"step_sizes": [1.0, math.nan]}, "step_sizes must be finite"),
        ({"step_sizes": [1.0], "n_layers": 2}, "expected 2 step sizes"),
        ({"step_sizes": [1.0], "n_layers": math.inf}, "takes no step_sizes"),
        ({"step_sizes": [1.0], "ridge": -0.1}, "ridge must be finite and not negative"),
        ({"n_layers": math.inf, "ridge": -1.0}, "ridge must be finite and not negative"),
        ({"step_sizes": [1.0], "n_landmarks": 0}, "n_landmarks must be at least 1"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        InContextTransformer(RBFKernel(1.0), **arguments)


def test_what_infinite_depth_cannot_do_says_so():
    transformer = InContextTransformer(RBFKernel(1.0), n_layers=math.inf)
    with pytest.raises(ValueError, match="needs a finite n_layers"):
        transformer(transformer.embed(random_context(3), queries()))
    with pytest.raises(ValueError, match="no layers to list"):
        _ = transformer.layers
    with pytest.raises(ValueError, match="pass n_features"):
        _ = InContextTransformer(RBFKernel(1.0), [1.0]).layers
    with pytest.raises(ValueError, match=r"expected states of shape \(\.\.\., m, 3\)"):
        transformer.condition(random_context(3))(queries(d=2))
    with pytest.raises(ValueError, match="landmarks need a positive definite kernel"):
        InContextTransformer(SoftmaxKernel(1.0), [1.0], n_landmarks=4)
