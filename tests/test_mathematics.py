"""Properties that hold for any context, on states that coincide often: ends, repeats, zeros and empty places."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.kernel_ridge import KernelRidge

from icrl_gym import Context, InContextTransformer
from icrl_gym.context import TransitionBuffer
from icrl_gym.kernels import LaplacianKernel, LinearKernel, MaternKernel, RBFKernel, ReLUKernel, SoftmaxKernel

quick = settings(deadline=None, max_examples=30, derandomize=True)

KERNELS = [
    RBFKernel("median"),
    LaplacianKernel(1.0),
    MaternKernel(2.0),
    SoftmaxKernel(2.0),
    ReLUKernel(),
    LinearKernel(),
]


@st.composite
def contexts(draw, least=1, most=8, full=False):
    """Transitions between few places of a grid with the origin, so that the next state is often that of the next row."""
    n = draw(st.integers(least, most))
    places = arrays.arrays(np.float64, (n, 2), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
    states, next_states = draw(places), draw(places)
    if draw(st.booleans()):
        next_states[:-1] = states[1:]
    flags = arrays.arrays(np.bool_, n)
    mask = np.ones(n, bool) if full else draw(flags)
    rewards = draw(arrays.arrays(np.float64, n, elements=st.integers(-9, 9).map(float)))
    return Context(states, rewards, next_states, draw(flags), mask=mask)


@st.composite
def designs(draw, landmarks=True):
    """The arguments of a transformer; it is built in the test, since the type checker draws random numbers of its own."""
    kernel, gamma = draw(st.sampled_from(KERNELS)), draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    n_layers = draw(st.sampled_from([0, 1, 6, math.inf]))
    options = {"step_sizes": 0.5} if n_layers < math.inf else {"ridge": 0.05}
    if landmarks and kernel.positive_definite:
        options["n_landmarks"] = draw(st.sampled_from([None, 3]))
    shift, offset = draw(st.booleans()), draw(st.sampled_from(["centered", "removed"]))
    return dict(kernel=kernel, gamma=gamma, n_layers=n_layers, value_shift=shift, offset=offset, **options)


ASKED = torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.3, 2.0]], dtype=torch.float64)


def answers(transformer, context):
    """The values and the offset by the fast path, or None where the system of infinite depth is (as good as) singular."""
    try:
        value = transformer.condition(context)
    except FloatingPointError:
        return None
    return torch.cat([value(ASKED), value.offset.unsqueeze(-1)], -1)


def same(actual, expected, tolerance=1e-9):
    if actual is None or expected is None:
        assert actual is expected
        return
    expected = np.asarray(expected)
    bound = tolerance * max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=bound)


def explicit(kernel, keys, queries):
    """k(key, query) of full contexts, without the library's distances."""
    squared, inner = ((keys[:, None] - queries[None]) ** 2).sum(-1), keys @ queries.T
    if isinstance(kernel, RBFKernel):
        pairs = np.sqrt(((keys[:, None] - keys[None]) ** 2).sum(-1))[np.triu_indices(len(keys), 1)]
        pairs = np.sort(pairs[pairs > 0])
        scale = pairs[(len(pairs) - 1) // 2] if len(pairs) else 1.0
        return np.exp(-squared / (2 * scale**2))
    if isinstance(kernel, LaplacianKernel):
        return np.exp(-np.sqrt(squared))
    if isinstance(kernel, MaternKernel):
        x = np.sqrt(3 * squared) / 2
        return (1 + x) * np.exp(-x)
    if isinstance(kernel, SoftmaxKernel):
        return np.exp(inner / 2) / np.exp(inner / 2).sum(0)
    return np.maximum(inner, 0) if isinstance(kernel, ReLUKernel) else inner


@quick
@given(contexts(), st.sampled_from(KERNELS), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans())
def test_both_paths_are_kernel_td_where_states_coincide(context, kernel, gamma, shift):
    present = context.mask.numpy()
    s, s_next = context.states.numpy()[present], context.next_states.numpy()[present]
    r, ended = context.rewards.numpy()[present], context.terminated.numpy()[present]
    weight = np.where(ended, 1.0, 1.0 - gamma)
    constant = r.sum() / weight.sum() if shift and weight.sum() > 0 else 0.0
    c, here, there = np.zeros(len(s)), explicit(kernel, s, s), explicit(kernel, s, s_next)
    for _ in range(5):
        change = [
            r[i] - constant * weight[i] + (0.0 if ended[i] else gamma * c @ there[:, i]) - c @ here[:, i]
            for i in range(len(s))
        ]
        c = c + 0.5 / max(len(s), 1) * np.array(change)
    expected = c @ explicit(kernel, s, ASKED.numpy()) + constant
    transformer = InContextTransformer(kernel, 0.5, gamma, "length", n_layers=5, value_shift=shift, offset="removed")
    same(transformer.condition(context)(ASKED), expected)
    same(transformer.read_out(transformer(transformer.embed(context, ASKED))), expected)


@quick
@given(contexts(), designs(), st.integers(1, 5), st.sampled_from([0.0, 1e30, math.nan, math.inf, -math.inf]))
def test_empty_places_behind_or_between_change_nothing(context, design, padding, junk):
    transformer = InContextTransformer(**design)

    def padded(field):
        extra = torch.full((padding, *field.shape[1:]), junk, dtype=torch.float64)
        extra = extra if field.is_floating_point() else torch.ones_like(extra, dtype=torch.bool)
        return torch.cat([field, extra])

    mask = torch.cat([context.mask, torch.zeros(padding, dtype=torch.bool)])
    fields = [padded(f) for f in (context.states, context.rewards, context.next_states, context.terminated)]
    longer = Context(*fields, mask=mask)
    same(answers(transformer, longer), answers(transformer, context))
    # And the places that were empty from the start are as good as not there.
    same(answers(transformer, context[context.mask]), answers(transformer, context))
    if not transformer.infinite:
        out = transformer(transformer.embed(longer, ASKED))
        assert torch.isfinite(out).all()
        fast = transformer.condition(context)
        same(transformer.read_out(out), fast(ASKED) + fast.offset)


@quick
@given(contexts(), designs(landmarks=False), st.randoms(use_true_random=False))
def test_the_order_of_transitions_changes_nothing_where_states_coincide(context, design, random):
    transformer = InContextTransformer(**design)
    order = random.sample(range(len(context)), len(context))
    same(answers(transformer, context[torch.tensor(order)]), answers(transformer, context))


@quick
@given(st.lists(contexts(), min_size=1, max_size=4), designs())
def test_a_batch_of_unequal_contexts_is_a_loop(several, design):
    transformer = InContextTransformer(**design)
    alone = [answers(transformer, context) for context in several]
    together = answers(transformer, Context.stack(several))
    if together is None:
        assert any(one is None for one in alone)
        return
    for one, row in zip(alone, together, strict=True):
        same(row, one)


@quick
@given(contexts(), designs(), st.integers(-9, 9))
def test_values_are_linear_in_the_rewards_where_states_coincide(context, design, factor):
    transformer = InContextTransformer(**design)

    def rewarded(rewards):
        return Context(context.states, rewards, context.next_states, context.terminated, mask=context.mask)

    other = torch.arange(len(context)).double()
    both = answers(transformer, rewarded(factor * context.rewards + other))
    parts = answers(transformer, context), answers(transformer, rewarded(other))
    if both is None or None in parts:
        return
    same(both, factor * parts[0] + parts[1])


@quick
@given(contexts(full=True), st.sampled_from([k for k in KERNELS if k.positive_definite]), st.sampled_from([1e-3, 1.0]))
def test_without_discount_infinite_depth_is_kernel_ridge_regression_where_states_coincide(context, kernel, ridge):
    s = context.states.numpy()
    model = KernelRidge(alpha=ridge * len(s), kernel="precomputed").fit(explicit(kernel, s, s), context.rewards.numpy())
    value = InContextTransformer(kernel, gamma=0.0, n_layers=math.inf, ridge=ridge).condition(context)
    same(value(ASKED), model.predict(explicit(kernel, s, ASKED.numpy()).T))


@quick
@given(contexts(full=True), designs(), st.integers(8, 40))
def test_the_capacity_of_a_buffer_that_is_not_full_changes_nothing(context, design, capacity):
    transformer = InContextTransformer(**design)
    small, large = TransitionBuffer(len(context), 2, np.float64), TransitionBuffer(capacity, 2, np.float64)
    large.add(np.full(2, 9.0), 9.0, np.full(2, 9.0), True)  # forgotten again
    large.clear()
    for buffer in (small, large):
        buffer.extend(context)
    same(answers(transformer, large.context()), answers(transformer, context), 0)
    same(answers(transformer, small.context()), answers(transformer, context), 0)


@quick
@given(contexts(), st.sampled_from(KERNELS), st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=2, max_size=3))
def test_a_discount_that_changes_between_calls_leaves_nothing_behind(context, kernel, gammas):
    changed = InContextTransformer(kernel, 0.5, 0.3, n_layers=4, value_shift=True)
    for gamma in gammas:
        changed.gamma.fill_(gamma)
        fresh = InContextTransformer(kernel, 0.5, gamma, n_layers=4, value_shift=True)
        same(answers(changed, context), answers(fresh, context), 0)
        out = changed.read_out(changed(changed.embed(context, ASKED)))
        same(out, fresh.read_out(fresh(fresh.embed(context, ASKED))), 0)


@quick
@given(contexts(full=True), st.integers(0, 99))
def test_features_that_hardly_vary_hardly_matter(context, seed):
    # Field report 15: [x] against [x, 7.0, 7.0 + 1e-9 noise].
    noise = 1e-9 * np.random.default_rng(seed).standard_normal((2, len(context)))

    def wider(states, noise):
        n = len(states)
        return np.column_stack([np.asarray(states), np.full(n, 7.0), 7.0 + noise])

    wide = Context(
        wider(context.states, noise[0]), context.rewards, wider(context.next_states, noise[1]), context.terminated
    )
    distinct = len(np.unique(context.states.numpy(), axis=0)) == len(context)  # or noise makes distances of its own
    asked = wider(ASKED, np.zeros(3))
    for kernel in [
        LaplacianKernel(1.0),
        MaternKernel(2.0),
        *([RBFKernel("median")] if distinct and len(context) > 1 else []),
    ]:
        transformer = InContextTransformer(kernel, gamma=0.9, n_layers=6, step_sizes=0.5)
        narrow = transformer.condition(context)(ASKED)
        same(transformer.condition(wide)(asked), narrow, 1e-6)
