"""Euclidean distances, fast through one matrix product and still exact near the diagonal and far from the origin."""

from __future__ import annotations

import torch
from torch import Tensor

from icrl_gym._typing import Float

__all__ = ["euclidean"]


def euclidean(keys: Float[Tensor, "*#b n d"], queries: Float[Tensor, "*#b m d"]) -> Float[Tensor, "*#b n m"]:
    """|u - w| for every key u and query w.

    The product form |u|^2 + |w|^2 - 2 <u, w> is several times faster for states of many features, but its rounding error is
    that of |u|^2: nearby states far from the origin come out wrong in most digits. Here states are first measured from the
    mean key, and the few pairs that are still too close for the product form are computed again from their differences, so
    the error of a distance stays below 1e-11 of itself in float64. float32, small problems, and anything that wants a
    gradient take the plain differences throughout.

    Args:
        keys: (..., n, d)
        queries: (..., m, d)

    Returns:
        (..., n, m)
    """
    few = keys.shape[-1] < 16 or keys.shape[-2] * queries.shape[-2] * keys.shape[-1] < 2**19
    plain = few or keys.dtype != torch.float64
    if plain or (torch.is_grad_enabled() and (keys.requires_grad or queries.requires_grad)):
        return torch.cdist(keys, queries, compute_mode="donot_use_mm_for_euclid_dist")
    center = keys.mean(-2, keepdim=True)
    u, w = keys - center, queries - center
    uu, ww = u.square().sum(-1, keepdim=True), w.square().sum(-1).unsqueeze(-2)
    squared = (uu + ww).sub_(u @ w.transpose(-1, -2), alpha=2)
    # One bound for all pairs, the largest; "not greater", so that what is not finite is computed again too.
    near = ~(squared > 1e-4 * (uu.max() + ww.max()))
    distance = squared.clamp_min_(0.0).sqrt_()
    index = near.nonzero(as_tuple=True)
    if len(index[0]) > near.numel() // 8:
        return torch.cdist(keys, queries, compute_mode="donot_use_mm_for_euclid_dist")
    if len(index[0]):
        *batch, j, i = index
        keys, queries = (
            keys.expand(*near.shape[:-2], *keys.shape[-2:]),
            queries.expand(*near.shape[:-2], *queries.shape[-2:]),
        )
        distance[index] = (keys[(*batch, j)] - queries[(*batch, i)]).norm(dim=-1)
    return distance
