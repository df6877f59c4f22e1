"""What the transformer is measured against on one and the same context: a small network fitted by gradient descent."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from icrl_gym._typing import Float
from icrl_gym.context import Context
from icrl_gym.metrics import standardization
from icrl_gym.value_function import reward_center

__all__ = ["FittedNetwork", "fit_networks"]


@dataclass(frozen=True)
class FittedNetwork:
    """A batch of networks, one a context, and how they got there.

    Attributes:
        values: (B, m), of the queries' states, after the last step.
        losses: (B, k), mean squared TD error of the queries after each of ``steps``.
        steps: (k,), gradient steps.
        seconds: (k,), of wall clock until then, for the whole batch.
    """

    values: Float[Tensor, "B m"]
    losses: Float[Tensor, "B k"]
    steps: list[int]
    seconds: list[float]


def fit_networks(
    contexts: Context,
    queries: Context,
    gamma: float,
    steps: int = 2000,
    every: int = 50,
    learning_rate: float = 3e-3,
    width: int = 64,
    seed: int = 0,
) -> FittedNetwork:
    """Fit tanh networks of two hidden layers to contexts, each its own, by Adam on the mean squared TD error.

    The network is that of Stable-Baselines3's critic. It has what the transformer has: standardized states, and the value shift,
    so that it starts at the best constant value.

    Args:
        contexts: (B,) contexts of n transitions.
        queries: (B,) of m further ones.
        gamma: The discount.
        steps: Gradient steps, each on the whole context.
        every: Steps between two looks at the queries.
        learning_rate: Adam's.
        width: Of the hidden layers.
        seed: Of the first weights.
    """
    generator = torch.Generator().manual_seed(seed)
    n_contexts, d = len(contexts.rewards), contexts.n_features

    def layer(inputs: int, outputs: int, gain: float) -> tuple[nn.Parameter, nn.Parameter]:
        weight = torch.empty(n_contexts, inputs, outputs, dtype=torch.float64)
        for one in weight:
            nn.init.orthogonal_(one, gain, generator=generator)
        return nn.Parameter(weight), nn.Parameter(torch.zeros(n_contexts, 1, outputs, dtype=torch.float64))

    parameters = [layer(d, width, 2**0.5), layer(width, width, 2**0.5), layer(width, 1, 0.01)]
    mean, scale = standardization(contexts.states, contexts.mask)
    rewards, shift = reward_center(contexts, torch.tensor(gamma, dtype=torch.float64))
    shift = shift.unsqueeze(-1)

    def value(states: Tensor) -> Tensor:
        hidden = (states - mean) / scale
        for index, (weight, bias) in enumerate(parameters):
            hidden = torch.baddbmm(bias, hidden, weight)
            hidden = hidden.tanh() if index < len(parameters) - 1 else hidden
        return hidden.squeeze(-1)

    def errors(transitions: Context, given: Tensor) -> Tensor:
        # One pass over both ends of the transitions.
        here, there = value(torch.cat([transitions.states, transitions.next_states], -2)).chunk(2, -1)
        return given + gamma * (~transitions.terminated) * there - here

    asked = queries.rewards - shift * (1 - gamma * (~queries.terminated).to(queries.rewards))
    optimizer = torch.optim.Adam([p for pair in parameters for p in pair], lr=learning_rate)
    looks: list[int] = []
    losses: list[Tensor] = []
    seconds: list[float] = []
    spent, start = 0.0, time.perf_counter()
    for step in range(steps + 1):
        if step % every == 0:
            spent += time.perf_counter() - start
            with torch.no_grad():
                losses.append(errors(queries, asked).square().mean(-1))
            looks.append(step)
            seconds.append(spent)
            start = time.perf_counter()
        if step == steps:
            break
        loss = errors(contexts, rewards).square().mean(-1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        answers = value(queries.states) + shift
    return FittedNetwork(answers, torch.stack(losses, -1), looks, seconds)
