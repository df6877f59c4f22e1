"""Pretraining: step sizes and temperature of a transformer, or all of its matrices, by the TD loss on contexts of one domain.

The critic itself never learns. What is learned here, once, is how far each layer steps and at what distance states count as
near; the weights that come out are fixed and serve other domains (He et al. 2026, section 4). Or, to see whether training finds
the construction, every key, query and value matrix (Wang et al. 2025, section 5); see :mod:`icrl_gym.learned`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from icrl_gym.context import Context
from icrl_gym.datasets import (
    NOISE_LEVELS,
    CollectConfig,
    Transitions,
    collect,
    contexts,
    dataset_id,
    load_dataset,
    load_transitions,
)
from icrl_gym.kernels import Kernel, LinearKernel, ReLUKernel, make_kernel
from icrl_gym.learned import Initialization, LearnedTransformer
from icrl_gym.metaworld import resolve_task
from icrl_gym.runs import versions, write_whole
from icrl_gym.similarity import similarity
from icrl_gym.td_loss import td_loss_by_depth
from icrl_gym.transformer import InContextTransformer, Offset, StepNormalization

__all__ = [
    "PretrainConfig",
    "Pretrained",
    "held_out_losses",
    "pretrain",
    "recorded",
    "scaled",
    "split",
    "train_matrices",
    "train_step_sizes",
    "training_settings",
]

KernelName = Literal["rbf", "laplacian", "matern", "exponential", "softmax", "relu", "linear"]


@dataclass
class PretrainConfig:
    """Train a transformer's step sizes and temperature, or its matrices, on one domain of Meta-World, by the held-out TD loss."""

    domain: str = "pick-place-v3"
    """The Meta-World task."""
    noise: Literal["low", "medium", "high"] = "high"
    """Of the scripted expert's actions."""
    kernel: KernelName = "rbf"
    """What states are compared with."""
    temperature: float = 0.1
    """Where the search for the temperature starts."""
    n_layers: int = 20
    """Depth L."""
    step_normalization: StepNormalization = "row_sum"
    """What divides the steps; the paper's construction has "length"."""
    gamma: float = 0.9
    """Discount."""
    n_context: int = 100
    """Transitions of a context."""
    n_queries: int = 50
    """Held-out transitions beside it."""
    reward_scale: float = 0.1
    """Rewards are multiplied by this; Meta-World's reach 10."""
    iterations: int = 200
    """Adam's steps."""
    batch_size: int = 16
    """Contexts a step."""
    learning_rate: float = 0.03
    """Of the logarithms of step sizes and temperature."""
    semi_gradient: bool = False
    """Hold the bootstrap target of a query constant, as TD does; otherwise the loss itself goes down (residual gradient)."""
    episodes: int = 10
    """Goals to record; the first half trains, the other half is held out."""
    steps: int = 200
    """Steps of each."""
    seed: int = 0
    """Of the contexts drawn, and of random matrices. The data are those of seed 0."""
    root: str | None = None
    """Where datasets are (None: Minari's own folder)."""
    out: str | None = None
    """Where the weights go; default pretrained/<domain>-<noise>-<kernel>-seed<seed>(-matrices-<initialization>)."""
    train: Literal["steps", "matrices"] = "steps"
    """Step sizes and temperature, or every key, query and value matrix (take few layers and small batches: 4 and 4, say)."""
    initialization: Initialization = "construction"
    """What the matrices start from: unit steps of TD, or small random numbers."""
    shared_layers: bool = False
    """All layers have the same matrices."""
    matrix_learning_rate: float = 0.001
    """Of the matrices."""
    evaluate: tuple[str, ...] = ()
    """Domains to measure the trained steps on as well, on held-out goals at three noise levels; the card says the losses."""
    force: bool = False
    """Train again and replace the weights in --out. Data sets stay as they are."""


@dataclass(frozen=True)
class Pretrained:
    """A trained transformer and how it got there.

    Attributes:
        transformer: With fixed weights.
        losses: (iterations,) the TD loss of the queries of each batch, normalized by the batch's mean squared reward.
        held_out: The mean held-out loss on goals that were not trained on, before (construction) and after.
    """

    transformer: InContextTransformer
    losses: list[float]
    held_out: tuple[float, float]


def split(config: PretrainConfig, train: bool) -> Transitions:
    """The transitions of the goals that train, or of those held out, with scaled rewards."""
    collected = CollectConfig(
        (config.domain,), (config.noise,), config.episodes, config.steps, root=config.root, jobs=1
    )
    (name,) = recorded(collected)
    half = config.episodes // 2
    episodes = range(half) if train else range(half, config.episodes)
    return scaled(load_transitions(name, episodes=episodes, root=config.root), config.reward_scale)


def recorded(config: CollectConfig) -> list[str]:
    """:func:`~icrl_gym.datasets.collect` for a command that is not ``collect``: its remedy is a command of its own here.

    Raises:
        ValueError: A data set is there with other settings, or damaged.
    """
    try:
        return collect(config)
    except ValueError as error:
        found, other, _ = str(error).partition(" Give --force ")
        if not other:
            raise
        again = (
            f"icrl-gym collect --tasks {' '.join(config.tasks)} --noise {' '.join(config.noise)} --episodes {config.episodes} "
            f"--steps {config.steps}" + (f" --root {config.root}" if config.root else "") + " --force"
        )
        raise ValueError(f"{found} Ask for what is there, give another --root, or record it again: {again}") from error


def scaled(data: Transitions, reward_scale: float) -> Transitions:
    """The same transitions with rewards in other units."""
    return Transitions(
        data.states, data.rewards * reward_scale, data.next_states, data.terminated, data.truncated, data.episode
    )


def train_step_sizes(
    data: Transitions, config: PretrainConfig, progress: bool = False
) -> tuple[InContextTransformer, list[float]]:
    """Minimize the TD loss of queries over step sizes and temperature.

    Both are searched by their logarithms, so they stay positive, with gradients through every layer. Held constant
    (``semi_gradient``), the bootstrap target of a query makes the fixed point of TD the aim, and the loss itself may rise; the
    default is the gradient of the loss.

    Args:
        data: Transitions of one domain; contexts are drawn within one episode, so within one goal.
        config: The settings.
        progress: Show it: a bar on a terminal, ten lines elsewhere.

    Returns:
        The trained transformer, and the normalized held-out TD loss of each iteration's batch.

    Raises:
        ValueError: Episodes shorter than a context and its queries.
    """
    log_steps = torch.zeros(config.n_layers, dtype=torch.float64, requires_grad=True)
    has_temperature = config.kernel not in ("relu", "linear")
    log_temperature = torch.tensor(math.log(config.temperature), dtype=torch.float64, requires_grad=has_temperature)

    def current() -> InContextTransformer:
        return _transformer(config, log_steps.exp(), log_temperature.exp() if has_temperature else None)

    def answers(batch: Context) -> Callable[[Tensor], Tensor]:
        # Layers that diverge have a gradient, and it leads out of there.
        return current().condition(batch, most_growth=math.inf)

    def back_off() -> None:
        log_steps.sub_(0.5)

    searched = [log_steps, *([log_temperature] if has_temperature else [])]
    losses = _minimize(data, config, searched, config.learning_rate, answers, back_off, progress)
    for logarithm in searched:
        logarithm.requires_grad_(False)
    return current(), losses


def train_matrices(
    data: Transitions, config: PretrainConfig, progress: bool = False
) -> tuple[LearnedTransformer, list[float]]:
    """Minimize the TD loss of queries over every key, query and value matrix.

    The offset of the read-out is removed at its source, so that the loss is that of the value itself, and the temperature stays:
    the scales of K and Q do what it does.

    Args:
        data: Transitions of one domain; contexts are drawn within one episode, so within one goal.
        config: The settings.
        progress: Show it: a bar on a terminal, ten lines elsewhere.

    Returns:
        The trained transformer, and the normalized held-out TD loss of each iteration's batch.

    Raises:
        ValueError: Episodes shorter than a context and its queries.
    """
    start = _construction(config, offset="removed")
    learned = LearnedTransformer(
        start, data.states.shape[-1], config.initialization, shared_layers=config.shared_layers, seed=config.seed
    )

    def back_off() -> None:
        for head in learned.heads:
            head.value *= 0.6

    def answers(batch: Context) -> Callable[[Tensor], Tensor]:
        return _answers(learned, batch)

    losses = _minimize(
        data, config, list(learned.parameters()), config.matrix_learning_rate, answers, back_off, progress
    )
    return learned.requires_grad_(False), losses


def _minimize(
    data: Transitions,
    config: PretrainConfig,
    parameters: list[Tensor],
    learning_rate: float,
    answers: Callable[[Context], Callable[[Tensor], Tensor]],
    back_off: Callable[[], None],
    progress: bool,
) -> list[float]:
    """Adam on the TD loss of queries; the loss of each iteration, infinite where the layers overflowed.

    Args:
        data: Contexts are drawn from it.
        config: The settings.
        parameters: Changed in place.
        learning_rate: Of Adam.
        answers: From contexts to a function of states, which ``parameters`` have a gradient through.
        back_off: Makes the layers' steps smaller, called where they overflow.
        progress: Whether to show it.
    """
    gamma = torch.tensor(config.gamma, dtype=torch.float64)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    seeds = np.random.SeedSequence([config.seed, 1]).generate_state(config.iterations)
    losses: list[float] = []
    with _progress(seeds.tolist(), losses, progress) as shown:
        for seed in shown:
            batch, queries = contexts(data, config.n_context, config.batch_size, seed, config.n_queries)
            optimizer.zero_grad()
            try:
                loss = _loss(answers(batch), gamma, queries, config.semi_gradient)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                if not bool(torch.isfinite(norm)):
                    raise FloatingPointError("the gradient overflows before the values do.")
            except FloatingPointError:
                # The layers have grown too far: back off and go on.
                with torch.no_grad():
                    back_off()
                losses.append(math.inf)
                continue
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@contextlib.contextmanager
def _progress(items: list[int], losses: list[float], shown: bool) -> Iterator[Iterable[int]]:
    """Walk through the items: a bar on a terminal, with the extra `progress`; a line each tenth of the way otherwise."""
    if not shown:
        yield items
        return
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            with tqdm(items, desc="pretrain", unit="step", dynamic_ncols=True) as bar:

                def with_loss() -> Iterator[int]:
                    for item in bar:
                        yield item
                        bar.set_postfix_str(f"TD loss {losses[-1]:.3g}", refresh=False)

                yield with_loss()
            return

    def with_lines() -> Iterator[int]:
        tenths = {math.ceil(len(items) * (i + 1) / 10) for i in range(10)}
        for done, item in enumerate(items, 1):
            yield item
            if done in tenths:
                print(f"pretrain: {done} of {len(items)} iterations, TD loss of the batch {losses[-1]:.3g}", flush=True)

    yield with_lines()


def pretrain(config: PretrainConfig) -> Path:
    """Train, and write the weights with a card.

    Args:
        config: The settings.

    Returns:
        The folder, which :meth:`InContextTransformer.from_pretrained` reads, or :meth:`LearnedTransformer.from_pretrained` if all
        matrices were trained.

    Raises:
        ValueError: Settings that cannot work, or weights in the folder already.
        ImportError: Minari or safetensors is missing.
    """
    config = _checked(config)
    name = f"{config.domain}-{config.noise}-{config.kernel}-seed{config.seed}"
    if config.train == "matrices":
        name += f"-matrices-{config.initialization}"
    folder = Path(config.out or Path("pretrained") / name)
    there = [file for file in ("config.json", "weights.safetensors", "card.json") if (folder / file).exists()]
    if there and not config.force:
        raise ValueError(
            f"{str(folder)!r} holds {', '.join(there)} already. Give --force to train again and replace it, or another --out."
        )
    if config.train == "matrices":
        return _pretrain_matrices(config, folder)
    result = pretrained(config, progress=True)
    measured = held_out_losses(result.transformer, config)
    (folder / "card.json").unlink(missing_ok=True)  # an old card must not describe new weights, wherever this is killed
    result.transformer.save_pretrained(folder)
    card = {
        "trained_by": _command(config),
        **_uses(result, config, measured),
        "data": _data(config),
        "config": training_settings(config),
        "versions": versions(),
        "held_out_td_loss_of_the_construction": result.held_out[0],
        "held_out_td_loss": result.held_out[1],
        "held_out_td_loss_by_domain": measured,
        "temperature": result.transformer.kernel.config().get("temperature"),
        "step_sizes": result.transformer.step_sizes.tolist(),
    }
    write_whole(folder / "card.json", json.dumps(card, indent=2) + "\n")
    _say(config, folder, "InContextTransformer", *result.held_out, "trained steps")
    return folder


def _checked(config: PretrainConfig) -> PretrainConfig:
    """The settings with full names of domains.

    Raises:
        ValueError: Settings that cannot work, in the words of the command line.
    """
    config = replace(
        config, domain=resolve_task(config.domain), evaluate=tuple(resolve_task(domain) for domain in config.evaluate)
    )
    least = {"iterations": 1, "n_layers": 1, "batch_size": 1, "n_context": 1, "n_queries": 1, "episodes": 2, "seed": 0}
    why = {"episodes": " (the first half of the goals trains, the other is held out)"}
    for name, low in least.items():
        if getattr(config, name) < low:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least {low}{why.get(name, '')}, got {getattr(config, name)}.")
    for name in ("temperature", "reward_scale", "learning_rate", "matrix_learning_rate"):
        if not 0 < getattr(config, name) < math.inf:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be positive and finite, got {getattr(config, name)}.")
    if not 0 <= config.gamma <= 1:
        raise ValueError(f"--gamma must be in [0, 1], got {config.gamma}.")
    if config.n_context + config.n_queries > config.steps:
        raise ValueError(
            f"--n-context {config.n_context} and --n-queries {config.n_queries} are transitions of one episode, and --steps "
            f"{config.steps} is fewer than their sum; give more --steps (at most 500), or fewer of the two."
        )
    if config.evaluate and config.train == "matrices":
        raise ValueError("--evaluate is for --train steps: matrices are measured on their own domain only.")
    return config


def _say(config: PretrainConfig, folder: Path, kind: str, before: float, after: float, what: str) -> None:
    """The last lines of the command: what was measured, what was written, and how to load it."""
    goals = config.episodes - config.episodes // 2
    print(
        f"held-out TD loss, mean delta^2 / mean r^2 (the value zero has 1), on {goals} goal{'s' * (goals > 1)} that did not train: "
        f"{before:.4g} with unit steps at temperature {config.temperature:g}, {after:.4g} with the {what}\n"
        f"written: weights.safetensors, config.json and card.json in {folder}\n"
        f"load them: {kind}.from_pretrained({str(folder)!r})"
    )


def pretrained(config: PretrainConfig, progress: bool = False) -> Pretrained:
    """Train, and measure on goals that were not trained on."""
    transformer, losses = train_step_sizes(split(config, train=True), config, progress)
    before, after = (_held_out_loss(t, config) for t in (_construction(config), transformer))
    return Pretrained(transformer, losses, (before, after))


def held_out_losses(transformer: InContextTransformer, config: PretrainConfig) -> dict[str, dict[str, float | None]]:
    """The mean held-out TD loss after the last layer, normalized: the value zero has the loss 1.

    Args:
        transformer: Of finite depth.
        config: Of its training; ``evaluate`` are the domains to measure on. The goals are those that the first half of a
            data set does not hold, 32 contexts of them.

    Returns:
        By domain and by noise level; None where every context has no reward at all.

    Raises:
        ValueError: An unknown domain, or a data set that is there with other settings.
    """
    losses: dict[str, dict[str, float | None]] = {}
    for domain in map(resolve_task, config.evaluate):
        losses[domain] = {}
        for level in NOISE_LEVELS:
            loss = _held_out_loss(transformer, replace(config, domain=domain, noise=level))  # type: ignore[arg-type]
            losses[domain][level] = None if math.isnan(loss) else loss  # JSON has no NaN
    return losses


def _held_out_loss(transformer: InContextTransformer, config: PretrainConfig) -> float:
    batch, queries = contexts(split(config, train=False), config.n_context, 32, config.seed, config.n_queries)
    return float(td_loss_by_depth(transformer, batch, queries)[1][:, -1].nanmean())


def training_settings(config: PretrainConfig) -> dict[str, Any]:
    """What the weights follow from, as JSON: neither where else they are measured, nor whether they replaced others."""
    return {name: value for name, value in asdict(config).items() if name not in ("evaluate", "force")}


def _command(config: PretrainConfig) -> str:
    """The command line of these settings; where data and weights are is the machine's own affair."""
    words = ["icrl-gym", "pretrain"]
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in ("root", "out", "force") or (
            value == item.default and item.name not in ("domain", "noise", "seed")
        ):
            continue
        option = item.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return " ".join(words)


def _data(config: PretrainConfig) -> dict[str, Any]:
    """What was trained on, for the card."""
    dataset = load_dataset(dataset_id(config.domain, config.noise), config.root)
    half = config.episodes // 2
    return {
        "dataset": str(dataset.id),
        "sha256": dataset.storage.metadata["icrl_gym"]["sha256"],
        "task": resolve_task(config.domain),
        "policy": "Meta-World's scripted expert with Gaussian noise on its actions, clipped to their range",
        "noise_level": config.noise,
        "noise_standard_deviation": NOISE_LEVELS[config.noise],
        "steps_of_an_episode": config.steps,
        "goals_trained_on": half,
        "goals_held_out": config.episodes - half,
        "data_seed": 0,
    }


def _uses(result: Pretrained, config: PretrainConfig, measured: dict[str, dict[str, float | None]]) -> dict[str, str]:
    """What the weights are good for, and what not, as far as it was measured."""
    task = resolve_task(config.domain)
    good = (
        f"Values at the discount {config.gamma} from a context of about {config.n_context} transitions of one goal of {task}, whose "
        f"states are Meta-World's own observations as they are and whose rewards are multiplied by {config.reward_scale}."
    )
    bad = (
        f"Other discounts: gamma is part of the weights. Standardized states, or those of other "
        f"environments: the temperature is a squared distance between raw states. Nothing was measured with contexts far from "
        f"{config.n_context} transitions, nor inside of PPO, whose critic has settings of its own."
    )
    worst = {
        domain: max((loss for loss in levels.values() if loss is not None), default=math.nan)
        for domain, levels in measured.items()
    }
    below, above = [d for d, loss in worst.items() if loss < 1], [d for d, loss in worst.items() if loss >= 1]
    if below:
        good += (
            " Held-out TD loss below that of the value zero (1) at all three noise levels, worst level in brackets: "
            + ", ".join(f"{d} ({worst[d]:.2g})" for d in below)
            + "."
        )
    if above:
        bad += (
            " Held-out TD loss not below that of the value zero: "
            + ", ".join(f"{d} ({worst[d]:.2g})" for d in above)
            + "."
        )
    before, after = result.held_out
    if after > before:
        bad += (
            f" On held-out goals at the noise that it was trained with, training raised the loss: unit steps at the temperature "
            f"{config.temperature:g} have {before:.2g}, these weights {after:.2g}."
        )
    largest = float(result.transformer.step_sizes.abs().max()) if config.n_layers else 0.0
    if config.step_normalization == "row_sum" and largest > 2:
        bad += (
            f" No bound holds for every context: layers of steps above 2 can diverge where the top eigenvalue of the kernel "
            f"matrix comes near its largest row sum, and the largest step is {largest:.2g}. That is so with states nearly all "
            f"alike, and with states far apart against the temperature; `condition` raises an error there, naming the layer."
        )
    return {"good_for": good, "not_good_for": bad}


def _pretrain_matrices(config: PretrainConfig, folder: Path) -> Path:
    data = split(config, train=True)
    # As many queries as it takes to tell implicit weights apart, whatever the training asked for.
    n_queries = max(config.n_queries, data.states.shape[-1])
    if config.n_context + n_queries > config.steps:
        raise ValueError(
            f"to compare matrices with the construction takes {n_queries} queries, one for each entry of a state, beside "
            f"--n-context {config.n_context} in one episode of --steps {config.steps}; give at least --steps "
            f"{config.n_context + n_queries}, or a smaller --n-context."
        )
    learned, _ = train_matrices(data, config, progress=True)
    batch, queries = contexts(split(config, train=False), config.n_context, 32, config.seed, n_queries)
    with torch.no_grad():
        untrained = learned.construction.condition(batch, most_growth=math.inf)
        before = _held_out(untrained, learned.construction.gamma, queries)
        after = _held_out(_answers(learned, batch), learned.construction.gamma, queries)
    measured = similarity(learned, batch, queries.states).as_dict()
    (folder / "card.json").unlink(missing_ok=True)
    learned.save_pretrained(folder)
    card = {
        "trained_by": _command(config),
        "data": _data(config),
        "config": training_settings(config),
        "versions": versions(),
        "held_out_td_loss_of_the_construction": before,
        "held_out_td_loss": after,
        # JSON has no NaN.
        "similarity_to_the_construction": {k: v if math.isfinite(v) else None for k, v in measured.items()},
    }
    write_whole(folder / "card.json", json.dumps(card, indent=2) + "\n")
    _say(config, folder, "LearnedTransformer", before, after, "learned matrices")
    print("beside the construction: " + ", ".join(f"{k.replace('_', ' ')} {v:.3f}" for k, v in measured.items()))
    return folder


def _answers(learned: LearnedTransformer, batch: Context) -> Callable[[Tensor], Tensor]:
    return lambda states: learned.values(batch, states)


def _held_out(value: Callable[[Tensor], Tensor], gamma: Tensor, queries: Context) -> float:
    """The mean over contexts of mean delta^2 / mean r^2, as :func:`~icrl_gym.td_loss.td_loss_by_depth` has it after the last layer."""
    target = queries.rewards + gamma * (~queries.terminated) * value(queries.next_states)
    scale = queries.rewards.square().mean(-1)
    error = (target - value(queries.states)).square().mean(-1)
    return float((error / torch.where(scale > 0, scale, math.nan)).nanmean())


def _construction(config: PretrainConfig, offset: Offset = "centered") -> InContextTransformer:
    steps = torch.ones(config.n_layers, dtype=torch.float64)
    return _transformer(config, steps, torch.tensor(config.temperature, dtype=torch.float64), offset)


def _transformer(
    config: PretrainConfig, steps: Tensor, temperature: Tensor | None, offset: Offset = "centered"
) -> InContextTransformer:
    kernel = _kernel(config.kernel, temperature)
    return InContextTransformer(kernel, steps, config.gamma, config.step_normalization, offset=offset)


def _kernel(name: KernelName, temperature: Tensor | None) -> Kernel:
    if name in ("relu", "linear"):
        return ReLUKernel() if name == "relu" else LinearKernel()
    kernel = make_kernel(name, 1.0)
    return type(kernel)(temperature)


def _loss(value: Callable[[Tensor], Tensor], gamma: Tensor, queries: Context, semi_gradient: bool) -> Tensor:
    """The loss to differentiate, normalized: the value zero has the loss 1."""
    following = value(queries.next_states)
    target = queries.rewards + gamma * (~queries.terminated) * following
    target = target.detach() if semi_gradient else target
    error = (target - value(queries.states)).square().mean()
    # One scale for the whole batch: a context whose queries happen to have next to no reward must not decide the step of all.
    return error / queries.rewards.square().mean().clamp_min(1e-12)
