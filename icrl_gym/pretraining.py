"""Pretraining: step sizes and temperature of a transformer, by the TD loss on contexts of one domain.

The critic itself never learns. What is learned here, once, is how far each layer steps and at what distance states count as
near; the weights that come out are fixed and serve other domains (He et al. 2026, section 4).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from icrl_gym.context import Context
from icrl_gym.datasets import CollectConfig, Transitions, collect, contexts, load_transitions
from icrl_gym.kernels import Kernel, LinearKernel, ReLUKernel, make_kernel
from icrl_gym.runs import versions, write_whole
from icrl_gym.td_loss import td_loss_by_depth
from icrl_gym.transformer import InContextTransformer, StepNormalization

__all__ = ["PretrainConfig", "Pretrained", "pretrain", "split", "train_step_sizes"]

KernelName = Literal["rbf", "laplacian", "matern", "exponential", "softmax", "relu", "linear"]


@dataclass
class PretrainConfig:
    """Train a transformer's step sizes and temperature on one Meta-World domain, by the TD loss of held-out queries."""

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
    """Of the contexts drawn. The data are those of seed 0."""
    root: str | None = None
    """Where datasets are (None: Minari's own folder)."""
    out: str | None = None
    """Where the weights go; default pretrained/<domain>-<noise>-<kernel>-seed<seed>."""


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
    (name,) = collect(collected)
    half = config.episodes // 2
    episodes = range(half) if train else range(half, config.episodes)
    return scaled(load_transitions(name, episodes=episodes, root=config.root), config.reward_scale)


def scaled(data: Transitions, reward_scale: float) -> Transitions:
    """The same transitions with rewards in other units."""
    return Transitions(
        data.states, data.rewards * reward_scale, data.next_states, data.terminated, data.truncated, data.episode
    )


def train_step_sizes(data: Transitions, config: PretrainConfig) -> tuple[InContextTransformer, list[float]]:
    """Minimize the TD loss of queries over step sizes and temperature.

    Both are searched by their logarithms, so they stay positive, with gradients through every layer. Held constant
    (``semi_gradient``), the bootstrap target of a query makes the fixed point of TD the aim, and the loss itself may rise; the
    default is the gradient of the loss.

    Args:
        data: Transitions of one domain; contexts are drawn within one episode, so within one goal.
        config: The settings.

    Returns:
        The trained transformer, and the normalized held-out TD loss of each iteration's batch.

    Raises:
        ValueError: Episodes shorter than a context and its queries.
    """
    log_steps = torch.zeros(config.n_layers, dtype=torch.float64, requires_grad=True)
    has_temperature = config.kernel not in ("relu", "linear")
    log_temperature = torch.tensor(math.log(config.temperature), dtype=torch.float64, requires_grad=has_temperature)
    optimizer = torch.optim.Adam([log_steps, *([log_temperature] if has_temperature else [])], lr=config.learning_rate)
    seeds = np.random.SeedSequence([config.seed, 1]).generate_state(config.iterations)
    losses = []
    for seed in seeds:
        batch, queries = contexts(data, config.n_context, config.batch_size, int(seed), config.n_queries)
        transformer = _transformer(config, log_steps.exp(), log_temperature.exp() if has_temperature else None)
        try:
            loss, shown = _query_loss(transformer, batch, queries, config.semi_gradient)
        except FloatingPointError:
            # The steps have grown too far: back off and go on.
            with torch.no_grad():
                log_steps -= 0.5
            losses.append(math.inf)
            continue
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([log_steps, log_temperature], 1.0)
        optimizer.step()
        losses.append(float(shown))
    trained = _transformer(
        config, log_steps.detach().exp(), log_temperature.detach().exp() if has_temperature else None
    )
    return trained, losses


def pretrain(config: PretrainConfig) -> Path:
    """Train, and write the weights with a card.

    Args:
        config: The settings.

    Returns:
        The folder, which :meth:`InContextTransformer.from_pretrained` reads.

    Raises:
        ValueError: Settings that cannot work.
        ImportError: Minari or safetensors is missing.
    """
    name = f"{config.domain}-{config.noise}-{config.kernel}-seed{config.seed}"
    folder = Path(config.out or Path("pretrained") / name)
    result = pretrained(config)
    result.transformer.save_pretrained(folder)
    card = {
        "trained_by": "icrl-gym pretrain",
        "config": asdict(config),
        "versions": versions(),
        "held_out_td_loss_of_the_construction": result.held_out[0],
        "held_out_td_loss": result.held_out[1],
        "temperature": result.transformer.kernel.config().get("temperature"),
        "step_sizes": result.transformer.step_sizes.tolist(),
    }
    write_whole(folder / "card.json", json.dumps(card, indent=2) + "\n")
    print(f"held-out TD loss, normalized: {result.held_out[0]:.4f} before, {result.held_out[1]:.4f} after; {folder}")
    return folder


def pretrained(config: PretrainConfig) -> Pretrained:
    """Train, and measure on goals that were not trained on."""
    transformer, losses = train_step_sizes(split(config, train=True), config)
    batch, queries = contexts(split(config, train=False), config.n_context, 32, config.seed, config.n_queries)
    start = torch.tensor(config.temperature, dtype=torch.float64)
    construction = _transformer(config, torch.ones(config.n_layers, dtype=torch.float64), start)
    before, after = (
        float(td_loss_by_depth(t, batch, queries)[1][:, -1].nanmean()) for t in (construction, transformer)
    )
    return Pretrained(transformer, losses, (before, after))


def _transformer(config: PretrainConfig, steps: Tensor, temperature: Tensor | None) -> InContextTransformer:
    return InContextTransformer(_kernel(config.kernel, temperature), steps, config.gamma, config.step_normalization)


def _kernel(name: KernelName, temperature: Tensor | None) -> Kernel:
    if name in ("relu", "linear"):
        return ReLUKernel() if name == "relu" else LinearKernel()
    kernel = make_kernel(name, 1.0)
    return type(kernel)(temperature)


def _query_loss(
    transformer: InContextTransformer, batch: Context, queries: Context, semi_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The loss to differentiate, and its value as the experiments normalize it."""
    value = transformer.condition(batch)
    following = value(queries.next_states)
    target = queries.rewards + transformer.gamma * (~queries.terminated) * following
    target = target.detach() if semi_gradient else target
    error = (target - value(queries.states)).square().mean()
    # One scale for the whole batch: a context whose queries happen to have next to no reward must not decide the step of all.
    loss = error / queries.rewards.square().mean().clamp_min(1e-12)
    return loss, loss.detach()
