"""ValueFunction: what conditioning on a context gives, and how the layers collapse to it.

The query is masked out of the keys, so nothing that it does reaches the context, and the whole forward pass is

    V_L(s) = sum_j c_j k(s_j, s),      c = sum_l alpha_l delta^(l)

with delta^(l) the TD errors before layer l (:mod:`icrl_gym.solvers` finds c). A context is conditioned once; then a query costs
one kernel value a center.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float
from icrl_gym.context import Context, as_tensor
from icrl_gym.kernels import Kernel
from icrl_gym.transition_matrix import TransitionMatrix

__all__ = [
    "MOST_GROWTH",
    "ValueFunction",
    "check_growth",
    "constant_share",
    "divergence",
    "expand",
    "grown",
    "reward_center",
    "temporal_difference",
    "transition_matrix",
]

MOST_GROWTH = 1e3
"""Layers that leave TD errors of more than so many times the norm before the first one are taken to diverge."""

_REMEDY = (
    'Use step_normalization="row_sum" with step_sizes below 2, algorithm="residual_gradient", or n_layers=math.inf.'
)


@dataclass(frozen=True)
class ValueFunction:
    """V(s) = shift + sum_j coefficients_j k(centers_j, s), the value function of a context.

    Attributes:
        kernel: k, with the temperature that the context gave it.
        centers: (..., n, d): the states of the context, or its landmarks; for the residual gradient the states and then the next
            states, 2n of them.
        coefficients: (..., n)
        center_mask: (..., n) bool, False for an empty place.
        shift: (...): C of the value shift, 0 without.
        offset: (...): b, what the literal read-out adds to the value, whatever the query: b = -gamma (V - C)(0), with the
            discount of the layers (1 for average reward, 0 for Monte Carlo).
        td_errors: (..., L+1, n): the TD error of each transition of the context before each layer and after the last
            (Monte Carlo: return minus value); for infinite depth two rows, before and at the fixed point. Zero in empty places.
    """

    kernel: Kernel
    centers: Float[Tensor, "*b n d"]
    coefficients: Float[Tensor, "*b n"]
    center_mask: Bool[Tensor, "*b n"]
    shift: Float[Tensor, "*b"]
    offset: Float[Tensor, "*b"]
    td_errors: Float[Tensor, "*b l N"]

    def __call__(self, states: Any) -> Float[Tensor, "*b m"]:
        """V(states), without the offset.

        Args:
            states: (..., m, d)

        Returns:
            (..., m), in the units of the rewards.

        Raises:
            ValueError: Their last dimension is not d.
        """
        tensor = as_tensor(states).to(self.centers)
        if tensor.ndim < 2 or tensor.shape[-1] != self.centers.shape[-1]:
            raise ValueError(
                f"expected states of shape (..., m, {self.centers.shape[-1]}) like those of the context, "
                f"got {tuple(tensor.shape)}."
            )
        tensor = tensor.expand(*self.centers.shape[:-2], *tensor.shape[-2:])
        return self.shift.unsqueeze(-1) + expand(self.kernel, self.centers, self.center_mask, self.coefficients, tensor)

    @classmethod
    def cat(cls, kernel: Kernel, values: Sequence[ValueFunction]) -> ValueFunction:
        """Those of a batch, from those of its parts.

        Args:
            kernel: As the whole batch adapts it.
            values: One a part, along the first dimension.
        """
        return cls(kernel, *(torch.cat(tensors) for tensors in cls._fields_of(values)))

    @classmethod
    def stack(cls, kernel: Kernel, values: Sequence[ValueFunction]) -> ValueFunction:
        """Those of a batch, from one of each context.

        Args:
            kernel: As the whole batch adapts it.
            values: Without the batch's dimension.
        """
        return cls(kernel, *(torch.stack(tensors) for tensors in cls._fields_of(values)))

    @classmethod
    def _fields_of(cls, values: Sequence[ValueFunction]) -> list[list[Tensor]]:
        names = [field.name for field in fields(cls) if field.name != "kernel"]
        return [[getattr(value, name) for value in values] for name in names]


def expand(
    kernel: Kernel,
    centers: Float[Tensor, "*#b n d"],
    mask: Bool[Tensor, "*#b n"] | None,
    coefficients: Float[Tensor, "*#b n"],
    states: Float[Tensor, "*#b m d"],
) -> Float[Tensor, "*#b m"]:
    """sum_j c_j k(s_j, s), for each state."""
    return kernel.expand(centers, coefficients, states, mask)


def reward_center(context: Context, gamma: Tensor) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b"]]:
    """The value shift: rewards for U, where V = U + C, that average zero over the context.

        U's rewards = r_i - C (1 - gamma (1 - terminated_i)),    C = sum_i w_i r_i / sum_i w_i (1 - gamma (1 - terminated_i))

    with the weights w_i of the context. It is exact for any C, episode ends included. With gamma = 1 and no episode that ended no
    constant fits better than another, and C = 0.

    Args:
        context: (...) contexts.
        gamma: The discount.

    Returns:
        The shifted rewards (..., n) and C (...).

    Source: Naik et al. 2024 (reward centering).
    """
    share = constant_share(context, gamma)
    total = (context.weights * share).sum(-1)
    rewards = (context.weights * context.rewards).sum(-1)
    shift = torch.where(total > 0, rewards / torch.where(total > 0, total, 1.0), 0.0)
    return context.rewards - shift.unsqueeze(-1) * share, shift


def constant_share(context: Context, gamma: Tensor) -> Float[Tensor, "*b n"]:
    """1 - gamma (1 - terminated_i): what a constant in every value adds to each TD error; zero in empty places."""
    return (1 - gamma * (~context.terminated).to(context.rewards)) * context.mask


def temporal_difference(
    kernel: Kernel,
    centers: Float[Tensor, "*b M d"],
    context: Context,
    mask: Bool[Tensor, "*b M"] | None,
    discount: Float[Tensor, "*b n"],
) -> tuple[Float[Tensor, "*b M n"], Float[Tensor, "*b M n"]]:
    """k(centers, s_j), and k(centers, s_j) - discount_j k(centers, s'_j), for the transitions of a context.

    Columns of empty places are zero.
    """
    matrix = transition_matrix(kernel, centers, context, mask, discount)
    return matrix.here, matrix.difference()


def transition_matrix(
    kernel: Kernel,
    centers: Float[Tensor, "*b M d"],
    context: Context,
    mask: Bool[Tensor, "*b M"] | None,
    discount: Float[Tensor, "*b n"],
) -> TransitionMatrix:
    """The same, with k(centers, s'_j) where it has to be computed only.

    Where the next transition goes on from this one (s_{j+1} = s'_j, most of a rolling
    context) the column of its state is taken instead of computed again. An empty place has no such column to take.
    """
    present = None if bool(context.mask.all()) else context.mask.unsqueeze(-2)
    # A mask that hides nothing costs a copy of all values.
    mask = None if mask is None or bool(mask.all()) else mask
    here = kernel(centers, context.states, mask)
    here = here if present is None else here * present
    follows = (context.next_states[..., :-1, :] == context.states[..., 1:, :]).all(-1) & context.mask[..., 1:]
    follows = follows | ~context.mask[..., :-1]  # what an empty place leads to is not used
    breaks = ~follows.reshape(context.batch_shape.numel(), follows.shape[-1]).all(0)
    rows = torch.nn.functional.pad(breaks, (0, min(len(context), 1)), value=True).nonzero().squeeze(-1)
    return TransitionMatrix(here, rows, kernel(centers, context.next_states[..., rows, :], mask), discount)


def divergence(index: int, n_layers: int, norm: float) -> FloatingPointError:
    """The error for layers that diverge: the layer (from 0), how many there are, the largest TD error before it."""
    return FloatingPointError(
        f"the layers diverge: the TD errors are no longer finite after layer {index + 1} of {n_layers} (the largest "
        f"before it was {norm:.3g}). {_REMEDY}"
    )


def grown(errors: Float[Tensor, "*b L1 n"], most_growth: float) -> tuple[Bool[Tensor, "*b L1"], Float[Tensor, "*b L1"]]:
    """Whether TD errors have a norm of more than ``most_growth`` times that of the first row, and the norms.

    Args:
        errors: (..., L+1, n), n at least 1.
        most_growth: How many times.
    """
    # In units of the largest first error, so that the square of no error that is given overflows.
    scale = errors[..., :1, :].abs().amax(-1)
    norms = (errors / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)).norm(dim=-1)
    return ~(norms <= most_growth * norms[..., :1]), scale * norms  # a NaN has grown too


def check_growth(errors: Float[Tensor, "*b L1 n"], most_growth: float, what: str = "context") -> None:
    """Raise where the last of L layers leaves TD errors whose norm is too many times that before the first.

    What an accelerated method lets grow on the way and takes back is no divergence.

    Args:
        errors: (..., L+1, n), the TD errors before each layer and after the last.
        most_growth: How many times; ``math.inf``: whatever is finite.
        what: The word for an element of the batch.

    Raises:
        FloatingPointError: With the first layer that passed the bound, the norms, and the remedy.
    """
    if not errors.numel():
        return
    errors = errors.detach().reshape(-1, *errors.shape[-2:])
    n_layers = errors.shape[-2] - 1
    if math.isinf(most_growth):
        finite = torch.isfinite(errors).all(-1).all(0)
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            raise divergence(first - 1, n_layers, float(errors[:, max(first - 1, 0)].abs().max()))
        return
    passed, norms = grown(errors, most_growth)
    diverging = passed[:, -1].nonzero().squeeze(-1)
    if len(diverging):
        index = int(diverging[0])
        start, end = (float(norms[index, layer]) for layer in (0, -1))
        others = f" ({len(diverging)} of them do)" if len(diverging) > 1 else ""
        where = f"this {what}" if len(errors) == 1 else f"{what} {index} of {len(errors)}{others}"
        raise FloatingPointError(
            f"the layers diverge on {where}: the norm of the TD errors was {start:.3g} at first, more than {most_growth:g} times "
            f"as much after layer {int(passed[index].nonzero()[0])} of {n_layers}, and {end:.3g} after the last. {_REMEDY}"
        )
