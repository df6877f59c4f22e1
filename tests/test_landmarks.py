"""Landmarks against farthest-first traversal written out, and on a context of a short passage and a long rest."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import Context
from icrl_gym.kernels import spread_rows
from icrl_gym.landmarks import choose_landmarks, landmark_rows


def states_of(n, d, seed):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 90), most=st.integers(1, 12), seed=st.integers(0, 99), weighted=st.booleans())
def test_half_is_spread_over_time_and_half_farthest_first(n, most, seed, weighted):
    states = states_of(n, 3, seed)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    rows = landmark_rows(states, most, weights if weighted else None).tolist()
    if n <= most:
        assert rows == list(range(n))
        return
    assert len(rows) == len(set(rows)) <= most
    expected = spread_rows(n, (most + 1) // 2, None, weights if weighted else None).tolist()
    among = spread_rows(n, 16 * most, None, weights if weighted else None).tolist()
    z = states.numpy()
    while len(expected) < most:
        gaps = [min(np.linalg.norm(z[i] - z[j]) for j in expected) for i in among]
        if max(gaps) == 0:
            break
        expected.append(among[int(np.argmax(gaps))])
    assert rows == expected


def test_no_state_is_farther_from_a_landmark_than_the_last_ones_are_from_each_other():
    # Gonzalez 1985: the radius of what is covered is at most the smallest distance between the points chosen for it.
    states = states_of(300, 2, 0)
    rows = landmark_rows(states, 40)
    z = states[rows]
    radius = float(torch.cdist(states, z).amin(-1).max())
    farthest = z[20:]
    between = torch.cdist(farthest, z) + torch.eye(20, 40, dtype=torch.float64).roll(20, -1) * 1e9
    assert radius <= float(between.min())


def test_a_short_passage_before_a_long_rest_has_landmarks():
    passage = torch.linspace(0, 10, 400, dtype=torch.float64).unsqueeze(-1)
    rest = 10 + 0.01 * states_of(4600, 1, 0)
    states = torch.cat([passage, rest])
    assert int((landmark_rows(states, 32) < 400).sum()) >= 15
    assert int((spread_rows(5000, 32) < 400).sum()) <= 3


def test_states_that_are_all_equal_need_no_second_half():
    assert len(landmark_rows(torch.zeros(100, 2), 10)) == 5


def test_a_batch_has_the_landmarks_of_each_context_and_says_how_many():
    one, other = states_of(50, 2, 0), torch.zeros(20, 2, dtype=torch.float64)
    contexts = [Context(s, torch.zeros(len(s)), s, torch.zeros(len(s), dtype=torch.bool)) for s in (one, other)]
    z, mask = choose_landmarks(Context.stack(contexts), 6)
    assert z.shape == (2, 6, 2) and mask.sum(-1).tolist() == [6, 3]
    assert torch.equal(z[0], one[landmark_rows(one, 6)])
    assert (z[1] == 0).all()
