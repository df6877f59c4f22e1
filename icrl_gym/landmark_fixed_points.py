"""Fixed points through landmarks: sums over the transitions, and one small system of them; with folds, one for each that is left out.

What transitions add to the system of a fixed point (:mod:`icrl_gym.fixed_points`) through landmarks,

    sum_i w_i phi_i (W (Phi - beta Phi'))_i^T        and        sum_i w_i phi_i (W y)_i,

is as small as the landmarks are few. So the value function of a context without some of its transitions costs one more solve, not
one more pass over the transitions: it is that of the sums over all others. That makes cross-fitting as cheap as conditioning once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float, Int
from icrl_gym.algorithms import Algorithm, discounted_sums, goes_on
from icrl_gym.context import Context
from icrl_gym.kernels import NystromKernel
from icrl_gym.linear_solve import require_solved, solve
from icrl_gym.solvers import apply, trace, value_of
from icrl_gym.value_function import MOST_GROWTH, ValueFunction, constant_share, reward_center, temporal_difference

__all__ = ["blocks", "landmark_fixed_point", "landmark_fixed_points", "leaves_out"]


def landmark_fixed_point(
    kernel: NystromKernel,
    context: Context,
    algorithm: Algorithm,
    rewards: Float[Tensor, "*b n"],
    shift: Float[Tensor, "*b"],
    gamma: Tensor,
    ridge: float,
    has_offset: bool,
    most_growth: float = MOST_GROWTH,
) -> ValueFunction:
    """:func:`~icrl_gym.fixed_points.fixed_point` through the landmarks of a kernel."""
    wide, discount = context.to(dtype=torch.float64), gamma.double()
    targets = algorithm.targets(wide, rewards.double(), discount)
    sums = _sums(kernel, wide, algorithm, targets.unsqueeze(-2), discount)
    solver = _Solver(kernel, algorithm, gamma, ridge, has_offset, most_growth, rewards.dtype)
    matrix, right = sums.whole
    n = wide.weights.sum(-1, keepdim=True)
    return solver(matrix, right.squeeze(-1), n, targets, sums.differences, shift)


def leaves_out(algorithm: Algorithm) -> bool:
    """Whether :func:`landmark_fixed_points` knows the algorithm: what a transition adds must not depend on the others' rewards."""
    return algorithm.name in ("td", "td_lambda")


def landmark_fixed_points(
    kernel: NystromKernel,
    context: Context,
    algorithm: Algorithm,
    folds: Int[Tensor, n],
    n_folds: int,
    value_shift: bool,
    gamma: Tensor,
    ridge: float,
    has_offset: bool,
    most_growth: float = MOST_GROWTH,
) -> list[ValueFunction]:
    """The fixed point of a context, and those of the context without the transitions of each fold.

    All have the kernel and the landmarks of the whole context, which hold states and no rewards. Without a fold, no trace crosses a
    border between folds, so that nothing of what was left out reaches what is left; and the value shift is that of what is left.

    Args:
        kernel: With landmarks.
        context: One context of n transitions.
        algorithm: One that :func:`leaves_out` allows.
        folds: (n,), 0 for a transition that is never left out, f for one of fold f. In long stretches: each is worked on apart.
        n_folds: How many there are.
        value_shift: Whether rewards are centered.
        gamma: The discount.
        ridge: rho.
        has_offset: Whether the literal read-out would carry an offset.
        most_growth: See :func:`~icrl_gym.fixed_points.fixed_point`.

    Returns:
        That of the whole, and that without fold 1, 2, ...

    Raises:
        FloatingPointError: One of them does not exist.

    Source: Chernozhukov et al. 2018 (cross-fitting).
    """
    wide, discount = context.to(dtype=torch.float64), gamma.double()
    # What C multiplies in the shifted rewards is summed beside the rewards, because each fold has a C of its own.
    targets = torch.stack([wide.rewards * wide.mask, constant_share(wide, discount)])
    sums = _sums(kernel, wide, algorithm, targets, discount, folds, n_folds)
    solver = _Solver(kernel, algorithm, gamma, ridge, has_offset, most_growth, context.rewards.dtype)
    values = []
    for fold in range(n_folds + 1):
        left = _left(wide, folds, fold)
        rewards, shift = reward_center(left, discount) if value_shift else (left.rewards, discount.new_zeros(()))
        matrix, right = sums.without(fold)
        targets = algorithm.targets(left, rewards, discount)
        right = right[..., 0] - shift * right[..., 1]
        n = left.weights.sum(-1, keepdim=True)
        values.append(solver(matrix, right, n, targets, sums.differences, shift.to(context.rewards), left.mask))
    return values


def _left(context: Context, folds: Int[Tensor, n], fold: int) -> Context:
    """What is left without a fold (0: nothing is left out), in the same places, without the states, which nothing here reads."""
    weights = context.weights * ((folds != fold) | (fold == 0))
    none = context.states[..., :0]
    return Context(none, context.rewards, none, context.terminated, context.truncated, context.mask, weights)


@dataclass(frozen=True)
class _Sums:
    """What the transitions add up to, over k(Z, .) of the landmarks Z.

    Attributes:
        whole: (..., M, M) and, for r rows of targets, (..., M, r).
        parts: The same of the transitions of fold 0, 1, ... alone, with traces that end where a fold does.
        differences: k(Z, s_i) - beta_i k(Z, s'_i), (..., M, block) each.
    """

    whole: tuple[Tensor, Tensor]
    parts: list[tuple[Tensor, Tensor]]
    differences: list[Tensor]

    def without(self, fold: int) -> tuple[Tensor, Tensor]:
        """Those of all other transitions; of fold 0, of all."""
        if fold == 0:
            return self.whole
        matrices, right = zip(*(part for index, part in enumerate(self.parts) if index != fold), strict=True)
        return torch.stack(matrices).sum(0), torch.stack(right).sum(0)


def _sums(
    kernel: NystromKernel,
    context: Context,
    algorithm: Algorithm,
    targets: Float[Tensor, "*b r n"],
    gamma: Tensor,
    folds: Int[Tensor, n] | None = None,
    n_folds: int = 0,
) -> _Sums:
    # Block by block: each one's kernel values are used while they are still in the processor's cache.
    root, landmarks = kernel.root, kernel.landmarks.double()
    discount, decay = algorithm.discount(context, gamma), gamma * algorithm.trace_decay
    matrix, right = root.new_zeros(root.shape), root.new_zeros(*root.shape[:-1], targets.shape[-2])
    parts = [(matrix.clone(), right.clone()) for _ in range(n_folds + 1)]
    goes = goes_on(context) if algorithm.has_trace else None
    traced = within = algorithm.traced(targets, context, gamma)
    if folds is not None and goes is not None and len(folds):
        stays = torch.nn.functional.pad(folds[:-1] == folds[1:], (0, 1), value=False)
        within = discounted_sums(targets, (goes & stays).unsqueeze(-2), decay)
    carried = root.new_zeros(())  # the trace that comes in from the block behind, of the same fold
    foreign: Tensor | None = None  # and from other folds behind it
    differences: list[Tensor] = []
    present, weights = (
        None if bool(kernel.mask.all()) else kernel.mask,
        context.weights if context.is_weighted else None,
    )
    # From the last block to the first, as traces run: forward in time, from the errors that follow.
    for rows in _stretches(len(context), folds):
        here, difference = temporal_difference(kernel.base, landmarks, context[..., rows], present, discount[..., rows])
        keys = difference if algorithm.differences else here
        keys = keys if weights is None else keys * weights[..., None, rows]
        followed = difference
        if goes is not None:
            if folds is not None and rows.stop < len(context) and folds[rows.stop] != folds[rows.stop - 1]:
                foreign, carried = carried if foreign is None else carried + foreign, root.new_zeros(())
            followed = discounted_sums(difference, goes[..., rows].unsqueeze(-2), decay, carried)
            carried = followed[..., 0]
            if foreign is not None:
                # How much of what comes in reaches each transition: the sums of a one that stands behind the last.
                reach = discounted_sums(torch.zeros_like(traced[0, rows]), goes[rows], decay, torch.ones_like(decay))
                matrix += torch.outer(keys @ reach, foreign)
                foreign = reach[0] * foreign
        own_matrix, own_right = parts[0 if folds is None else int(folds[rows.start])]
        own_matrix += keys @ followed.transpose(-1, -2)
        own_right += keys @ within[..., rows].transpose(-1, -2)
        if folds is not None:
            right += keys @ traced[..., rows].transpose(-1, -2)
        differences.insert(0, difference)
    # `matrix` holds what crosses a border so far, `right` the sums with all traces.
    whole = parts[0] if folds is None else (matrix + torch.stack([part for part, _ in parts]).sum(0), right)
    return _Sums(whole, parts, differences)


@dataclass(frozen=True)
class _Solver:
    """From sums to a value function.

    Attributes:
        kind: The type of the value function.
    """

    kernel: NystromKernel
    algorithm: Algorithm
    gamma: Tensor
    ridge: float
    has_offset: bool
    most_growth: float
    kind: torch.dtype

    def __call__(
        self,
        matrix: Float[Tensor, "*b M M"],
        right: Float[Tensor, "*b M"],
        n: Float[Tensor, "*b 1"],
        targets: Float[Tensor, "*b n"],
        differences: list[Tensor],
        shift: Float[Tensor, "*b"],
        mask: Bool[Tensor, n] | None = None,
    ) -> ValueFunction:
        """Solve for it.

        Args:
            matrix: Of :class:`_Sums`.
            right: (..., M)
            n: (..., 1), what the transitions weigh.
            targets: (..., n), y.
            differences: Of :class:`_Sums`.
            shift: (...), what is added to every value.
            mask: (n,), False for a transition that was left out.
        """
        kernel, root, kind = self.kernel, self.kernel.root, self.kind
        n = torch.where(n > 0, n, 1.0)
        matrix = root.transpose(-1, -2) @ matrix @ root / n.unsqueeze(-1)
        # Directions that were cut off as rounding hold nothing, and of differences those in which nothing moves; a one keeps
        # the system regular where rho is 0.
        dead = root.abs().sum(-2) == 0
        if self.algorithm.differences:
            dead = dead | (matrix.diagonal(dim1=-2, dim2=-1) == 0)
        size = trace(matrix).unsqueeze(-1) if self.algorithm.differences else 1.0
        matrix = matrix + torch.diag_embed(self.ridge * size + dead.double())
        right = apply(root.transpose(-1, -2), right) / n
        solution = solve(matrix, right, self.ridge)
        # V(s) = phi(s) . u = k(s, Z) (root u): coefficients of the landmarks themselves.
        weights = apply(root, solution)
        predicted = [apply(difference.transpose(-1, -2), weights) for difference in differences]
        errors = targets - torch.cat(predicted, -1) if predicted else targets
        errors = errors if mask is None else errors * mask
        require_solved(matrix, solution, right, targets, errors, self.ridge, self.most_growth)
        offset = self.algorithm.bootstrap_gamma(self.gamma).to(kind) * self.has_offset
        td_errors = torch.stack([targets, errors], -2).to(kind)
        return value_of(kernel.base, kernel.landmarks, kernel.mask, weights.to(kind), shift, offset, td_errors)


def _stretches(n: int, folds: Int[Tensor, n] | None) -> Iterator[slice]:
    """Blocks of one fold each, the last first."""
    borders = [0, n]
    if folds is not None:
        borders = [0, *((folds.diff() != 0).nonzero().squeeze(-1) + 1).tolist(), n]
    for start, stop in reversed(list(itertools.pairwise(borders))):
        for rows in reversed(blocks(stop - start)):
            yield slice(start + rows.start, start + rows.stop)


def blocks(n: int, size: int = 2048) -> list[slice]:
    """Slices of at most ``size`` that cover n rows."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
