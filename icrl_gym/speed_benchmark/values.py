"""Rows about the values of many states: against the literal pass, against a loop over queries, against bare torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.context import Context
from icrl_gym.kernels import LaplacianKernel, LinearKernel, RBFKernel, make_kernel
from icrl_gym.speed_benchmark.measured import Goal, Measured, Settings
from icrl_gym.speed_benchmark.problems import random_context, random_states
from icrl_gym.speed_benchmark.timing import Spread, ratio_of, side_by_side
from icrl_gym.transformer import InContextTransformer
from icrl_gym.value_function import expand

__all__ = ["evaluation", "linear_attention_loop", "literal", "query_loop"]

_TYPES = {"float64": torch.float64, "float32": torch.float32}


def literal(settings: Settings) -> list[Measured]:
    """The fast path against the literal forward pass, one prompt a query.

    A prompt's cost does not depend on the others, so a few are timed and their time is multiplied.
    """
    n, m, layers = settings.size(512, 32), settings.size(2048, 64), settings.size(50, 5)
    few = settings.size(2, 4)
    transformer = InContextTransformer(RBFKernel(float(settings.n_features)), n_layers=layers)

    def slow(context: Context, queries: Tensor) -> Tensor:
        return transformer.read_out(transformer(transformer.embed(context, queries)))

    def fast(context: Context, queries: Tensor) -> Tensor:
        value = transformer.condition(context)
        return value(queries) + value.offset

    differences = {}
    for name, dtype in _TYPES.items():
        context, queries = _problem(settings, n, m, dtype)
        differences[name] = float((fast(context, queries[:few]) - slow(context, queries[:few])).abs().max())
    context, queries = _problem(settings, n, m, torch.float64)
    calls = {"fast": lambda: fast(context, queries), "literal": lambda: slow(context, queries[:few])}
    taken = side_by_side(calls, min(settings.rounds, 3))
    whole = [m / few * seconds for seconds in taken["literal"]]
    return [
        _faster(
            "literal", f"values of {m} states, context {n}, {layers} layers", "the literal forward pass, one prompt a query",
            Goal("at least", 1000), taken["fast"], whole, differences, f"{few} prompts timed, times {m // few}",
        )
    ]  # fmt: skip


def query_loop(settings: Settings) -> list[Measured]:
    """The fast path against a Python loop over queries of linear attention, matrices and all."""
    n, m, layers = settings.size(512, 32), settings.size(2048, 64), settings.size(50, 5)
    few = settings.size(4, 4)
    transformer = InContextTransformer(LinearKernel(), [0.5] * layers, step_normalization="length", gamma=0.9)

    def fast(context: Context, queries: Tensor) -> Tensor:
        return transformer.condition(context)(queries)

    slow = functools.partial(linear_attention_loop, step=0.5, layers=layers, gamma=0.9)
    differences = {}
    for name, dtype in _TYPES.items():
        context, queries = _problem(settings, n, m, dtype)
        differences[name] = float((fast(context, queries[:few]) - slow(context, queries[:few])).abs().max())
    context, queries = _problem(settings, n, m, torch.float64)
    calls = {"fast": lambda: fast(context, queries), "loop": lambda: slow(context, queries[:few])}
    taken = side_by_side(calls, min(settings.rounds, 3))
    whole = [m / few * seconds for seconds in taken["loop"]]
    return [
        _faster(
            "query-loop", f"values of {m} states, context {n}, {layers} layers, linear",
            "a Python loop over queries of linear attention (Wang et al. 2025)",
            Goal("at least", 5000), taken["fast"], whole, differences, f"{few} queries timed, times {m // few}",
        )
    ]  # fmt: skip


def linear_attention_loop(
    context: Context, queries: Float[Tensor, "m d"], step: float, layers: int, gamma: float
) -> Float[Tensor, m]:
    """Values by linear attention, one query at a time: Z <- Z + step / n P Z M Z^T Q Z, layer by layer.

    The columns of Z are [s_j; gamma s'_j; r_j] and [s_q; 0; 0]; P picks the last row, M all columns but the last, and Q compares
    states with states (minus) and with next states (plus).

    Args:
        context: One context.
        queries: (m, d)
        step: Before it is divided by n.
        layers: L.
        gamma: The discount.

    Returns:
        (m,)

    Source: Wang et al. 2025, section 4.
    """
    states, d, n = context.states, context.n_features, len(context)
    following = gamma * context.next_states * (~context.terminated).unsqueeze(-1)
    picks = states.new_zeros(2 * d + 1, 2 * d + 1)
    picks[-1, -1] = 1.0
    compares = torch.zeros_like(picks)
    compares[:d, :d], compares[:d, d : 2 * d] = -torch.eye(d), torch.eye(d)
    masks = torch.eye(n + 1, dtype=states.dtype)
    masks[-1, -1] = 0.0
    tokens = torch.cat([states, following, context.rewards.unsqueeze(-1)], -1).T
    values = []
    for query in queries:
        column = torch.cat([query, query.new_zeros(d + 1)]).unsqueeze(-1)
        z = torch.cat([tokens, column], -1)
        for _ in range(layers):
            z = z + step / n * (picks @ z @ masks @ (z.T @ compares @ z))
        values.append(-z[-1, -1])
    return torch.stack(values)


def evaluation(settings: Settings) -> list[Measured]:
    """V of many states against the least that torch can do: a matrix product, an exponential, a matrix-vector product."""
    n, m, d = settings.size(512, 64), settings.size(2048, 128), settings.n_features
    rows = []
    kernels = {"rbf": RBFKernel(float(d)), "laplacian": LaplacianKernel(float(d) ** 0.5),
               "laplacian+linear": make_kernel("laplacian+linear", float(d) ** 0.5)}  # fmt: skip
    for kernel_name, kernel in kernels.items():
        for type_name, dtype in _TYPES.items():
            context, queries = _problem(settings, n, m, dtype)
            weights = random_states(n, 1, seed=2, dtype=dtype).squeeze(-1)
            calls = {
                "ours": functools.partial(expand, kernel, context.states, None, weights, queries),
                "bare": functools.partial(_bare, context.states, weights, queries),
            }
            taken = side_by_side(calls, settings.rounds)
            exact = _exact(kernel_name, context.states, weights, queries)
            rows.append(
                Measured(
                    "evaluation", f"V of {m} states, {n} centers, {kernel_name}, {type_name}",
                    "bare torch: a matrix product, an exponential, a matrix-vector product",
                    ratio_of(taken["ours"], taken["bare"]), "x the time",
                    Goal("at most", 1.3) if (kernel_name, type_name) == ("rbf", "float64") else None,
                    _medians(taken), {type_name: float((expand(kernel, context.states, None, weights, queries) - exact).abs().max())},
                    "difference from a sum by differences of states, in float64",
                )
            )  # fmt: skip
    return rows


def _bare(centers: Tensor, weights: Tensor, states: Tensor) -> Tensor:
    return torch.exp((states @ centers.T).mul_(1e-2)) @ weights


def _exact(kernel: str, centers: Tensor, weights: Tensor, states: Tensor) -> Tensor:
    centers, weights, states = centers.double(), weights.double(), states.double()
    distance = torch.cdist(states, centers, compute_mode="donot_use_mm_for_euclid_dist")
    d = centers.shape[-1]
    values = torch.exp(-(distance**2) / (2 * d)) if kernel == "rbf" else torch.exp(-distance / d**0.5)
    values = values + states @ centers.T / d if "linear" in kernel else values
    return values @ weights


def _problem(settings: Settings, n: int, m: int, dtype: torch.dtype) -> tuple[Context, Tensor]:
    d = settings.n_features
    return random_context(n, d, dtype=dtype), random_states(m, d, dtype=dtype)


def _medians(taken: dict[str, list[float]]) -> dict[str, float]:
    return {name: float(torch.tensor(values).median()) for name, values in taken.items()}


def _faster(
    row: str,
    what: str,
    against: str,
    goal: Goal,
    fast: list[float],
    slow: list[float],
    differences: dict[str, float],
    note: str,
) -> Measured:
    value: Spread = ratio_of(slow, fast)
    return Measured(
        row, what, against, value, "x faster", goal, _medians({"fast": fast, "slow": slow}), differences, note
    )
