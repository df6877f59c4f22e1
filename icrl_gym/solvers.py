"""From a context to coefficients: layers as steps on a linear system, and the same with conjugate directions.

A context, a kernel and an algorithm (:mod:`icrl_gym.algorithms`) make the system

    (W A w + rho n I) b = W y,      A_ij = kappa_j(s_i) - beta_i kappa_j(s'_i),      c = w b

(w: the diagonal matrix of the context's weights, n: their sum), and every layer moves b along what is left of its right side,
e = W (y - A w b) - rho n b. A plain layer moves alpha_l e; a
conjugate layer moves along the part of e that the layers before have not settled, as far as is best for the squared errors
(Hestenes and Stiefel 1952), which no step size has to be chosen for, but which needs a positive semi-definite system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float
from icrl_gym.algorithms import Algorithm
from icrl_gym.context import Context
from icrl_gym.kernels import Kernel, NystromKernel
from icrl_gym.transition_matrix import TransitionMatrix
from icrl_gym.value_function import ValueFunction, expand, temporal_difference, transition_matrix

__all__ = [
    "Directions",
    "System",
    "apply",
    "conjugate",
    "conjugate_ratio",
    "iterate",
    "key_values",
    "system",
    "trace",
    "value_of",
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
        return apply(self.stored, coefficients if self.factor is None else apply(self.factor, coefficients))

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
            weights = apply(self.kernel.root.to(coefficients), apply(self.factor, coefficients))
            centers, mask = self.kernel.landmarks, self.kernel.mask
            offset = self.algorithm.bootstrap_gamma(self.gamma) * has_offset
            return value_of(self.kernel.base, centers, mask, weights, self.shift, offset, td_errors)
        centers, mask = self.context.states, self.context.mask
        if self.algorithm.differences:
            centers = torch.cat([centers, self.context.next_states], -2)
            coefficients = torch.cat([coefficients, -self.discount.to(coefficients) * coefficients], -1)
            mask = torch.cat([mask, mask], -1)
        offset = self.algorithm.bootstrap_gamma(self.gamma) * has_offset
        return value_of(self.kernel, centers, mask, coefficients, self.shift, offset, td_errors)


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


def trace(matrix: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b"]:
    """The sum of the diagonal."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def apply(matrix: Float[Tensor, "*b i j"], vector: Float[Tensor, "*b j"]) -> Float[Tensor, "*b i"]:
    """The product of a matrix and a vector, of each context."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def value_of(
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
