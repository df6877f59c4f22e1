"""Euclidean distances, fast through matrix products and still exact near the diagonal and far from the origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from icrl_gym._typing import Float

__all__ = [
    "BLOCK",
    "Distances",
    "euclidean",
    "few_pairs",
    "map_distances",
    "plain_distances",
    "product_error",
    "row_blocks",
]

BLOCK = 2**16
"""Pairs that are worked on at a time: half a megabyte in float64, so that every pass over them stays in the processor's cache."""


class Distances:
    """Squared distances from keys to queries that come in blocks; what belongs to the keys is computed once.

    The product form |u|^2 + |w|^2 - 2 <u, w> is one matrix product of [-2 u; |u|^2; 1] and [w; 1; |w|^2], several times faster
    than differences for states of more than a few features, but its rounding error is that of |u|^2: nearby states far from
    the origin come out wrong in most digits. Here states are first measured from the mean key, everything is done in float64,
    and the few pairs that are still too close for the product form are computed again from their differences. So the error of a
    distance stays below 1e-11 of itself, and float32 states get all the digits that they have.

    Args:
        keys: (n, d)
    """

    def __init__(self, keys: Float[Tensor, "n d"]) -> None:
        self.keys = keys
        wide = keys.double()
        self.center = wide.mean(-2, keepdim=True)
        u = wide - self.center
        square = u.square().sum(-1, keepdim=True)
        self.left = torch.cat([u.mul_(-2.0), square, torch.ones_like(square)], -1)
        self.largest = float(square.max()) if len(keys) else 0.0

    def prepared(self, queries: Float[Tensor, "m d"]) -> tuple[Float[Tensor, "m k"], float]:
        """The other factor of the product, and the largest sum |u|^2 + |w|^2.

        Args:
            queries: (m, d)
        """
        w = queries.double() - self.center
        square = w.square().sum(-1, keepdim=True)
        return torch.cat([w, torch.ones_like(square), square], -1), self.largest + float(square.max())

    def renew(
        self,
        squared: Float[Tensor, "j i"],
        first: Float[Tensor, "j d"],
        second: Float[Tensor, "i d"],
        largest: float,
    ) -> Float[Tensor, "j i"]:
        """Compute in place again, from differences, what is too small for the product form.

        Args:
            squared: (j, i), of the product form.
            first: (j, d), the states of its rows.
            second: (i, d), and of its columns.
            largest: The largest |u|^2 + |w|^2 anywhere.
        """
        # One bound for all pairs; "not greater", so that what is not finite is computed again too. Half the digits of float64 are
        # more than float32 has.
        bound = (1e-4 if self.keys.dtype == torch.float64 else 1e-8) * largest
        if bool(squared.amin() > bound):
            return squared
        near = ~(squared > bound)
        j, i = near.nonzero(as_tuple=True)
        if len(j) > near.numel() // 8:
            return squared.copy_(plain_distances(first.double(), second.double()).square_())
        squared[j, i] = (first[j].double() - second[i].double()).square_().sum(-1)
        return squared


def euclidean(keys: Float[Tensor, "*#b n d"], queries: Float[Tensor, "*#b m d"]) -> Float[Tensor, "*#b n m"]:
    """|u - w| for every key u and query w, to 1e-11 of itself in float64 (:class:`Distances`).

    Small problems, states of fewer than four features, and anything that wants a gradient take plain differences throughout.

    Args:
        keys: (..., n, d)
        queries: (..., m, d)

    Returns:
        (..., n, m)
    """
    if few_pairs(keys, queries) or (torch.is_grad_enabled() and (keys.requires_grad or queries.requires_grad)):
        return plain_distances(keys, queries)
    return map_distances(keys, queries, lambda squared, _: squared.sqrt())


def few_pairs(keys: Float[Tensor, "*#b n d"], queries: Float[Tensor, "*#b m d"]) -> bool:
    """Whether plain differences are at least as fast as anything else."""
    d = keys.shape[-1]
    return d < 4 or keys.shape[-2] * queries.shape[-2] * d < 2**17


def plain_distances(keys: Float[Tensor, "*#b n d"], queries: Float[Tensor, "*#b m d"]) -> Float[Tensor, "*#b n m"]:
    """|u - w| from differences."""
    return torch.cdist(keys, queries, compute_mode="donot_use_mm_for_euclid_dist")


def map_distances(
    keys: Float[Tensor, "*#b n d"],
    queries: Float[Tensor, "*#b m d"],
    function: Callable[[Tensor, int], Tensor],
    error: float = 0.0,
) -> Float[Tensor, "*#b n m"]:
    """A function of squared distances, block by block.

    Args:
        keys: (..., n, d)
        queries: (..., m, d)
        function: Of a block of squared distances (j, i) in float64, which it may overwrite, and of the number of the context (0 for
            one alone) that the block is of.
        error: A function that is smooth in the squared distance can do without exact small ones: where the product form is off by
            less than this (absolute, in squared units of the state), it is taken as it is.

    Returns:
        (..., n, m), in the type of the keys. Of keys with themselves half is computed, and is exactly symmetric.
    """
    batch = torch.broadcast_shapes(keys.shape[:-2], queries.shape[:-2])
    n, m = keys.shape[-2], queries.shape[-2]
    out = keys.new_empty(*batch, n, m)
    symmetric = _same(keys, queries)
    flat = zip(_flat(keys, batch), _flat(queries, batch), out.reshape(-1, n, m), strict=True)
    for index, (some_keys, some_queries, values) in enumerate(flat):
        distances = Distances(some_keys)
        right, largest = distances.prepared(some_queries)
        exact = not product_error(largest) <= error
        scratch = None
        for rows in row_blocks(n, m, keys.device):
            first, here = 0, values[rows]
            if symmetric:
                # In a place of its own: contiguous, which is faster than parts of rows, even with the copies to both sides.
                first, size = rows.start, (rows.stop - rows.start) * (n - rows.start)
                scratch = keys.new_empty(size) if scratch is None else scratch
                here = scratch[:size].view(-1, n - first)
            # In float64, in the place where it will stay: no second pass to copy it there.
            out_place = here if here.dtype == torch.float64 else None
            squared = torch.mm(distances.left[rows], right[first:].T, out=out_place)
            if exact:
                squared = distances.renew(squared, some_keys[rows], some_queries[first:], largest)
            mapped = function(squared.clamp_min_(0.0), index)
            if symmetric:
                values[rows, first:] = mapped
                values[rows.stop :, rows] = mapped[:, rows.stop - first :].T
            elif mapped.data_ptr() != here.data_ptr():
                here.copy_(mapped)
    return out


def product_error(largest: float) -> float:
    """How far squared distances of the product form can be off, from the largest |u|^2 + |w|^2."""
    return 8 * torch.finfo(torch.float64).eps * largest


def row_blocks(n: int, m: int, device: torch.device) -> Iterator[slice]:
    """Slices of n rows of m entries, of about :data:`BLOCK` entries each; 256 times as many where there is no cache to stay in."""
    size = max(1, BLOCK * (1 if device.type == "cpu" else 256) // max(m, 1))
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _same(keys: Tensor, queries: Tensor) -> bool:
    """Whether both are the same numbers in the same place."""
    alike = keys.shape == queries.shape and keys.stride() == queries.stride()
    return alike and keys.data_ptr() == queries.data_ptr() and keys.dtype == queries.dtype


def _flat(states: Tensor, batch: torch.Size) -> Tensor:
    return states.expand(*batch, *states.shape[-2:]).reshape(-1, *states.shape[-2:])
