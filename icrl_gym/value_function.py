"""ValueFunction: what conditioning on a context gives, and how the layers collapse to it.

The query is masked out of the keys, so nothing that it does reaches the context, and the whole forward pass is

    V_L(s) = sum_j c_j k(s_j, s),      c = sum_l alpha_l delta^(l)

with delta^(l) the TD errors before layer l. A context is conditioned once; then a query costs one kernel value a center.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float
from icrl_gym.context import Context, as_tensor
from icrl_gym.kernels import Kernel, NystromKernel

__all__ = ["ValueFunction", "fixed_point", "iterate", "reward_center"]


@dataclass(frozen=True)
class ValueFunction:
    """V(s) = shift + sum_j coefficients_j k(centers_j, s), the value function of a context.

    Attributes:
        kernel: k, with the temperature that the context gave it.
        centers: (..., n, d): the states of the context, or its landmarks.
        coefficients: (..., n)
        center_mask: (..., n) bool, False for an empty place.
        shift: (...): C of the value shift, 0 without.
        offset: (...): b, what the literal read-out adds to the value, whatever the query: b = -gamma (V - C)(0).
        td_errors: (..., L+1, n): the TD error of each transition of the context before each layer and after the last;
            for infinite depth two rows, before and at the fixed point. Zero in empty places.
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


def expand(
    kernel: Kernel,
    centers: Float[Tensor, "*#b n d"],
    mask: Bool[Tensor, "*#b n"] | None,
    coefficients: Float[Tensor, "*#b n"],
    states: Float[Tensor, "*#b m d"],
) -> Float[Tensor, "*#b m"]:
    """sum_j c_j k(s_j, s), for each state."""
    values = kernel(centers, states, mask)
    return coefficients @ values if coefficients.ndim == 1 else (coefficients.unsqueeze(-2) @ values).squeeze(-2)


def reward_center(context: Context, gamma: Tensor) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b"]]:
    """The value shift: rewards for U, where V = U + C, that average zero over the context.

        U's rewards = r_i - C (1 - gamma (1 - terminated_i)),    C = sum_i r_i / sum_i (1 - gamma (1 - terminated_i))

    It is exact for any C, episode ends included. With gamma = 1 and no episode that ended no constant fits better than
    another, and C = 0.

    Args:
        context: (...) contexts.
        gamma: The discount.

    Returns:
        The shifted rewards (..., n) and C (...).

    Source: Naik et al. 2024 (reward centering).
    """
    weight = (1 - gamma * (~context.terminated).to(context.rewards)) * context.mask
    total = weight.sum(-1)
    shift = torch.where(total > 0, context.rewards.sum(-1) / torch.where(total > 0, total, 1.0), 0.0)
    return (context.rewards - shift.unsqueeze(-1) * weight), shift


def iterate(
    kernel: Kernel,
    context: Context,
    rewards: Float[Tensor, "*b n"],
    shift: Float[Tensor, "*b"],
    gamma: Tensor,
    step_sizes: Float[Tensor, L],
    normalizer: Callable[[Kernel, Tensor, Tensor, Tensor | None], Tensor],
    has_offset: bool,
) -> ValueFunction:
    """L steps of kernelized TD(0), delta <- delta - alpha (K - gamma K')^T delta, and their coefficients.

    Args:
        kernel: k; a :class:`~icrl_gym.kernels.NystromKernel` makes each step linear in n.
        context: (...) contexts.
        rewards: (..., n), shifted if values are.
        shift: (...), what is added to every value again.
        gamma: The discount.
        step_sizes: (L,), before normalization.
        normalizer: From the kernel, the states, their mask and their kernel matrix to what divides the steps.
        has_offset: Whether the query bootstraps, as in the literal construction.

    Raises:
        FloatingPointError: The layers diverge.
    """
    if isinstance(kernel, NystromKernel):
        # V(s) = k(s, Z) root w, so a step is two thin products: first to M dimensions, then back to n.
        here, difference = temporal_difference(kernel.base, kernel.landmarks, context, kernel.mask, gamma)
        gram = None
    else:
        here, difference = temporal_difference(kernel, context.states, context, context.mask, gamma)
        gram = here
    alpha = step_sizes / normalizer(kernel, context.states, context.mask, gram).unsqueeze(-1)
    root = kernel.root.to(rewards) if isinstance(kernel, NystromKernel) else None
    difference = difference.transpose(-1, -2)
    delta = rewards * context.mask
    errors, weights = [delta], here.new_zeros(here.shape[:-1])
    for step in alpha.unbind(-1):
        moved = step.unsqueeze(-1) * delta
        if root is not None:
            moved = _apply(root, _apply(root.transpose(-1, -2), _apply(here, moved)))
        weights = weights + moved
        delta = delta - _apply(difference, moved)
        errors.append(delta)
    td_errors = torch.stack(errors, -2)
    if not bool(torch.isfinite(td_errors).all()):
        finite = torch.isfinite(td_errors).all(-1).reshape(-1, td_errors.shape[-2]).all(0)
        first = int((~finite).nonzero()[0])
        raise divergence(first - 1, len(step_sizes), float(td_errors[..., max(first - 1, 0), :].abs().max()))
    return _value_function(kernel, context, weights, shift, gamma, td_errors, has_offset)


def fixed_point(
    kernel: Kernel,
    context: Context,
    rewards: Float[Tensor, "*b n"],
    shift: Float[Tensor, "*b"],
    gamma: Tensor,
    ridge: float,
    has_offset: bool,
) -> ValueFunction:
    """Infinite depth: the value function whose TD errors no further layer would change, but for the ridge rho.

        (K - gamma K' + rho n I)^T c = r                                  every transition its own center
        (Phi^T (Phi - gamma Phi') / n + rho I) w = Phi^T r / n            through landmarks, V(s) = phi(s) . w

    With gamma = 0 this is kernel ridge regression with alpha = rho n. Solved in float64.

    Args:
        kernel: k; a :class:`~icrl_gym.kernels.NystromKernel` for the second form.
        context: (...) contexts of n transitions.
        rewards: (..., n), shifted if values are.
        shift: (...), what is added to every value again.
        gamma: The discount.
        ridge: rho.
        has_offset: Whether the literal read-out would carry an offset.

    Raises:
        FloatingPointError: The system has no unique solution.

    Source: Farahmand et al. 2016 (regularized LSTD); Xu et al. 2007 (kernel LSTD).
    """
    kind = rewards.dtype
    given, context = context, context.to(dtype=torch.float64)
    target, gamma = rewards.double() * context.mask, gamma.double()
    n = context.n_transitions.double().clamp_min(1.0).unsqueeze(-1)
    if isinstance(kernel, NystromKernel):
        # Block by block: each one's kernel values are used while they are still in the processor's cache.
        root = kernel.root
        system, right = root.new_zeros(root.shape), root.new_zeros(root.shape[:-1])
        differences = []
        landmarks = kernel.landmarks.double()
        present = None if bool(kernel.mask.all()) else kernel.mask
        for rows in blocks(len(context)):
            here, difference = temporal_difference(kernel.base, landmarks, context[..., rows], present, gamma)
            system = system + here @ difference.transpose(-1, -2)
            right = right + _apply(here, target[..., rows])
            differences.append(difference)
        # Directions that were cut off as rounding hold nothing; a one keeps the system regular where rho is 0.
        dead = (root.abs().sum(-2) == 0).double()
        system = root.transpose(-1, -2) @ system @ root / n.unsqueeze(-1) + torch.diag_embed(ridge + dead)
        right = _apply(root.transpose(-1, -2), right) / n
    else:
        _, difference = temporal_difference(kernel, context.states, context, context.mask, gamma)
        right, differences = target, [difference]
        system = difference.transpose(-1, -2) + torch.diag_embed(ridge * n + (~context.mask).double())
    solution, info = torch.linalg.solve_ex(system, right)
    # V(s) = phi(s) . w = k(s, Z) (root w): coefficients of the landmarks themselves.
    coefficients = _apply(kernel.root, solution) if isinstance(kernel, NystromKernel) else solution
    predicted = [_apply(difference.transpose(-1, -2), coefficients) for difference in differences]
    errors = torch.stack([target, target - torch.cat(predicted, -1) if predicted else target], -2)
    # A system can be singular but for rounding: no pivot is zero, and yet the solution does not solve it.
    unsolved = (_apply(system, solution) - right).norm(dim=-1) > 1e-3 * right.norm(dim=-1)
    if bool((info != 0).any()) or bool(unsolved.any()) or not bool(torch.isfinite(errors).all()):
        raise FloatingPointError(
            f"the fixed point of this context is not unique with ridge={ridge:g} (duplicated states, or more transitions than "
            f"the kernel can tell apart, or a kernel whose values are far too large). "
            + (
                "Set a larger one, or take a bounded kernel (RBF, Laplacian)."
                if ridge
                else "Set a positive ridge, 1e-4 say."
            )
        )
    return _value_function(kernel, given, coefficients.to(kind), shift, gamma, errors.to(kind), has_offset)


def temporal_difference(
    kernel: Kernel,
    centers: Float[Tensor, "*b M d"],
    context: Context,
    mask: Bool[Tensor, "*b M"] | None,
    gamma: Tensor,
) -> tuple[Float[Tensor, "*b M n"], Float[Tensor, "*b M n"]]:
    """k(centers, s_j), and k(centers, s_j) - gamma (1 - terminated_j) k(centers, s'_j), for the transitions of a context.

    Columns of empty places are zero. Where the next transition goes on from this one (s_{j+1} = s'_j, most of a rolling
    context) the column of its state is taken instead of computed again. An empty place has no such column to take.
    """
    present = None if bool(context.mask.all()) else context.mask.unsqueeze(-2)
    here = kernel(centers, context.states, mask)
    here = here if present is None else here * present
    follows = (context.next_states[..., :-1, :] == context.states[..., 1:, :]).all(-1) & context.mask[..., 1:]
    follows = follows | ~context.mask[..., :-1]  # what an empty place leads to is not used
    breaks = ~follows.reshape(context.batch_shape.numel(), follows.shape[-1]).all(0)
    rows = torch.nn.functional.pad(breaks, (0, min(len(context), 1)), value=True).nonzero().squeeze(-1)
    there = torch.roll(here, -1, -1)
    there[..., rows] = kernel(centers, context.next_states[..., rows, :], mask)
    discount = gamma * (~context.terminated & context.mask).to(here).unsqueeze(-2)
    return here, torch.addcmul(here, there, -discount)


def blocks(n: int, size: int = 2048) -> list[slice]:
    """Slices of at most ``size`` that cover n rows."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def divergence(index: int, n_layers: int, norm: float) -> FloatingPointError:
    """The error for layers that diverge: the layer (from 0), how many there are, the largest TD error before it."""
    return FloatingPointError(
        f"the layers diverge: the TD errors are no longer finite after layer {index + 1} of {n_layers} (the largest "
        f'before it was {norm:.3g}). Use step_normalization="row_sum", smaller step_sizes, or n_layers=math.inf.'
    )


def _apply(matrix: Float[Tensor, "*b i j"], vector: Float[Tensor, "*b j"]) -> Float[Tensor, "*b i"]:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _value_function(
    kernel: Kernel,
    context: Context,
    coefficients: Tensor,
    shift: Tensor,
    gamma: Tensor,
    td_errors: Tensor,
    has_offset: bool,
) -> ValueFunction:
    centers, mask = context.states, context.mask
    if isinstance(kernel, NystromKernel):
        centers, mask = kernel.landmarks.to(coefficients), kernel.mask
        kernel = kernel.base
    coefficients = coefficients * mask
    origin = centers.new_zeros(*centers.shape[:-2], 1, centers.shape[-1])
    at_origin = expand(kernel, centers, mask, coefficients, origin).squeeze(-1)
    offset = -gamma * at_origin if has_offset else torch.zeros_like(at_origin)
    return ValueFunction(kernel, centers, coefficients, mask, shift, offset, td_errors)
