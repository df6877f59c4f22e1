"""Fixed points without a fold, from shared sums, against conditioning on what is left; and what must not reach them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import Context, InContextCritic, InContextTransformer
from icrl_gym.kernels import make_kernel
from icrl_gym.landmark_fixed_points import blocks

GAMMA = 0.95


def walk(n, d=3, seed=0, episode=11, weighted=True):
    """A walk whose episodes end by turns at a limit and by terminating, with rewards that are no function of the state alone."""
    rng = np.random.default_rng(seed)
    states, following, terminated, truncated = np.zeros((n, d)), np.zeros((n, d)), np.zeros(n, bool), np.zeros(n, bool)
    x = rng.normal(size=d)
    for i in range(n):
        states[i], x = x, 0.9 * x + 0.4 * rng.normal(size=d)
        following[i] = x
        if i % episode == episode - 1:
            terminated[i], truncated[i] = i // episode % 2 == 0, i // episode % 2 == 1
            x = rng.normal(size=d)
    weights = rng.uniform(0.2, 2.0, n) if weighted else np.ones(n)
    rewards = states[:, 0] + rng.normal(size=n)
    return Context(states, rewards, following, terminated, truncated, weights=weights)


def cut_between_folds(context, folds):
    """The same transitions, as if each stretch of a fold had been cut off from the next."""
    border = torch.nn.functional.pad(folds[1:] != folds[:-1], (0, 1), value=False)
    return Context(
        context.states, context.rewards, context.next_states, context.terminated,
        context.truncated | (border & ~context.terminated), context.mask, context.weights,
    )  # fmt: skip


def transformer_of(algorithm="td_lambda", n_landmarks=12, value_shift=True, kernel="laplacian+linear", **options):
    options = {"ridge": 1e-3, "n_layers": math.inf, "gamma": GAMMA, **options}
    trace = {"trace_decay": 0.8} if algorithm == "td_lambda" else {}
    return InContextTransformer(
        make_kernel(kernel), algorithm=algorithm, n_landmarks=n_landmarks, value_shift=value_shift, **trace, **options
    )


def by_hand(transformer, context, folds, fold, kernel, landmarks, mask):
    """Conditioning on what is left, with the kernel and the landmarks of the whole."""
    own = InContextTransformer(
        kernel, n_layers=math.inf, gamma=GAMMA, ridge=transformer.ridge, algorithm=transformer.algorithm.name,
        trace_decay=transformer.algorithm.trace_decay or None, value_shift=transformer.value_shift, n_landmarks=len(landmarks),
    )  # fmt: skip
    kept = context if fold == 0 else cut_between_folds(context, folds)[folds != fold]
    return own.condition(kept, landmarks, mask)


FOLDS = {
    "two environments": [0] * 20 + [1] * 13 + [0] * 17 + [2] * 10,
    "side by side": [1] * 9 + [2] * 8 + [1] * 9 + [3] * 20 + [0] * 4 + [2] * 10,
    "one of many transitions": [0] * 5 + [2] + [0] * 24 + [1] * 30,
    "all": [1] * 40 + [2] * 20,
    "every other": [1, 2] * 30,
}


@pytest.mark.parametrize("algorithm", ["td", "td_lambda"])
@pytest.mark.parametrize("value_shift", [True, False])
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("size", [2048, 7])
def test_without_a_fold_it_is_the_fixed_point_of_what_is_left(algorithm, value_shift, name, size, monkeypatch):
    folds = torch.tensor(FOLDS[name])
    context = walk(len(folds), weighted=value_shift)
    transformer = transformer_of(algorithm, value_shift=value_shift)
    monkeypatch.setattr("icrl_gym.landmark_fixed_points.blocks", lambda n: blocks(n, size))
    n_folds = int(folds.max())
    values = transformer.condition_folds(context, folds, n_folds)
    kernel, landmarks, mask = values[0].kernel, values[0].centers, values[0].center_mask
    assert len(values) == n_folds + 1
    asked = walk(40, seed=1).states
    for fold, value in enumerate(values):
        expected = by_hand(transformer, context, folds, fold, kernel, landmarks, mask)
        torch.testing.assert_close(value(asked), expected(asked), rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(value.shift, expected.shift)
        torch.testing.assert_close(value.offset, expected.offset, rtol=1e-8, atol=1e-9)
        kept = (folds != fold) | (fold == 0)
        torch.testing.assert_close(value.td_errors[:, kept], expected.td_errors, rtol=1e-8, atol=1e-8)
        assert not value.td_errors[:, ~kept].any()
    # The whole is what conditioning on it gives, landmarks and all.
    torch.testing.assert_close(values[0](asked), transformer.condition(context)(asked), rtol=1e-8, atol=1e-9)


@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(-1e3, 1e3))
@settings(deadline=None, max_examples=30)
def test_rewards_of_a_fold_reach_everything_but_the_fixed_point_without_it(seed, fold, more):
    rng = np.random.default_rng(seed)
    folds = torch.from_numpy(np.repeat(rng.integers(0, 5, 8), rng.integers(1, 15, 8)))
    context, transformer = walk(len(folds), seed=seed % 1000), transformer_of()
    own = folds == fold
    moved = Context(
        context.states, context.rewards + more * own, context.next_states, context.terminated, context.truncated, None,
        context.weights,
    )  # fmt: skip
    before, after = (transformer.condition_folds(c, folds, 4) for c in (context, moved))
    asked = walk(20, seed=2).states
    assert torch.equal(before[fold](asked), after[fold](asked))  # to the last bit
    if bool(own.any()) and abs(more) > 1e-3:
        assert not torch.equal(before[0](asked), after[0](asked))
        assert all(not torch.equal(before[f](asked), after[f](asked)) for f in range(1, 5) if f != fold)


def test_several_tasks_each_have_their_own():
    contexts = [walk(60, seed=0), walk(45, seed=1)]
    folds = [torch.tensor(FOLDS["two environments"]), torch.tensor([0] * 20 + [2] * 25)]
    batch = Context.stack(contexts)
    transformer = transformer_of(kernel="laplacian")
    values = transformer.condition_folds(batch, torch.stack([folds[0], torch.nn.functional.pad(folds[1], (0, 15))]), 2)
    asked = walk(40, seed=2).states
    for task, (context, own) in enumerate(zip(contexts, folds, strict=True)):
        expected = transformer.condition_folds(context, own, 2)
        for value, alone in zip(values, expected, strict=True):
            torch.testing.assert_close(value(asked.expand(2, -1, -1))[task], alone(asked), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("n_landmarks", [64, None])
@pytest.mark.parametrize("n_tasks", [1, 2])
def test_a_critic_evaluates_folds_as_it_evaluates_contexts(n_landmarks, n_tasks):
    d = 3 + (n_tasks if n_tasks > 1 else 0)
    critic = InContextCritic(d, gamma=GAMMA, ridge=1e-2, n_landmarks=n_landmarks, n_tasks=n_tasks)
    parts = [walk(60, seed=seed) for seed in range(4)]
    if n_tasks > 1:
        code = torch.eye(n_tasks, dtype=torch.float64)
        parts = [
            Context(
                torch.cat([p.states, code[i % 2].expand(60, -1)], -1), p.rewards,
                torch.cat([p.next_states, code[i % 2].expand(60, -1)], -1), p.terminated, p.truncated, None, p.weights,
            )
            for i, p in enumerate(parts)
        ]  # fmt: skip
    context = Context.cat(parts)
    folds = torch.cat([torch.tensor([0] * 40 + [1 + i // n_tasks] * 20) for i in range(4)])
    n_folds = int(folds.max())
    whole, without = critic.evaluate_folds(context, folds, n_folds)
    assert (whole is not None) == (n_landmarks is not None) and len(without) == n_folds
    asked = context.states[::3]
    if whole is not None:
        expected = critic.values_of(critic.evaluate(context), asked)
        torch.testing.assert_close(critic.values_of(whole, asked), expected, rtol=1e-7, atol=1e-8)
    for fold, evaluation in enumerate(without, 1):
        alone = critic.values_of(critic.evaluate(context[folds != fold]), asked)
        found = critic.values_of(evaluation, asked)
        if n_landmarks is None:
            torch.testing.assert_close(found, alone)
        else:  # other landmarks and other coordinates, so another approximation of the same values
            assert np.corrcoef(found, alone)[0, 1] > 0.98


def test_a_fold_without_a_plausible_fixed_point_has_a_ridge_of_its_own():
    # Two states whose successors are the other's, and next to no ridge: without fold 1 nothing else is left.
    swap = Context([[0.0], [1.0]] * 2, [1.0, 1.0] * 2, [[1.0], [0.0]] * 2, [False] * 4)
    rest = walk(40, d=1)
    context = Context.cat([swap, rest.weighted(np.ones(40))])
    folds = torch.tensor([0] * 4 + [1] * 40)
    critic = InContextCritic(
        1, gamma=1.0, ridge=0.0, value_shift=False, standardize=False, kernel="rbf", temperature=1.0, algorithm="td", n_landmarks=2
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="no plausible fixed point"):
        whole, without = critic.evaluate_folds(context, folds, 1)
    assert whole is None and torch.isfinite(critic.values_of(without[0], context.states)).all()


def test_folds_are_for_those_that_share_sums():
    for transformer in (
        transformer_of(n_landmarks=None),
        transformer_of("monte_carlo"),
        transformer_of("residual_gradient"),
        InContextTransformer(make_kernel("rbf"), n_layers=3, n_landmarks=8),
    ):
        assert not transformer.shares_folds
        with pytest.raises(ValueError, match="folds share their sums at infinite depth"):
            transformer.condition_folds(walk(20), torch.zeros(20, dtype=torch.long), 1)


@pytest.mark.parametrize("n", [0, 1])
def test_contexts_of_next_to_nothing(n):
    context = walk(5)[:n]
    for value in transformer_of().condition_folds(context, torch.ones(n, dtype=torch.long), 2):
        assert torch.isfinite(value(walk(4).states)).all()
