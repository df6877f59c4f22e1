"""Weights on disk: what was saved comes back, and nothing else is let in."""

import json
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

from icrl_gym import Context, InContextTransformer
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.datasets import NOISE_LEVELS, CollectConfig, collect, contexts, dataset_id, load_transitions
from icrl_gym.kernels import (
    ExponentialKernel,
    Kernel,
    LaplacianKernel,
    LinearKernel,
    MaternKernel,
    RBFKernel,
    ReLUKernel,
    SoftmaxKernel,
)
from icrl_gym.learned import LearnedTransformer
from icrl_gym.metaworld import PAPER_DOMAINS
from icrl_gym.pretraining import PretrainConfig, scaled, training_settings
from icrl_gym.weights import shipped, shipped_card

TRANSFORMERS = {
    "trained": InContextTransformer(
        RBFKernel(0.1), [0.5, 1.5, 0.2], gamma=0.7, step_normalization="length", offset="removed"
    ),
    "sum": InContextTransformer(
        RBFKernel(0.3) + 0.5 * LaplacianKernel("median"), [1.0] * 4, gamma=0.9, value_shift=True
    ),
    "softmax": InContextTransformer(SoftmaxKernel(2.0), [], gamma=0.0),
    "limit": InContextTransformer(LinearKernel(), n_layers=math.inf, ridge=1e-3, n_landmarks=3),
    "exponential": InContextTransformer(ExponentialKernel(3.0), [0.3, 0.1], gamma=0.5),
    "matern": InContextTransformer(MaternKernel("median"), n_layers=math.inf, gamma=1.0, offset="removed"),
    "relu": InContextTransformer(ReLUKernel(), torch.tensor([0.1, 0.2]), gamma=0.95),
    "lambda": InContextTransformer(RBFKernel(0.3), [0.5, 0.2], algorithm="td_lambda", trace_decay=0.7),
    "residual": InContextTransformer(
        RBFKernel(0.3), n_layers=4, algorithm="residual_gradient", acceleration="conjugate", ridge=1e-3
    ),
    "average": InContextTransformer(RBFKernel(0.3), n_layers=math.inf, algorithm="average_reward", ridge=1e-2),
    "returns": InContextTransformer(RBFKernel(0.3), [0.4], algorithm="monte_carlo", value_shift=True, ridge=1e-2),
    "adaptive": AdaptiveTransformer(
        [0.7, 3.0], [1e-3, 0.1, 0.5], ["standardized"], n_layers=7, gamma=0.8, sharpness=0.2
    ),
    "adaptive limit": AdaptiveTransformer(n_layers=math.inf, n_folds=3, contiguous_folds=True, offset="removed"),
    "none": InContextTransformer(
        RBFKernel(torch.tensor(0.1)), [0.02], step_normalization="none", value_shift=True, n_landmarks=2
    ),
}


def context():
    g = torch.Generator().manual_seed(0)
    states = torch.randn(9, 2, generator=g, dtype=torch.float64)
    return Context(states, torch.randn(9, generator=g), states.flip(0), torch.zeros(9, dtype=torch.bool))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_what_was_saved_comes_back(name, tmp_path):
    saved = TRANSFORMERS[name]
    saved.save_pretrained(tmp_path / "weights")
    loaded = type(saved).from_pretrained(tmp_path / "weights")
    assert repr(loaded) == repr(saved)
    asked = torch.randn(5, 2, dtype=torch.float64)
    before, after = saved.condition(context()), loaded.condition(context())
    torch.testing.assert_close(after(asked), before(asked), rtol=0, atol=0)
    torch.testing.assert_close(after.offset, before.offset, rtol=0, atol=0)
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["config.json", "weights.safetensors"]


def test_a_transformer_of_another_kind_says_so(tmp_path):
    TRANSFORMERS["adaptive"].save_pretrained(tmp_path / "a")
    TRANSFORMERS["trained"].save_pretrained(tmp_path / "t")
    with pytest.raises(ValueError, match="holds a AdaptiveTransformer; load it with that class"):
        InContextTransformer.from_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="holds a InContextTransformer"):
        AdaptiveTransformer.from_pretrained(tmp_path / "t")


@pytest.fixture
def folder(tmp_path):
    TRANSFORMERS["trained"].save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


def test_nothing_there_says_so(tmp_path, folder):
    for missing in ("pick-place-v9", tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"expected a folder with config.json and weights.safetensors"):
            InContextTransformer.from_pretrained(missing)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        InContextTransformer.from_pretrained(folder)


@pytest.mark.parametrize("keep", [0, 5, 60, -8])
def test_a_truncated_file_says_so(folder, keep):
    file = folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        InContextTransformer.from_pretrained(folder)


def test_a_pickle_is_refused_and_does_not_run(folder, tmp_path):
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self):
            return open, (str(trap), "w")

    (folder / "weights.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="Pickled weights are not read"):
        InContextTransformer.from_pretrained(folder)
    torch.save({"step_sizes": torch.ones(3)}, folder / "weights.safetensors")
    with pytest.raises(ValueError, match="Pickled weights are not read"):
        InContextTransformer.from_pretrained(folder)
    assert not trap.exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "another"}, "does not say format"),
        ({"version": 2}, "does not say format"),
        ({"kernel": {"name": "warp"}}, "unknown kernel 'warp'"),
        ({"n_layers": 5}, "does not fit config.json"),
        ({"n_layers": 2.7}, "n_layers must be a whole number"),
        ({"n_layers": None}, "is not the configuration of a transformer"),
        ({"kernel": {"name": "rbf", "tau": 3.0}}, "the rbf kernel takes no tau"),
        ({"kernel": {"name": "rbf", "temperature": -1.0}}, "temperature must be positive"),
        ({"kernel": {"name": "sum"}}, "the sum kernel needs kernels"),
        ({"step_normalization": "sideways"}, "step_normalization must be one of|step_normalization"),
    ],
)
def test_a_foreign_configuration_says_so(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((ValueError, TypeError), match=message):
        InContextTransformer.from_pretrained(folder)
    (folder / "config.json").write_text('{"format": "icrl_gym.InCont')
    with pytest.raises(ValueError, match="is not the configuration of a transformer"):
        InContextTransformer.from_pretrained(folder)


def test_a_killed_save_leaves_nothing_that_loads(tmp_path, monkeypatch):
    from icrl_gym import weights

    calls = []

    def killed(path, content):
        if calls:
            raise KeyboardInterrupt
        calls.append(path)
        real(path, content)

    real = weights._replace
    monkeypatch.setattr(weights, "_replace", killed)
    with pytest.raises(KeyboardInterrupt):
        TRANSFORMERS["trained"].save_pretrained(tmp_path / "weights")
    with pytest.raises(FileNotFoundError):
        InContextTransformer.from_pretrained(tmp_path / "weights")


@pytest.mark.parametrize("text", [b"[1, 2]", b"null", b"\xff\xfe\x00", b"[" * 200_000, b""])
def test_what_is_no_configuration_says_so(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match="is not the configuration of a transformer"):
        InContextTransformer.from_pretrained(folder)


@pytest.mark.parametrize(
    "name, value",
    [("gamma", 5.0), ("gamma", math.nan), ("step_sizes", [math.inf, 1.0, 1.0]), ("kernel.temperature", -1.0)],
)
def test_numbers_out_of_range_say_so(folder, name, value):
    from safetensors.torch import load_file, save_file

    file = folder / "weights.safetensors"
    save_file({**load_file(file), name: torch.tensor(value, dtype=torch.float64)}, file)
    with pytest.raises(ValueError, match="holds numbers out of their range: expected finite step sizes"):
        InContextTransformer.from_pretrained(folder)


def test_a_save_over_another_transformer_replaces_it_or_leaves_nothing_that_loads(folder, monkeypatch):
    from icrl_gym import weights

    other = InContextTransformer(LaplacianKernel(2.0), [1.0, 2.0, 3.0], gamma=0.1)
    real = weights._replace

    def killed(path, content):
        real(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_replace", killed)
        with pytest.raises(KeyboardInterrupt):
            other.save_pretrained(folder)
    # Otherwise: the new numbers under the old configuration, which fit by chance.
    with pytest.raises(FileNotFoundError):
        InContextTransformer.from_pretrained(folder)
    other.save_pretrained(folder)
    assert repr(InContextTransformer.from_pretrained(folder)) == repr(other)


# What the package ships


SHIPPED = tuple(PAPER_DOMAINS)
ADAPTIVE = ("adaptive-0.9", "adaptive-0.99")


def test_the_weights_of_the_paper_s_domains_are_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert set(shipped()) == {*SHIPPED, *ADAPTIVE}
    short = InContextTransformer.from_pretrained("pick-place")
    assert torch.equal(short.step_sizes, InContextTransformer.from_pretrained("pick-place-v3").step_sizes)
    with pytest.raises(FileNotFoundError, match=r"or a shipped name .*plate-slide-v3"):
        InContextTransformer.from_pretrained("pick-place-v3-v3")
    with pytest.raises(ValueError, match=r"is named 'reach-v3'; expected one of adaptive-0\.9, .*button-press-v3"):
        shipped_card("reach-v3")
    # A folder of that name in the working directory comes first.
    TRANSFORMERS["trained"].save_pretrained(tmp_path / "pick-place")
    assert repr(InContextTransformer.from_pretrained("pick-place")) == repr(TRANSFORMERS["trained"])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_transformer_is_the_paper_s_construction_and_has_a_card(name):
    transformer, card = InContextTransformer.from_pretrained(name), shipped_card(name)
    assert (
        transformer.n_layers == 20 and float(transformer.gamma) == 0.9 and transformer.step_normalization == "row_sum"
    )
    assert isinstance(transformer.kernel, RBFKernel) and 0.01 < float(transformer.kernel.temperature) < 1
    assert transformer.algorithm.name == "td" and transformer.acceleration == "none" and not transformer.value_shift
    assert bool((transformer.step_sizes > 1).all()) and bool((transformer.step_sizes < 20).all())
    assert card["temperature"] == float(transformer.kernel.temperature)
    assert card["step_sizes"] == transformer.step_sizes.tolist()
    assert card["config"]["domain"] == card["data"]["task"] == name and card["config"]["seed"] == 0
    assert card["data"]["dataset"] == dataset_id(name, "high") and re.fullmatch("[0-9a-f]{64}", card["data"]["sha256"])
    assert (
        card["trained_by"].startswith(f"icrl-gym pretrain --domain {name} --noise high ")
        and "/" not in card["trained_by"]
    )
    assert card["config"]["root"] is None and card["config"]["out"] == name
    assert {"torch", "metaworld", "numpy", "python", "icrl-gym"} <= set(card["versions"])
    losses = card["held_out_td_loss_by_domain"]
    assert set(losses) == set(SHIPPED) and all(set(levels) == set(NOISE_LEVELS) for levels in losses.values())
    assert all(0 < loss < 1 for levels in losses.values() for loss in levels.values())
    assert losses[name]["high"] == card["held_out_td_loss"]
    assert f"{name} ({max(losses[name].values()):.2g})" in card["good_for"]
    raised = card["held_out_td_loss"] > card["held_out_td_loss_of_the_construction"]
    assert ("training raised the loss" in card["not_good_for"]) == raised
    assert f"the largest step is {max(card['step_sizes']):.2g}" in card["not_good_for"]
    assert "states far apart against the temperature; `condition` raises an error" in card["not_good_for"]
    apart = 10 * math.sqrt(card["temperature"])
    with pytest.raises(FloatingPointError, match=r"layers diverge .*layer"):
        transformer.condition(Context([[0.0], [apart]], [1.0, 0.0], [[apart], [2 * apart]], [False, False]))


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_shipped_adaptive_transformer_has_a_card_too(name):
    transformer, card = AdaptiveTransformer.from_pretrained(name), shipped_card(name)
    gamma = float(name.removeprefix("adaptive-"))
    assert float(transformer.gamma) == gamma == card["config"]["gamma"] and transformer.n_layers == 20
    assert not any(buffer.requires_grad for buffer in transformer.buffers())
    bandwidths = transformer.log_bandwidths.exp().tolist()
    # The logarithms are what is kept; machines round their exponentials differently in the last digit.
    assert list(card["bandwidths"]) == list(transformer.metrics)
    for metric, expected in zip(transformer.metrics, bandwidths, strict=True):
        assert card["bandwidths"][metric] == pytest.approx(expected, rel=1e-12)
    assert card["ridges"] == pytest.approx(transformer.log_ridges.exp().tolist(), rel=1e-12) and min(
        card["ridges"]
    ) >= 1e-4 * (1 - 1e-9)
    # Trained: neither the multiples nor the ridges are those of the constructor.
    start = AdaptiveTransformer(gamma=gamma)
    assert not torch.allclose(transformer.log_bandwidths, start.log_bandwidths, atol=0.1)
    # Of the very data that the step sizes of pick-place are.
    assert card["data"] == shipped_card("pick-place-v3")["data"]
    losses = card["held_out_td_loss_by_domain"]
    assert set(losses) == set(SHIPPED) and all(set(levels) == set(NOISE_LEVELS) for levels in losses.values())
    assert all(0 < loss < 1 for levels in losses.values() for loss in levels.values())
    assert losses["pick-place-v3"]["high"] == card["held_out_td_loss"]
    raised = card["held_out_td_loss"] > card["held_out_td_loss_of_the_construction"]
    assert ("training raised the loss" in card["not_good_for"]) == raised
    assert f"Values at the discount {gamma} " in card["good_for"] and "none makes them diverge" in card["good_for"]
    for caveat in ("gamma is part of the weights", "450 columns", "docs/critic.md"):
        assert caveat in card["not_good_for"]
    assert card["config"]["root"] is None and card["config"]["out"] == name and "kernel" not in card["config"]


def test_a_shipped_adaptive_transformer_has_values_where_trained_steps_diverge():
    states = np.linspace(0, 5, 21)[:, None]
    ended = np.arange(20) == 19
    context = Context(states[:-1], np.ones(20), states[1:], ended)
    with pytest.raises(FloatingPointError, match="layers diverge"):
        InContextTransformer.from_pretrained("pick-place-v3").condition(context)
    # A walk of 20 steps with the reward 1 each: a closed form.
    value = AdaptiveTransformer.from_pretrained("adaptive-0.9").condition(context)
    true = (1 - 0.9 ** np.arange(20, 0, -1)) / (1 - 0.9)
    error = value(states[:-1]).numpy() - true
    assert np.mean(error**2) < 0.12**2 * np.mean(true**2)
    # States in other units and rewards in other units: the same values, in those units.
    moved = Context(7 + 1000 * states[:-1], np.full(20, 0.001), 7 + 1000 * states[1:], ended)
    again = AdaptiveTransformer.from_pretrained("adaptive-0.9").condition(moved)
    torch.testing.assert_close(1000 * again(7 + 1000 * states[:-1]), value(states[:-1]), rtol=1e-6, atol=1e-6)


def test_a_shipped_name_of_another_kind_names_the_right_class():
    with pytest.raises(ValueError, match=r"adaptive-0\.9 holds a AdaptiveTransformer; load it with that class"):
        InContextTransformer.from_pretrained("adaptive-0.9")
    with pytest.raises(ValueError, match="pick-place holds a InContextTransformer"):
        AdaptiveTransformer.from_pretrained("pick-place")


@pytest.mark.parametrize("name", ["shelf-place-v3", *ADAPTIVE])
def test_the_command_of_a_card_is_understood_and_says_its_settings(name):
    card = shipped_card(name)
    config = tyro.cli(PretrainConfig, args=card["trained_by"].split()[2:])
    assert training_settings(replace(config, out=name)) == card["config"]
    assert config.evaluate == SHIPPED


def test_shipped_weights_evaluate_fresh_recordings_better_than_the_value_zero(tmp_path):
    # Other goals and other noise than those of any training: another seed.
    collect(
        CollectConfig(
            ("plate-slide", "button-press"), ("medium",), episodes=2, steps=150, seed=7, root=str(tmp_path), jobs=1
        )
    )
    for task in ("plate-slide-v3", "button-press-v3"):
        data = load_transitions(dataset_id(task, "medium"), root=tmp_path)
        batch, queries = contexts(scaled(data, 0.1), 100, 4, 0, 50)
        for name in SHIPPED:
            value = InContextTransformer.from_pretrained(name).condition(batch)
            errors = queries.rewards + 0.9 * value(queries.next_states) - value(queries.states)
            assert float(errors.square().mean() / queries.rewards.square().mean()) < 0.2, (task, name)
        for name in ADAPTIVE:
            transformer = AdaptiveTransformer.from_pretrained(name)
            value = transformer.condition(batch)
            errors = queries.rewards + transformer.gamma * value(queries.next_states) - value(queries.states)
            assert float(errors.square().mean() / queries.rewards.square().mean()) < 0.2, (task, name)


def test_the_page_s_blocks_run_and_print_what_it_says(tmp_path):
    page = (Path(__file__).resolve().parent.parent / "docs" / "weights.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for line in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE):
            assert done.stdout.splitlines()[-1] == line
        assert ("TD loss" in done.stdout) == ('print(f"TD loss' in block)


def test_each_class_that_the_page_names_loads_its_kind(tmp_path):
    TRANSFORMERS["trained"].save_pretrained(tmp_path / "mine")
    LearnedTransformer(TRANSFORMERS["trained"], 2).save_pretrained(tmp_path / "mine-matrices")
    TRANSFORMERS["adaptive"].save_pretrained(tmp_path / "adaptive")
    page = (Path(__file__).resolve().parent.parent / "docs" / "weights.md").read_text()
    calls = re.findall(r"`(\w+)\.from_pretrained\(\"([\w-]+)\"\)`", page)
    classes = {c.__name__: c for c in (InContextTransformer, LearnedTransformer, AdaptiveTransformer)}
    assert len(calls) == 3 and {name for name, _ in calls} == set(classes)
    for name, folder in calls:
        assert type(classes[name].from_pretrained(tmp_path / folder)) is classes[name]


def test_a_kernel_of_one_s_own_works_and_says_that_it_cannot_be_saved(tmp_path):
    class Cauchy(Kernel):
        def pairwise(self, keys, queries, mask):
            return 1 / (1 + torch.cdist(keys, queries).square())

    transformer = InContextTransformer(Cauchy(), gamma=0.5, n_layers=2)
    context = Context(np.ones((3, 2)), np.ones(3), np.ones((3, 2)), np.zeros(3, bool))
    assert torch.isfinite(transformer.condition(context)(np.zeros((1, 2)))).all()
    with pytest.raises(TypeError, match="Cauchy is not a kernel of this package"):
        transformer.save_pretrained(tmp_path)
