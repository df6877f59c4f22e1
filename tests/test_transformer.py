"""The transformer's matrices, layer by layer, and its passes through landmarks, against plain NumPy."""

import math
import re

import numpy as np
import pytest
import torch

from icrl_gym import Context, InContextTransformer
from icrl_gym.kernels import (
    ExponentialKernel,
    LaplacianKernel,
    LinearKernel,
    MaternKernel,
    RBFKernel,
    ReLUKernel,
    SoftmaxKernel,
)
from icrl_gym.weights import shipped

D = 2


def distance(u, w):
    return np.sqrt(((u[:, None] - w[None]) ** 2).sum(-1))


def matern(x):
    return (1 + x) * np.exp(-x)


# Each kernel of the library beside the same one written in NumPy.
POSITIVE = {
    "rbf": (RBFKernel(0.7), lambda u, w: np.exp(-(distance(u, w) ** 2) / 1.4)),
    "laplacian": (LaplacianKernel(1.3), lambda u, w: np.exp(-distance(u, w) / 1.3)),
    "matern": (MaternKernel(1.3), lambda u, w: matern(math.sqrt(3) * distance(u, w) / 1.3)),
    "exponential": (ExponentialKernel(2.0), lambda u, w: np.exp(u @ w.T / 2)),
    "linear": (LinearKernel(), lambda u, w: u @ w.T),
    "sum": (
        RBFKernel(0.1) + 0.5 * LaplacianKernel(2.0),
        lambda u, w: np.exp(-(distance(u, w) ** 2) / 0.2) + 0.5 * np.exp(-distance(u, w) / 2),
    ),
}


def walk(n, seed=0, masked=True, batch=()):
    """A walk with a jump and ends in it, so that some states follow on and some do not; its last step leads to zero."""
    g = torch.Generator().manual_seed(seed)
    path = torch.randn(*batch, n + 1, D, generator=g, dtype=torch.float64)
    states, next_states = path[..., :-1, :].clone(), path[..., 1:, :].clone()
    if n > 2:
        next_states[..., 2, :] = torch.randn(D, generator=g, dtype=torch.float64)
    rewards = torch.randn(*batch, n, generator=g, dtype=torch.float64)
    terminated = torch.zeros(*batch, n, dtype=torch.bool)
    terminated[..., 2::5] = True
    mask = torch.ones(*batch, n, dtype=torch.bool)
    if masked and n > 3:
        mask[..., 1] = mask[..., -1] = False
        next_states[..., -2, :] = 0.0
    return Context(states, rewards, next_states, terminated, mask=mask)


def close(actual, expected, tolerance=1e-10):
    expected = np.asarray(expected)
    bound = tolerance * max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=bound)


def loop_through_landmarks(k, context, points, steps, gamma, normalization, shift, most):
    """Kernel TD(0) with k(u, Z) k(Z, Z)^+ k(Z, w), transition by transition: values, value at 0, errors of every depth."""
    present = context.mask.numpy()
    s, s_next = context.states.numpy()[present], context.next_states.numpy()[present]
    r, ended = context.rewards.numpy()[present].copy(), context.terminated.numpy()[present]
    n, constant = len(s), 0.0
    if n == 0:
        return np.zeros(len(points)), 0.0, np.zeros((len(steps) + 1, 0))
    if shift:
        weight = [1.0 if e else 1.0 - gamma for e in ended]
        constant = sum(r) / sum(weight)
        r = r - constant * np.array(weight)
    m = min(most, len(context), n)
    half = (m + 1) // 2 if n > m else m
    golden = (math.sqrt(5) - 1) / 2
    stretches = [range(i * n // half, (i + 1) * n // half) for i in range(half)]
    z = np.array([s[rows[int(i * golden % 1 * len(rows))]] for i, rows in enumerate(stretches)])
    for _ in range(m - half):  # these contexts are short: every state is a candidate
        gaps = np.linalg.norm(s[:, None] - z[None], axis=-1).min(1)
        z = np.vstack([z, s[gaps.argmax()]])
    values, vectors = np.linalg.eigh(k(z, z))
    kept = values > 1e-10 * values[-1]
    root = vectors[:, kept] / np.sqrt(values[kept])

    def features(u):
        return k(u, z) @ root

    phi, phi_next, asked, origin = features(s), features(s_next), features(points), features(np.zeros((1, D)))[0]
    if normalization == "row_sum":
        gram = phi.T @ phi
        divisor = max(sum(abs(gram[a, b]) for b in range(len(gram))) for a in range(len(gram)))
    else:
        divisor = n if normalization == "length" else 1.0
    w, errors = np.zeros(root.shape[1]), []
    for step in [*steps, None]:
        delta = [r[i] + (0.0 if ended[i] else gamma * phi_next[i] @ w) - phi[i] @ w for i in range(n)]
        errors.append(delta)
        if step is not None:
            w = w + step / divisor * sum(delta[i] * phi[i] for i in range(n))
    return asked @ w + constant, float(origin @ w), np.array(errors)


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize(
    "normalization, n", [("row_sum", 0), ("row_sum", 1), ("none", 1), ("row_sum", 7), ("length", 7), ("none", 7)]
)
def test_literal_pass_fast_path_and_loop_agree_through_landmarks(name, normalization, n):
    kernel, k = POSITIVE[name]
    context, gamma = walk(n, seed=3), 0.9
    asked = torch.randn(3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for n_layers in (0, 1, 2, 15, 50) if n == 7 else (0, 1, 2, 15):
        # No two layers alike.
        steps = [(0.05 if normalization == "none" else 0.5) * (1 + math.sin(i)) for i in range(n_layers)]
        for shift, offset in ((False, "centered"), (True, "removed"), (True, "centered"), (False, "removed")):
            if n_layers > 2 and (shift, offset) != ((True, "centered") if n_layers == 15 else (False, "centered")):
                continue  # taken literally, deep passes are slow
            transformer = InContextTransformer(
                kernel, steps, gamma, normalization, value_shift=shift, offset=offset, n_landmarks=4
            )
            value, at_origin, errors = loop_through_landmarks(
                k, context, asked.numpy(), steps, gamma, normalization, shift, 4
            )
            b = -gamma * at_origin if offset == "centered" else 0.0
            fast = transformer.condition(context)
            tokens = transformer(transformer.embed(context, asked))
            close(fast(asked), value)
            close(fast.offset, b)
            close(fast.td_errors[:, context.mask], errors)
            close(transformer.read_out(tokens), value + b)
            close(tokens[0, -1, :-1][context.mask], errors[-1])


@pytest.mark.parametrize("offset", ["centered", "removed"])
def test_a_layer_is_the_formula_with_its_matrices_and_leaves_the_errors_of_its_depth(offset):
    kernel, k = POSITIVE["rbf"]
    context, asked = walk(7), torch.ones(1, D, dtype=torch.float64)
    steps, gamma = [0.3, 0.1, 0.4], 0.8
    transformer = InContextTransformer(kernel, steps, gamma, "none", offset=offset, n_features=D)
    prompt = transformer.embed(context, asked)
    errors = transformer.condition(context).td_errors
    z = prompt.tokens[0].numpy()
    s, s_next, r = context.states.numpy(), context.next_states.numpy(), context.rewards.numpy()
    np.testing.assert_array_equal(z[:, :-1], np.concatenate([s.T, s_next.T, r[None]]))
    np.testing.assert_array_equal(z[:, -1], [1.0] * D + [0.0] * (D + 1))
    m = np.diag(np.append(context.mask.numpy(), False).astype(float))
    g = np.diag(np.append(~context.terminated.numpy(), offset == "centered").astype(float))
    for depth, layer in enumerate(transformer.layers):
        close(z[-1, :-1][context.mask.numpy()], errors[depth][context.mask])
        value, boot = layer.value_head, layer.bootstrap_head
        update = np.zeros_like(z)
        for head, columns in ((value, np.eye(len(g))), (boot, g)):
            key, query, v = head.key.numpy(), head.query.numpy(), head.value.numpy()
            update += v @ z @ m @ k((key @ z).T, (query @ z).T) @ columns
        assert (update[:-1] == 0).all() and np.abs(update[-1]).max() > 1e-3
        prompt = layer(prompt, kernel, torch.ones(1).double())
        z = z + update
        close(prompt.tokens[0], z)
    close(z[-1, :-1][context.mask.numpy()], errors[-1][context.mask])
    close(-z[-1, -1:], transformer.condition(context)(asked) + transformer.condition(context).offset)


@pytest.mark.parametrize(
    "kernel, n_landmarks",
    [(RBFKernel("median"), None), (RBFKernel("median"), 4), (SoftmaxKernel(1.0), None), (ReLUKernel(), None)],
)
def test_a_literal_pass_over_a_batch_is_a_loop(kernel, n_landmarks):
    # Contexts of unequal length, one of them empty.
    context = Context.stack([walk(7, seed=1), walk(4, seed=2, masked=False), walk(0)])
    asked = torch.randn(3, 5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    transformer = InContextTransformer(kernel, 0.5, 0.9, n_layers=6, value_shift=True, n_landmarks=n_landmarks)
    together = transformer.read_out(transformer(transformer.embed(context, asked)))
    assert together.shape == (3, 5)
    for i in range(3):
        for j in range(5):
            alone = transformer(transformer.embed(context[i], asked[i, j : j + 1]))
            close(together[i, j], transformer.read_out(alone)[0])
    close(together[2], np.zeros(5))


def test_a_truncated_transition_bootstraps_and_a_terminated_one_does_not():
    cut, plain = walk(7, masked=False), walk(7, masked=False)
    cut.truncated[:] = True
    ended = Context(plain.states, plain.rewards, plain.next_states, torch.ones(7, dtype=torch.bool))
    transformer = InContextTransformer(RBFKernel(1.0), 0.5, 0.9, n_layers=5)
    values = [transformer.condition(c)(plain.states) for c in (plain, cut, ended)]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
    assert (values[0] - values[2]).abs().max() > 0.01
    # Nothing in a context that ended at every step depends on where it led.
    elsewhere = Context(plain.states, plain.rewards, 7 + plain.next_states, torch.ones(7, dtype=torch.bool))
    torch.testing.assert_close(transformer.condition(elsewhere)(plain.states), values[2])


def test_gradients_reach_step_sizes_and_temperature_by_both_paths():
    context, asked = walk(5), torch.randn(2, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def answer(literal):
        def function(steps, temperature):
            transformer = InContextTransformer(RBFKernel(temperature), steps, 0.9, offset="removed")
            if literal:
                return transformer.read_out(transformer(transformer.embed(context, asked)))
            return transformer.condition(context)(asked)

        return function

    steps = torch.tensor([0.5, 0.2], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    gradients = []
    for literal in (True, False):
        assert torch.autograd.gradcheck(answer(literal), (steps, temperature))
        gradients.append(torch.autograd.grad(answer(literal)(steps, temperature).sum(), (steps, temperature)))
    for one, other in zip(*gradients, strict=True):
        assert bool((one != 0).all())
        torch.testing.assert_close(one, other)


def test_the_layer_that_diverges_is_the_one_named():
    context, step = walk(7, masked=False), 1e10
    k = np.exp(context.states.numpy() @ context.states.numpy().T)
    k_next = np.exp(context.states.numpy() @ context.next_states.numpy().T) * ~context.terminated.numpy()
    delta, sizes = context.rewards.numpy(), []
    with np.errstate(all="ignore"):
        while np.isfinite(delta).all():
            sizes.append(np.abs(delta).max())
            delta = delta - step * (k - 0.9 * k_next).T @ delta
    transformer = InContextTransformer(ExponentialKernel(1.0), step, 0.9, "none", n_layers=200)
    found = []
    for run in (
        lambda: transformer.condition(context, most_growth=math.inf),
        lambda: transformer(transformer.embed(context, context.states[:1]), most_growth=math.inf),
    ):
        with pytest.raises(FloatingPointError, match=r"the layers diverge.*n_layers=math\.inf") as error:
            run()
        layer, before = re.search(
            r"after layer (\d+) of 200 \(the largest before it was (\S+)\)", str(error.value)
        ).groups()
        found.append((int(layer), float(before)))
    assert found[0] == (len(sizes), pytest.approx(sizes[-1], rel=0.01))
    # The literal pass also sees the query, which may overflow with the rest but no later.
    assert found[1][0] in (len(sizes), len(sizes) - 1)


def far_apart(rewards=(0.0, 1.0)):
    """Two terminated transitions whose kernel matrix is the identity: a step of a multiplies errors by 1 - a, by hand."""
    ended = [True, True]
    return Context([[0.0], [100.0]], list(rewards), [[0.0], [0.0]], ended)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e150])
def test_layers_that_grow_without_overflowing_are_an_error_too(scale):
    # |1 - 5| = 4: 4^4 is below the bound of 1000 and 4^5 above it, so five layers are the first to pass it.
    four, many = (InContextTransformer(RBFKernel(1.0), [5.0] * layers, 0.9) for layers in (4, 20))
    context = far_apart((0.0, 0.5 * scale))
    assert float(four.condition(context).td_errors[-1, 1]) == pytest.approx(0.5 * scale * 4**4)
    message = r"on this (context|prompt): .* was \S+ at first, more than 1000 times as much after layer 5 of 20, and (\S+) after"
    for run in (lambda: many.condition(context), lambda: many(many.embed(context, [[0.0]]))):
        with pytest.raises(
            FloatingPointError, match=message + r" the last\. Use .*step_sizes below 2.*n_layers=math\.inf"
        ) as error:
            run()
        assert float(re.search(message, str(error.value)).group(2)) == pytest.approx(0.5 * scale * 4.0**20, rel=0.01)
    unchecked = many.condition(context, most_growth=math.inf)
    assert float(unchecked.td_errors[-1, 1]) == pytest.approx(0.5 * scale * 4.0**20)


def test_the_context_of_a_batch_that_diverges_is_named():
    # Rewards of zero have no errors that could grow.
    batch = Context.stack([far_apart((0.0, 0.0)), far_apart(), far_apart((1.0, 1.0))])
    with pytest.raises(
        FloatingPointError, match=r"on context 1 of 3 \(2 of them do\): the norm of the TD errors was 1 at"
    ):
        InContextTransformer(RBFKernel(1.0), [5.0] * 6, 0.9).condition(batch)


def test_what_grows_on_the_way_and_is_taken_back_does_not_diverge():
    value = InContextTransformer(RBFKernel(1.0), [1e5, 1.0], 0.9).condition(far_apart())
    assert float(value.td_errors[1].norm()) > 9e4 and float(value.td_errors[2].norm()) < 1e-9


@pytest.mark.parametrize("name", [name for name in shipped() if not name.startswith("adaptive")])
def test_shipped_weights_say_so_where_states_are_far_apart(name):
    context = Context([[0.0], [1.0]], [0.0, 1.0], [[1.0], [2.0]], [False, True])  # the README's
    with pytest.raises(FloatingPointError, match="the layers diverge on this context"):
        InContextTransformer.from_pretrained(name).condition(context)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"n_layers": -math.inf}, "n_layers must be a whole number or math.inf, got -inf"),
        ({"n_layers": math.nan}, "n_layers must be a whole number or math.inf, got nan"),
        ({"n_layers": 1.5}, "n_layers must be a whole number or math.inf, got 1.5"),
        ({"n_layers": -1}, "n_layers must be a whole number or math.inf, got -1"),
        ({"step_sizes": torch.ones(2, 2)}, "one a layer; got shape"),
        ({"step_sizes": [math.inf]}, "step_sizes must be finite"),
        ({"n_layers": 1, "gamma": -0.1}, r"gamma must lie in \[0, 1\], got -0.1"),
        ({"n_layers": math.inf, "ridge": math.nan}, "ridge must be finite and not negative, got nan"),
    ],
)
def test_more_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        InContextTransformer(RBFKernel(1.0), **arguments)


def test_landmarks_of_a_kernel_that_has_none_say_so():
    for kernel in (ReLUKernel(), SoftmaxKernel(1.0), RBFKernel(1.0) + ReLUKernel()):
        with pytest.raises(ValueError, match=r"(?s)landmarks need a positive definite kernel, got .*n_landmarks=None"):
            InContextTransformer(kernel, [1.0], n_landmarks=4)
        with pytest.raises(ValueError, match="landmarks need a positive definite kernel"):
            InContextTransformer(kernel, [1.0]).condition(walk(7), landmarks=walk(3).states)
