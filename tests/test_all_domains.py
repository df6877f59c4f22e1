"""The experiments on all domains: what is drawn, what it is compared with, and the whole command at quick size."""

import csv
import math

import numpy as np
import pytest
import torch

from icrl_gym import Context
from icrl_gym.adaptive_pretraining import td_errors, train_heads
from icrl_gym.cli import main
from icrl_gym.datasets import CollectConfig, Transitions, collect
from icrl_gym.experiments.all_domains import build, draw
from icrl_gym.experiments.baselines import fit_networks
from icrl_gym.pretraining import PretrainConfig


def walks(n_episodes=3, length=60, seed=0):
    rng = np.random.default_rng(seed)
    n = n_episodes * length
    states = rng.normal(size=(n, 2)).cumsum(0) * 0.1
    rewards = np.sin(states[:, 0])
    last = np.arange(n) % length == length - 1
    return Transitions(
        states, rewards, states + 0.05, np.zeros(n, bool), last, np.repeat(np.arange(n_episodes), length)
    )


@pytest.mark.parametrize(("n", "of_one_episode"), [(30, True), (55, True), (150, False)])
def test_what_is_drawn_are_transitions_with_their_true_returns(n, of_one_episode):
    data = walks()
    contexts, queries, returns, asked = draw(data, n, 5, 4, seed=1, gamma=0.9)
    assert contexts.states.shape == (4, n, 2) and queries.states.shape == (4, 5, 2)
    assert returns.shape == (4, n) and asked.shape == (4, 5)
    for part, sums in ((contexts, returns), (queries, asked)):
        for b in range(4):
            rows = [int(np.flatnonzero((data.states == s.numpy()).all(1))[0]) for s in part.states[b]]
            if of_one_episode:
                assert len({data.episode[row] for row in rows}) == 1
            for row, total in zip(rows, sums[b], strict=True):
                end = (row // 60 + 1) * 60
                expected = sum(0.9**k * data.rewards[row + k] for k in range(end - row))
                assert float(total) == pytest.approx(expected, rel=1e-10)
    assert torch.equal(draw(data, n, 5, 4, seed=1, gamma=0.9)[0].states, contexts.states)


def test_networks_are_fitted_each_to_its_own_context():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(2, 40, 3))
    rewards = np.stack([states[0, :, 0], -2 * states[1, :, 1]])
    batch = Context(states, rewards, states + 0.1, np.zeros((2, 40), bool))
    fitted = fit_networks(batch, batch, gamma=0.0, steps=400, every=100)
    assert fitted.steps == [0, 100, 200, 300, 400] and fitted.losses.shape == (2, 5)
    assert (fitted.losses[:, -1] < 0.02 * torch.tensor(rewards).square().mean(-1)).all()
    # Without a discount the values are the rewards themselves, and each network has those of its own context.
    torch.testing.assert_close(fitted.values, torch.tensor(rewards), rtol=0, atol=0.6)
    errors = torch.tensor(rewards) - fitted.values
    torch.testing.assert_close(errors.square().mean(-1), fitted.losses[:, -1])
    alone = fit_networks(batch[1:], batch[1:], gamma=0.0, steps=0)
    assert alone.losses.shape == (1, 1)


def test_a_network_starts_at_the_best_constant():
    batch = Context(np.zeros((1, 5, 2)), np.ones((1, 5)), np.zeros((1, 5, 2)), np.zeros((1, 5), bool))
    fitted = fit_networks(batch, batch, gamma=0.9, steps=0)
    torch.testing.assert_close(fitted.values, torch.full((1, 5), 10.0).double(), rtol=0, atol=0.2)


def test_training_the_heads_changes_them_and_is_reproducible():
    config = PretrainConfig(n_context=20, n_queries=10, iterations=3, batch_size=2, n_layers=5, train="heads")
    start = {"bandwidths": (1.0, 3.0), "ridges": (1e-4, 1e-1), "metrics": ("standardized",)}
    one, losses = train_heads(walks(), config, **start)
    two, _ = train_heads(walks(), config, **start)
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    assert torch.equal(one.log_bandwidths, two.log_bandwidths) and not one.log_ridges.requires_grad
    assert not torch.allclose(one.log_bandwidths.exp(), torch.tensor([[1.0, 3.0]]).double(), atol=1e-3)
    assert float(one.log_ridges.exp().min()) >= 1e-4 * (1 - 1e-9)


def test_td_errors_do_not_bootstrap_past_an_end():
    part = Context([[1.0], [2.0]], [1.0, 1.0], [[2.0], [3.0]], [False, True])
    errors = td_errors(lambda s: torch.as_tensor(s).sum(-1) * 10, 0.5, part)
    assert errors.tolist() == [1 + 0.5 * 20 - 10, 1 - 20]


def test_the_whole_command(tmp_path, capsys):
    assert main(["reproduce", "all-domains", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert main(["reproduce", "any-context", "--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]) == 0
    with (tmp_path / "all-domains" / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["task"], r["gamma"]) for r in rows] == [
        (t, g) for g in ("0.9", "0.99") for t in ("reach-v3", "drawer-close-v3")
    ]
    for row in rows:
        assert 0 < float(row["adaptive"]) < 1 and -1 <= float(row["correlation, adaptive"]) <= 1
        assert float(row["MLP at its best"]) <= float(row["MLP"])
        assert float(row["adaptive 95% low"]) <= float(row["adaptive"]) <= float(row["adaptive 95% high"])
    with (tmp_path / "any-context" / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["gamma"] for row in rows] == ["0.9", "0.99"] and all(
        row["finite"] == row["cells"] == "2" for row in rows
    )
    assert list((tmp_path / "all-domains").glob("heat_map_*.png"))
    assert not list((tmp_path / "all-domains").glob("*partial*"))


def test_the_constructions_have_the_depth_they_are_named_after():
    weights = {"bandwidths": [[1.0]] * 3, "ridges": [0.1], "temperature": 0.5, "step_sizes": [1.0, 2.0]}
    assert (
        build("adaptive", weights, 0.9).n_layers == 20
        and build("adaptive fixed point", weights, 0.9).n_layers == math.inf
    )
    assert build("paper", weights, 0.9).step_normalization == "length" and build("row_sum", weights, 0.9).n_layers == 2


def test_data_of_another_experiment_are_kept_and_the_error_says_what_to_do(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    collect(CollectConfig(("drawer-close",), ("high",), episodes=2, steps=5, root=str(data)))
    arguments = ["reproduce", "all-domains", "--quick", "--out", str(out), "--root", str(data)]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "is there with episodes 2 instead of 4, steps 5 instead of 220. They may be another experiment's" in said
    assert "give another --root" in said and "--force" not in said
