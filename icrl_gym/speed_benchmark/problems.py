"""The contexts that speed is measured on: a random walk in episodes, some of which end and some of which are cut."""

from __future__ import annotations

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.context import Context

__all__ = ["random_context", "random_states"]


def random_context(
    n: int, n_features: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, episode: int = 100
) -> Context:
    """One context of n transitions with standardized states.

    Args:
        n: Transitions.
        n_features: d.
        seed: Of the generator.
        dtype: Of its numbers, which are drawn in float64 whatever it is.
        episode: Steps of an episode; every second one terminates, the others are cut.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n + 1, n_features, generator=generator, dtype=torch.float64)
    states = noise.clone()
    for step in range(1, n + 1):
        if step % episode:  # else a new episode begins anywhere
            states[step] = 0.9 * states[step - 1] + 0.19**0.5 * noise[step]
    last = torch.arange(1, n + 1) % episode == 0
    next_states = torch.where(last.unsqueeze(-1), states[:-1] + 0.1 * noise[:-1], states[1:])
    even = (torch.arange(n) // episode) % 2 == 0
    rewards = torch.sin(states[:-1].sum(-1) / n_features**0.5)
    return Context(states[:-1], rewards, next_states, last & even, last & ~even).to(dtype=dtype)


def random_states(
    m: int, n_features: int, *, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "m d"]:
    """(m, d) standard normal states to ask for the value of."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n_features, generator=generator, dtype=torch.float64).to(dtype)
