"""The policy-evaluation algorithms that layers can carry out, as four choices in one linear problem.

A value function is V = C + sum_j w_j b_j kappa_j, with the weights w_j of the context (1, where nothing else is said), the error of
transition i is delta = y - A (w b), and a layer moves

    b <- b + alpha (W delta - rho n b),        A_ij = kappa_j(s_i) - beta_i kappa_j(s'_i),      n = sum_j w_j

which moves the coefficients c = w b by each transition's traced error, times its weight.

| algorithm           | kappa_j                             | target y_i       | discount beta_i         | trace W           |
| ------------------- | ----------------------------------- | ---------------- | ----------------------- | ----------------- |
| `td`                | k(s_j, .)                           | r_i              | gamma (1 - terminated)  | identity          |
| `td_lambda`         | k(s_j, .)                           | r_i              | gamma (1 - terminated)  | sum of (gamma lambda)^l |
| `residual_gradient` | k(s_j, .) - beta_j k(s'_j, .)       | r_i              | gamma (1 - terminated)  | identity          |
| `average_reward`    | k(s_j, .)                           | r_i - mean of r  | 1 - terminated          | identity          |
| `monte_carlo`       | k(s_j, .)                           | return of i      | 0                       | identity          |

What runs along a trajectory, a trace or a return, goes on from transition i to i+1 only where the trajectory does: neither
terminated nor truncated, and s'_i = s_{i+1}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.context import Context

__all__ = ["Algorithm", "AlgorithmName", "discounted_sums", "goes_on"]

AlgorithmName = Literal["td", "td_lambda", "residual_gradient", "average_reward", "monte_carlo"]


@dataclass(frozen=True)
class Algorithm:
    """What a layer does with a context.

    Attributes:
        name: See the table above.
        trace_decay: lambda of ``td_lambda``, in [0, 1].

    Raises:
        ValueError: An unknown name, or a trace decay outside [0, 1] or for an algorithm that has none.

    Source: Wang et al. 2025, sections 4 and 5 (TD, TD(lambda), residual gradient and average-reward TD by linear attention);
    Baird 1995 (residual gradient); Sutton and Barto 2018, chapters 9, 10 and 12.
    """

    name: AlgorithmName = "td"
    trace_decay: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no algorithm."""
        if self.name not in get_args(AlgorithmName):
            raise ValueError(f"algorithm must be one of {', '.join(get_args(AlgorithmName))}; got {self.name!r}.")
        if not 0.0 <= self.trace_decay <= 1.0:
            raise ValueError(f"trace_decay (lambda) must lie in [0, 1], got {self.trace_decay}.")
        if self.trace_decay and self.name != "td_lambda":
            raise ValueError(
                f"trace_decay belongs to algorithm='td_lambda'; got trace_decay={self.trace_decay} with {self.name!r}."
            )

    @property
    def differences(self) -> bool:
        """Whether the value function is made of differences k(s_j, .) - beta_j k(s'_j, .), each transition at both its ends."""
        return self.name == "residual_gradient"

    @property
    def positive(self) -> bool:
        """Whether the matrix A is symmetric and positive semi-definite for every context, so that some step always contracts."""
        return self.name in ("residual_gradient", "monte_carlo")

    @property
    def has_trace(self) -> bool:
        """Whether W is more than the identity."""
        return self.trace_decay > 0

    def bootstrap_gamma(self, gamma: Tensor) -> Tensor:
        """What multiplies the value of a next state that is no end: gamma, 1 for average reward, 0 for Monte Carlo."""
        if self.name == "average_reward":
            return torch.ones_like(gamma)
        return torch.zeros_like(gamma) if self.name == "monte_carlo" else gamma

    def discount(self, context: Context, gamma: Tensor) -> Float[Tensor, "*b n"]:
        """beta_i (..., n), zero at terminated transitions and in empty places."""
        return self.bootstrap_gamma(gamma) * (~context.terminated & context.mask).to(context.rewards)

    def targets(self, context: Context, rewards: Float[Tensor, "*b n"], gamma: Tensor) -> Float[Tensor, "*b n"]:
        """y_i (..., n), zero in empty places.

        A return ends where its trajectory does in the context. What would have come after a cut counts as zero, which with the
        value shift means "as on average".
        """
        rewards = rewards * context.mask
        if self.name == "average_reward":
            return (rewards - (context.weights * rewards).sum(-1, keepdim=True) / _total(context)) * context.mask
        return discounted_sums(rewards, goes_on(context), gamma) if self.name == "monte_carlo" else rewards

    def traced(self, errors: Tensor, context: Context, gamma: Tensor) -> Tensor:
        """W delta: for each transition, the sum of (gamma lambda)^l delta_{i+l} along its trajectory.

        Args:
            errors: (..., n), or several rows of such (..., k, n).
            context: (...) contexts.
            gamma: The discount.
        """
        if not self.has_trace:
            return errors
        follows = goes_on(context)
        follows = follows.unsqueeze(-2) if errors.ndim > follows.ndim else follows
        return discounted_sums(errors, follows, gamma * self.trace_decay)

    def trace_matrix(self, context: Context, gamma: Tensor) -> Float[Tensor, "*b n n"]:
        """M (..., n, n) with (delta M)_j = (W delta)_j: column j holds (gamma lambda)^(i-j) for the i that follow j."""
        return _sums_matrix(context, gamma * self.trace_decay)

    def return_matrix(self, context: Context, gamma: Tensor) -> Float[Tensor, "*b n n"]:
        """(..., n, n) that takes the row of rewards to the row of targets: rewards @ matrix = y."""
        n = len(context)
        identity = torch.eye(n, dtype=context.rewards.dtype, device=context.rewards.device)
        if self.name == "monte_carlo":
            return _sums_matrix(context, gamma)
        if self.name == "average_reward":
            # Column i takes from its own reward what all rewards together are on average.
            share = context.weights / _total(context)
            return identity - share.unsqueeze(-1) * context.mask.unsqueeze(-2)
        return identity.expand(*context.batch_shape, n, n)


def goes_on(context: Context) -> Tensor:
    """Whether transition i+1 follows from transition i, (..., n) bool; False for the last."""
    follows = (context.next_states[..., :-1, :] == context.states[..., 1:, :]).all(-1)
    follows = follows & context.mask[..., :-1] & context.mask[..., 1:]
    follows = follows & ~context.terminated[..., :-1] & ~context.truncated[..., :-1]
    return torch.nn.functional.pad(follows, (0, min(len(context), 1)), value=False)


_BLOCK = 64
"""Values that are summed at a time, where many rows are."""


def discounted_sums(
    values: Float[Tensor, "*b n"], follows: Tensor, decay: Tensor | float, after: Tensor | None = None
) -> Float[Tensor, "*b n"]:
    """x_i + decay x_{i+1} + decay^2 x_{i+2} + ... as far as each follows from the one before.

    In log2(n) steps over all values; for many rows with the same ``follows``, (..., 1, n), in products with matrices of a block.

    Args:
        values: (..., n)
        follows: (..., n) bool, as :func:`goes_on` gives it.
        decay: In [0, 1].
        after: (...), the sum of the transition behind the last, where this is a part of a longer row; it counts where ``follows``
            says so of the last.
    """
    if follows.ndim > 1 and follows.shape[-2] == 1 and values.shape[-2] >= _BLOCK and values.shape[-1] > _BLOCK:
        return _sums_by_blocks(values, follows, decay, after)
    weight = follows.to(values) * decay
    if after is not None and values.shape[-1]:
        last = values[..., -1] + weight[..., -1] * after
        values = torch.cat([values[..., :-1], last.unsqueeze(-1)], -1)
    reach = 1
    while reach < values.shape[-1]:
        # Sums over `reach` transitions become sums over twice as many.
        pad = (0, reach)
        values = values + weight * torch.nn.functional.pad(values[..., reach:], pad)
        weight = weight * torch.nn.functional.pad(weight[..., reach:], pad)
        reach *= 2
    return values


def _sums_by_blocks(
    values: Float[Tensor, "*b k n"], follows: Tensor, decay: Tensor | float, after: Tensor | None
) -> Float[Tensor, "*b k n"]:
    first = values.shape[-1] % _BLOCK
    if first:
        # The blocks end where the row does, so what is left over of it is at its beginning.
        behind = _sums_by_blocks(values[..., first:], follows[..., first:], decay, after)
        return torch.cat(
            [discounted_sums(values[..., :first], follows[..., :first], decay, behind[..., 0]), behind], -1
        )
    goes = follows.unflatten(-1, (-1, _BLOCK)).transpose(-3, -2)  # (..., blocks, 1, B)
    identity = torch.eye(_BLOCK, dtype=values.dtype, device=values.device)
    # (..., blocks, B, B): in row j and column i, how much x_j adds to the sum at i of the same block.
    within = discounted_sums(identity.expand(*goes.shape[:-2], -1, -1), goes, decay)
    sums = values.unflatten(-1, (-1, _BLOCK)).transpose(-3, -2) @ within
    # (..., blocks, 1, B): how much the first sum of the block behind adds.
    reach = within[..., -1:, :] * (goes[..., -1:].to(values) * decay)
    carried = (sums.new_zeros(()) if after is None else after).expand(sums.shape[:-3] + sums.shape[-2:-1])
    come_in: list[Tensor] = []
    for block in range(sums.shape[-3] - 1, -1, -1):
        come_in.insert(0, carried)
        carried = sums[..., block, :, 0] + reach[..., block, :, 0] * carried
    sums = torch.addcmul(sums, reach, torch.stack(come_in, -2).unsqueeze(-1))
    return sums.transpose(-3, -2).flatten(-2)


def _total(context: Context) -> Float[Tensor, "*b 1"]:
    """What all transitions weigh; 1 where there is none."""
    total = context.weights.sum(-1, keepdim=True)
    return torch.where(total > 0, total, 1.0)


def _sums_matrix(context: Context, decay: Tensor | float) -> Float[Tensor, "*b n n"]:
    identity = torch.eye(len(context), dtype=context.rewards.dtype, device=context.rewards.device)
    rows = identity.expand(*context.batch_shape, *identity.shape)
    # Row i of the sums of unit vectors: what x_i adds to the sum of each transition.
    return discounted_sums(rows, goes_on(context).unsqueeze(-2), decay)
