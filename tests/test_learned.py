"""Learned matrices: the construction is one of them, Wang et al.'s form is another, and what was trained is saved and measured."""

import json
import math
import pickle

import numpy as np
import pytest
import torch

from icrl_gym import Context, InContextTransformer
from icrl_gym.kernels import LaplacianKernel, LinearKernel, RBFKernel, SoftmaxKernel
from icrl_gym.learned import LearnedTransformer
from icrl_gym.similarity import (
    cosine,
    implicit_weights,
    layer_similarity,
    matched_construction,
    sensitivity,
    similarity,
    value_difference,
)

STEPS = [0.5, 1.5, 0.2]
OPTIONS = [
    (RBFKernel(0.4), {}),
    (RBFKernel("median"), {"value_shift": True}),
    (LaplacianKernel(0.7), {"step_normalization": "length", "offset": "removed"}),
    (SoftmaxKernel(1.0), {"step_normalization": "none"}),
    (LinearKernel(), {"step_normalization": "length", "value_shift": True, "offset": "removed"}),
]


def draw(n=7, d=2, batch=(), seed=0, ends=True, masked=True):
    rng = np.random.default_rng(seed)
    states, following = rng.normal(size=(2, *batch, n, d))
    terminated = rng.uniform(size=(*batch, n)) < (0.3 if ends else 0.0)
    mask = np.ones((*batch, n), bool)
    if masked and n:
        mask[..., -1] = False
    return Context(states, rng.normal(size=(*batch, n)), following, terminated, mask=mask)


def queries(m=5, d=2, batch=(), seed=1):
    return torch.as_tensor(np.random.default_rng(seed).normal(size=(*batch, m, d)))


def random_one(kernel=None, d=2, steps=(1.0, 1.0), **options):
    construction = InContextTransformer(kernel or LinearKernel(), list(steps), 0.9, "length")
    return LearnedTransformer(construction, d, "random", **{"gain": 1.0, **options})


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("kernel, options", OPTIONS, ids=lambda option: repr(option))
def test_from_the_construction_the_outputs_are_those_of_the_construction(kernel, options, width, batch):
    construction = InContextTransformer(kernel, STEPS, 0.8, **options)
    learned = LearnedTransformer(construction, 2, width=width)
    context, asked = draw(batch=batch), queries(batch=batch)
    value = construction.condition(context)
    expected = value(asked) + value.offset.unsqueeze(-1)
    torch.testing.assert_close(learned.values(context, asked), expected, rtol=1e-10, atol=1e-10)
    prompt = construction.embed(context, asked)
    torch.testing.assert_close(learned(prompt), construction(prompt), rtol=0, atol=0)


@pytest.mark.parametrize("n_heads", [1, 2])
@pytest.mark.parametrize("n_layers", [0, 1, 4])
def test_one_head_is_the_same_construction_with_the_linear_kernel(n_heads, n_layers):
    construction = InContextTransformer(LinearKernel(), [0.4] * n_layers, 0.8, "length")
    learned = LearnedTransformer(construction, 2, shared_layers=True, n_heads=n_heads)
    assert len(learned.layers) == min(n_layers, 1)
    context, asked = draw(), queries()
    torch.testing.assert_close(learned.values(context, asked), construction.condition(context)(asked))


@pytest.mark.parametrize("kernel", [LinearKernel(), RBFKernel(0.5), SoftmaxKernel(1.0)], ids=repr)
def test_queries_that_share_a_prompt_get_what_each_gets_from_its_own(kernel):
    learned = random_one(kernel, seed=3)
    context, asked = draw(batch=(2,)), queries(batch=(2,))
    together = learned.values(context, asked)
    own = learned.construction.read_out(learned(learned.construction.embed(context, asked)))
    torch.testing.assert_close(together, own, rtol=1e-10, atol=1e-12)
    assert together.std() > 1e-4
    single = torch.cat([learned.values(context, asked[:, i : i + 1]) for i in range(5)], -1)
    torch.testing.assert_close(together, single, rtol=1e-10, atol=1e-12)
    assert learned.values(context, asked[:, :0]).shape == (2, 0)


def test_one_head_of_full_width_is_the_linear_attention_of_wang_et_al():
    """Z + (1/n) P Z M (Z^T Q Z) by NumPy, on their tokens [s; gamma s'; r], with P = D V D^-1 and Q = D^-1 K^T Q D^-1."""
    gamma, d, n = 0.9, 2, 6
    learned = random_one(n_heads=1, width=5, shared_layers=True, seed=5, steps=[1.0] * 3)
    context, asked = draw(n, ends=False, masked=False), queries(1)
    scale = np.diag([1.0] * d + [gamma] * d + [1.0])
    inverse = np.linalg.inv(scale)
    (head,) = learned.layers[0].heads
    key, query, value = (matrix.detach().numpy() for matrix in (head.key, head.query, head.value))
    p, q = scale @ value @ inverse, inverse @ key.T @ query @ inverse
    z = np.zeros((5, n + 1))
    z[:d, :n], z[d : 2 * d, :n] = context.states.numpy().T, gamma * context.next_states.numpy().T
    z[-1, :n], z[:d, n] = context.rewards.numpy(), asked.numpy()[0]
    mask = np.diag([1.0] * n + [0.0])
    for _ in range(3):
        z = z + p @ z @ mask @ (z.T @ q @ z) / n
    assert float(learned.values(context, asked)[0].detach()) == pytest.approx(-z[-1, -1], rel=1e-10)
    construction = LearnedTransformer(learned.construction, d, n_heads=1).layers[0].value_head
    theirs = np.zeros((5, 5))
    theirs[:d, :d], theirs[:d, d : 2 * d] = -np.eye(d), np.eye(d)
    ours = (construction.key.T @ construction.query).detach().numpy()
    np.testing.assert_allclose(inverse @ ours @ inverse, theirs, atol=1e-12)


@pytest.mark.parametrize("n_heads, kernel", [(2, RBFKernel(0.5)), (2, LinearKernel()), (1, LinearKernel())])
@pytest.mark.parametrize("initialization", ["construction", "random"])
def test_gradients_reach_every_matrix(n_heads, kernel, initialization):
    construction = InContextTransformer(kernel, STEPS, 0.8)
    learned = LearnedTransformer(construction, 2, initialization, n_heads=n_heads)
    learned.values(draw(), queries()).square().sum().backward()
    parameters = dict(learned.named_parameters())
    assert len(parameters) == 3 * n_heads * len(STEPS)
    for name, parameter in parameters.items():
        if "layers.2.bootstrap" in name and initialization == "construction":
            continue  # the last layer's bootstrap head moves the context alone, which nobody reads any more
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name


def test_random_matrices_come_from_their_seed_and_have_their_scale():
    one, same, other = (random_one(d=30, seed=s, gain=0.3, steps=[1.0]) for s in (0, 0, 1))
    for name, matrix in one.named_parameters():
        assert torch.equal(matrix, same.get_parameter(name)) and not torch.equal(matrix, other.get_parameter(name))
    head = one.layers[0].value_head
    for matrix in (head.value, head.key.T @ head.query):
        assert float(matrix.detach().std()) == pytest.approx(0.3 / math.sqrt(61), rel=0.05)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"construction": InContextTransformer(RBFKernel(1.0), n_layers=math.inf)}, "finite transformer"),
        ({"construction": InContextTransformer(RBFKernel(1.0), [1.0], n_landmarks=2)}, "n_landmarks=2"),
        (
            {"construction": InContextTransformer(RBFKernel(1.0), [1.0], algorithm="residual_gradient")},
            "plain TD layers",
        ),
        ({"n_features": 0}, "n_features must be at least 1"),
        ({"width": 1}, "needs width >= 2"),
        ({"n_heads": 3}, "n_heads must be 1 or 2"),
        ({"n_heads": 1}, "linear kernel only"),
        ({"shared_layers": True}, "shared layers have one step size"),
        ({"gain": 0.0}, "gain must be positive"),
    ],
)
def test_what_cannot_be_learned_says_so(change, message):
    settings = {"construction": InContextTransformer(RBFKernel(1.0), STEPS, 0.9), "n_features": 2, **change}
    with pytest.raises(ValueError, match=message):
        LearnedTransformer(**settings)


def test_states_of_another_size_and_diverging_layers_say_so():
    learned = random_one()
    with pytest.raises(ValueError, match="for states of 2 entries"):
        learned.values(draw(d=3), queries(d=3))
    huge = random_one(gain=1e60, steps=[1.0] * 5)
    with pytest.raises(FloatingPointError, match="the layers diverge"):
        huge.values(draw(), queries())


# Saving


@pytest.mark.parametrize(
    "learned",
    [
        random_one(SoftmaxKernel(2.0), seed=4),
        random_one(n_heads=1, width=5, shared_layers=True),
        LearnedTransformer(InContextTransformer(RBFKernel(0.3), STEPS, 0.7, offset="removed"), 2),
        random_one(RBFKernel(0.3), n_heads=1, steps=[]),
    ],
    ids=["softmax", "looped", "construction", "empty"],
)
def test_what_was_saved_comes_back(learned, tmp_path):
    learned.save_pretrained(tmp_path)
    loaded = LearnedTransformer.from_pretrained(tmp_path)
    assert repr(loaded) == repr(learned)
    context, asked = draw(), queries()
    torch.testing.assert_close(loaded.values(context, asked), learned.values(context, asked), rtol=0, atol=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "weights.safetensors"]


def test_damaged_and_foreign_files_say_so(tmp_path):
    load = LearnedTransformer.from_pretrained
    with pytest.raises(FileNotFoundError, match=r"expected a folder with config.json"):
        load(tmp_path / "nowhere")
    random_one().save_pretrained(tmp_path)
    weights, config = tmp_path / "weights.safetensors", tmp_path / "config.json"
    whole, settings = weights.read_bytes(), json.loads(config.read_text())
    for damaged in (b"", whole[:60], whole[:-8], pickle.dumps(1)):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            load(tmp_path)
    weights.write_bytes(whole)
    for change, message in [
        ({"format": "icrl_gym.InContextTransformer"}, "load it with InContextTransformer.from_pretrained"),
        ({"width": 3}, "does not fit config.json"),
        ({"width": "wide"}, "not the configuration"),
        ({"n_heads": 7}, "n_heads must be 1 or 2"),
        ({"construction": {}}, "not the configuration"),
    ]:
        config.write_text(json.dumps({**settings, **change}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    config.write_text(json.dumps(settings))
    load(tmp_path)
    with pytest.raises(ValueError, match=r"load it with LearnedTransformer.from_pretrained"):
        InContextTransformer.from_pretrained(tmp_path)
    broken = random_one()
    with torch.no_grad():
        broken.layers[0].value_head.key[0, 0] = math.nan
    broken.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="finite matrices"):
        load(tmp_path)


# Measures


def test_cosines_and_differences_are_those_of_numpy():
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 3, 8))
    expected = [u @ w / np.linalg.norm(u) / np.linalg.norm(w) for u, w in zip(one, other, strict=True)]
    np.testing.assert_allclose(cosine(torch.as_tensor(one), torch.as_tensor(other)), expected)
    assert value_difference(torch.as_tensor(one), torch.as_tensor(other)) == pytest.approx(
        np.mean((one - other) ** 2) / np.mean(other**2)
    )
    states, values = rng.normal(size=(9, 3)), rng.normal(size=9)
    expected = np.linalg.lstsq(states, values, rcond=None)[0]
    np.testing.assert_allclose(implicit_weights(torch.as_tensor(values), torch.as_tensor(states)), expected, atol=1e-12)
    with pytest.raises(ValueError, match="need as many states"):
        implicit_weights(torch.ones(2), torch.ones(2, 3))


def test_implicit_weights_of_linear_layers_are_values_of_unit_states():
    learned = random_one(seed=2)
    context = draw()
    found = implicit_weights(learned.values(context, queries()), queries())
    torch.testing.assert_close(found, learned.values(context, torch.eye(2, dtype=torch.float64)))


@pytest.mark.parametrize("kernel", [LinearKernel(), RBFKernel(0.5)], ids=repr)
def test_sensitivities_are_finite_differences(kernel):
    learned, context, asked, small = random_one(kernel), draw(), queries(), 1e-6
    gradients = sensitivity(lambda states: learned.values(context, states), asked)
    for k in range(2):
        moved = torch.zeros_like(asked)
        moved[:, k] = small
        slope = (learned.values(context, asked + moved) - learned.values(context, asked - moved)) / (2 * small)
        torch.testing.assert_close(gradients[:, k], slope, rtol=1e-5, atol=1e-7)


def test_the_map_of_a_layer_is_compared_as_numpy_does_it():
    one, other = (random_one(seed=s).layers[0] for s in (0, 1))

    def tensor(layer):
        return sum(np.einsum("ij,kl->ijkl", h.value.detach(), (h.key.T @ h.query).detach()) for h in layer.heads)

    u, w = tensor(one).ravel(), tensor(other).ravel()
    expected = u @ w / np.linalg.norm(u) / np.linalg.norm(w)
    assert layer_similarity(one, other, linear=True)[0] == pytest.approx(expected)


def test_scales_and_signs_that_no_output_tells_do_not_count():
    construction = InContextTransformer(LinearKernel(), [0.3, 0.5], 0.9, "length")
    learned, context, asked = LearnedTransformer(construction, 2), draw(), queries()
    turn = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    with torch.no_grad():
        for layer in learned.layers:
            for head in layer.heads:
                head.key.copy_(-5.0 * turn @ head.key)
                head.query.copy_(turn @ head.query)
                head.value.mul_(-0.2)
    torch.testing.assert_close(matched_construction(learned).step_sizes, construction.step_sizes)
    measured = similarity(learned, context, asked)
    assert measured.value_difference < 1e-20
    for name, value in measured.as_dict().items():
        if name != "value_difference":
            assert value == pytest.approx(1.0), name


def test_other_matrices_are_told_apart():
    construction = InContextTransformer(RBFKernel(0.5), [1.0] * 2, 0.9)
    same = similarity(LearnedTransformer(construction, 2), draw(), queries()).as_dict()
    other = similarity(LearnedTransformer(construction, 2, "random"), draw(), queries()).as_dict()
    assert same.pop("value_difference") < 1e-20 and other.pop("value_difference") > 0.1
    assert all(value == pytest.approx(1.0) for value in same.values())
    assert all(value < 0.9 for value in other.values())
