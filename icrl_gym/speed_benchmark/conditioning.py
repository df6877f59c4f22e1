"""Rows about conditioning: against bare torch, of a rolling context against afresh, of a batch against a loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from icrl_gym.context import Context
from icrl_gym.kernels import LaplacianKernel, RBFKernel
from icrl_gym.rolling import RollingConditioner
from icrl_gym.speed_benchmark.measured import Goal, Measured, Settings
from icrl_gym.speed_benchmark.problems import random_context, random_states
from icrl_gym.speed_benchmark.timing import ratio_of, side_by_side, spread
from icrl_gym.transformer import InContextTransformer

__all__ = ["batch", "conditioning", "rolling"]


def conditioning(settings: Settings) -> list[Measured]:
    """Conditioning against one Gram matrix and as many matrix-vector products as there are layers."""
    n, layers, d = settings.size(1024, 64), 20, settings.n_features
    rows = []
    for type_name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        context = random_context(n, d, dtype=dtype)
        transformer = InContextTransformer(RBFKernel(float(d)), n_layers=layers)
        calls: dict[str, Callable[[], object]] = {
            "ours": functools.partial(transformer.condition, context),
            "bare": functools.partial(_bare, context.states, context.rewards, layers),
        }
        taken = side_by_side(calls, settings.rounds)
        value = transformer.condition(context)
        exact = _numpy_layers(context, float(d), layers, 0.99)
        difference = float((value.coefficients.double() - exact).abs().max())
        rows.append(
            Measured(
                "conditioning", f"conditioning, {n} transitions, {layers} layers, {type_name}",
                f"bare torch: a Gram matrix, {layers} matrix-vector products", ratio_of(taken["ours"], taken["bare"]), "x the time",
                Goal("at most", 1.3) if dtype == torch.float64 else None, _medians(taken), {type_name: difference},
                "difference of coefficients from dense layers by differences of states, in float64",
            )
        )  # fmt: skip
    return rows


def _bare(states: Tensor, rewards: Tensor, layers: int) -> Tensor:
    gram = torch.exp((states @ states.T).mul_(1e-2))
    vector = rewards
    for _ in range(layers):
        vector = 1e-3 * (gram @ vector)
    return vector


def _numpy_layers(context: Context, temperature: float, layers: int, gamma: float) -> Tensor:
    """The coefficients after so many layers with ``row_sum`` steps, dense, from plain differences."""
    states, following = context.states.double(), context.next_states.double()

    def kernel(queries: Tensor) -> Tensor:
        return torch.exp(
            -(torch.cdist(states, queries, compute_mode="donot_use_mm_for_euclid_dist") ** 2) / 2 / temperature
        )

    here = kernel(states)
    matrix = (here - kernel(following) * (gamma * (~context.terminated).double())).T
    rewards = context.rewards.double()
    coefficients = torch.zeros_like(rewards)
    for _ in range(layers):
        coefficients = coefficients + (rewards - matrix @ coefficients) / here.sum(-1).max()
    return coefficients


def rolling(settings: Settings) -> list[Measured]:
    """New transitions into a rolling context against conditioning afresh on what is then in it."""
    n, new, d = settings.size(1024, 64), settings.size(64, 8), settings.n_features
    updates = settings.size(1000, 10)
    kernel = LaplacianKernel(float(d) ** 0.5)
    transformers = {
        "fixed point of TD(0.8)": InContextTransformer(
            kernel, n_layers=math.inf, algorithm="td_lambda", trace_decay=0.8, value_shift=True
        ),
        "fixed point of TD(0)": InContextTransformer(kernel, n_layers=math.inf, value_shift=True),
        "20 layers": InContextTransformer(kernel, n_layers=20, value_shift=True),
    }
    stream = random_context(n + new * updates, d)
    queries = random_states(64, d)
    rows = []
    for name, transformer in transformers.items():
        conditioner = RollingConditioner(transformer, n, d)
        conditioner.extend(stream[:n])
        conditioner.condition()
        place = n

        def roll(conditioner: RollingConditioner = conditioner) -> None:
            nonlocal place
            place = place if place + new <= len(stream) else 0
            conditioner.extend(stream[place : place + new])
            conditioner.condition()
            place += new

        def afresh(
            transformer: InContextTransformer = transformer, conditioner: RollingConditioner = conditioner
        ) -> None:
            transformer.condition(conditioner.context)

        # A turn of many updates, so that whatever is renewed now and then is in the mean.
        taken = side_by_side({"rolling": roll, "afresh": afresh}, settings.rounds, settings.size(3, 1) * 0.1)
        while place + new <= len(stream):
            conditioner.extend(stream[place : place + new])
            conditioner.condition()
            place += new
        ours, twin = conditioner.condition(), transformer.condition(conditioner.context)
        rows.append(
            Measured(
                "rolling", f"{new} new transitions into {n}, {name}", "conditioning afresh",
                ratio_of(taken["afresh"], taken["rolling"]),
                "x faster", Goal("at least", 5), _medians(taken), {"float64": float((ours(queries) - twin(queries)).abs().max())},
                f"difference of values after {updates} updates and more",
            )
        )  # fmt: skip
    return rows


def batch(settings: Settings) -> list[Measured]:
    """A batch of contexts in one call against a loop over them."""
    tasks, d = settings.size(64, 8), settings.n_features
    rows = []
    for n in (settings.size(256, 32), settings.size(32, 8)):
        contexts = [random_context(n, d, seed=seed) for seed in range(tasks)]
        together = Context.stack(contexts)
        for name, layers in (("20 layers", 20.0), ("fixed point", math.inf)):
            transformer = InContextTransformer(RBFKernel(float(d)), n_layers=layers, value_shift=True)

            def loop(
                transformer: InContextTransformer = transformer, contexts: list[Context] = contexts
            ) -> list[Tensor]:
                return [transformer.condition(context).coefficients for context in contexts]

            calls: dict[str, Callable[[], object]] = {
                "batch": functools.partial(transformer.condition, together),
                "loop": loop,
            }
            taken = side_by_side(calls, settings.rounds)
            difference = float((transformer.condition(together).coefficients - torch.stack(loop())).abs().max())
            rows.append(
                Measured(
                    "batch", f"{tasks} contexts of {n} transitions, {name}", "a loop over them",
                    ratio_of(taken["loop"], taken["batch"]),
                    "x faster", Goal("at least", 5) if n == 256 else None, _medians(taken), {"float64": difference},
                    "difference of coefficients",
                )
            )  # fmt: skip
    return rows


def _medians(taken: dict[str, list[float]]) -> dict[str, float]:
    return {name: spread(values).median for name, values in taken.items()}
