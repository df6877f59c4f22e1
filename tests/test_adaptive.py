"""The adaptive transformer against heads built one at a time, and a search for contexts that make it or its layers diverge."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import Context, InContextCritic, InContextTransformer
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.kernels import RBFKernel
from icrl_gym.metrics import relevance, standardization
from icrl_gym.solvers import Directions

GAMMA = 0.9
BANDWIDTHS, RIDGES = (0.7, 2.0), (1e-2, 0.3)
SMALL = {"bandwidths": BANDWIDTHS, "ridges": RIDGES, "gamma": GAMMA}


def walk(n=14, d=3, seed=0, empty=0, dtype=np.float64):
    """A random walk, terminated at 3 and truncated at 7; one feature is constant and one large."""
    rng = np.random.default_rng(seed)
    path = rng.normal(size=(n + 1, d)).cumsum(0) * np.array([1.0, 30.0, 0.0, 1.0][:d]) + 5.0
    s, t, r = path[:-1].copy(), path[1:].copy(), rng.normal(size=n)
    terminated, truncated, mask = np.arange(n) == 3, np.arange(n) == 7, np.arange(n) < n - empty
    for end in (3, 7):
        if end < n:
            t[end] = path[0]
    return Context(s.astype(dtype), r.astype(dtype), t.astype(dtype), terminated, truncated, mask)


def numpy_coordinates(metric, context, gamma, value_shift):
    """Origin and scale (d,) of a metric, feature by feature; what is relevant by automatic differentiation."""
    s = context.states[context.mask].numpy()
    d = s.shape[1]
    mean, deviation = s.mean(0), s.std(0)
    varying = [i for i in range(d) if deviation[i] > 1e-6 * max(abs(mean[i]), deviation.max())]
    usual = sorted(deviation[i] for i in varying)[(len(varying) - 1) // 2] if varying else 0.0
    scale = np.full(d, deviation.max() if deviation.max() > 0 else 1.0)
    for i in varying:
        if deviation[i] > 0.05 * usual:
            scale[i] = deviation[i]
    if metric == "raw":
        return mean, np.ones(d)
    if metric == "standardized":
        return mean, scale
    moved = in_coordinates(context, mean, scale)
    value = InContextTransformer(
        RBFKernel("median"), gamma=gamma, n_layers=20, algorithm="residual_gradient", acceleration="conjugate", ridge=1e-2,
        value_shift=value_shift,
    ).condition(moved)  # fmt: skip
    at = moved.states[moved.mask].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(at).sum(), at)
    square = (gradient.numpy() ** 2).sum(0)
    share = square / square.max() if square.max() > 0 else np.ones(d)
    return mean, scale / np.sqrt(share + 1e-3)


def in_coordinates(context, origin, scale, mask=None):
    origin, scale = torch.as_tensor(origin), torch.as_tensor(scale)
    return Context(
        (context.states - origin) / scale,
        context.rewards,
        (context.next_states - origin) / scale,
        context.terminated,
        context.truncated,
        context.mask if mask is None else torch.as_tensor(mask) & context.mask,
    )


def twin(context, queries, n_layers, value_shift=True, sharpness=0.1, folds=5, contiguous=False, literal=False):
    """Values of queries, every head a transformer of its own, and the weights (M, B, R) by a NumPy softmax.

    With ``literal``, values with the offset, by the forward pass.
    """
    present = context.mask.numpy()
    n, gamma = int(present.sum()), GAMMA
    keep = 1 - gamma * ~context.terminated.numpy()
    c = context.rewards.numpy()[present].sum() / keep[present].sum() if value_shift else 0.0
    shifted = Context(*(getattr(context, x) for x in ("states",)), context.rewards - c * torch.as_tensor(keep),
                      context.next_states, context.terminated, context.truncated, context.mask)  # fmt: skip
    place = np.cumsum(present) - 1
    fold = place * folds // n if contiguous else place % folds
    answers, losses = [], []
    for metric in ("raw", "standardized", "relevance"):
        origin, scale = numpy_coordinates(metric, context, gamma, value_shift)
        moved = in_coordinates(shifted, origin, scale)
        s = moved.states[moved.mask].numpy()
        between = sorted(np.linalg.norm(s[i] - s[j]) for i in range(n) for j in range(i))
        between = [x for x in between if x > 0]
        median = between[(len(between) - 1) // 2] if between else 1.0
        for bandwidth in BANDWIDTHS:
            for ridge in RIDGES:
                layers = {} if n_layers == math.inf else {"acceleration": "conjugate"}
                head = InContextTransformer(
                    RBFKernel((bandwidth * median) ** 2), gamma=gamma, n_layers=n_layers, ridge=ridge,
                    algorithm="residual_gradient", **layers,
                )  # fmt: skip

                missed = 0.0
                for f in range(folds):
                    value = head.condition(in_coordinates(shifted, origin, scale, fold != f))
                    bootstrap = gamma * (1 - moved.terminated.double()) * value(moved.next_states)
                    errors = (moved.rewards + bootstrap - value(moved.states)).numpy()
                    missed += (errors[present & (fold == f)] ** 2).sum()
                losses.append(missed / n)
                asked = (queries - torch.as_tensor(origin)) / torch.as_tensor(scale)
                if literal:
                    prompt = head.embed(moved, asked)
                    tokens, d = prompt.tokens.clone(), len(origin)
                    # The query's next state is the zero of the states, wherever that is in the head's coordinates.
                    tokens[..., d : 2 * d, -1] = torch.as_tensor(-origin / scale)
                    answers.append(head.read_out(head(replace(prompt, tokens=tokens))).numpy())
                else:
                    answers.append(head.condition(moved)(asked).numpy())
    logits = -sharpness * n * np.log(np.array(losses) / min(losses))
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    weights[weights < 1e-3 * weights.max()] = 0.0
    weights /= weights.sum()
    shape = (3, len(BANDWIDTHS), len(RIDGES))
    return c + weights @ np.array(answers), weights.reshape(shape), np.array(losses).reshape(shape)


@pytest.mark.parametrize("n_layers", [2, 20, math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"value_shift": False, "sharpness": 1.0}, {"n_folds": 3, "contiguous_folds": True}]
)
@pytest.mark.parametrize("empty", [0, 3])
def test_it_is_heads_one_at_a_time(n_layers, options, empty):
    context = walk(empty=empty)
    value, mixture = AdaptiveTransformer(**SMALL, n_layers=n_layers, **options).mix(context)
    queries = context.states[::2] + torch.tensor([0.5, -4.0, 0.0]).double()
    names = {"n_folds": "folds", "contiguous_folds": "contiguous"}
    expected, weights, losses = twin(context, queries, n_layers, **{names.get(k, k): v for k, v in options.items()})
    np.testing.assert_allclose(mixture.held_out, losses, rtol=1e-6)
    np.testing.assert_allclose(mixture.weights, weights, atol=1e-6)
    np.testing.assert_allclose(value(queries), expected, atol=1e-7)
    # Its errors are those of its values, and after no layer those of the constant.
    bootstrap = GAMMA * (1 - context.terminated.double()) * value(context.next_states)
    errors = (context.rewards + bootstrap - value(context.states)) * context.mask
    torch.testing.assert_close(value.td_errors[-1], errors, rtol=0, atol=1e-9)
    assert value.td_errors.shape == (2 if n_layers == math.inf else n_layers + 1, 14)
    zero = value(torch.zeros(1, 3).double())[0] - value.shift
    assert float(value.offset) == pytest.approx(-GAMMA * float(zero))


def test_it_is_what_the_heads_tokens_come_to():
    context = walk(empty=2)
    queries = context.states[::2] + torch.tensor([0.5, -4.0, 0.0]).double()
    value = AdaptiveTransformer(**SMALL).condition(context)
    literal, _, _ = twin(context, queries, 20, literal=True)
    np.testing.assert_allclose(value(queries) + value.offset, literal, atol=1e-7)
    removed = AdaptiveTransformer(**SMALL, offset="removed").condition(context)
    assert float(removed.offset) == 0.0
    torch.testing.assert_close(removed(queries), value(queries))


def test_batches_are_loops_and_padding_changes_nothing():
    contexts = [walk(n=n, seed=n) for n in (14, 1, 6)] + [Context.empty(3), walk(empty=4)]
    batch = Context.stack(contexts)
    transformer = AdaptiveTransformer(**SMALL)
    many, mixture = transformer.mix(batch)
    asked = torch.linspace(-3, 9, 18).double().reshape(6, 3)
    assert many(asked).shape == (5, 6) and mixture.weights.shape == (5, 3, 2, 2)
    torch.testing.assert_close(mixture.weights.sum((-3, -2, -1)), torch.ones(5).double())
    for b, context in enumerate(contexts):
        one, alone = transformer.mix(context)
        torch.testing.assert_close(many(asked)[b], one(asked), rtol=0, atol=1e-8)
        torch.testing.assert_close(many.offset[b], one.offset, rtol=0, atol=1e-8)
        torch.testing.assert_close(many.td_errors[b][:, : len(context)], one.td_errors, rtol=0, atol=1e-8)
        torch.testing.assert_close(mixture.weights[b], alone.weights, rtol=0, atol=1e-8)
    grid = Context.stack([batch, batch])
    torch.testing.assert_close(transformer.condition(grid)(asked)[1], many(asked))


def test_contexts_of_nothing_and_of_one_transition():
    for n_layers in (0, 1, 20, math.inf):
        transformer = AdaptiveTransformer(**SMALL, n_layers=n_layers)
        nothing = transformer.condition(Context.empty(2))
        assert nothing([[0.0, 1.0]]).tolist() == [0.0]
        masked = Context([[1.0, 2.0]], [3.0], [[0.0, 0.0]], [False], None, [False])
        assert transformer.condition(masked)([[0.0, 1.0]]).tolist() == [0.0]
        for terminated, expected in ((True, 3.0), (False, 30.0)):
            one = Context([[1.0, 2.0]], [3.0], [[0.0, 0.0]], [terminated])
            # The best constant already predicts it without an error.
            torch.testing.assert_close(
                transformer.condition(one)([[1.0, 2.0], [9.0, 9.0]]), torch.full((2,), expected).double()
            )
    raw = AdaptiveTransformer(**{**SMALL, "ridges": [1e-6]}, value_shift=False)
    ended = raw.condition(Context([[1.0, 2.0]], [3.0], [[0.0, 0.0]], [True]))([[1.0, 2.0], [99.0, 99.0]])
    torch.testing.assert_close(ended, torch.tensor([3.0, 0.0]).double(), rtol=1e-5, atol=1e-9)


def test_float32_contexts_are_worked_out_in_float64():
    single, double = walk(dtype=np.float32), walk()
    for n_layers in (20, math.inf):
        transformer = AdaptiveTransformer(gamma=0.99, n_layers=n_layers)
        values = transformer.condition(single)(single.states)
        assert values.dtype == torch.float64
        torch.testing.assert_close(values, transformer.condition(double)(double.states), rtol=1e-3, atol=1e-3)


def test_save_and_load(tmp_path):
    pytest.importorskip("safetensors")
    transformer = AdaptiveTransformer(
        torch.tensor([[0.3, 1.0], [0.5, 2.0]]),
        RIDGES,
        ("raw", "relevance"),
        gamma=GAMMA,
        n_layers=7,
        n_folds=3,
        sharpness=0.4,
    )
    transformer.save_pretrained(tmp_path / "weights")
    loaded = AdaptiveTransformer.from_pretrained(tmp_path / "weights")
    context = walk()
    assert torch.equal(loaded.condition(context)(context.states), transformer.condition(context)(context.states))
    with pytest.raises(ValueError, match="load it with that class"):
        InContextTransformer.from_pretrained(tmp_path / "weights")


@pytest.mark.parametrize("standardize", [False, True])
def test_a_critic_has_its_values(standardize):
    transformer, context = AdaptiveTransformer(**SMALL), walk()
    critic = InContextCritic(3, transformer=transformer, standardize=standardize)
    critic.condition(context)
    values = critic(context.states).squeeze(-1)
    if standardize:
        mean, scale = standardization(context.states, context.mask)
        moved = in_coordinates(context, mean, scale)
        expected = transformer.condition(moved)
        torch.testing.assert_close(values, expected(moved.states) + expected.offset)
    else:
        expected = transformer.condition(context)
        torch.testing.assert_close(values, expected(context.states) + expected.offset)


def test_few_layers_do_not_overshoot():
    # In the textbook's conjugate method the squared TD error would rise here: most of the rewards lie in a weak direction.
    matrix = torch.diag(torch.tensor([1.0, 1000.0]).double())
    target = torch.tensor([1.0, 1000**-0.5]).double()
    textbook = target.square().sum() / (target @ matrix @ target)
    assert float((target - textbook * (matrix @ target)).norm()) > 10 * float(target.norm())
    first = Directions.first(target, lambda c: c @ matrix)
    _, following = first.step(lambda c: c @ matrix, torch.zeros(1).double(), first)
    # The best of all steps along the first direction.
    best = min(float((target - a * (matrix @ target)).norm()) for a in np.linspace(0, 2e-3, 20_001))
    assert float(following.residual.norm()) == pytest.approx(best, rel=1e-6) and best <= float(target.norm())


def test_metrics_do_not_depend_on_units():
    context = walk(n=30, d=4)
    mean, scale = standardization(context.states, context.mask)
    value = InContextTransformer(RBFKernel(2.0), gamma=GAMMA, n_layers=3, algorithm="residual_gradient").condition(
        context
    )
    for power in (-900, -600, 600, 900):
        unit = 2.0**power
        other_mean, other_scale = standardization(context.states * unit, context.mask)
        torch.testing.assert_close(other_mean / unit, mean)
        torch.testing.assert_close(other_scale / unit, scale)
    for unit in (1e-200, 1e200):
        scaled = replace(value, coefficients=value.coefficients * unit)
        torch.testing.assert_close(
            relevance(scaled, context.states, context.mask), relevance(value, context.states, context.mask)
        )


KINDS = ("normal", "duplicates", "collinear", "constant", "one next state", "far", "far apart", "stays", "walk", "units",
         "nearly equal", "far origin", "outlier")  # fmt: skip


@st.composite
def hostile(draw, most=300):
    """Contexts as hard as could be thought of, and a discount."""
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**31))
    n, d = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    scale = 10.0 ** draw(st.sampled_from([e for e in (0, 0, -8, 8, -100, 100, 150, -150, -300, 300) if abs(e) <= most]))
    rng = np.random.default_rng(seed)
    s, t = rng.normal(size=(n, d)), rng.normal(size=(n, d))
    if kind == "duplicates":
        s, t = s[rng.integers(0, max(1, n // 3), n)], s[rng.integers(0, n, n)]
    elif kind == "collinear":
        s, t = s[:, :1] * np.ones(d), t[:, :1] * np.ones(d)
    elif kind == "constant":
        s = t = np.ones((n, d)) * s[0]
    elif kind == "one next state":
        t = np.ones((n, d)) * t[0]
    elif kind == "far":
        t = s + 1e6 * t
    elif kind == "far apart":
        s = s * 10.0 ** rng.uniform(-6, 6, size=(n, 1))
    elif kind == "stays":
        t = s
    elif kind == "walk":
        path = rng.normal(size=(n + 1, d)).cumsum(0)
        s, t = path[:-1], path[1:]
    elif kind == "units":
        units = 10.0 ** rng.uniform(-6, 6, size=d)
        s, t = s * units, t * units
    elif kind == "nearly equal":
        s, t = 1 + 1e-14 * s, 1 + 1e-14 * t
    elif kind == "far origin":
        s, t = s + 1e6, t + 1e6
    elif kind == "outlier":
        s[0] = 1e6
    rewards = {
        "normal": rng.normal(size=n), "constant": np.full(n, 2.0), "zero": np.zeros(n), "one": 1.0 * (np.arange(n) == n - 1),
        "huge": 1e150 * rng.normal(size=n), "tiny": 1e-150 * rng.normal(size=n),
    }[draw(st.sampled_from(("normal", "constant", "zero", "one", "huge", "tiny")))]  # fmt: skip
    terminated = rng.random(n) < draw(st.sampled_from((0.0, 0.1, 1.0)))
    mask = np.arange(n) < n - draw(st.integers(0, min(2, n - 1)))
    return Context(s * scale, rewards, t * scale, terminated, None, mask), draw(st.sampled_from((0.0, 0.9, 0.99, 1.0)))


def td_errors(value, context, gamma):
    discount = gamma * (1 - context.terminated.double())
    return (context.rewards + discount * value(context.next_states) - value(context.states)) * context.mask


def of_other_rewards(context, rewards, features=slice(None)):
    return Context(
        context.states[:, features],
        rewards,
        context.next_states[:, features],
        context.terminated,
        context.truncated,
        context.mask,
    )


@given(hostile(), st.sampled_from([20, 3, math.inf]))
@settings(max_examples=12, deadline=None)
def test_no_context_makes_the_adaptive_transformer_diverge(case, n_layers):
    context, gamma = case
    transformer = AdaptiveTransformer(gamma=gamma, n_layers=n_layers)
    value, mixture = transformer.mix(context)
    nowhere = torch.cat(
        [torch.zeros(1, context.n_features).double(), torch.full((1, context.n_features), 1e290, dtype=torch.float64)]
    )
    states = torch.cat([context.states, context.next_states, nowhere])
    values, size = value(states), float(context.rewards.abs().max()) or 1.0
    assert torch.isfinite(values).all() and torch.isfinite(value.td_errors).all()
    assert float(mixture.weights.sum()) == pytest.approx(1.0) and bool((mixture.weights >= 0).all())
    # In units of the rewards, as their squares may be no numbers any more.
    constant, after = (value.td_errors[row] / size for row in (0, -1))
    level = 1 + float(value.shift.abs()) / size
    assert float(after.norm()) <= float(constant.norm()) * (1 + 1e-9) + 1e-9 * level
    found = td_errors(value, context, gamma) / size
    torch.testing.assert_close(found, after, rtol=0, atol=1e-5 * level)
    # Proportional to the rewards, to the last digit where the factor is a power of two.
    other = transformer.condition(of_other_rewards(context, -8.0 * context.rewards))(states)
    torch.testing.assert_close(other / size, -8.0 * values / size, rtol=1e-12, atol=0)
    turned = list(reversed(range(context.n_features)))
    order = transformer.condition(of_other_rewards(context, context.rewards, turned))(states[:, turned])
    torch.testing.assert_close(order / size, values / size, rtol=0, atol=2e-3 * level)
    # |V - C| <= |f|, and |f|^2 = c A c <= |y|^2 / (the smallest ridge in units of the system).
    if n_layers != math.inf and gamma == 0.0:
        present = int(context.mask.sum())
        bound = float(constant.norm()) / math.sqrt(float(transformer.log_ridges.exp().min()) * present)
        assert float((values - value.shift).abs().max()) / size <= bound * (1 + 1e-9) + 1e-9


@given(hostile(most=100), st.sampled_from([0.3, 1.0, 1.9]))
@settings(max_examples=15, deadline=None)
def test_no_context_makes_plain_layers_of_the_residual_gradient_diverge(case, step):
    context, gamma = case
    transformer = InContextTransformer(
        RBFKernel("median"), step_sizes=step, n_layers=20, gamma=gamma, algorithm="residual_gradient"
    )
    value, size = transformer.condition(context), float(context.rewards.abs().max()) or 1.0
    norms = (value.td_errors / size).norm(dim=-1)
    assert torch.isfinite(value(context.next_states)).all()
    problem, _, _ = transformer.coefficients_by_depth(context)
    # With gamma 1 and next states that are the states but for rounding, so is the matrix, and it need not be positive.
    if float(problem.matrix.diagonal().max()) > 1e-6 or float(problem.matrix.abs().max()) == 0.0:
        assert bool((norms.diff() <= 1e-9 * norms[0]).all())


@given(
    hostile(most=100),
    st.sampled_from(["td", "td_lambda", "average_reward", "monte_carlo", "residual_gradient"]),
    st.sampled_from([None, 4]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_context_stops_a_critic_of_infinite_depth(case, algorithm, landmarks, standardize):
    context, gamma = case
    context = of_other_rewards(context, context.rewards.clamp(-1e100, 1e100))
    critic = InContextCritic(
        context.n_features,
        # Products of raw states have no bound.
        kernel="laplacian+linear" if standardize else "laplacian",
        gamma=gamma,
        algorithm=algorithm,
        n_landmarks=landmarks,
        standardize=standardize,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        critic.condition(context)
    assert torch.isfinite(critic(torch.cat([context.states, context.next_states]))).all()


@pytest.mark.parametrize("landmarks", [None, 4])
@pytest.mark.parametrize("moves", [False, True])
def test_a_transition_that_stays_says_nothing_about_differences_of_values(moves, landmarks):
    # With gamma 1 the difference of V(s) and V(s) is 0 whatever V is: one such transition, alone or beside one that moves.
    states, next_states, rewards = [[1.0], [0.0]], [[1.0], [1.0]], [0.6, 2.0]
    n = 1 + moves
    context = Context(states[:n], rewards[:n], next_states[:n], [False] * n)
    critic = InContextCritic(
        1, gamma=1.0, algorithm="residual_gradient", ridge=0.0 if moves else 1e-4, value_shift=False, standardize=False,
        n_landmarks=landmarks, kernel="rbf", temperature=1.0,
    )  # fmt: skip
    critic.condition(context)
    values = critic(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert torch.isfinite(values).all()
    # V(0) - V(1) = 2 where that is all that is known, and nothing where nothing is.
    torch.testing.assert_close((values[0] - values[1]).item(), 2.0 if moves else 0.0, rtol=1e-6, atol=1e-9)


def test_a_fixed_point_that_does_not_exist_is_looked_for_with_a_larger_ridge():
    # Two states whose successors are the other's, and gamma 1: (K - K') is singular, and near to that with a ridge.
    context = Context([[0.0], [1.0]], [1.0, 1.0], [[1.0], [0.0]], [False, False])
    critic = InContextCritic(
        1, gamma=1.0, ridge=0.0, value_shift=False, standardize=False, n_landmarks=None, kernel="rbf", temperature=1.0,
        algorithm="td",
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="no plausible fixed point on this context with ridge=0; 0.001 was taken"):
        critic.condition(context)
    expected = InContextTransformer(RBFKernel(1.0), gamma=1.0, n_layers=math.inf, ridge=1e-3).condition(context)
    torch.testing.assert_close(critic(context.states).squeeze(-1), expected(context.states) + expected.offset)
    # Layers that diverge are the user's to mend.
    layers = InContextCritic(1, gamma=0.9, n_layers=40, step_sizes=50.0, n_landmarks=None, value_shift=False)
    with pytest.raises(FloatingPointError, match="diverge"):
        layers.condition(context)


@pytest.mark.parametrize("landmarks", [None, 8])
def test_a_task_without_a_fixed_point_changes_no_other_task_s_values(landmarks):
    rng = np.random.default_rng(0)
    path = 3.0 * rng.permutation(13).reshape(-1, 1)
    fine = Context(path[:-1], rng.normal(size=12), path[1:], [False] * 11 + [True])
    swap = Context([[0.0], [1.0]], [1.0, 1.0], [[1.0], [0.0]], [False, False])

    def of_task(context, task):
        code = np.eye(2)[task] * np.ones((len(context), 1))
        states, following = (np.concatenate([x, code], -1) for x in (context.states, context.next_states))
        return Context(states, context.rewards, following, context.terminated)

    options = {
        "gamma": 1.0,
        "ridge": 0.0,
        "value_shift": False,
        "standardize": False,
        "kernel": "rbf",
        "temperature": 1.0,
    }
    critic = InContextCritic(3, n_tasks=2, algorithm="td", n_landmarks=landmarks, **options)
    with pytest.warns(RuntimeWarning, match="with ridge=0; 0.001 was taken"):
        critic.condition(Context.cat([of_task(fine, 0), of_task(swap, 1)]))
    for task, (context, ridge) in enumerate([(fine, 0.0), (swap, 1e-3)]):
        own = InContextTransformer(RBFKernel(1.0), gamma=1.0, n_layers=math.inf, ridge=ridge, n_landmarks=landmarks)
        value = own.condition(of_task(context, task))
        asked = of_task(fine, task).states
        torch.testing.assert_close(critic(asked).squeeze(-1), value(asked) + value.offset, rtol=1e-6, atol=1e-8)


def few_next_states(seed):
    """Transitions that all lead to the same one or two states, where the system of TD is easily singular."""
    rng = np.random.default_rng(seed)
    n, d, hubs = int(rng.integers(2, 14)), int(rng.integers(1, 8)), int(rng.integers(1, 3))
    to = rng.normal(size=(hubs, d))[rng.integers(0, hubs, n)] * rng.choice([0.0, 0.3])
    return Context(rng.normal(size=(n, d)), rng.normal(size=n), to, rng.random(n) < rng.choice([0.0, 0.2]))


@pytest.mark.parametrize("algorithm, kernel", [(None, "laplacian+linear"), ("td", "laplacian"), ("td", "rbf")])
def test_values_of_a_critic_are_such_as_discounted_sums_of_the_rewards_have(algorithm, kernel):
    most = 0.0
    for seed in range(150):
        context = few_next_states(seed)
        critic = InContextCritic(context.n_features, gamma=0.99, algorithm=algorithm, kernel=kernel, offset="removed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            critic.condition(context)
        values = critic(torch.cat([context.states, context.next_states])).squeeze(-1)
        farthest = float((values - critic.shift).abs().max() / context.rewards.abs().max())
        assert farthest <= 2 / (1 - 0.99) * (1 + 1e-9)
        most = max(most, farthest)
        errors = critic.value_function.td_errors
        assert float(errors[-1].norm()) <= 10 * float(errors[0].norm()) * (1 + 1e-9)
    assert most > 10  # so that these contexts are hard ones


@given(hostile(most=100), st.integers(0, 30))
@settings(max_examples=15, deadline=None)
def test_no_context_makes_conjugate_layers_with_a_ridge_diverge(case, n_layers):
    context, gamma = case
    context = of_other_rewards(context, context.rewards.clamp(-1e100, 1e100))  # whose squares are numbers
    transformer = InContextTransformer(
        RBFKernel("median"), n_layers=n_layers, gamma=gamma, algorithm="residual_gradient", acceleration="conjugate", ridge=1e-3
    )  # fmt: skip
    problem, path, errors = transformer.coefficients_by_depth(context)
    assert torch.isfinite(path).all() and torch.isfinite(problem.residual(errors, path)).all()
    size = float(context.rewards.abs().max()) or 1.0
    norms = (errors / size).norm(dim=-1)
    # Squared errors and ridge fall with every layer, and the ridge is zero at first.
    assert float(norms.max()) <= float(norms[0]) * (1 + 1e-6)


def at_the_edge(kind):
    """Contexts that only one line each of the adaptive transformer keeps from harm."""
    rng, n = np.random.default_rng(0), 8
    rewards, s, gamma = rng.normal(size=n), rng.normal(size=(n, 2)), 0.9
    if kind == "differences near rounding":
        t, gamma = s + 1e-8 * rng.normal(size=(n, 2)), 1.0
    else:
        s, t = 1e-300 * s, np.full((n, 2), 1e300)
    return Context(s, rewards, t, np.zeros(n, bool)), gamma


@pytest.mark.parametrize("kind", ["differences near rounding", "next states beyond all numbers"])
def test_contexts_at_the_edge_of_what_numbers_can_say(kind):
    context, gamma = at_the_edge(kind)
    value = AdaptiveTransformer(gamma=gamma).condition(context)
    values = value(torch.cat([context.states, context.next_states]))
    # Without the least ridge they would be a million times the rewards, and their errors not those that were promised.
    assert torch.isfinite(values).all() and float(values.abs().max()) < 100
    torch.testing.assert_close(td_errors(value, context, gamma), value.td_errors[-1], rtol=0, atol=1e-5)
