"""TD losses of contexts and held-out queries, after every layer: what pretraining minimizes and the experiments report."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.context import Context
from icrl_gym.transformer import InContextTransformer
from icrl_gym.value_function import temporal_difference

__all__ = ["td_loss_by_depth"]


def td_loss_by_depth(
    transformer: InContextTransformer, contexts: Context, queries: Context
) -> tuple[Float[Tensor, "B L1"], Float[Tensor, "B L1"]]:
    """Normalized TD losses after 0, 1, ..., L layers: mean delta^2 / mean r^2, so that the value zero has the loss 1.

    Args:
        transformer: Of finite depth, without landmarks or value shift.
        contexts: A batch (B,) of n transitions.
        queries: A batch (B,) of m further transitions, which no context holds.

    Returns:
        (B, L+1) in-context and (B, L+1) held-out losses; infinite for a context on which the layers overflow, NaN where every
        reward is zero (there is nothing to predict).

    Raises:
        ValueError: An infinite depth, landmarks, or a value shift.
    """
    if transformer.infinite or transformer.n_landmarks is not None or transformer.value_shift:
        raise ValueError("losses by depth are of finite transformers without landmarks and value shift.")
    try:
        return _losses(transformer, contexts, queries)
    except FloatingPointError:
        if contexts.batch_shape.numel() == 1:
            infinite = torch.full((1, len(transformer.step_sizes) + 1), math.inf, dtype=contexts.rewards.dtype)
            return infinite, infinite.clone()
    pairs = [
        td_loss_by_depth(transformer, contexts[i : i + 1], queries[i : i + 1]) for i in range(len(contexts.rewards))
    ]
    return torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])


def _losses(transformer: InContextTransformer, contexts: Context, queries: Context) -> tuple[Tensor, Tensor]:
    value = transformer.condition(contexts)
    moved = transformer.layer_steps(contexts).unsqueeze(-1) * value.td_errors[..., :-1, :]
    coefficients = torch.nn.functional.pad(moved.cumsum(-2), (0, 0, 1, 0))  # (B, L+1, n), zero before the first layer
    gamma = transformer.gamma.to(queries.rewards)
    _, difference = temporal_difference(value.kernel, contexts.states, queries, contexts.mask, gamma)
    held_out = queries.rewards.unsqueeze(-2) - coefficients @ difference
    return _normalized(value.td_errors, contexts), _normalized(held_out, queries)


def _normalized(errors: Float[Tensor, "B L1 n"], transitions: Context) -> Float[Tensor, "B L1"]:
    scale = transitions.rewards.square().sum(-1, keepdim=True)
    return (errors * transitions.mask.unsqueeze(-2)).square().sum(-1) / torch.where(scale > 0, scale, math.nan)
