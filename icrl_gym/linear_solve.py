"""Linear systems whose solution is checked: what is singular but for rounding has none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.solvers import apply
from icrl_gym.value_function import grown

__all__ = ["require_solved", "solve"]


def solve(matrix: Float[Tensor, "*b p p"], right: Float[Tensor, "*b p"], ridge: float) -> Float[Tensor, "*b p"]:
    """The solution of a linear system.

    Raises:
        FloatingPointError: It is singular.
    """
    solution, info = torch.linalg.solve_ex(matrix, right)
    if bool((info != 0).any()):
        raise _not_unique(ridge)
    return solution


def require_solved(
    matrix: Tensor, solution: Tensor, right: Tensor, targets: Tensor, errors: Tensor, ridge: float, most_growth: float
) -> None:
    """Say so where a solution is none, or leaves TD errors that have grown too much.

    Raises:
        FloatingPointError: See :func:`fixed_point`.
    """
    # A system can be singular but for rounding: no pivot is zero, and yet the solution does not solve it.
    size = right.norm(dim=-1)
    unsolved = (apply(matrix, solution) - right).norm(dim=-1) > 1e-3 * size
    # Nor does a residual tell anything where rounding the product weighs more than the right side: the condition is above 1 / eps.
    rounding = torch.finfo(solution.dtype).eps * matrix.flatten(-2).norm(dim=-1) * solution.norm(dim=-1)
    unsolved |= rounding > size
    if bool(unsolved.any()) or not bool(torch.isfinite(errors).all()):
        raise _not_unique(ridge)
    if errors.shape[-1] and not math.isinf(most_growth):
        passed, _ = grown(torch.stack([targets, errors], -2), most_growth)
        if bool(passed.any()):
            raise _not_unique(ridge)


def _not_unique(ridge: float) -> FloatingPointError:
    return FloatingPointError(
        f"the fixed point of this context is not unique with ridge={ridge:g} (duplicated states, or more transitions than "
        f"the kernel can tell apart, or a kernel whose values are far too large). "
        + (
            "Set a larger one, or take a bounded kernel (RBF, Laplacian)."
            if ridge
            else "Set a positive ridge, 1e-4 say."
        )
    )
