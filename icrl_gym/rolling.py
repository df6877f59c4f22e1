"""RollingConditioner: a context that rolls on, conditioned on again at the cost of what is new in it.

Conditioning afresh costs n x n kernel values and, for infinite depth, n^3 / 3 products. When k transitions come in and the k oldest
go, all kernel values among the others stay, and so does nearly all of the inverse of the system's matrix

    M = A + rho n W^-1,      M c = y        (W^-1: 1 on the diagonal, -gamma lambda beside it where a trajectory goes on)

which is (W A + rho n I) c = W y with the trace taken to the other side, where it touches two diagonals only. By blocks of what goes
(first), stays and comes (last), the inverse P of M changes by products of k columns and rows, n^2 k in all:

    without what goes:    Q = P_ss - P_sg P_gg^-1 P_gs
    with what comes:      [ Q + U S^-1 V,  -U S^-1 ;  -S^-1 V,  S^-1 ],   U = Q M_sc,  V = M_cs Q,  S = M_cc - M_cs U

P is kept in float32 and only approximates: the solution is refined in float64 by residuals of M itself until rounding is all that
is left, so that nothing piles up over any number of updates; where refinement gains too little, P is computed anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.algorithms import goes_on
from icrl_gym.context import Context
from icrl_gym.fixed_points import fixed_point
from icrl_gym.kernels import Kernel, NystromKernel, SoftmaxKernel, SumKernel
from icrl_gym.solvers import System, conjugate, iterate
from icrl_gym.transformer import InContextTransformer
from icrl_gym.transition_matrix import TransitionMatrix
from icrl_gym.value_function import MOST_GROWTH, ValueFunction, check_growth, grown, transition_matrix

__all__ = ["RollingConditioner", "SlidingMatrix"]

_MOST_REFINEMENTS = 12
_ENOUGH = 1e-10
"""Of the right side: a larger residual than that is not left to be rounding."""


class SlidingMatrix:
    """A square matrix whose first rows and columns go and last ones come, without the rest being moved.

    It is a window that moves along the diagonal of a store one and a half times as long; at the end it is copied back to the start.

    Args:
        length: Rows and columns at most.
        dtype: Of its entries.
        device: Where it is.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        size = length + max(1, length // 2)
        self._store = torch.zeros(size, size, dtype=dtype, device=device)
        self._start = self._end = 0

    @property
    def window(self) -> Float[Tensor, "n n"]:
        """The matrix, a view that later changes show in."""
        return self._store[self._start : self._end, self._start : self._end]

    def roll(self, drop: int, add: int) -> Float[Tensor, "n n"]:
        """Drop the first rows and columns and add as many last ones as asked for, whose entries are left as they are.

        Returns:
            The new window.
        """
        self._start += drop
        if self._end + add > len(self._store):
            kept = self.window.clone()
            self._start, self._end = 0, len(kept)
            self.window.copy_(kept)
        self._end += add
        return self.window

    def set(self, matrix: Float[Tensor, "n n"]) -> None:
        """Put another matrix in its place."""
        self._start, self._end = 0, len(matrix)
        self.window.copy_(matrix)


class RollingConditioner:
    """Conditions a transformer on the newest transitions again and again, at the cost of the new ones.

    It gives what ``transformer.condition(rolling.context)`` gives, to rounding. The kernel's values may depend on the two states
    alone: a temperature of the context's own would change all of them with every transition.

    Args:
        transformer: Of any depth, with every transition its own center; any algorithm but the residual gradient.
        length: How many transitions are kept, n.
        n_features: d.
        device: Where it computes.

    Raises:
        ValueError: A transformer with landmarks or residual gradients; a kernel that takes something from the context; a length
            below 1.

    Source: The inverse of a partitioned matrix, Hager 1989, section 1; iterative refinement with a factor of lower precision,
    Higham 2002, chapter 12.

    Example:
        >>> from icrl_gym.kernels import RBFKernel
        >>> rolling = RollingConditioner(InContextTransformer(RBFKernel(0.1), n_layers=50, gamma=0.9), length=2, n_features=1)
        >>> rolling.extend(Context([[5.0], [0.0]], [7.0, 0.0], [[0.0], [1.0]], [False, False]))
        >>> rolling.extend(Context([[1.0]], [1.0], [[2.0]], [True]))
        >>> rolling.condition()([[0.0], [1.0]])
        tensor([0.9000, 1.0000], dtype=torch.float64)
    """

    def __init__(
        self,
        transformer: InContextTransformer,
        length: int,
        n_features: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1 transition, got {length}.")
        if transformer.n_landmarks is not None:
            raise ValueError(
                f"a rolling context has every transition for a center, got n_landmarks={transformer.n_landmarks}. Use "
                f"n_landmarks=None; through landmarks conditioning is linear in the context anyway."
            )
        if transformer.algorithm.differences:
            raise ValueError(
                "a rolling context takes every algorithm but residual_gradient; condition that one with `transformer.condition`."
            )
        _require_pairwise(transformer.kernel)
        self.transformer, self.length = transformer, length
        device = torch.device(device)
        self.context = Context.empty(n_features).to(device)
        # In row j, column i: k(s_j, s_i), and k(s_j, s_i) - beta_i k(s_j, s'_i), the transpose of A.
        self._here = SlidingMatrix(length, torch.float64, device)
        self._difference = SlidingMatrix(length, torch.float64, device)
        self._inverse = SlidingMatrix(length, torch.float32, device)
        self._has_inverse = False

    def __len__(self) -> int:
        """How many transitions there are: at most ``length``."""
        return len(self.context)

    @torch.no_grad()
    def extend(self, context: Context) -> None:
        """Take in transitions, in place of the oldest where there is no room.

        Args:
            context: One context, oldest first; the last ``length`` of its transitions count.

        Raises:
            ValueError: A batch of contexts, states of another size, or weights.
        """
        if context.batch_shape or context.n_features != self.context.n_features:
            raise ValueError(f"expected one context of states with {self.context.n_features} entries, got {context!r}.")
        if context.is_weighted:
            raise ValueError(
                "a rolling context counts every transition alike, got one with weights; condition it with `transformer.condition`."
            )
        new = context.to(self.context.states.device, torch.float64)
        new = new[new.mask][-self.length :]
        if not len(new):
            return
        drop = max(0, len(self) + len(new) - self.length)
        stays = self.context[drop:]
        self.context = together = Context.cat([stays, new])
        kernel, gamma, n = self.transformer.kernel, self.transformer.gamma, len(stays)
        discount = self.transformer.algorithm.discount(together, gamma)
        rows = transition_matrix(kernel, new.states, together, None, discount)
        here, difference = self._here.roll(drop, len(new)), self._difference.roll(drop, len(new))
        here[n:], difference[n:] = rows.here, rows.difference()
        columns = self._columns(rows, stays, new, discount[n:])
        here[:n, n:], difference[:n, n:] = columns.here, columns.difference()
        if drop and drop == len(new) and n and self._has_inverse:
            self._update_inverse(drop)
        else:
            self._has_inverse = False  # rho n has changed too, everywhere

    @torch.no_grad()
    def condition(self, *, most_growth: float = MOST_GROWTH) -> ValueFunction:
        """The value function of the context as it is now.

        Args:
            most_growth: See :meth:`InContextTransformer.condition`.

        Raises:
            FloatingPointError: The layers diverge, or the fixed point does not exist.
        """
        transformer, context, algorithm = self.transformer, self.context, self.transformer.algorithm
        rewards, shift = transformer._shifted(context)
        gamma, has_offset = transformer.gamma.to(rewards), transformer.offset == "centered"
        targets, discount = algorithm.targets(context, rewards, gamma), algorithm.discount(context, gamma)
        ridge = context.mask.sum().to(rewards) * transformer.ridge
        stored = self._difference.window.transpose(-1, -2)
        problem = System(
            transformer.kernel, context, algorithm, gamma, targets, shift, discount, ridge, stored, factor=None
        )
        if transformer.infinite:
            solution = self._solution(problem) if len(context) else targets
            if solution is None:  # singular, or nearly: the direct solver says what is to be said
                return fixed_point(
                    transformer.kernel,
                    context,
                    algorithm,
                    rewards,
                    shift,
                    gamma,
                    transformer.ridge,
                    has_offset,
                    most_growth,
                )
            errors = torch.stack([targets, targets - problem.times(solution)], -2)
            if len(context) and bool(grown(errors, most_growth)[0].any()):
                return fixed_point(
                    transformer.kernel,
                    context,
                    algorithm,
                    rewards,
                    shift,
                    gamma,
                    transformer.ridge,
                    has_offset,
                    most_growth,
                )
            return problem.value_function(solution, errors, has_offset)
        if transformer.acceleration == "conjugate":
            path, errors = conjugate(problem, len(transformer.step_sizes))
        else:
            path, errors = iterate(problem, transformer._alpha(problem, self._here.window))
        check_growth(errors, most_growth)
        return problem.value_function(path[..., -1, :], errors, has_offset)

    def _columns(
        self, rows: TransitionMatrix, stays: Context, new: Context, discount: Float[Tensor, k]
    ) -> TransitionMatrix:
        """k(s_j, s_i) of those that stay and new ones: of a symmetric kernel, what stands in the new rows already."""
        kernel, n = self.transformer.kernel, len(stays)
        if not kernel.positive_definite:
            return transition_matrix(kernel, stays.states, new, None, discount)
        breaks = rows.breaks[rows.breaks >= n] - n
        there = kernel(stays.states, new.next_states[breaks])
        return TransitionMatrix(rows.here[:, :n].T, breaks, there, discount)

    def _beside(self) -> Float[Tensor, n]:
        """What W^-1 has right of its diagonal: -gamma lambda where the next transition goes on."""
        return -self.transformer.gamma * self.transformer.algorithm.trace_decay * goes_on(self.context).double()

    @property
    def _ridge(self) -> float:
        return self.transformer.ridge * len(self)

    def _update_inverse(self, k: int) -> None:
        """P of the new window from P of the old one; k go and k come."""
        n = len(self) - k
        old = self._inverse.window
        goes, stays = slice(0, k), slice(k, n + k)
        # Blocks of M, which is the difference's transpose, in float32 as P is.
        difference, ridge = self._difference.window, self._ridge
        beside = ridge * self._beside()
        m_sc = difference[n:, :n].T.float()
        m_sc[-1, 0] += beside[n - 1]
        m_cs = difference[:n, n:].T.float()
        m_cc = difference[n:, n:].T + torch.diag(beside[n:-1], 1)
        m_cc.diagonal().add_(ridge)
        left = old[stays, goes] @ -torch.linalg.inv_ex(old[goes, goes].double())[0].float()
        right = old[goes, stays].clone()
        new = self._inverse.roll(k, k)
        kept = new[:n, :n]
        u = kept @ m_sc + left @ (right @ m_sc)
        v = m_cs @ kept + (m_cs @ left) @ right
        corner = torch.linalg.inv_ex(m_cc - (m_cs @ u).double())[0].float()
        us = u @ corner
        kept.addmm_(torch.cat([left, us], 1), torch.cat([right, v]))
        new[:n, n:], new[n:, :n], new[n:, n:] = -us, -corner @ v, corner

    def _renew_inverse(self) -> None:
        matrix = self._difference.window.T.clone()
        matrix.diagonal().add_(self._ridge)
        matrix.diagonal(1).add_(self._ridge * self._beside()[:-1])
        self._inverse.set(torch.linalg.inv_ex(matrix)[0].float())
        self._has_inverse = True

    def _solution(self, problem: System) -> Float[Tensor, n] | None:
        """The c of M c = y, to rounding; None where refinement does not get there."""
        was_known = self._has_inverse
        if not was_known:
            self._renew_inverse()
        solution = self._refined(problem)
        if solution is None and was_known:
            self._renew_inverse()
            solution = self._refined(problem)
        if solution is None:
            self._has_inverse = False
        return solution

    def _refined(self, problem: System) -> Float[Tensor, n] | None:
        ridge, beside, inverse = self._ridge, self._beside(), self._inverse.window
        solution, residual = torch.zeros_like(problem.targets), problem.targets
        size = first = float(residual.norm())
        for _ in range(_MOST_REFINEMENTS):
            if not size:
                break
            # In units of the residual, so that float32 holds it.
            moved = (inverse @ (residual / size).float()).double() * size
            tried = solution + moved
            left = problem.targets - problem.times(tried) - ridge * (tried + beside * torch.roll(tried, -1))
            left_size = float(left.norm())
            if not left_size < size:
                break
            gained = left_size / size
            solution, residual, size = tried, left, left_size
            if gained > 0.5:
                break
        return solution if size <= _ENOUGH * first else None


def _require_pairwise(kernel: Kernel) -> None:
    parts = kernel.parts if isinstance(kernel, SumKernel) else [kernel]
    for part in parts:
        if isinstance(part, (SoftmaxKernel, NystromKernel)) or getattr(part, "from_median", False):
            raise ValueError(
                f"a rolling context needs a kernel of two states and nothing else, got {part}: its values change with the "
                f"context. Give it a temperature in numbers, and no softmax."
            )
