"""Pretraining of :class:`~icrl_gym.adaptive.AdaptiveTransformer`: bandwidths and ridges of its heads, on contexts of one domain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.datasets import Transitions, contexts
from icrl_gym.pretrain_settings import PretrainConfig
from icrl_gym.td_loss import td_errors
from icrl_gym.weight_search import shown_progress

__all__ = ["train_heads"]


def train_heads(
    data: Transitions, config: PretrainConfig, progress: bool = False, **options: Any
) -> tuple[AdaptiveTransformer, list[float]]:
    """Minimize the TD loss of held-out queries over bandwidths and ridges, by gradients through every layer and the mixture.

    The loss is the mean of the contexts' logarithms of it: contexts whose rewards are easy to predict count as much as others.

    Args:
        data: Transitions of one domain; contexts are drawn within one episode, so within one goal.
        config: The settings; ``train`` must be ``"heads"``, whose batch size and learning rate are others.
        progress: Show it: a bar on a terminal, ten lines elsewhere.
        **options: Of :class:`~icrl_gym.adaptive.AdaptiveTransformer`, where the search starts.

    Returns:
        The trained transformer, and the loss of each step, normalized by the mean squared reward: its geometric mean over the
        batch, NaN for a batch without any reward, from which nothing is learned.

    Raises:
        ValueError: Settings of another kind of training, or episodes shorter than a context and its queries.
    """
    if config.train != "heads":
        raise ValueError(f'expected settings with train="heads", got {config.train!r}.')
    transformer = AdaptiveTransformer(gamma=config.gamma, n_layers=config.n_layers, **options)
    searched = [transformer.log_bandwidths.requires_grad_(), transformer.log_ridges.requires_grad_()]
    optimizer = torch.optim.Adam(searched, lr=config.rate)
    losses: list[float] = []
    seeds = np.random.SeedSequence([config.seed, 2]).generate_state(config.iterations)
    with shown_progress(seeds.tolist(), losses, progress) as shown:
        for seed in shown:
            batch, queries = contexts(data, config.n_context, config.contexts_a_step, seed, config.n_queries)
            errors = td_errors(transformer.condition(batch), config.gamma, queries)
            scale = queries.rewards.square().mean(-1)
            given = scale > 0
            if not bool(given.any()):
                losses.append(math.nan)
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
