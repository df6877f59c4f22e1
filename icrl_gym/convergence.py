"""Convergence that is known: whether the layers of a transformer contract on a context, and weights that contract on every one.

The error of the coefficients, e_l = c_l - c*, goes through a layer as

    e_{l+1} = (I - alpha_l B) e_l,        B = W A + rho n I        (:mod:`icrl_gym.solvers`)

so layers diverge on a context when the product of these maps has an eigenvalue outside the unit circle. The conditions for every
algorithm, with derivations: ``docs/convergence.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.context import Context
from icrl_gym.kernels import NystromKernel
from icrl_gym.solvers import System, system, trace
from icrl_gym.transformer import InContextTransformer

__all__ = ["Convergence", "certificate", "check_convergence"]


@dataclass(frozen=True)
class Convergence:
    """What the layers of a transformer do with the error on a context.

    Attributes:
        growth: (...): spectral radius of the product of all L layer maps: above 1 they diverge, and below it the error shrinks by
            this factor in the end. Exactly 1 for what layers never move (two equal states have coefficients whose difference
            changes no value). Of conjugate layers a bound instead, min(1, 2 ((sqrt(kappa) - 1) / (sqrt(kappa) + 1))^L), for the
            norm of the error in the system.
        layer_growth: (...): the same of one layer, with the largest step (in absolute value).
        top_eigenvalue: (...): the largest absolute eigenvalue of B, in units of the kernel's values.
        least_eigenvalue: (...): the smallest of <f, T f> / <f, f> over f = sum_j c_j kappa_j in the inner product of the kernel,
            T the map of functions that W A is; negative: there is an error that every small step makes larger in that norm. Without
            the ridge. NaN for a kernel that is not positive definite, which has no such norm.
        safe_ridge: (...): the least ``ridge`` (rho) of the transformer with which no such error is left; then small enough steps
            contract. NaN likewise.
        certificate: What :func:`certificate` says of the weights, whatever the context.
        tolerance: How far from 1 growth has to be to tell it from 1, after so many iterations.
    """

    growth: Float[Tensor, "*b"]
    layer_growth: Float[Tensor, "*b"]
    top_eigenvalue: Float[Tensor, "*b"]
    least_eigenvalue: Float[Tensor, "*b"]
    safe_ridge: Float[Tensor, "*b"]
    certificate: float
    tolerance: float

    @property
    def diverges(self) -> Bool[Tensor, "*b"]:
        """(...) bool: whether the error grows over the layers, by more than what could be the iteration's own error."""
        return self.growth > 1 + self.tolerance

    def describe(self) -> str:
        """The same in words, a line a context."""
        columns = (self.growth, self.layer_growth, self.top_eigenvalue, self.least_eigenvalue, self.safe_ridge)
        lines = []
        for growth, layer, top, least, ridge in zip(*(x.reshape(-1).tolist() for x in columns), strict=True):
            if growth > 1 + self.tolerance:
                line = f"The layers diverge: all together multiply the error by up to {growth:.4g}"
            elif growth > 1 - self.tolerance:
                line = f"There is an error that the layers hardly change (a factor within {self.tolerance:.2g} of 1)"
            else:
                line = f"The layers contract: all together multiply the error by {growth:.4g} or less"
            line += f"; one layer with the largest step by up to {layer:.4g}. The top eigenvalue is {top:.3g}."
            # Against the top one, a smaller number is rounding.
            if least < -1e-6 * top:
                line += (
                    f" Some error grows in the kernel's norm with any small step (eigenvalue {least:.3g}); ridge={ridge:.3g} "
                    f"or more would prevent it, as would algorithm='residual_gradient'."
                )
            if self.certificate == 1:
                line += " No context makes these weights diverge."
            lines.append(line)
        return "\n".join(lines)


def check_convergence(
    transformer: InContextTransformer | AdaptiveTransformer, context: Context, iterations: int = 64
) -> Convergence:
    """Whether the layers contract on a context, by power iteration: some thousand products with its n x n matrix.

    Args:
        transformer: An :class:`~icrl_gym.transformer.InContextTransformer` of finite depth.
        context: (...) contexts of n transitions.
        iterations: So many times all layers are applied; the growth is the mean of the second half. Where eigenvalues are in complex
            pairs, or many are near each other, it is right to about 1 / iterations.

    Returns:
        Numbers (...), a context each.

    Raises:
        TypeError: An :class:`~icrl_gym.adaptive.AdaptiveTransformer`, which needs no check.
        ValueError: An infinite depth, or fewer than 2 iterations.

    Example:
        >>> from icrl_gym.kernels import LinearKernel
        >>> context = Context([[1.0]], [0.0], [[2.0]], [False])  # w leads to 2 w (Tsitsiklis and Van Roy 1997)
        >>> td = InContextTransformer(LinearKernel(), step_sizes=[0.5], gamma=0.9)
        >>> found = check_convergence(td, context)
        >>> print(f"{found.growth:.2f} {found.least_eigenvalue:.2f} {found.safe_ridge:.2f}")
        1.40 -0.80 0.80
    """
    if isinstance(transformer, AdaptiveTransformer):
        raise TypeError(
            f"expected an InContextTransformer, got an {type(transformer).__name__}. No context makes an AdaptiveTransformer "
            f"diverge: certificate(transformer) says so."
        )
    _require_finite(transformer)
    if iterations < 2:
        raise ValueError(f"iterations must be at least 2, got {iterations}.")
    with torch.no_grad():
        context = context.to(dtype=torch.float64)
        kernel, rewards, shift, gamma = transformer._given(context)
        problem, gram = system(kernel, context, transformer.algorithm, rewards, shift, gamma, transformer.ridge)
        start = _start(context)
        traced = problem.algorithm.traced(problem.matrix.transpose(-1, -2), context, gamma).transpose(-1, -2)

        def times(c: Tensor) -> Tensor:
            """B c."""
            weighted = problem.coefficients(c).unsqueeze(-1)
            inner = weighted if problem.factor is None else problem.factor @ weighted
            return (traced @ inner).squeeze(-1) + problem.ridge.unsqueeze(-1) * c

        def layer_of(step: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda c: c - step.unsqueeze(-1) * times(c)

        top = _geometric_growth([times], start, 4 * iterations)
        least = _least_eigenvalue(problem, gram, traced, start)
        if transformer.acceleration == "conjugate":
            growth, layer = _conjugate_bounds(top, problem.ridge, len(transformer.step_sizes))
        else:
            alpha = transformer._alpha(problem, gram)
            growth = _geometric_growth([layer_of(step) for step in alpha.unbind(-1)], start, iterations)
            layer = torch.ones_like(growth)
            if alpha.shape[-1]:
                largest = alpha.gather(-1, alpha.abs().argmax(-1, keepdim=True)).squeeze(-1)
                layer = _geometric_growth([layer_of(largest)], start, 4 * iterations)
        size = trace(gram) if transformer.algorithm.differences else context.weights.sum(-1).to(top)
        ridge = (-least).clamp_min(0.0) / torch.where(size > 0, size, 1.0)
    exact = transformer.acceleration == "conjugate" or not len(transformer.step_sizes)
    tolerance = 1e-9 if exact else 1 / iterations
    return Convergence(growth, layer, top, least, ridge, certificate(transformer), tolerance)


def certificate(transformer: InContextTransformer | AdaptiveTransformer) -> float:
    """The most that all layers together can multiply the error of any context by, from the weights alone; 1: none diverges.

    For ``residual_gradient`` and ``monte_carlo`` with ``row_sum`` normalization it is

        max over 0 <= x <= 1 of |prod_l (1 - step_l x)|

    as the row sum bounds the top eigenvalue of their positive semi-definite matrix: x is an eigenvalue divided by it. Conjugate layers
    never increase the squared errors: 1. So it is for :class:`~icrl_gym.adaptive.AdaptiveTransformer`.

    Returns:
        A number of at least 1; infinite where the weights alone certify nothing (other algorithms and normalizations).

    Raises:
        ValueError: An infinite depth: it has no layers, and is the point where they would end.

    Example:
        >>> from icrl_gym.kernels import RBFKernel
        >>> certificate(InContextTransformer(RBFKernel(0.1), step_sizes=[1.0, 1.9, 1.0], algorithm="residual_gradient"))
        1.0
        >>> certificate(InContextTransformer(RBFKernel(0.1), step_sizes=[1.0, 1.9, 1.0], algorithm="td"))
        inf
    """
    if isinstance(transformer, AdaptiveTransformer):
        return 1.0
    _require_finite(transformer)
    if transformer.acceleration == "conjugate":
        return 1.0
    # Row sums bound eigenvalues of symmetric matrices, and only kernels that are positive definite have no negative ones.
    positive = transformer.algorithm.positive and transformer.kernel.positive_definite
    if not positive or transformer.step_normalization != "row_sum":
        return math.inf
    return _largest_product(transformer.step_sizes.detach().double())


def _largest_product(steps: Tensor) -> float:
    """The maximum over 0 <= x <= 1 of |prod_l (1 - step_l x)|; its logarithm is concave between neighboring roots 1 / step_l.

    Args:
        steps: (L,)
    """
    roots = 1.0 / steps[steps >= 1.0]
    edges = torch.cat([steps.new_zeros(1), roots, steps.new_ones(1)]).sort().values
    low, high = edges[:-1].clone(), edges[1:].clone()

    def height(x: Tensor) -> Tensor:
        return (1 - steps * x.unsqueeze(-1)).abs().log().sum(-1)

    for _ in range(120):  # (2/3)^120 = 1e-21 of the interval
        left, right = low + (high - low) / 3, high - (high - low) / 3
        rises = height(left) < height(right)
        low, high = torch.where(rises, left, low), torch.where(rises, high, right)
    # At x = 0 the product is 1 whatever the steps, and at 1 the search ends short of it.
    found = torch.cat([height(edges[[0, -1]]), height((low + high) / 2)]).max()
    return max(1.0, float(found.exp()))


def _require_finite(transformer: InContextTransformer) -> None:
    if transformer.infinite:
        raise ValueError(
            "a transformer of infinite depth has no layers that could diverge: it is solved directly. Ask of one with a finite "
            "n_layers."
        )


def _start(context: Context) -> Float[Tensor, "*b n"]:
    """Random numbers in the places that hold a transition, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(context), generator=generator, dtype=torch.float64).to(context.rewards)
    return numbers * context.mask


def _geometric_growth(
    maps: list[Callable[[Tensor], Tensor]], start: Float[Tensor, "*b n"], iterations: int
) -> Float[Tensor, "*b"]:
    """By how much linear maps, one after the other, multiply a vector: the mean over the second half of the iterations."""
    vector, logarithms = start, []
    for _ in range(iterations):
        total = start.new_zeros(start.shape[:-1])
        for apply in maps:
            vector = apply(vector)
            # After every map: the product of all could overflow.
            size = vector.norm(dim=-1)
            total = total + size.log()
            vector = vector / torch.where(size > 0, size, 1.0).unsqueeze(-1)
        logarithms.append(total)
    return torch.stack(logarithms[iterations // 2 :]).mean(0).exp()


def _conjugate_bounds(
    top: Float[Tensor, "*b"], ridge: Float[Tensor, "*b"], n_layers: int
) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
    """min(1, 2 q^L) with q = (sqrt(kappa) - 1) / (sqrt(kappa) + 1), and of one layer, (kappa - 1) / (kappa + 1)."""
    # 1 / kappa, as kappa is infinite without a ridge.
    inverse = torch.where(top > 0, ridge / torch.where(top > 0, top, 1.0), 1.0).clamp_max(1.0)
    root = inverse.sqrt()
    all_layers = (2 * ((1 - root) / (1 + root)) ** n_layers).clamp_max(1.0)
    return all_layers, (1 - inverse) / (1 + inverse)


def _least_eigenvalue(
    problem: System, gram: Tensor, traced: Float[Tensor, "*b n p"], start: Float[Tensor, "*b n"]
) -> Float[Tensor, "*b"]:
    """The least <f, T f> / <f, f> over f = sum_j c_j kappa_j; ``traced`` is W A, or of landmarks W F."""
    if not problem.kernel.positive_definite:
        return torch.full_like(start.sum(-1), math.nan)
    if isinstance(problem.kernel, NystromKernel):
        assert problem.factor is not None
        # Features are orthonormal coordinates of the functions already.
        weighted = problem.factor if problem.weights is None else problem.factor * problem.weights.unsqueeze(-2)
        operator = weighted @ traced
        return _lanczos((operator + operator.transpose(-1, -2)) / 2, (problem.factor @ start.unsqueeze(-1)).squeeze(-1))
    if problem.weights is not None:
        root = problem.weights.sqrt()
        gram = root.unsqueeze(-1) * gram * torch.where(root > 0, 1 / root, 0.0).unsqueeze(-2)
        traced = root.unsqueeze(-1) * traced * root.unsqueeze(-2)
    if not len(problem.context):
        return start.sum(-1)
    # In coordinates where <f, f> is the sum of squares. What is added to the diagonal hides functions that are zero but for rounding.
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    small = 1e-8 * diagonal.amax(-1, keepdim=True)
    root = torch.linalg.cholesky(gram + torch.diag_embed(torch.where(small > 0, small, 1.0).expand_as(diagonal)))
    operator = gram @ traced
    operator = torch.linalg.solve_triangular(root, (operator + operator.transpose(-1, -2)) / 2, upper=False)
    operator = torch.linalg.solve_triangular(root, operator.transpose(-1, -2), upper=False)
    return _lanczos((operator + operator.transpose(-1, -2)) / 2, start)


def _lanczos(matrix: Float[Tensor, "*b p p"], start: Float[Tensor, "*b p"], most: int = 80) -> Float[Tensor, "*b"]:
    """The smallest eigenvalue of a symmetric matrix, from at most so many products with it (Lanczos 1950).

    A power iteration would find the smallest of n eigenvalues next to a top one of order n only after very many of them.
    """
    size = start.norm(dim=-1, keepdim=True)
    basis = [start / torch.where(size > 0, size, 1.0)]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    scale = matrix.abs().amax((-2, -1)) if matrix.numel() else start.sum(-1)
    for _ in range(min(most, start.shape[-1])):
        moved = (matrix @ basis[-1].unsqueeze(-1)).squeeze(-1)
        quotient = (moved * basis[-1]).sum(-1)
        # All of the space that the start reaches is found: what follows must not look like an eigenvalue of zero.
        ended = basis[-1].norm(dim=-1) < 0.5
        diagonal.append(torch.where(ended, diagonal[0], quotient) if diagonal else quotient)
        for _ in range(2):  # once leaves rounding, which grows
            for other in basis:
                moved = moved - (moved * other).sum(-1, keepdim=True) * other
        length = moved.norm(dim=-1)
        length = torch.where(length > 1e-12 * scale, length, 0.0)
        beside.append(length)
        basis.append(torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0).unsqueeze(-1) * moved)
    if not diagonal:
        return start.sum(-1)
    tridiagonal = torch.diag_embed(torch.stack(diagonal, -1))
    if len(beside) > 1:
        below = torch.diag_embed(torch.stack(beside[:-1], -1), offset=-1)
        tridiagonal = tridiagonal + below + below.transpose(-1, -2)
    return torch.linalg.eigvalsh(tridiagonal)[..., 0]
