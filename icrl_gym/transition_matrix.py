"""TransitionMatrix: the matrix of a context's TD errors, kept without writing down what it holds twice.

In a rolling context the next state of a transition is the state of the one after it, so k(s_j, s'_i) stands in the kernel matrix
k(s_j, s_i) already, one column on. Only where a trajectory breaks is it a column of its own. A product with

    A_ij = k(s_j, s_i) - beta_i k(s_j, s'_i)

is then one product with the kernel matrix, and nothing of its size has to be made besides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from icrl_gym._typing import Float, Int

__all__ = ["TransitionMatrix"]


@dataclass(frozen=True)
class TransitionMatrix:
    """A, as a product and as a dense matrix.

    Attributes:
        here: (..., n, m), k(center_j, s_i).
        breaks: (b,), the i whose next state is not the state of transition i + 1; the last is always one of them.
        there: (..., n, b), k(center_j, s'_i) of those.
        discount: (..., m), beta.
    """

    here: Float[Tensor, "*b n m"]
    breaks: Int[Tensor, k]
    there: Float[Tensor, "*b n k"]
    discount: Float[Tensor, "*b m"]

    def times(self, coefficients: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m"]:
        """A c.

        Args:
            coefficients: (..., n)
        """
        row = coefficients.unsqueeze(-2)
        values = (row @ self.here).squeeze(-2)
        following = torch.roll(values, -1, -1)
        following[..., self.breaks] = (row @ self.there).squeeze(-2)
        return torch.addcmul(values, self.discount, following, value=-1.0)

    def difference(self) -> Float[Tensor, "*b n m"]:
        """A's transpose, k(center_j, s_i) - beta_i k(center_j, s'_i) in row j."""
        there = torch.roll(self.here, -1, -1)
        there[..., self.breaks] = self.there
        return torch.addcmul(self.here, there, -self.discount.unsqueeze(-2))
