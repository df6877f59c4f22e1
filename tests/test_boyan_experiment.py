"""Boyan chains by the batch against the environment, training on them, and the experiment."""

import csv
import json

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from icrl_gym.cli import main
from icrl_gym.envs import BoyanChain
from icrl_gym.experiments.boyan import (
    GAMMA,
    N_FEATURES,
    N_STATES,
    REWARDS_IN_TRAINING,
    Chains,
    _note,
    linear_construction,
    msve_by_length,
    sample_chains,
    train_on_chains,
)

COUNT = 400


@pytest.fixture(scope="module")
def environments():
    return {kind: [BoyanChain(representable=kind, seed=s) for s in range(COUNT)] for kind in (False, True)}


@pytest.mark.parametrize("representable", [False, True])
def test_chains_by_the_batch_are_those_of_the_environment(representable, environments):
    chains = sample_chains(COUNT, np.random.default_rng(0), representable)
    theirs = environments[representable]
    for name in ("transitions", "initial", "features", "rewards", "values"):
        ours, others = getattr(chains, name), np.stack([getattr(chain, name) for chain in theirs])
        assert ours.shape == others.shape
        # Entry by entry: which are always zero or one, and one entry of each row of the rest as a distribution.
        constant = others.std(0) == 0
        np.testing.assert_array_equal(ours.std(0) == 0, constant)
        np.testing.assert_allclose(ours[:, constant], others[:, constant])
        for index in list(zip(*np.nonzero(~constant), strict=True))[::7]:
            assert ks_2samp(ours[(slice(None), *index)], others[(slice(None), *index)]).pvalue > 1e-4, (name, index)
    for b in range(5):
        expected = np.linalg.solve(np.eye(N_STATES) - GAMMA * chains.transitions[b], chains.rewards[b])
        np.testing.assert_allclose(chains.values[b], expected)
        residual = np.linalg.lstsq(chains.features[b], chains.values[b], rcond=None)[1]
        assert (residual < 1e-20) == representable


def test_walks_follow_the_transitions():
    one = sample_chains(1, np.random.default_rng(1))
    many = Chains(*(np.repeat(getattr(one, name), 20_000, axis=0) for name in one.__dataclass_fields__))
    path = many.walk(3, np.random.default_rng(2))
    starts = np.bincount(path[:, 0], minlength=N_STATES) / len(path)
    np.testing.assert_allclose(starts, one.initial[0], atol=0.015)
    for state in range(N_STATES):
        after = path[path[:, 0] == state, 1]
        seen = np.bincount(after, minlength=N_STATES) / len(after)
        np.testing.assert_allclose(seen, one.transitions[0, state], atol=0.06)


def test_contexts_are_the_beginnings_of_walks():
    chains = sample_chains(3, np.random.default_rng(3))
    path = chains.walk(9, np.random.default_rng(4))
    context, states, rewards = chains.context(path, 5)
    assert context.states.shape == (3, 5, N_FEATURES) and states.shape == (3, 4, N_FEATURES) and rewards.shape == (3, 3)
    for b in range(3):
        phi, r = chains.features[b], chains.rewards[b]
        np.testing.assert_array_equal(context.states[b], phi[path[b, :5]])
        np.testing.assert_array_equal(context.next_states[b], phi[path[b, 1:6]])
        np.testing.assert_array_equal(context.rewards[b], r[path[b, :5]])
        np.testing.assert_array_equal(states[b], phi[path[b, 5:]])
        np.testing.assert_array_equal(rewards[b], r[path[b, 5:8]])


def test_value_errors_are_those_of_a_loop():
    (errors,) = msve_by_length(linear_construction(2), [12], 3, True)
    for index, error in enumerate(errors):
        chain = BoyanChain(representable=True, seed=10_000 + index)
        context = chain.sample_context(12, 0)
        phi, following, r = (t.numpy() for t in (context.states, context.next_states, context.rewards))
        w = np.zeros(N_FEATURES)
        for _ in range(2):
            w = w + phi.T @ (r + GAMMA * following @ w - phi @ w) / 12
        assert error == pytest.approx(chain.msve(chain.features @ w) / chain.msve(np.zeros(N_STATES)))


def test_more_transitions_help_where_values_are_linear():
    short, long = msve_by_length(linear_construction(30), [8, 100], 40, True)
    assert np.mean(long) < 0.5 * np.mean(short)


def test_training_from_random_matrices_finds_td():
    # Not from every seed: some stay where K reads the reward and V a state.
    _, history = train_on_chains(1, 300, seed=2, n_queries=16, n_points=6)
    first, last = history[0], history[-1]
    assert [point["iteration"] for point in history] == [0, 50, 100, 150, 200, 250, 300]
    assert last["msve"] < 0.97 * first["msve"] and last["loss"] < history[1]["loss"]
    assert first["implicit_weight"] < 0.5 < 0.9 < last["implicit_weight"]
    assert last["value"] > 0.95 and last["product"] > 0.65 and last["step"] > 0.2
    again, _ = train_on_chains(1, 5, seed=0, n_queries=8, n_points=1)
    same, _ = train_on_chains(1, 5, seed=0, n_queries=8, n_points=1)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), same.parameters(), strict=True))


def test_the_experiment_leaves_its_folder(tmp_path):
    run = ["reproduce", "boyan", "--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    assert main(run) == 0
    folder = tmp_path / "boyan"
    for name in ("msve.png", "emergence.png", "matrices.png", "table.csv", "verdict.md"):
        assert (folder / name).stat().st_size > 50, name
    assert json.loads((folder / "config.json").read_text())["name"] == "boyan"
    with (folder / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["varied"] for row in rows} == {"n", "iteration"}
    assert {row["model"] for row in rows} == {"linear", "rbf", "linear fixed point", "trained"}
    start = [r for r in rows if r["quantity"] == "map" and r["at"] == "0"]
    assert len(start) == 2 and all(abs(float(r["mean"])) < 0.5 for r in start)
    # What a mean above the value zero comes from.
    assert all(bool(row["note"]) == (float(row["mean"]) > 1) for row in rows if row["quantity"] == "relative MSVE")
    verdict = (folder / "verdict.md").read_text()
    finding = verdict.split("Measured: ")[1].removesuffix("They differ.\n").removesuffix("They agree.\n")
    assert finding.count(". ") <= 3 and len(finding) < 450 and "inf" not in finding


def test_a_note_says_which_chains_lift_the_mean():
    errors, rewards = np.array([0.1, 0.2, 0.3, 5e4]), np.array([1.0, 1.1, 1.2, 3.0])
    assert _note(errors[:3], None) == _note(errors[:3], rewards[:3]) == ""
    assert _note(errors, None) == "1 of 4 chains above 1, the median 0.25"
    assert _note(errors, rewards).endswith("rewards (root mean square) 3 where above, 1.1 elsewhere, 0.58 in training")
    chains = sample_chains(4000, np.random.default_rng(0))  # what training draws
    assert np.sqrt(np.mean(chains.rewards**2)) == pytest.approx(REWARDS_IN_TRAINING, rel=0.01)
