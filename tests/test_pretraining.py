"""The TD loss by depth against its definition, and training that lowers it."""

import json
import math
import re
import sys

import numpy as np
import pytest
import torch

from icrl_gym import Context, InContextTransformer
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.cli import main
from icrl_gym.datasets import Transitions, contexts
from icrl_gym.envs import KernelMRP
from icrl_gym.kernels import LinearKernel, RBFKernel, SoftmaxKernel
from icrl_gym.learned import LearnedTransformer
from icrl_gym.pretraining import (
    PretrainConfig,
    pretrain,
    split,
    train_heads,
    train_matrices,
    train_step_sizes,
    training_settings,
)
from icrl_gym.similarity import similarity
from icrl_gym.td_loss import mean_squared_reward, td_errors, td_loss_by_depth
from icrl_gym.weight_search import shown_progress


def walk(n_episodes=4, length=60, seed=0):
    """Episodes of a kernel MRP as the transitions of a data set."""
    env = KernelMRP(n_features=2, temperature=0.3, gamma=0.9, seed=seed)
    parts = [env.sample_context(length, seed + e) for e in range(n_episodes)]
    joined = Context.cat(parts)
    arrays = [getattr(joined, name).numpy() for name in ("states", "rewards", "next_states", "terminated", "truncated")]
    return Transitions(*arrays, np.repeat(np.arange(n_episodes), length))


@pytest.mark.parametrize("kernel", [RBFKernel(0.3), SoftmaxKernel(1.0), LinearKernel()], ids=repr)
@pytest.mark.parametrize("normalization", ["row_sum", "length", "none"])
def test_losses_after_each_layer_are_those_of_shallower_transformers(kernel, normalization):
    data, gamma, steps = walk(), 0.9, [0.3, 0.1, 0.2]
    batch, queries = contexts(data, 20, 3, seed=0, query=7)
    inside, outside = td_loss_by_depth(InContextTransformer(kernel, steps, gamma, normalization), batch, queries)
    assert inside.shape == outside.shape == (3, 4)
    for depth in range(4):
        shallow = InContextTransformer(kernel, steps[:depth], gamma, normalization)
        for b in range(3):
            value = shallow.condition(batch[b])
            for transitions, losses in ((batch[b], inside), (queries[b], outside)):
                here, there = value(transitions.states).numpy(), value(transitions.next_states).numpy()
                r, ended = transitions.rewards.numpy(), transitions.terminated.numpy()
                errors = r + gamma * ~ended * there - here
                assert float(losses[b, depth]) == pytest.approx(np.mean(errors**2) / np.mean(r**2), rel=1e-9)
    assert torch.allclose(inside[:, 0], torch.ones(3).double())


def test_contexts_without_reward_have_no_loss_and_overflowing_ones_an_infinite_one():
    states = np.random.default_rng(0).normal(size=(3, 6, 2))
    rewards = np.array([[0.0] * 6, [1.0] * 6, [1.0] * 6])
    batch = Context(states, rewards, states + 0.1, np.zeros((3, 6), bool))
    inside, outside = td_loss_by_depth(InContextTransformer(RBFKernel(1.0), [0.5] * 3, 0.9), batch, batch)
    assert inside[0].isnan().all() and outside[0].isnan().all() and inside[1:].isfinite().all()
    far = Context(
        np.stack([states[0], 1e3 * states[1]]),
        rewards[1:],
        np.stack([states[0], 1e3 * states[1]]),
        np.zeros((2, 6), bool),
    )
    inside, outside = td_loss_by_depth(InContextTransformer(LinearKernel(), [0.1] * 100, 0.9, "none"), far, far)
    assert inside[0].isfinite().all() and inside[1].isinf().all() and outside[1].isinf().all()


@pytest.mark.parametrize(
    "options",
    [{"n_layers": math.inf}, {"n_layers": 2, "n_landmarks": 3}, {"n_layers": 2, "algorithm": "average_reward"}],
)
def test_losses_of_what_has_no_depth_say_so(options):
    batch = Context(np.ones((1, 3, 2)), np.ones((1, 3)), np.ones((1, 3, 2)), np.zeros((1, 3), bool))
    with pytest.raises(ValueError, match="finite transformers without landmarks"):
        td_loss_by_depth(InContextTransformer(RBFKernel(1.0), gamma=0.9, **options), batch, batch)


SMALL = {"n_layers": 5, "n_context": 30, "n_queries": 20, "iterations": 60, "batch_size": 4, "temperature": 0.02}


@pytest.mark.parametrize("normalization", ["row_sum", "length"])
def test_training_lowers_the_loss_on_held_out_episodes(normalization):
    config = PretrainConfig(step_normalization=normalization, **SMALL)
    transformer, losses = train_step_sizes(walk(), config)
    assert len(losses) == 60 and np.mean(losses[-10:]) < np.mean(losses[:10])
    batch, queries = contexts(walk(seed=0, n_episodes=6), 30, 12, seed=9, query=20)
    before = InContextTransformer(RBFKernel(0.02), [1.0] * 5, 0.9, normalization)
    losses_before, losses_after = (td_loss_by_depth(t, batch, queries)[1][:, -1].mean() for t in (before, transformer))
    assert float(losses_after) < 0.9 * float(losses_before)
    assert not transformer.step_sizes.requires_grad and float(transformer.kernel.temperature) > 0.02


def test_the_same_seed_trains_the_same_weights_and_another_others():
    config = {**SMALL, "iterations": 5}
    one, two, other = (train_step_sizes(walk(), PretrainConfig(seed=s, **config))[0] for s in (0, 0, 1))
    assert torch.equal(one.step_sizes, two.step_sizes) and not torch.equal(one.step_sizes, other.step_sizes)


def test_weights_are_written_with_a_card_and_come_back(tmp_path, capsys):
    small = {**SMALL, "iterations": 2, "episodes": 2, "steps": 60}
    config = PretrainConfig("drawer-close-v3", root=str(tmp_path / "data"), out=str(tmp_path / "weights"), **small)
    folder = pretrain(config)
    assert "held-out TD loss, mean delta^2 / mean r^2" in capsys.readouterr().out
    card = json.loads((folder / "card.json").read_text())
    assert card["config"]["domain"] == "drawer-close-v3" and card["held_out_td_loss"] > 0
    loaded = InContextTransformer.from_pretrained(folder)
    assert loaded.step_sizes.tolist() == card["step_sizes"] and float(loaded.gamma) == 0.9


def test_training_matrices_lowers_the_loss_from_the_construction_and_from_random():
    for initialization, shared in (("construction", False), ("random", True)):
        config = PretrainConfig(**{**SMALL, "n_layers": 2}, initialization=initialization, shared_layers=shared,
                                matrix_learning_rate=0.01)  # fmt: skip
        learned, losses = train_matrices(walk(), config)
        assert np.mean(losses[-10:]) < 0.97 * np.mean(losses[:10]), initialization
        assert len(learned.layers) == (1 if shared else 2)
        assert not any(parameter.requires_grad for parameter in learned.parameters())


def test_matrices_are_written_with_a_card_that_says_how_close_they_come(tmp_path, capsys):
    small = {
        **SMALL,
        "n_layers": 2,
        "iterations": 2,
        "episodes": 2,
        "steps": 80,
        "n_context": 20,
        "root": str(tmp_path / "data"),
    }
    command = ["pretrain", "--train", "matrices", "--domain", "drawer-close-v3", "--out", str(tmp_path / "weights")]
    for name, value in small.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    assert main(command) == 0
    assert "beside the construction: map" in capsys.readouterr().out
    card = json.loads((tmp_path / "weights" / "card.json").read_text())
    learned = LearnedTransformer.from_pretrained(tmp_path / "weights")
    config = PretrainConfig(**card["config"])
    batch, queries = contexts(split(config, train=False), 20, 32, 0, 39)
    measured = similarity(learned, batch, queries.states)
    assert card["similarity_to_the_construction"]["map"] == pytest.approx(measured.map) == pytest.approx(1.0, abs=0.05)
    before = td_loss_by_depth(learned.construction, batch, queries)[1][:, -1].nanmean()
    assert card["held_out_td_loss_of_the_construction"] == pytest.approx(float(before))
    assert card["held_out_td_loss"] != card["held_out_td_loss_of_the_construction"]


QUICK = ["--iterations", "2", "--n-layers", "2", "--n-context", "20", "--n-queries", "20", "--batch-size", "2"]
DATA = ["--domain", "drawer-close", "--episodes", "2", "--steps", "60"]


def test_the_command_says_what_it_does_and_keeps_weights_that_are_there(tmp_path, capsys):
    out = tmp_path / "weights"
    command = ["pretrain", *DATA, *QUICK, "--root", str(tmp_path / "data"), "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "pretrain: 2 of 2 iterations, TD loss of the batch" in said
    card = json.loads((out / "card.json").read_text())
    assert f"{card['held_out_td_loss']:.4g} with the trained steps" in said and "the value zero has 1" in said
    assert f"written: weights.safetensors, config.json and card.json in {out}" in said
    assert f"load them: InContextTransformer.from_pretrained({str(out)!r})" in said
    # The full name of a domain, in whatever way it was given, and no word of --force.
    assert card["config"]["domain"] == "drawer-close-v3" and "force" not in card["config"]

    before = {file: file.read_bytes() for file in out.iterdir()}
    other = [*command, "--seed", "1"]
    assert main(other) == 2
    assert "holds config.json, weights.safetensors, card.json already. Give --force" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in out.iterdir()} == before
    assert main([*other, "--force"]) == 0
    replaced = json.loads((out / "card.json").read_text())
    assert replaced["config"]["seed"] == 1 and "--force" not in replaced["trained_by"]

    # Data that are there with other settings: a remedy that this command has, or one that is another command.
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path / "else"), "--episodes", "4"]) == 2
    said = capsys.readouterr().err
    assert "is there with episodes 2 instead of 4. Ask for what is there, give another --root, or record it" in said
    again = said.split("record it again: ")[1].split()
    assert again[:2] == ["icrl-gym", "collect"] and again[-1] == "--force" and main(again[1:]) == 0
    assert main([*command, "--out", str(tmp_path / "else"), "--episodes", "4"]) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (["--iterations", "0"], "--iterations must be at least 1, got 0"),
        (["--episodes", "1"], r"--episodes must be at least 2 \(the first half of the goals trains"),
        (["--n-layers", "0"], "--n-layers must be at least 1"),
        (["--temperature", "-1"], "--temperature must be positive and finite, got -1.0"),
        (["--gamma", "1.5"], r"--gamma must be in \[0, 1\], got 1.5"),
        (["--n-context", "100"], "--n-context 100 and --n-queries 20 are transitions of one episode, and --steps 60"),
        (["--domain", "draw-close"], "did you mean 'drawer-close-v3'"),
        (["--evaluate", "reech"], "did you mean 'reach-v3'"),
        (["--train", "matrices", "--evaluate", "reach"], "--evaluate is for --train steps and heads"),
        (["--train", "heads", "--kernel", "laplacian"], "--kernel cannot be given with --train heads"),
        (["--train", "heads", "--semi-gradient", "--temperature", "1"], "--temperature and --semi-gradient cannot be"),
        (["--train", "heads", "--learning-rate", "0"], "--learning-rate must be positive and finite, got 0.0"),
        (["--train", "heads", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_said_before_anything_is_recorded(options, message, tmp_path, capsys):
    command = [
        "pretrain",
        *DATA,
        *QUICK,
        "--root",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "weights"),
        *options,
    ]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "within_episode" not in error
    assert not list(tmp_path.iterdir())


def test_matrices_need_as_many_queries_as_a_state_has_entries(tmp_path, capsys):
    command = ["pretrain", *DATA, *QUICK, "--n-context", "30", "--train", "matrices", "--root", str(tmp_path / "data")]
    assert main([*command, "--out", str(tmp_path / "weights")]) == 2
    error = capsys.readouterr().err
    assert "takes 39 queries" in error and "give at least --steps 69, or a smaller --n-context" in error
    assert not (tmp_path / "weights").exists()


def test_a_gradient_that_overflows_before_the_values_do_makes_steps_smaller():
    # 200 linear layers without a normalizer: values of 1e150 whose squares are no number any more.
    config = PretrainConfig(**{**SMALL, "n_layers": 200, "iterations": 15}, kernel="linear", step_normalization="none")
    transformer, losses = train_step_sizes(walk(), config)
    assert math.inf in losses and transformer.step_sizes.isfinite().all() and float(transformer.step_sizes.max()) < 1


def test_heads_are_written_with_a_card_that_says_what_they_are_good_for(tmp_path, capsys):
    out = tmp_path / "weights"
    command = ["pretrain", "--train", "heads", *DATA, *QUICK, "--root", str(tmp_path / "data"), "--out", str(out)]
    assert main([*command, "--gamma", "0.95", "--evaluate", "drawer-close"]) == 0
    said = capsys.readouterr().out
    assert "pretrain: 2 of 2 iterations, TD loss of the batch" in said
    assert f"load them: AdaptiveTransformer.from_pretrained({str(out)!r})" in said
    card = json.loads((out / "card.json").read_text())
    before, after = card["held_out_td_loss_of_the_construction"], card["held_out_td_loss"]
    assert f"{before:.4g} with the constructor's heads, {after:.4g} with the trained heads" in said

    config = PretrainConfig(**{**card["config"], "batch_size": 2, "root": str(tmp_path / "data")})
    loaded = AdaptiveTransformer.from_pretrained(out)
    again, losses = train_heads(split(config, train=True), config)
    assert torch.equal(loaded.log_bandwidths, again.log_bandwidths) and float(loaded.gamma) == 0.95
    assert loaded.n_layers == 2 and f"TD loss of the batch {losses[-1]:.3g}" in said

    # The loss of the card, by its definition.
    batch, queries = contexts(split(config, train=False), 20, 32, 0, 20)
    expected = []
    for b in range(32):
        value, r = loaded.condition(batch[b]), queries[b].rewards.numpy()
        following, here = value(queries[b].next_states).numpy(), value(queries[b].states).numpy()
        expected.append(np.mean((r + 0.95 * following - here) ** 2) / np.mean(r**2))
    assert after == pytest.approx(np.mean(expected), rel=1e-9)
    assert card["held_out_td_loss_by_domain"]["drawer-close-v3"]["high"] == after
    for text, part in (("discount 0.95 ", "good_for"), ("gamma is part of the weights", "not_good_for")):
        assert text in card[part]
    assert ("training raised the loss: the constructor's heads" in card["not_good_for"]) == (after > before)
    assert card["data"]["goals_trained_on"] == 1 and "--train heads" in card["trained_by"]
    assert "--learning-rate" not in card["trained_by"] and card["config"]["learning_rate"] == 0.05


def test_training_heads_gives_the_numbers_that_it_always_gave():
    config = PretrainConfig(train="heads", n_context=30, n_queries=20, iterations=3)
    assert (config.contexts_a_step, config.rate) == (8, 0.05)
    transformer, losses = train_heads(walk(), config, bandwidths=(1.0, 3.0), ridges=(1e-3, 1e-1))
    assert losses == pytest.approx([0.03388368330820092, 0.02050705393430359, 0.021738115793564217], rel=1e-5)
    assert transformer.log_bandwidths[0].exp().tolist() == pytest.approx(
        [0.8613945840830746, 3.4692631984172966], rel=1e-6
    )


def test_heads_want_settings_of_their_own_and_learn_nothing_without_any_reward():
    with pytest.raises(ValueError, match="expected settings with train=\"heads\", got 'steps'"):
        train_heads(walk(), PretrainConfig())
    silent = walk()
    silent.rewards[:] = 0.0
    config = PretrainConfig(train="heads", n_context=30, n_queries=20, iterations=2, batch_size=2)
    transformer, losses = train_heads(silent, config)
    assert np.isnan(losses).all() and torch.equal(transformer.log_ridges, AdaptiveTransformer().log_ridges)


@pytest.mark.parametrize("kind, expected", [("steps", (16, 0.03)), ("matrices", (16, 0.03)), ("heads", (8, 0.05))])
def test_settings_that_were_not_given_are_those_of_what_is_trained(kind, expected):
    settings = training_settings(PretrainConfig(train=kind))
    assert (settings["batch_size"], settings["learning_rate"]) == expected
    assert training_settings(PretrainConfig(**settings)) == settings
    given = training_settings(PretrainConfig(train=kind, batch_size=3, learning_rate=1.0))
    assert (given["batch_size"], given["learning_rate"]) == (3, 1.0)


@pytest.mark.parametrize("semi_gradient", [False, True])
def test_td_errors_are_those_of_the_formula_and_so_are_their_gradients(semi_gradient):
    rng = np.random.default_rng(0)
    states, following = rng.normal(size=(2, 3, 5, 4))
    rewards, ends = rng.normal(size=(3, 5)), rng.random((3, 5)) < 0.4
    w = torch.tensor(rng.normal(size=4), requires_grad=True)
    gamma = torch.tensor(0.7, dtype=torch.float64)
    errors = td_errors(lambda s: s @ w, gamma, Context(states, rewards, following, ends), semi_gradient)
    errors.square().sum().backward()
    expected, gradient = np.zeros((3, 5)), np.zeros(4)
    for b, i in np.ndindex(3, 5):
        discount = 0.0 if ends[b, i] else 0.7
        expected[b, i] = (
            rewards[b, i] + discount * following[b, i] @ w.detach().numpy() - states[b, i] @ w.detach().numpy()
        )
        direction = (0.0 if semi_gradient else discount) * following[b, i] - states[b, i]
        gradient += 2 * expected[b, i] * direction
    np.testing.assert_allclose(errors.detach(), expected, atol=1e-12)
    np.testing.assert_allclose(w.grad, gradient, atol=1e-12)


def test_the_mean_squared_reward_is_the_td_loss_of_zero_and_nothing_without_rewards():
    rewards = np.array([[1.0, -2.0], [0.0, 0.0]])
    context = Context(np.ones((2, 2, 1)), rewards, np.ones((2, 2, 1)), np.zeros((2, 2), bool))
    np.testing.assert_array_equal(mean_squared_reward(context), [2.5, np.nan])
    zero = td_errors(lambda states: 0 * states[..., 0], 0.9, context)
    assert float(zero[0].square().mean()) == 2.5


def test_a_search_shows_a_bar_on_a_terminal_and_ten_lines_elsewhere(monkeypatch, capsys):
    pytest.importorskip("tqdm")

    def walk():
        losses = []
        with shown_progress(list(range(25)), losses, True) as shown:
            for item in shown:
                losses.append(item / 8)
        return capsys.readouterr()

    lines = walk().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    assert lines[0] == "pretrain: 3 of 25 iterations, TD loss of the batch 0.25"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = walk()
    assert not bar.out and "25/25" in bar.err and "TD loss 3" in bar.err
