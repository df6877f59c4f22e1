"""Infinite depth: the value function that no further layer would change, found by solving for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.algorithms import Algorithm, goes_on
from icrl_gym.context import Context
from icrl_gym.kernels import Kernel, NystromKernel
from icrl_gym.landmark_fixed_points import landmark_fixed_point
from icrl_gym.linear_solve import require_solved, solve
from icrl_gym.solvers import system
from icrl_gym.value_function import MOST_GROWTH, ValueFunction

__all__ = ["fixed_point"]


def fixed_point(
    kernel: Kernel,
    context: Context,
    algorithm: Algorithm,
    rewards: Float[Tensor, "*b n"],
    shift: Float[Tensor, "*b"],
    gamma: Tensor,
    ridge: float,
    has_offset: bool,
    most_growth: float = MOST_GROWTH,
) -> ValueFunction:
    """Infinite depth: the value function that no further layer would change.

        (W A w + rho n I) b = W y                                             every transition its own center, c = w b
        (Phi^T w W (Phi - beta Phi') / n + rho I) u = Phi^T w W y / n         through landmarks, V(s) = phi(s) . u

    (for the residual gradient with Phi - beta Phi' on both sides, and rho times the trace of what it is added to). TD with
    gamma = 0 and Monte Carlo are kernel ridge regression with alpha = rho n. Solved in float64.

    Args:
        kernel: k; a :class:`~icrl_gym.kernels.NystromKernel` for the second form.
        context: (...) contexts of n transitions.
        algorithm: What the layers do.
        rewards: (..., n), shifted if values are.
        shift: (...), what is added to every value again.
        gamma: The discount.
        ridge: rho.
        has_offset: Whether the literal read-out would carry an offset.
        most_growth: TD errors of more than so many times the norm that the value zero has are those of no solution;
            ``math.inf``: whatever is finite.

    Raises:
        FloatingPointError: The system has no unique solution, or is so near to that that TD errors have grown.

    Source: Farahmand et al. 2016 (regularized LSTD); Xu et al. 2007 (kernel LSTD); Engel et al. 2005 (the residual gradient's, as
    Gaussian process TD).
    """
    if isinstance(kernel, NystromKernel):
        return landmark_fixed_point(kernel, context, algorithm, rewards, shift, gamma, ridge, has_offset, most_growth)
    kind = rewards.dtype
    given, context = context, context.to(dtype=torch.float64)
    gamma = gamma.double()
    problem, _ = system(kernel, context, algorithm, rewards.double(), shift, gamma, ridge)
    # (A w + rho n W^-1) b = y: on the ridge's side the trace touches two diagonals, as W A it would take passes over all of A.
    right, matrix = problem.targets, problem.matrix
    matrix = matrix.clone() if problem.weights is None else matrix * problem.weights.unsqueeze(-2)
    rho_n = problem.ridge.unsqueeze(-1)
    # A one where a transition says nothing: it is not there, or it stays where it is and gamma is 1 (its difference is 0).
    silent = ~context.mask
    if algorithm.differences:
        silent = silent | (matrix.diagonal(dim1=-2, dim2=-1) == 0)
    matrix.diagonal(dim1=-2, dim2=-1).add_(rho_n + silent.double())
    if algorithm.has_trace:
        beside = rho_n * gamma * algorithm.trace_decay * goes_on(context).double()
        matrix.diagonal(1, dim1=-2, dim2=-1).sub_(beside[..., :-1])
    solution = solve(matrix, right, ridge)
    errors = problem.targets - problem.times(solution)
    require_solved(matrix, solution, right, problem.targets, errors, ridge, most_growth)
    td_errors = torch.stack([problem.targets, errors], -2).to(kind)
    return replace(problem, context=given, gamma=gamma.to(kind)).value_function(
        solution.to(kind), td_errors, has_offset
    )
