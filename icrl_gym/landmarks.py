"""Landmarks: the few states of a context that all others are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float, Int
from icrl_gym.context import Context
from icrl_gym.kernels import spread_rows

__all__ = ["choose_landmarks", "landmark_rows"]

_CANDIDATES = 16
"""Times the number of landmarks: so many states, spread evenly, are looked at for the farthest ones."""


def landmark_rows(states: Float[Tensor, "n d"], most: int, weights: Float[Tensor, n] | None = None) -> Int[Tensor, M]:
    """At most ``most`` of n states: one half spread over time, the other half where the first has left the largest gaps.

    States that are met often need landmarks because they count often, and those of a short passage, a reach before a long hold,
    because values change most there. Spread over time alone, the passage gets next to none; each in its turn the farthest from all
    landmarks so far, most would be outliers.

    Args:
        states: (n, d), in the coordinates of the kernel.
        most: M.
        weights: (n,), positive; the half that is spread over time lies as dense as they do.

    Returns:
        (m,) rows, m <= M: fewer where there are fewer distinct states. The first half in order.

    Source: Gonzalez 1985 (farthest-first traversal); its mixture with a sample over time is this package's own.

    Example:
        >>> rest, passage = torch.zeros(48, 1), torch.tensor([[1.0], [2.0]])
        >>> states = torch.cat([rest, passage])
        >>> states[landmark_rows(states, 6)].ravel()
        tensor([0., 0., 0., 2., 1.])
    """
    n = len(states)
    if n <= most:
        return torch.arange(n, device=states.device)
    first = spread_rows(n, (most + 1) // 2, states.device, weights)
    among = spread_rows(n, _CANDIDATES * most, states.device, weights)
    candidates = states[among]
    # From every candidate to the nearest landmark.
    distance = torch.cdist(candidates, states[first]).amin(-1)
    farthest = []
    for _ in range(most - len(first)):
        index = int(distance.argmax())
        if not float(distance[index]) > 0:
            break  # all that is left is there already
        farthest.append(index)
        distance = torch.minimum(distance, (candidates - candidates[index]).norm(dim=-1))
    return torch.cat([first, among[farthest]])


def choose_landmarks(context: Context, most: int) -> tuple[Float[Tensor, "*b M d"], Bool[Tensor, "*b M"]]:
    """The landmarks of each context (:func:`landmark_rows`).

    Args:
        context: (...) contexts of n transitions.
        most: M.

    Returns:
        (..., M, d) states and (..., M) bool, False where a context has fewer landmarks.
    """
    size = min(most, len(context))
    flat = context.states.reshape(context.batch_shape.numel(), *context.states.shape[-2:])
    rows_of = flat.shape[:-1]
    weights = context.weights.reshape(rows_of) if context.is_weighted else [None] * len(flat)
    chosen, present = [], []
    for states, mask, weight in zip(flat, context.mask.reshape(rows_of), weights, strict=True):
        there = states[mask]
        rows = landmark_rows(there.detach(), size, None if weight is None else weight[mask])
        chosen.append(torch.nn.functional.pad(there[rows], (0, 0, 0, size - len(rows))))
        present.append(torch.arange(size, device=states.device) < len(rows))
    shape = (*context.batch_shape, size)
    return torch.stack(chosen).reshape(*shape, context.n_features), torch.stack(present).reshape(shape)
