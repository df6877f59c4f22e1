"""From a context to coefficients: layers as steps on a linear system, the same with conjugate directions, and the limit of depth.

A context, a kernel and an algorithm (:mod:`icrl_gym.algorithms`) make the system

    (W A w + rho n I) b = W y,      A_ij = kappa_j(s_i) - beta_i kappa_j(s'_i),      c = w b

(w: the diagonal matrix of the context's weights, n: their sum), and every layer moves b along what is left of its right side,
e = W (y - A w b) - rho n b. A plain layer moves alpha_l e; a
conjugate layer moves along the part of e that the layers before have not settled, as far as is best for the squared errors
(Hestenes and Stiefel 1952), which no step size has to be chosen for, but which needs a positive semi-definite system.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float
from icrl_gym.algorithms import Algorithm, discounted_sums, goes_on
from icrl_gym.context import Context
from icrl_gym.kernels import Kernel, NystromKernel
from icrl_gym.transition_matrix import TransitionMatrix
from icrl_gym.value_function import MOST_GROWTH, ValueFunction, expand, grown, temporal_difference, transition_matrix

__all__ = [
    "Directions",
    "System",
    "conjugate",
    "conjugate_ratio",
    "fixed_point",
    "iterate",
    "key_values",
    "system",
]


@dataclass(frozen=True)
class System:
    """The linear system of a context, as products with its matrix.

    Attributes:
        kernel: k; a :class:`~icrl_gym.kernels.NystromKernel` makes a product linear in n.
        context: (...) contexts of n transitions.
        algorithm: What kappa, y, beta and W are.
        gamma: The discount.
        targets: (..., n), y.
        shift: (...), what is added to every value.
        discount: (..., n), beta.
        ridge: (...), rho n; for the residual gradient rho sum_j <kappa_j, kappa_j>, which for kernels with k(s, s) = 1 is what n is
            to the others.
        stored: A (..., n, n), or what it can be multiplied by without being written down; through landmarks (..., n, M), the
            factor F of A = F P.
        factor: P (..., M, n) of landmarks, else None.
        weights: (..., n), w; None where all are 1.
    """

    kernel: Kernel
    context: Context
    algorithm: Algorithm
    gamma: Tensor
    targets: Float[Tensor, "*b n"]
    shift: Float[Tensor, "*b"]
    discount: Float[Tensor, "*b n"]
    ridge: Float[Tensor, "*b"]
    stored: Float[Tensor, "*b n p"] | TransitionMatrix
    factor: Float[Tensor, "*b p n"] | None
    weights: Float[Tensor, "*b n"] | None = None

    @property
    def matrix(self) -> Float[Tensor, "*b n p"]:
        """A, or F, written down."""
        return self.stored.difference().transpose(-1, -2) if isinstance(self.stored, TransitionMatrix) else self.stored

    def coefficients(self, solution: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """The coefficients c = w b."""
        return solution if self.weights is None else self.weights.to(solution) * solution

    def times(self, solution: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """A w b: what b takes away from the errors."""
        coefficients = self.coefficients(solution)
        if isinstance(self.stored, TransitionMatrix):
            return self.stored.times(coefficients)
        return _apply(self.stored, coefficients if self.factor is None else _apply(self.factor, coefficients))

    def residual(self, errors: Float[Tensor, "*b n"], solution: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """The right side's remainder, e = W delta - rho n b."""
        return self.algorithm.traced(errors, self.context, self.gamma) - self.ridge.unsqueeze(-1) * solution

    def value_function(
        self, solution: Float[Tensor, "*b n"], td_errors: Float[Tensor, "*b l n"], has_offset: bool
    ) -> ValueFunction:
        """The value function of a solution b."""
        coefficients = self.coefficients(solution)
        if isinstance(self.kernel, NystromKernel):
            assert self.factor is not None
            weights = _apply(self.kernel.root.to(coefficients), _apply(self.factor, coefficients))
            centers, mask = self.kernel.landmarks, self.kernel.mask
            offset = self.algorithm.bootstrap_gamma(self.gamma) * has_offset
            return _value_function(self.kernel.base, centers, mask, weights, self.shift, offset, td_errors)
        centers, mask = self.context.states, self.context.mask
        if self.algorithm.differences:
            centers = torch.cat([centers, self.context.next_states], -2)
            coefficients = torch.cat([coefficients, -self.discount.to(coefficients) * coefficients], -1)
            mask = torch.cat([mask, mask], -1)
        offset = self.algorithm.bootstrap_gamma(self.gamma) * has_offset
        return _value_function(self.kernel, centers, mask, coefficients, self.shift, offset, td_errors)


def system(
    kernel: Kernel,
    context: Context,
    algorithm: Algorithm,
    rewards: Float[Tensor, "*b n"],
    shift: Float[Tensor, "*b"],
    gamma: Tensor,
    ridge: float = 0.0,
) -> tuple[System, Float[Tensor, "*b k k"]]:
    """The system of a context, and the matrix whose row sums bound its top eigenvalue from above.

    That matrix is k(s_j, s_i) w_i, or <kappa_j, kappa_i> w_i where transitions count at both their ends; through landmarks, the
    M x M matrix of the same eigenvalues.

    Args:
        kernel: k, adapted to the context.
        context: (...) contexts.
        algorithm: What the layers do.
        rewards: (..., n), shifted if values are.
        shift: (...), what is added to every value again.
        gamma: The discount.
        ridge: rho.
    """
    discount = algorithm.discount(context, gamma)
    targets = algorithm.targets(context, rewards, gamma)
    factor: Tensor | None = None
    matrix: Tensor | TransitionMatrix
    weights = context.weights.to(rewards) if context.is_weighted else None
    if isinstance(kernel, NystromKernel):
        here, difference = temporal_difference(kernel.base, kernel.landmarks, context, kernel.mask, discount)
        root = kernel.root.to(rewards)
        factor = root.transpose(-1, -2) @ (difference if algorithm.differences else here)
        matrix = difference.transpose(-1, -2) @ root
        gram = (factor if weights is None else factor * weights.unsqueeze(-2)) @ factor.transpose(-1, -2)
    elif algorithm.differences:
        _, difference = key_values(kernel, context, context, algorithm, discount, discount)
        matrix = difference.transpose(-1, -2)
        gram = matrix if weights is None else matrix * weights.unsqueeze(-2)
    else:
        matrix = transition_matrix(kernel, context.states, context, context.mask, discount)
        gram = matrix.here if weights is None else matrix.here * weights.unsqueeze(-2)
    size = trace(gram) if algorithm.differences else context.weights.sum(-1).to(rewards)
    return System(
        kernel, context, algorithm, gamma, targets, shift, discount, ridge * size, matrix, factor, weights
    ), gram


def key_values(
    kernel: Kernel,
    context: Context,
    queries: Context,
    algorithm: Algorithm,
    discount: Float[Tensor, "*b n"],
    query_discount: Float[Tensor, "*b m"],
) -> tuple[Float[Tensor, "*b n m"], Float[Tensor, "*b n m"]]:
    """kappa_j(s_i), and kappa_j(s_i) - beta_i kappa_j(s'_i), for the keys j of a context and other transitions i.

    Args:
        kernel: k.
        context: (...) contexts of n transitions, the keys.
        queries: (...) contexts of m transitions.
        algorithm: Whether a key is a state or a difference.
        discount: (..., n), beta of the keys.
        query_discount: (..., m), beta of the queries.
    """
    here, difference = temporal_difference(kernel, context.states, queries, context.mask, query_discount)
    if not algorithm.differences:
        return here, difference
    here_next, difference_next = temporal_difference(kernel, context.next_states, queries, context.mask, query_discount)
    beta = discount.unsqueeze(-1)
    return here - beta * here_next, difference - beta * difference_next


def iterate(problem: System, alpha: Float[Tensor, "*b L"]) -> tuple[Float[Tensor, "*b L1 n"], Float[Tensor, "*b L1 n"]]:
    """L plain layers: b <- b + alpha_l e.

    Args:
        problem: Of :func:`system`.
        alpha: (..., L), the step of each layer, normalized.

    Returns:
        b and errors delta after 0, 1, ..., L layers, (..., L+1, n) each, however large.
    """
    delta, solution = problem.targets, torch.zeros_like(problem.targets)
    errors, path = [delta], [solution]
    for step in alpha.unbind(-1):
        moved = step.unsqueeze(-1) * problem.residual(delta, solution)
        solution = solution + moved
        delta = delta - problem.times(moved)
        errors.append(delta)
        path.append(solution)
    return torch.stack(path, -2), torch.stack(errors, -2)


def conjugate(problem: System, n_layers: int) -> tuple[Float[Tensor, "*b L1 n"], Float[Tensor, "*b L1 n"]]:
    """L conjugate layers: after each, V is the best of all that so many layers with any steps could reach.

    Best for sum_i w_i delta_i^2 + rho n <V, V>, the squared errors and the ridge, which therefore fall with every layer: no context
    makes them diverge.

    Args:
        problem: A positive semi-definite one (``algorithm.positive``).
        n_layers: L.

    Returns:
        b and errors delta after 0, 1, ..., L layers, (..., L+1, n) each.
    """
    delta, solution = problem.targets, torch.zeros_like(problem.targets)
    errors, path = [delta], [solution]
    start = Directions.first(problem.residual(delta, solution), problem.times, problem.weights)
    now, ridge = start, problem.ridge.unsqueeze(-1)
    for _ in range(n_layers):
        step, following = now.step(problem.times, ridge, start)
        solution = solution + step * now.direction
        delta = delta - step * now.taken
        now = following
        errors.append(delta)
        path.append(solution)
    return torch.stack(path, -2), torch.stack(errors, -2)


@dataclass(frozen=True)
class Directions:
    """Where conjugate layers stand: what is left, where the next one goes, and what the matrix A makes of both.

    Directions are conjugate, and steps are best, in the inner product of the kernel: <a, b> = (w a)^T A (w b) for functions of
    coefficients w a and w b. In that of the coefficients themselves, which is the textbook's, errors of directions that hardly
    change any value would count as much as all others, and the squared TD error could rise on the way.

    Attributes:
        residual: (..., n), e = y - (A w + rho n I) b.
        reach: (..., n), A w e.
        direction: (..., n), p.
        taken: (..., n), A w p.
        weights: (..., n), w; None where all are 1.

    Source: Hestenes and Stiefel 1952, section 10 (their method for the normal equations); Saad 2003, section 8.3.
    """

    residual: Float[Tensor, "*b n"]
    reach: Float[Tensor, "*b n"]
    direction: Float[Tensor, "*b n"]
    taken: Float[Tensor, "*b n"]
    weights: Float[Tensor, "*b n"] | None = None

    @classmethod
    def first(
        cls,
        residual: Float[Tensor, "*b n"],
        times: Callable[[Tensor], Tensor],
        weights: Float[Tensor, "*b n"] | None = None,
    ) -> Directions:
        """The first direction is the residual.

        Args:
            residual: (..., n), e.
            times: A w, as a product.
            weights: (..., n), w.
        """
        reach = times(residual)
        return cls(residual, reach, residual, reach, weights)

    def step(
        self, times: Callable[[Tensor], Tensor], ridge: Float[Tensor, "*#b 1"], start: Directions
    ) -> tuple[Float[Tensor, "*b 1"], Directions]:
        """How far to go along p, and where that leads: one product with A.

        Args:
            times: A w, as a product.
            ridge: (..., 1), rho n.
            start: Before the first layer; a residual of its rounding is taken for zero, and nothing moves any more.
        """
        step = self.best_step(ridge, start)
        residual = self.residual - step * (self.taken + ridge * self.direction)
        reach = self.reach - step * (times(self.taken) + ridge * self.taken)
        ratio = conjugate_ratio(step, self.weighted_sum(residual * reach), self.square)
        following = residual + ratio * self.direction, reach + ratio * self.taken
        return step, Directions(residual, reach, *following, self.weights)

    def weighted_sum(self, values: Float[Tensor, "*b n"]) -> Float[Tensor, "*b 1"]:
        """sum_i w_i x_i."""
        values = values if self.weights is None else self.weights.to(values) * values
        return values.sum(-1, keepdim=True)

    @property
    def square(self) -> Float[Tensor, "*b 1"]:
        """<e, e>."""
        return self.weighted_sum(self.residual * self.reach)

    def curvature(self, ridge: Float[Tensor, "*#b 1"]) -> Float[Tensor, "*b 1"]:
        """<p, (A w + rho n I) p>."""
        return self.weighted_sum(self.taken.square()) + ridge * self.weighted_sum(self.direction * self.taken)

    def best_step(self, ridge: Float[Tensor, "*#b 1"], start: Directions) -> Float[Tensor, "*b 1"]:
        """The best step along a direction, zero where nothing is left but rounding.

        Without a ridge e may keep a part that A does not see (more transitions than the kernel's rank), which never shrinks: then
        <e, e> comes down to the rounding of the product alone, and a step made of it would be any number.

        Args:
            ridge: (..., 1), rho n.
            start: Before the first layer.
        """
        square, curvature = self.square, self.curvature(ridge)
        least = torch.finfo(square.dtype).tiny
        seen = start.square / self.weighted_sum(start.residual.square()).clamp_min(least)
        rounding = 1e3 * torch.finfo(square.dtype).eps * seen * self.weighted_sum(self.residual.square())
        settled = (square <= 1e-26 * start.square) | (square <= rounding) | ~(curvature > 0)
        return torch.where(settled, 0.0, square / torch.where(settled, 1.0, curvature))


def conjugate_ratio(
    step: Float[Tensor, "*b 1"], square: Float[Tensor, "*b 1"], before: Float[Tensor, "*b 1"]
) -> Float[Tensor, "*b 1"]:
    """How much of a direction stays in the next one.

    Args:
        step: (..., 1), of :meth:`Directions.best_step`.
        square: (..., 1), <e, e> after it.
        before: (..., 1), and before.
    """
    # Rounding can make the square of next to nothing negative.
    return torch.where(step > 0, square.clamp_min(0.0) / torch.where(step > 0, before, 1.0), 0.0)


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
    kind = rewards.dtype
    given, context = context, context.to(dtype=torch.float64)
    gamma, n = gamma.double(), context.weights.sum(-1, keepdim=True)
    n = torch.where(n > 0, n, 1.0)
    if not isinstance(kernel, NystromKernel):
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
        solution = _solve(matrix, right, ridge)
        errors = problem.targets - problem.times(solution)
        _require_solved(matrix, solution, right, problem.targets, errors, ridge, most_growth)
        td_errors = torch.stack([problem.targets, errors], -2).to(kind)
        return replace(problem, context=given, gamma=gamma.to(kind)).value_function(
            solution.to(kind), td_errors, has_offset
        )
    # Block by block: each one's kernel values are used while they are still in the processor's cache.
    root, landmarks = kernel.root, kernel.landmarks.double()
    discount, targets = algorithm.discount(context, gamma), algorithm.targets(context, rewards.double(), gamma)
    matrix, right = root.new_zeros(root.shape), root.new_zeros(root.shape[:-1])
    traced_targets = algorithm.traced(targets, context, gamma)
    follows = goes_on(context).unsqueeze(-2) if algorithm.has_trace else None
    after = root.new_zeros(())  # the trace that comes in from the block behind
    differences: list[Tensor] = []
    weighted = context.is_weighted
    present = None if bool(kernel.mask.all()) else kernel.mask
    # From the last block to the first, as traces run: forward in time, from the errors that follow.
    for rows in reversed(blocks(len(context))):
        here, difference = temporal_difference(kernel.base, landmarks, context[..., rows], present, discount[..., rows])
        keys = difference if algorithm.differences else here
        keys = keys * context.weights[..., None, rows] if weighted else keys
        right = right + _apply(keys, traced_targets[..., rows])
        followed = difference
        if follows is not None:
            followed = discounted_sums(difference, follows[..., rows], gamma * algorithm.trace_decay, after)
            after = followed[..., 0]
        matrix = matrix + keys @ followed.transpose(-1, -2)
        differences.insert(0, difference)
    matrix = root.transpose(-1, -2) @ matrix @ root / n.unsqueeze(-1)
    # Directions that were cut off as rounding hold nothing, and of differences those in which nothing moves; a one keeps
    # the system regular where rho is 0.
    dead = root.abs().sum(-2) == 0
    if algorithm.differences:
        dead = dead | (matrix.diagonal(dim1=-2, dim2=-1) == 0)
    dead = dead.double()
    size = trace(matrix).unsqueeze(-1) if algorithm.differences else 1.0
    matrix = matrix + torch.diag_embed(ridge * size + dead)
    right = _apply(root.transpose(-1, -2), right) / n
    solution = _solve(matrix, right, ridge)
    # V(s) = phi(s) . u = k(s, Z) (root u): coefficients of the landmarks themselves.
    weights = _apply(root, solution)
    predicted = [_apply(difference.transpose(-1, -2), weights) for difference in differences]
    errors = targets - torch.cat(predicted, -1) if predicted else targets
    _require_solved(matrix, solution, right, targets, errors, ridge, most_growth)
    offset = algorithm.bootstrap_gamma(gamma).to(kind) * has_offset
    td_errors = torch.stack([targets, errors], -2).to(kind)
    return _value_function(kernel.base, kernel.landmarks, kernel.mask, weights.to(kind), shift, offset, td_errors)


def trace(matrix: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b"]:
    """The sum of the diagonal."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def blocks(n: int, size: int = 2048) -> list[slice]:
    """Slices of at most ``size`` that cover n rows."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _solve(matrix: Float[Tensor, "*b p p"], right: Float[Tensor, "*b p"], ridge: float) -> Float[Tensor, "*b p"]:
    solution, info = torch.linalg.solve_ex(matrix, right)
    if bool((info != 0).any()):
        raise _not_unique(ridge)
    return solution


def _require_solved(
    matrix: Tensor, solution: Tensor, right: Tensor, targets: Tensor, errors: Tensor, ridge: float, most_growth: float
) -> None:
    # A system can be singular but for rounding: no pivot is zero, and yet the solution does not solve it.
    unsolved = (_apply(matrix, solution) - right).norm(dim=-1) > 1e-3 * right.norm(dim=-1)
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


def _apply(matrix: Float[Tensor, "*b i j"], vector: Float[Tensor, "*b j"]) -> Float[Tensor, "*b i"]:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _value_function(
    kernel: Kernel,
    centers: Float[Tensor, "*b c d"],
    mask: Bool[Tensor, "*b c"],
    coefficients: Float[Tensor, "*b c"],
    shift: Float[Tensor, "*b"],
    gamma: Tensor,
    td_errors: Float[Tensor, "*b l n"],
) -> ValueFunction:
    """The value function whose literal read-out carries -gamma (V - C)(0); ``gamma`` is 0 where the query does not bootstrap."""
    centers, coefficients = centers.to(coefficients), coefficients * mask
    origin = centers.new_zeros(*centers.shape[:-2], 1, centers.shape[-1])
    at_origin = expand(kernel, centers, mask, coefficients, origin).squeeze(-1)
    return ValueFunction(kernel, centers, coefficients, mask, shift, -gamma * at_origin, td_errors)
