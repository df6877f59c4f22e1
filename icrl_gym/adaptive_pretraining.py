"""Pretraining of :class:`~icrl_gym.adaptive.AdaptiveTransformer`: bandwidths and ridges of its heads, on contexts of one domain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.context import Context
from icrl_gym.datasets import Transitions, contexts

__all__ = ["HeadsConfig", "td_errors", "train_heads"]


@dataclass
class HeadsConfig:
    """How the heads' bandwidths and ridges are searched."""

    gamma: float = 0.9
    """Discount."""
    n_layers: int = 20
    """Depth L of every head."""
    n_context: int = 100
    """Transitions of a context."""
    n_queries: int = 50
    """Held-out transitions beside it."""
    iterations: int = 60
    """Adam's steps."""
    batch_size: int = 8
    """Contexts a step."""
    learning_rate: float = 0.05
    """Of the logarithms of bandwidths and ridges."""
    seed: int = 0
    """Of the contexts drawn."""
    options: dict[str, object] = field(default_factory=dict)
    """Of :class:`~icrl_gym.adaptive.AdaptiveTransformer`, where the search starts."""


def td_errors(value: object, gamma: float | Tensor, transitions: Context) -> Tensor:
    """TD errors (..., m) of a value function on transitions, terminated ones without a bootstrap."""
    following = value(transitions.next_states)  # type: ignore[operator]
    return transitions.rewards + gamma * (~transitions.terminated) * following - value(transitions.states)  # type: ignore[operator]


def train_heads(data: Transitions, config: HeadsConfig) -> tuple[AdaptiveTransformer, list[float]]:
    """Minimize the TD loss of held-out queries over bandwidths and ridges, by gradients through every layer and the mixture.

    The loss is the mean of the contexts' logarithms of it: contexts whose rewards are easy to predict count as much as others.

    Args:
        data: Transitions of one domain; contexts are drawn within one episode, so within one goal.
        config: The settings.

    Returns:
        The trained transformer, and the loss of each step, normalized by the mean squared reward: its geometric mean over the batch.
    """
    transformer = AdaptiveTransformer(gamma=config.gamma, n_layers=config.n_layers, **config.options)  # type: ignore[arg-type]
    searched = [transformer.log_bandwidths.requires_grad_(), transformer.log_ridges.requires_grad_()]
    optimizer = torch.optim.Adam(searched, lr=config.learning_rate)
    losses = []
    for seed in np.random.SeedSequence([config.seed, 2]).generate_state(config.iterations):
        batch, queries = contexts(data, config.n_context, config.batch_size, int(seed), config.n_queries)
        errors = td_errors(transformer.condition(batch), config.gamma, queries)
        scale = queries.rewards.square().mean(-1)
        given = scale > 0
        if not bool(given.any()):
            continue
        loss = (errors.square().mean(-1)[given] / scale[given]).clamp_min(1e-12).log().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(searched, 1.0)
        optimizer.step()
        with torch.no_grad():
            # A ridge below this would need more layers than there are (docs/convergence.md).
            transformer.log_ridges.clamp_min_(np.log(1e-4))
        losses.append(float(loss.detach().exp()))
    for tensor in searched:
        tensor.requires_grad_(False)
    return transformer, losses
