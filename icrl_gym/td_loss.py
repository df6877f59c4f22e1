"""TD losses of contexts and held-out queries, after every layer: what pretraining minimizes and the experiments report."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.context import Context
from icrl_gym.solvers import key_values
from icrl_gym.transformer import InContextTransformer

__all__ = ["mean_squared_reward", "td_errors", "td_loss_by_depth"]


def td_errors(
    value: Callable[[Tensor], Tensor], gamma: float | Tensor, transitions: Context, semi_gradient: bool = False
) -> Float[Tensor, "*b m"]:
    r"""TD errors of a value function: delta = r + gamma V(s') - V(s), without the bootstrap gamma V(s') past termination.

    Args:
        value: From states (..., m, d) to values (..., m).
        gamma: The discount.
        transitions: (...,) batches of m, none of which is padding.
        semi_gradient: Hold the target r + gamma V(s') constant, as TD does, in what gradients the result has.

    Returns:
        (..., m), in the units of the rewards.

    Source: Sutton & Barto 2018, "Reinforcement Learning: An Introduction", sections 6.1 (TD error), 9.3 (semi-gradient).

    Example:
        >>> chain = Context([[0.0], [1.0]], [2.0, 3.0], [[1.0], [2.0]], terminated=[False, True])
        >>> td_errors(lambda states: 10 * states.sum(-1), 0.5, chain)
        tensor([ 7., -7.], dtype=torch.float64)
    """
    following = value(transitions.next_states)
    target = transitions.rewards + gamma * torch.where(transitions.terminated, 0.0, following)
    target = target.detach() if semi_gradient else target
    return target - value(transitions.states)


def mean_squared_reward(transitions: Context) -> Float[Tensor, "*b"]:
    """The mean of r^2 over transitions without padding, which is the TD loss of the value zero; NaN without any reward."""
    scale = transitions.rewards.square().mean(-1)
    return torch.where(scale > 0, scale, math.nan)


def td_loss_by_depth(
    transformer: InContextTransformer, contexts: Context, queries: Context
) -> tuple[Float[Tensor, "B L1"], Float[Tensor, "B L1"]]:
    """Normalized TD losses after 0, 1, ..., L layers: mean delta^2 / mean r^2, so that the value zero has the loss 1.

    Args:
        transformer: Of finite depth, without landmarks, for discounted values.
        contexts: A batch (B,) of n transitions.
        queries: A batch (B,) of m further transitions, which no context holds.

    Returns:
        (B, L+1) in-context and (B, L+1) held-out losses; infinite for a context on which the layers overflow, NaN where every
        reward is zero (there is nothing to predict).

    Raises:
        ValueError: An infinite depth, landmarks, or average reward.
    """
    average = transformer.algorithm.name == "average_reward"
    if transformer.infinite or transformer.n_landmarks is not None or average:
        raise ValueError("losses by depth are of finite transformers without landmarks, for discounted values.")
    try:
        return _losses(transformer, contexts, queries)
    except FloatingPointError:
        if contexts.batch_shape.numel() == 1:
            infinite = torch.full((1, len(transformer.step_sizes) + 1), math.inf, dtype=contexts.rewards.dtype)
            return infinite, infinite.clone()
    pairs = [
        td_loss_by_depth(transformer, contexts[i : i + 1], queries[i : i + 1]) for i in range(len(contexts.rewards))
    ]
    return torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])


def _losses(transformer: InContextTransformer, contexts: Context, queries: Context) -> tuple[Tensor, Tensor]:
    problem, coefficients, errors = transformer.coefficients_by_depth(contexts)
    # Of Monte Carlo's values too the TD loss is asked for, with the discount.
    gamma = transformer.gamma.to(queries.rewards)
    discounts = [gamma * (~which.terminated & which.mask) for which in (contexts, queries)]
    shift = problem.shift.unsqueeze(-1)
    losses = []
    for which, discount in zip((contexts, queries), discounts, strict=True):
        if which is contexts and transformer.algorithm.name != "monte_carlo":
            losses.append(_normalized(errors, contexts))
            continue
        _, difference = key_values(problem.kernel, contexts, which, transformer.algorithm, problem.discount, discount)
        rewards = which.rewards - shift * (1 - discount)
        losses.append(_normalized(rewards.unsqueeze(-2) - coefficients @ difference, which))
    return losses[0], losses[1]


def _normalized(errors: Float[Tensor, "B L1 n"], transitions: Context) -> Float[Tensor, "B L1"]:
    scale = transitions.rewards.square().sum(-1, keepdim=True)
    return (errors * transitions.mask.unsqueeze(-2)).square().sum(-1) / torch.where(scale > 0, scale, math.nan)
