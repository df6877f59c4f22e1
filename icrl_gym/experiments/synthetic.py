"""A Markov reward process whose values lie in the kernel's space: is their shape recovered, and what does the error depend on?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from icrl_gym.envs import KernelMRP
from icrl_gym.experiments.config import ReproduceConfig
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.report import Report, interval
from icrl_gym.kernels import RBFKernel
from icrl_gym.plots import new_figure
from icrl_gym.transformer import InContextTransformer

__all__ = ["synthetic"]

TRUE_TEMPERATURE = 0.1


def synthetic_cell(
    n_features: int, n: int, n_layers: int, temperature: float, seed: int, curve: bool = False
) -> dict[str, Any]:
    """The error of L unit ``row_sum`` steps on one process and one context.

    Args:
        n_features: d.
        n: Transitions of the context, drawn independently.
        n_layers: L.
        temperature: Of the transformer's RBF kernel; the process has 0.1.
        seed: Of the process and the context.
        curve: Also return values on a grid.

    Returns:
        ``error`` and ``shape``: the root mean square error in units of the true values' deviation, without and with the
        best constant taken out.
    """
    env = KernelMRP(n_features=n_features, kernel="rbf", temperature=TRUE_TEMPERATURE, gamma=0.9, seed=seed)
    context = env.sample_context(n, seed, iid=True)
    transformer = InContextTransformer(RBFKernel(temperature), [1.0] * n_layers, gamma=0.9)
    value = transformer.condition(context, most_growth=math.inf)  # an error of any size is a result
    asked = np.random.default_rng([seed, 7]).uniform(-1, 1, (2000, n_features))
    difference = np.asarray(value(asked)) - np.asarray(env.value(asked))
    deviation = float(np.std(np.asarray(env.value(asked))))
    result: dict[str, Any] = {
        "error": float(np.sqrt(np.mean(difference**2))) / deviation,
        "shape": float(np.std(difference)) / deviation,
    }
    if curve:
        axis = np.linspace(-1, 1, 101 if n_features == 1 else 41)
        grid = axis[:, None] if n_features == 1 else np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
        result["grid"] = {
            "states": grid.tolist(),
            "true": np.asarray(env.value(grid)).tolist(),
            "found": np.asarray(value(torch.as_tensor(grid))).tolist(),
        }
    return result


def synthetic(config: ReproduceConfig) -> Report:
    """Recovered shape in 1-D and 2-D; error against n, L, and the distance between the true kernel and the used one."""
    seeds = range(config.size(max(config.seeds, 10), 2))
    lengths = [16, 32, 64, 128, 256, 512] if not config.quick else [16, 64]
    depths = [1, 3, 10, 30, 100, 300, 1000] if not config.quick else [1, 30]
    factors = [0.1, 0.3, 1.0, 3.0, 10.0] if not config.quick else [0.3, 1.0]
    n, depth = (256, 300) if not config.quick else (64, 30)
    base = {"n_features": 1, "n": n, "n_layers": depth, "temperature": TRUE_TEMPERATURE}
    varied: list[tuple[str, str, list[Any]]] = [
        ("n", "transitions n", lengths),
        ("n_layers", "layers L", depths),
        ("temperature", "temperature used / true", [factor * TRUE_TEMPERATURE for factor in factors]),
    ]
    cells, labels = [], []
    for dimension in (1, 2):
        for name, label, settings in varied:
            for setting in settings:
                for seed in seeds:
                    cells.append({**base, "n_features": dimension, name: setting, "seed": seed})
                    labels.append((dimension, name, label, setting))
    results = run_grid(synthetic_cell, cells, config.cache, config.workers, "synthetic")
    shapes = run_grid(
        synthetic_cell,
        [{**base, "n_features": d, "seed": 0, "curve": True} for d in (1, 2)],
        config.cache,
        1,
        "synthetic shapes",
    )
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(labels):
        mine = [result for result, label in zip(results, labels, strict=True) if label == key]
        dimension, name, label, setting = key
        shown = setting / TRUE_TEMPERATURE if name == "temperature" else setting
        mean, low, high = interval([result["shape"] for result in mine])
        rows.append(
            {
                "d": dimension, "varied": label, "at": shown, "shape error": mean, "95% low": low, "95% high": high,
                "error with the constant": interval([result["error"] for result in mine])[0],
            }
        )  # fmt: skip
    at_best = [row["shape error"] for row in rows if row["d"] == 1 and row["varied"] == "layers L"][-1]
    more = [row["shape error"] for row in rows if row["d"] == 1 and row["varied"] == "transitions n"]
    return Report(
        "synthetic",
        "the shape of a value function in the kernel's space is recovered, up to the constant.",
        f"in 1-D with {n} transitions and {depths[-1]} layers the error of the shape is {at_best:.1%} of the values' deviation "
        f"(mean over {len(seeds)} processes); from {lengths[0]} to {lengths[-1]} transitions, at {depth} layers, it goes from "
        f"{more[0]:.1%} to {more[-1]:.1%}.",
        at_best < 0.1 and more[-1] < more[0],
        rows,
        {"errors": _errors(rows), "shapes": _shapes(shapes)},
    )


def _errors(rows: list[dict[str, Any]]) -> Any:
    figure = new_figure(10, 3.5)
    if figure is None:
        return None
    labels = list(dict.fromkeys(row["varied"] for row in rows))
    for axes, label in zip(figure.subplots(1, len(labels), sharey=True), labels, strict=True):
        for d in (1, 2):
            mine = [row for row in rows if row["varied"] == label and row["d"] == d]
            x = [row["at"] for row in mine]
            axes.plot(x, [row["shape error"] for row in mine], marker="o", label=f"d = {d}")
            axes.fill_between(x, [row["95% low"] for row in mine], [row["95% high"] for row in mine], alpha=0.2)
        axes.set(xscale="log", yscale="log", xlabel=label)
        # The settings themselves: between 16 and 512 there is one power of ten.
        axes.set_xticks(x, [f"{at:g}" for at in x])
        axes.minorticks_off()
        axes.legend()
    figure.axes[0].set_ylabel("error of the shape / deviation of the values")
    return figure


def _shapes(shapes: list[dict[str, Any]]) -> Any:
    figure = new_figure(11, 3.5)
    if figure is None:
        return None
    line, true, found = figure.subplots(1, 3)
    one, two = (shape["grid"] for shape in shapes)
    line.plot([s[0] for s in one["states"]], one["true"], label="true")
    line.plot([s[0] for s in one["states"]], one["found"], "--", label="in context")
    line.set(xlabel="state", ylabel="value", title="d = 1")
    line.legend()
    side = int(np.sqrt(len(two["true"])))
    for axes, name in ((true, "true"), (found, "found")):
        picture = axes.imshow(
            np.reshape(two[name], (side, side)),
            origin="lower",
            extent=(-1, 1, -1, 1),
            vmin=min(two["true"]),
            vmax=max(two["true"]),
        )
        axes.set_title(f"d = 2, {'true' if name == 'true' else 'in context'}")
    figure.colorbar(picture, ax=[true, found])
    return figure
