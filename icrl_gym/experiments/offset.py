"""The constant offset of the literal read-out: predicted, measured, and what it does to advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from icrl_gym.advantages import center, generalized_advantages
from icrl_gym.envs import KernelMRP
from icrl_gym.experiments.config import ReproduceConfig
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.report import Report, interval
from icrl_gym.kernels import make_kernel
from icrl_gym.plots import new_figure
from icrl_gym.transformer import InContextTransformer

__all__ = ["offset"]

GAMMA, LAMBDA = 0.9, 0.95
ENDS = ("none", "time limits", "terminations")


def offset_cell(kernel: str, ends: str, n: int, seed: int) -> dict[str, Any]:
    """One context, and one rollout of 512 steps, by the literal forward pass.

    Returns:
        ``predicted`` (b), ``measured`` (mean of read-out minus V over queries), ``spread`` (its largest deviation from b),
        and the root mean square error of the normalized advantages against those of the offset-free critic, ``centered`` exactly
        and with the ``mean`` alone subtracted.
    """
    env = KernelMRP(gamma=GAMMA, termination=0.05 if ends == "terminations" else 0.0, seed=seed)
    context = env.sample_context(n, seed)
    transformer = InContextTransformer(make_kernel(kernel, 0.1), [1.0] * 20, gamma=GAMMA)
    value = transformer.condition(context)
    rollout = env.sample_context(512, seed + 1000)
    states = torch.cat([rollout.states, rollout.next_states[-1:]])
    with torch.no_grad():
        literal = torch.cat(
            [transformer.read_out(transformer(transformer.embed(context, part))) for part in states.split(64)]
        ).numpy()
    free = value(states).numpy()
    b = float(value.offset)
    terminated = rollout.terminated.numpy()[:, None]
    stops = terminated.copy()
    if ends == "time limits":
        stops[19::20] = True

    def advantages(values: np.ndarray) -> np.ndarray:
        following = values[1:].copy()
        if stops.any():  # the state that an episode ended in, not the next episode's first one
            with torch.no_grad():
                last = value(rollout.next_states).numpy() + (values[0] - free[0])
            following = np.where(stops[:, 0], last, following)
        errors = rollout.rewards.numpy() + GAMMA * ~terminated[:, 0] * following - values[:-1]
        return generalized_advantages(errors[:, None], stops, GAMMA, LAMBDA)

    truth, shifted = advantages(free), advantages(free + b)
    _, exact = center(shifted, b, terminated, stops, GAMMA, LAMBDA)
    return {
        "predicted": b,
        "measured": float(np.mean(literal - free)),
        "spread": float(np.abs(literal - free - b).max()),
        "centered": _distance(exact, truth),
        "mean": _distance(shifted, truth),
    }


def _distance(advantages: np.ndarray, truth: np.ndarray) -> float:
    """Root mean square difference of normalized advantages, as PPO normalizes them."""
    normalized = [(a - a.mean()) / a.std() for a in (advantages, truth)]
    return float(np.sqrt(np.mean((normalized[0] - normalized[1]) ** 2)))


def offset(config: ReproduceConfig) -> Report:
    """Offsets of several kernels, and what centering leaves of their effect."""
    kernels = ("rbf", "laplacian", "softmax") if not config.quick else ("rbf",)
    seeds = range(config.size(max(config.seeds, 10), 2))
    keys = [(kernel, ends, seed) for kernel in kernels for ends in ENDS for seed in seeds]
    cells = [{"kernel": k, "ends": e, "n": config.size(64, 16), "seed": s} for k, e, s in keys]
    results = dict(zip(keys, run_grid(offset_cell, cells, config.cache, config.workers, "offset"), strict=True))
    rows = []
    for kernel in kernels:
        for ends in ENDS:
            mine = [results[kernel, ends, seed] for seed in seeds]
            mean, low, high = interval([result["mean"] for result in mine])
            rows.append(
                {
                    "kernel": kernel, "ends of episodes": ends,
                    "|offset|": float(np.mean([abs(result["predicted"]) for result in mine])),
                    "largest deviation from it": max(result["spread"] for result in mine),
                    "advantages, centered exactly": max(result["centered"] for result in mine),
                    "advantages, mean subtracted": mean, "95% low": low, "95% high": high,
                }
            )  # fmt: skip
    figure = new_figure(5, 4)
    if figure is not None:
        axes = figure.add_subplot()
        for kernel in kernels:
            mine = [results[key] for key in keys if key[0] == kernel]
            axes.scatter([r["predicted"] for r in mine], [r["measured"] for r in mine], s=12, label=kernel)
        axes.axline((0, 0), slope=1, color="gray", linewidth=1, label="measured = predicted")
        axes.set(xlabel="predicted offset", ylabel="measured offset")
        axes.legend()
    spread = max(row["largest deviation from it"] for row in rows)
    exact = max(row["advantages, centered exactly"] for row in rows)
    plain = max(row["advantages, mean subtracted"] for row in rows)
    return Report(
        "offset",
        "the read-out carries a constant that does not depend on the query, without effect on the policy gradient once advantages are "
        "centered.",
        f"the read-out differs from V by the predicted constant to {spread:.1g}; normalized advantages equal those of the offset-free "
        f"critic to {exact:.1g} after exact centering. Subtracting the mean alone leaves a root mean square difference of up to "
        f"{plain:.2g} deviations, because the effect of the constant depends on how far the ends of episode and rollout are.",
        spread < 1e-8 and exact < 1e-8,
        rows,
        {"offset": figure},
    )
