"""One set of weights for all fifty domains of Meta-World: constructions side by side."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.adaptive_pretraining import train_heads
from icrl_gym.context import Context
from icrl_gym.datasets import NOISE_LEVELS, CollectConfig, Transitions, contexts, dataset_id, load_transitions
from icrl_gym.experiments.baselines import fit_networks
from icrl_gym.experiments.config import ReproduceConfig
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.report import Report
from icrl_gym.kernels import LaplacianKernel, RBFKernel
from icrl_gym.metaworld import PAPER_DOMAINS, TASKS
from icrl_gym.metrics import standardization
from icrl_gym.plots import new_figure
from icrl_gym.pretraining import PretrainConfig, recorded, scaled, train_step_sizes
from icrl_gym.td_loss import mean_squared_reward, td_errors
from icrl_gym.transformer import InContextTransformer

__all__ = ["all_domains"]

EPISODES, STEPS = 14, 500
"""Goals of a data set, of which the first half trains, and steps of each."""
MOVING = 200
"""Contexts of up to 150 transitions and queries are of so many first steps of an episode: later the experts mostly stand still."""
QUERIES = 50
REWARD_SCALE = 0.1
CONSTRUCTIONS = ("paper", "row_sum", "adaptive", "adaptive fixed point", "TD fixed point", "MLP", "returns")
GAMMAS = (0.9, 0.99)


def transitions_of(task: str, level: str, train: bool, sizes: dict[str, Any]) -> Transitions:
    """The goals that train or are held out, with scaled rewards."""
    half = sizes["episodes"] // 2
    return _read(task, level, range(half) if train else range(half, sizes["episodes"]), sizes["root"])


# Reading a file takes longer than a small cell: a process meets the same few again and again.
@functools.lru_cache(maxsize=200)
def _read(task: str, level: str, episodes: range, root: str | None) -> Transitions:
    return scaled(load_transitions(dataset_id(task, level), episodes=episodes, root=root), REWARD_SCALE)


def _steps_before(data: Transitions) -> npt.NDArray[np.int_]:
    """(n,), how many steps of its episode came before each transition."""
    first = np.flatnonzero(np.diff(data.episode, prepend=-1))
    return np.arange(len(data)) - np.repeat(first, np.diff(np.append(first, len(data))))


def draw(
    data: Transitions, n: int, m: int, count: int, seed: int, gamma: float
) -> tuple[Context, Context, Tensor, Tensor]:
    """Contexts and queries with the true discounted returns of their states.

    Args:
        data: Whole episodes.
        n: Transitions of a context; up to 150 with its queries, all are of the first 200 steps of one episode, more are of one
            episode if it has so many, and else of all.
        m: Queries.
        count: Contexts.
        seed: Of the draw.
        gamma: Of the returns, which run to the end of the episode.

    Returns:
        (count,) contexts and queries, and the returns (count, n) and (count, m).
    """
    position = _steps_before(data)
    longest = int(position.max()) + 1
    rows = np.flatnonzero(position < (MOVING if n + m <= 150 else longest))
    # Transitions whose state is their own row number: what is drawn says which rows it is.
    numbers = rows[:, None].astype(float)
    none = np.zeros(len(rows), bool)
    index = Transitions(numbers, np.zeros(len(rows)), numbers, none, none, data.episode[rows])
    drawn = contexts(index, n, count, seed, m, within_episode=n + m <= longest)
    returns = np.zeros(len(data))
    following = 0.0
    for row in range(len(data) - 1, -1, -1):
        last = row + 1 == len(data) or data.episode[row + 1] != data.episode[row]
        following = data.rewards[row] + (0.0 if last else gamma * following)
        returns[row] = following
    chosen = [part.states[..., 0].numpy().astype(int) for part in drawn]
    return (
        data.context(chosen[0]), data.context(chosen[1]), torch.as_tensor(returns[chosen[0]]), torch.as_tensor(returns[chosen[1]])
    )  # fmt: skip


def weights_cell(
    construction: str, domain: str, gamma: float, seed: int, iterations: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Train a construction on one domain's high-noise tasks.

    Returns:
        ``temperature`` and ``step_sizes``, or ``bandwidths`` and ``ridges``, and the ``losses`` on the way.
    """
    data = transitions_of(domain, "high", True, sizes)
    position = _steps_before(data)
    kept = position < MOVING
    data = Transitions(*(getattr(data, name)[kept] for name in Transitions.__dataclass_fields__))
    if construction == "adaptive":
        heads = PretrainConfig(domain, gamma=gamma, seed=seed, iterations=iterations, train="heads")
        trained, losses = train_heads(data, heads)
        return {
            "bandwidths": trained.log_bandwidths.exp().tolist(),
            "ridges": trained.log_ridges.exp().tolist(),
            "losses": losses,
        }
    normalization = {"paper": "length", "row_sum": "row_sum"}[construction]
    config = PretrainConfig(
        domain, step_normalization=normalization, gamma=gamma, seed=seed, iterations=iterations  # type: ignore[arg-type]
    )  # fmt: skip
    transformer, losses = train_step_sizes(data, config)
    return {
        "temperature": float(transformer.kernel.config()["temperature"]),
        "step_sizes": transformer.step_sizes.tolist(),
        "losses": losses,
    }


def build(construction: str, weights: dict[str, Any], gamma: float) -> InContextTransformer | AdaptiveTransformer:
    """The transformer of a construction and its trained weights."""
    if construction in ("paper", "row_sum"):
        normalization = "length" if construction == "paper" else "row_sum"
        kernel = RBFKernel(weights["temperature"])
        return InContextTransformer(kernel, weights["step_sizes"], gamma, normalization)  # type: ignore[arg-type]
    depth = math.inf if construction == "adaptive fixed point" else 20
    bandwidths = torch.tensor(weights["bandwidths"], dtype=torch.float64)
    return AdaptiveTransformer(bandwidths, weights["ridges"], n_layers=depth, gamma=gamma)


def network_cell(
    task: str, level: str, gamma: float, n: int, count: int, steps: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Networks fitted to the contexts of one task.

    Returns:
        Of each context, the normalized held-out TD ``losses`` after each of ``steps`` (NaN without any reward), and the
        ``correlation`` of V with the true returns of the queries at the end.
    """
    batch, queries, _, asked_returns = draw(transitions_of(task, level, False, sizes), n, QUERIES, count, 0, gamma)
    fitted = fit_networks(batch, queries, gamma, steps)
    return {
        "steps": fitted.steps,
        "losses": (fitted.losses / mean_squared_reward(queries).unsqueeze(-1)).tolist(),
        "correlation": _correlation(fitted.values, asked_returns).tolist(),
    }


@torch.no_grad()
def compare_cell(
    task: str, level: str, gamma: float, weights: dict[str, dict[str, Any]], n: int, count: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Every construction on the same contexts of one task.

    Returns:
        For each construction and ``constant`` (the best constant value for the queries themselves) the normalized held-out TD
        ``loss`` of each context (infinite where layers overflow, NaN without any reward), the ``correlation`` of V with the true
        returns of the queries, and ``seconds`` of conditioning and evaluation a context; and the seconds a context that one step
        of the MLP takes, measured beside them.
    """
    batch, queries, returns, asked_returns = draw(
        transitions_of(task, level, False, sizes), n, QUERIES, count, 0, gamma
    )
    scale = mean_squared_reward(queries)
    result: dict[str, Any] = {}

    def keep(name: str, errors: Tensor, values: Tensor | None, seconds: float) -> None:
        result[name] = {
            "loss": (errors.square().mean(-1) / scale).tolist(),
            "correlation": _correlation(values, asked_returns).tolist() if values is not None else [math.nan] * count,
            "seconds": seconds / count,
        }

    keep("constant", queries.rewards - queries.rewards.mean(-1, keepdim=True), None, 0.0)
    for name in CONSTRUCTIONS:
        if name == "MLP":
            continue
        start = time.perf_counter()
        transformer: InContextTransformer | AdaptiveTransformer
        given, asked = batch, queries
        if name == "TD fixed point":
            # What the policy of this package has for its critic.
            mean, spread = standardization(batch.states, batch.mask)
            transformer = InContextTransformer(
                LaplacianKernel("median"), gamma=gamma, n_layers=math.inf, value_shift=True
            )
            given, asked = _moved(batch, mean, spread), _moved(queries, mean, spread)
        elif name == "returns":
            # Without a discount the residual gradient is ridge regression: on the true returns of the context's states.
            transformer = AdaptiveTransformer(gamma=0.0)
            given = Context(batch.states, returns, batch.next_states, torch.ones_like(batch.terminated))
        else:
            transformer = build(name, weights[name.removesuffix(" fixed point")], gamma)
        errors, values = evaluate(transformer, given, asked, gamma)
        keep(name, errors, values, time.perf_counter() - start)
        if name == "adaptive":
            with torch.enable_grad():
                fitted = fit_networks(batch, queries, gamma, steps=20, every=20)
            result["seconds a step of the MLP"] = fitted.seconds[-1] / (20 * count)
    return result


def _joined(compared: dict[str, Any], networks: dict[str, Any]) -> dict[str, Any]:
    """The result of :func:`compare_cell` with its MLP, and the time until that had the adaptive transformer's loss."""
    losses = torch.tensor(networks["losses"], dtype=torch.float64)
    # A loss of the batch, as the batch takes the time.
    goal = known_median(compared["adaptive"]["loss"])
    reached = [
        step for step, loss in zip(networks["steps"], losses.T.tolist(), strict=True) if known_median(loss) <= goal
    ]
    steps = reached[0] if reached else math.inf
    mlp = {
        "loss": losses[:, -1].tolist(),
        "best": losses.amin(-1).tolist(),
        "correlation": networks["correlation"],
        "seconds to the adaptive loss": steps * compared["seconds a step of the MLP"],
    }
    return {**compared, "MLP": mlp}


def _moved(part: Context, mean: Tensor, spread: Tensor) -> Context:
    states, following = (part.states - mean) / spread, (part.next_states - mean) / spread
    return Context(states, part.rewards, following, part.terminated, part.truncated, part.mask)


def evaluate(
    transformer: InContextTransformer | AdaptiveTransformer, batch: Context, queries: Context, gamma: float
) -> tuple[Tensor, Tensor]:
    """TD errors and values of the queries; infinite errors for a context on which the layers overflow."""
    try:
        # A loss of diverging layers is a result here.
        if isinstance(transformer, InContextTransformer):
            value = transformer.condition(batch, most_growth=math.inf)
        else:
            value = transformer.condition(batch)
        return td_errors(value, gamma, queries), value(queries.states)
    except FloatingPointError:
        if len(batch.rewards) == 1:
            return torch.full_like(queries.rewards, math.inf), torch.full_like(queries.rewards, math.nan)
    parts = [evaluate(transformer, batch[i : i + 1], queries[i : i + 1], gamma) for i in range(len(batch.rewards))]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _correlation(values: Tensor, returns: Tensor) -> Tensor:
    """(B,) Pearson correlations, whatever constant there is between the two; NaN where one does not vary."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (values, returns))
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > 0, (a * b).sum(-1) / torch.where(size > 0, size, 1.0), math.nan)


def collected(config: ReproduceConfig, tasks: list[str], levels: list[str]) -> dict[str, Any]:
    """Record what is missing; the sizes of the data sets and where they are."""
    sizes = {"episodes": config.size(EPISODES, 4), "steps": config.size(STEPS, 220), "root": config.root}
    domains = tuple(dict.fromkeys([*tasks, *training_domains(config)]))
    wanted = tuple(dict.fromkeys([*levels, "high"]))
    recorded(
        CollectConfig(domains, wanted, **sizes, jobs=config.jobs),  # type: ignore[arg-type]
        remedy="They may be another experiment's, whose data have other sizes: give another --root.",
    )
    return sizes


def training_domains(config: ReproduceConfig) -> list[str]:
    """The domains that weights are trained on."""
    return list(PAPER_DOMAINS if not config.quick else PAPER_DOMAINS[:1])


def cells_of(config: ReproduceConfig) -> tuple[list[str], list[str]]:
    """Tasks and noise levels."""
    return (list(TASKS), list(NOISE_LEVELS)) if not config.quick else (["reach-v3", "drawer-close-v3"], ["high"])


def all_domains(config: ReproduceConfig) -> Report:
    """Weights trained on pick-place alone, on every task and noise level, beside what fits each context anew."""
    tasks, levels = cells_of(config)
    sizes = collected(config, tasks, levels)
    kinds = ("paper", "row_sum", "adaptive")
    keys = [(kind, gamma) for kind in kinds for gamma in GAMMAS]
    iterations = {"paper": config.size(200, 5), "row_sum": config.size(200, 5), "adaptive": config.size(20, 2)}
    training = [
        {
            "construction": kind, "domain": PAPER_DOMAINS[0], "gamma": gamma, "seed": 0, "iterations": iterations[kind],
            "sizes": sizes,
        }
        for kind, gamma in keys
    ]  # fmt: skip
    found = run_grid(weights_cell, training, config.cache, config.workers, "weights")
    weights = dict(zip(keys, found, strict=True))
    where = [(task, level, gamma) for gamma in GAMMAS for task in tasks for level in levels]
    cells = [
        {
            "task": task, "level": level, "gamma": gamma, "n": 100, "count": config.size(8, 2), "sizes": sizes,
            "weights": {kind: numbers_of(weights[kind, gamma]) for kind in kinds},
        }
        for task, level, gamma in where
    ]  # fmt: skip
    compared = run_grid(compare_cell, cells, config.cache, config.workers, "all-domains")
    # Apart, as they take most of the time and know nothing of the transformers.
    fits = [{**cell, "steps": config.size(1000, 100)} for cell in cells]
    for cell in fits:
        del cell["weights"]
    networks = run_grid(network_cell, fits, config.cache, config.workers, "networks")
    results = {at: _joined(*both) for at, both in zip(where, zip(compared, networks, strict=True), strict=True)}
    rows = []
    names = ("constant", *CONSTRUCTIONS)
    for (task, level, gamma), result in results.items():
        row: dict[str, Any] = {"task": task, "noise": level, "gamma": gamma}
        for name in names:
            row[name] = known_median(result[name]["loss"])
        row["adaptive 95% low"], row["adaptive 95% high"] = _interval_of_the_median(result["adaptive"]["loss"])
        row["MLP at its best"] = known_median(result["MLP"]["best"])
        for name in CONSTRUCTIONS:
            row[f"correlation, {name}"] = known_median(result[name]["correlation"])
        row["MLP's time to the adaptive loss / adaptive time"] = (
            result["MLP"]["seconds to the adaptive loss"] / result["adaptive"]["seconds"]
        )
        rows.append(row)
    return Report(
        "all-domains",
        "Beyond the paper, which leaves kernels that serve every domain to future work.",
        " ".join(_summary(rows, gamma) for gamma in GAMMAS),
        None,
        rows,
        {f"heat_map_{gamma:g}".replace(".", "_"): _heat_map(rows, gamma) for gamma in GAMMAS},
        summary=[_counts(rows, gamma, name) for gamma in GAMMAS for name in CONSTRUCTIONS],
    )


def numbers_of(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights without the losses on the way to them."""
    return {name: value for name, value in weights.items() if name != "losses"}


def known_median(values: list[float]) -> float:
    """The median of the values that are no NaN; NaN if all are."""
    # Of an even number, the mean of the two in the middle; torch has the lower one.
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def _interval_of_the_median(values: list[float]) -> tuple[float, float]:
    """A 95% bootstrap interval over contexts, hence over goals."""
    known = np.asarray([value for value in values if not math.isnan(value)])
    if len(known) < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(0).choice(known, (2000, len(known)))
    low, high = np.quantile(np.median(drawn, 1), [0.025, 0.975])
    return float(low), float(high)


def _counts(rows: list[dict[str, Any]], gamma: float, name: str) -> dict[str, Any]:
    """A construction over all cells of a discount."""
    mine = [row for row in rows if row["gamma"] == gamma]
    losses = np.array([row[name] for row in mine])
    return {
        "gamma": gamma, "construction": name, "cells": len(mine), "median": float(np.median(losses)), "worst": float(losses.max()),
        "below 1": int((losses < 1).sum()), "below the best constant": sum(row[name] < row["constant"] for row in mine),
        "correlation": float(np.nanmedian([row[f"correlation, {name}"] for row in mine])),
    }  # fmt: skip


def _summary(rows: list[dict[str, Any]], gamma: float) -> str:
    mine = [row for row in rows if row["gamma"] == gamma]
    near = sum(row["adaptive"] <= 1.1 * row["adaptive fixed point"] for row in mine)
    ratios = [row["MLP's time to the adaptive loss / adaptive time"] for row in mine]
    by_task: dict[str, list[dict[str, Any]]] = {}
    for row in mine:
        by_task.setdefault(row["task"], []).append(row)

    def no_worse(name: str) -> int:
        means = [[np.mean([row[which] for row in own]) for which in ("adaptive", name)] for own in by_task.values()]
        return sum(bool(ours <= theirs) for ours, theirs in means)

    adaptive, paper, mlp = (_counts(rows, gamma, name) for name in ("adaptive", "paper", "MLP"))
    ratio, never = float(np.median(ratios)), sum(math.isinf(ratio) for ratio in ratios)
    speed = f"takes {ratio:.3g} times as long to the same loss (median) and " if math.isfinite(ratio) else ""
    return (
        f"At gamma {gamma:g} the median held-out TD loss of {len(mine)} cells is {adaptive['median']:.3g} for one set of weights "
        f"(worst {adaptive['worst']:.3g}; {adaptive['below 1']} below the value zero, {adaptive['below the best constant']} below the "
        f"best constant), {paper['median']:.3g} for the paper's construction and {mlp['median']:.3g} for a network fitted to each "
        f"context. 20 layers are within 10% of their fixed point in {near} cells, and no worse than the network on "
        f"{no_worse('MLP')} of {len(by_task)} tasks ({no_worse('MLP at its best')} if it is stopped at its best), which {speed}never "
        f"gets to the same loss in {never} cells."
    )


def _heat_map(rows: list[dict[str, Any]], gamma: float) -> Any:
    mine = [row for row in rows if row["gamma"] == gamma]
    tasks = list(dict.fromkeys(row["task"] for row in mine))
    levels = list(dict.fromkeys(row["noise"] for row in mine))
    figure = new_figure(12, 2 + 0.2 * len(tasks))
    if figure is None:
        return None
    values = {(row["task"], row["noise"]): row for row in mine}
    names = ("constant", *CONSTRUCTIONS)
    axes = figure.add_subplot()
    grid = [[values[task, level][name] for name in names for level in levels] for task in tasks]
    shown = np.log10(np.clip(np.asarray(grid), 1e-4, 1e2))
    picture = axes.imshow(shown, vmin=-3, vmax=1, cmap="RdYlGn_r", aspect="auto")
    axes.set_yticks(range(len(tasks)), [task.removesuffix("-v3") for task in tasks], fontsize=7)
    axes.set_xticks(range(len(names) * len(levels)), [level[0] for _ in names for level in levels], fontsize=7)
    for index, name in enumerate(names):
        axes.axvline(len(levels) * index - 0.5, color="white")
        axes.text(len(levels) * (index + 0.5) - 0.5, -1.0, name, ha="center", fontsize=8)
    axes.set_xlabel(f"noise level (low, medium, high); gamma {gamma:g}, contexts of 100 transitions")
    figure.colorbar(picture, ax=axes, label="log10 of the held-out TD loss (0: the value zero)")
    return figure
