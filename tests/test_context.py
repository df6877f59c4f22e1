"""The context and its ring buffer: what is accepted, what is refused, and that nothing is shared."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import InContextTransformer
from icrl_gym.context import Context, TransitionBuffer
from icrl_gym.kernels import RBFKernel


def fields(n=4, d=2, batch=()):
    g = torch.Generator().manual_seed(0)
    states, next_states = (torch.randn(*batch, n, d, generator=g) for _ in range(2))
    return {
        "states": states,
        "rewards": torch.randn(*batch, n, generator=g),
        "next_states": next_states,
        "terminated": torch.rand(*batch, n, generator=g) < 0.5,
    }


def test_lists_arrays_and_tensors_are_accepted():
    lists = Context([[1, 2], [3, 4]], [1, 2], [[3, 4], [5, 6]], [False, True])
    assert lists.states.dtype == torch.get_default_dtype()
    arrays = Context(np.ones((3, 2)), np.ones(3), np.ones((3, 2)), np.zeros(3, bool))
    assert arrays.states.dtype == torch.float64 and len(arrays) == 3 and arrays.n_features == 2
    scalar_states = Context([1.0, 2.0], [0.0, 0.0], [2.0, 3.0], [False, False])
    assert scalar_states.states.shape == (2, 1)
    assert Context(**fields(batch=(5,))).batch_shape == (5,)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rewards": torch.ones(3)}, ValueError, r"states \(4, 2\) and rewards \(3,\)"),
        ({"next_states": torch.ones(4, 3)}, ValueError, r"shape of states, \(4, 2\); got \(4, 3\)"),
        ({"terminated": torch.ones(4)}, TypeError, "terminated must be boolean, got torch.float32"),
        ({"terminated": torch.ones(3, dtype=torch.bool)}, ValueError, r"terminated must have shape \(4,\)"),
        ({"mask": [1, 0, 1, 0]}, TypeError, "mask must be boolean"),
        ({"rewards": torch.tensor([1.0, float("nan"), 1.0, 1.0])}, ValueError, "rewards must be finite; 1 of 4"),
        ({"states": torch.full((4, 2), float("inf"))}, ValueError, "states must be finite; 4 of 4"),
        ({"states": torch.ones(4, 2, dtype=torch.complex64)}, TypeError, "states must be real"),
    ],
)
def test_what_does_not_fit_says_so(change, error, message):
    with pytest.raises(error, match=message):
        Context(**{**fields(), **change})


def test_an_empty_place_may_hold_anything_and_holds_nothing():
    bad = fields()
    bad["states"][1] = float("nan")
    bad["rewards"][1] = float("inf")
    context = Context(**bad, mask=[True, False, True, True])
    assert (context.states[1] == 0).all() and context.rewards[1] == 0
    assert int(context.n_transitions) == 3
    assert torch.isnan(bad["states"][1]).all()  # what came in is as it was


def test_parts_joined_and_stacked():
    one, two = Context(**fields(4)), Context(**fields(2))
    assert one[1] == one[1:2] and one[-1] == one[3:]
    assert Context.cat([one, two])[4:] == two
    stacked = Context.stack([one, two])
    assert stacked.batch_shape == (2,) and stacked.n_transitions.tolist() == [4, 2]
    assert stacked[1][:2] == two and stacked[0] == one
    assert stacked[..., slice(0, 2)].states.shape == (2, 2, 2)
    assert repr(stacked) == "Context(n=4, d=2, batch_shape=(2,), filled=[4, 2])"
    assert len(Context.empty(7)) == 0 and Context.empty(7).n_features == 7
    for joined in (Context.cat, Context.stack):
        with pytest.raises(ValueError, match="at least one context"):
            joined([])


def test_copies_and_pickles_are_equal_and_alone():
    context = Context(**fields(), truncated=[False, True, False, False])
    for clone in (copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
        assert clone == context and clone is not context
        clone.states.fill_(0.0)
        assert clone != context
    assert context.to(dtype=torch.float64).rewards.dtype == torch.float64
    assert context != 3


@settings(deadline=None, max_examples=60)
@given(
    capacity=st.integers(1, 7),
    events=st.lists(st.sampled_from(["add", "add", "add", "cut", "skip", "clear"]), max_size=40),
)
def test_the_ring_is_a_list_of_the_newest(capacity, events):
    buffer, expected, last = TransitionBuffer(capacity, 2, np.float64), [], None
    for index, event in enumerate(events):
        if event == "add":
            last = [index, False]
            expected = [*expected, last][-capacity:]
            buffer.add(np.array([index, 0.0]), index, np.array([index + 1, 0.0]), False)
        elif event == "cut" and last is not None:
            last[1] = True
            buffer.cut()
        elif event == "cut":
            buffer.cut()  # nothing to cut
        elif event == "skip":
            last = None
            buffer.skip()
        else:
            expected, last = [], None
            buffer.clear()
    context = buffer.context()
    assert context.rewards.tolist() == [index for index, _ in expected]
    assert context.truncated.tolist() == [cut for _, cut in expected]
    assert len(buffer) == len(expected)
    newest = buffer.context(newest=2)
    assert newest.rewards.tolist() == [index for index, _ in expected[-2:]]


def test_the_buffer_copies_in_and_out():
    buffer, state = TransitionBuffer(3, 2, np.float64), np.array([1.0, 2.0])
    buffer.add(state, 1.0, state, False)
    state[:] = 9.0
    context = buffer.context()
    context.states.fill_(5.0)
    assert buffer.context().states.tolist() == [[1.0, 2.0]]
    other = TransitionBuffer(2, 2, np.float64)
    other.extend(Context.cat([buffer.context()] * 3))
    assert len(other) == 2
    with pytest.raises(ValueError, match="states with 2 entries"):
        other.extend(Context.empty(3))


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True, "8"])
def test_a_length_must_be_a_whole_number(capacity):
    from inspect import unwrap

    with pytest.raises(ValueError, match="at least 1 transition, got"):
        unwrap(TransitionBuffer.__init__)(TransitionBuffer.__new__(TransitionBuffer), capacity, 2)


def test_arrays_that_must_not_be_written_to_are_taken():
    states = np.ones((3, 2))
    states.flags.writeable = False
    context = Context(states, np.ones(3), states, np.zeros(3, bool))
    value = InContextTransformer(RBFKernel(1.0), gamma=0.5, n_layers=2).condition(context)
    assert torch.isfinite(value(states)).all()
