"""Recency: transitions count less the older they are, because the policy that made them is not the present one any more."""

from __future__ import annotations

import torch

from icrl_gym.context import Context

__all__ = ["aged"]


def aged(context: Context, window: int, oldest_weight: float, age: int = 0) -> Context:
    """A context whose weights fall geometrically with age: 1 for the newest transition, ``oldest_weight`` at the window's end.

    A long window knows states that the policy has left, and may come back to; the weights keep the values those of the present
    policy where it goes now.

    Args:
        context: (...) transitions of one environment, oldest first.
        window: How many transitions of an environment a context can hold.
        oldest_weight: In (0, 1]; 1 leaves the weights as they are.
        age: How many newer transitions the environment has recorded since.

    Example:
        >>> chain = Context([[0.0], [1.0], [2.0]], [0.0] * 3, [[1.0], [2.0], [3.0]], [False] * 3)
        >>> aged(chain, 3, 0.125).weights
        tensor([0.2500, 0.5000, 1.0000])
    """
    if oldest_weight == 1.0:
        return context
    ages = torch.arange(len(context) - 1, -1, -1, device=context.weights.device) + age
    return context.weighted(context.weights * oldest_weight ** (ages.to(context.weights) / window))
