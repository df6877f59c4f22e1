"""Random Boyan chains: value errors against context length, and whether training from random matrices finds in-context TD.

After Wang et al. 2025. Decisions: their chain of 10 states, 4 features, discount 0.9, context of 30 transitions, batches of 64, weight
decay 1e-6, one head, one layer's matrices for all layers, and small random matrices to start from. Every step of training draws 64 new
chains, one trajectory each, where theirs draws 320 windows of one chain; all queries of a trajectory share one context, where
their windows slide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from icrl_gym.context import Context
from icrl_gym.envs import BoyanChain
from icrl_gym.experiments.config import ReproduceConfig
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.report import Report, interval
from icrl_gym.kernels import LinearKernel, RBFKernel
from icrl_gym.learned import LearnedTransformer
from icrl_gym.plots import new_figure
from icrl_gym.similarity import matched_construction, matrices, similarity
from icrl_gym.transformer import InContextTransformer

__all__ = ["Chains", "boyan", "sample_chains", "train_on_chains"]

N_STATES, N_FEATURES, GAMMA, N_CONTEXT, BATCH = 10, 4, 0.9, 30, 64
REWARDS_IN_TRAINING = 1 / math.sqrt(3)  # root mean square of what is uniform in [-1, 1]
MOST_OF_ONE_LAYER = 1 / math.sqrt(1 + GAMMA**2)  # cosine of [-I, gamma I] and [-I, 0]
MOST_SHOWN = 10.0
MEASURES = ("map", "value", "product", "implicit_weight", "value_difference", "sensitivity")


@dataclass(frozen=True)
class Chains:
    """A batch of Boyan chains as arrays, with the attributes of :class:`~icrl_gym.envs.BoyanChain`.

    Attributes:
        transitions: (B, m, m), P.
        initial: (B, m)
        features: (B, m, d)
        rewards: (B, m)
        values: (B, m)
    """

    transitions: np.ndarray
    initial: np.ndarray
    features: np.ndarray
    rewards: np.ndarray
    values: np.ndarray

    def walk(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """The states (B, n) of one trajectory a chain, from its initial distribution."""
        rows = np.arange(len(self.initial))
        cumulated = self.transitions.cumsum(-1)
        path = np.empty((len(rows), n), np.intp)
        distribution = self.initial.cumsum(-1)
        for step, uniform in enumerate(rng.uniform(size=(n, len(rows), 1))):
            # Scaled by the last entry: rounding may leave it below 1, and no state is beyond it.
            path[:, step] = (distribution < uniform * distribution[:, -1:]).sum(-1)
            distribution = cumulated[rows, path[:, step]]
        return path

    def context(self, path: np.ndarray, n: int) -> tuple[Context, torch.Tensor, torch.Tensor]:
        """The first n transitions of a trajectory, and what comes after them.

        Args:
            path: (B, n+m+1)
            n: Transitions of the context.

        Returns:
            The contexts (B,), the states (B, m+1, d) that follow, and the rewards (B, m) between those.
        """
        rows = np.arange(len(path))[:, None]
        states, rewards = torch.as_tensor(self.features[rows, path]), torch.as_tensor(self.rewards[rows, path])
        never = torch.zeros(len(path), n, dtype=torch.bool)
        context = Context(states[:, :n], rewards[:, :n], states[:, 1 : n + 1], never)
        return context, states[:, n:], rewards[:, n:-1]


def sample_chains(count: int, rng: np.random.Generator, representable: bool = False) -> Chains:
    """Draw chains from the distribution that :class:`~icrl_gym.envs.BoyanChain` draws from by its seed, many at once.

    Args:
        count: B.
        rng: Moves on.
        representable: Whether values are linear in the features.
    """
    m, d = N_STATES, N_FEATURES
    transitions = np.zeros((count, m, m))
    left, right = np.arange(m - 2), np.arange(m - 2) + 1
    transitions[:, left, right] = rng.uniform(0.01, 0.99, (count, m - 2))
    transitions[:, left, right + 1] = 1 - transitions[:, left, right]
    transitions[:, -2, -1] = 1.0
    last, initial = rng.uniform(0.01, 0.99, (2, count, m))
    transitions[:, -1] = last / last.sum(-1, keepdims=True)
    features = rng.uniform(-1.0, 1.0, (count, m, d))
    system = np.eye(m) - GAMMA * transitions
    if representable:
        rewards = (system @ features @ rng.standard_normal((count, d, 1)))[..., 0]
    else:
        rewards = rng.uniform(-1.0, 1.0, (count, m))
    values = np.linalg.solve(system, rewards[..., None])[..., 0]
    return Chains(transitions, initial / initial.sum(-1, keepdims=True), features, rewards, values)


def linear_construction(n_layers: int, step: float = 1.0) -> InContextTransformer:
    """Wang et al.'s construction: linear attention, divided by the length of the context."""
    return InContextTransformer(LinearKernel(), [step] * n_layers, GAMMA, "length")


def msve_by_length(
    model: InContextTransformer | LearnedTransformer, lengths: Sequence[int], n_tasks: int, representable: bool
) -> list[list[float]]:
    """Mean squared value errors, weighted by the stationary distribution, over those of the value zero.

    Args:
        model: Answers for all states of a chain from a context of it.
        lengths: Of contexts: beginnings of one trajectory a chain.
        n_tasks: Chains; the same ones for every model.
        representable: Whether their values are linear in the features.

    Returns:
        For each length a number a chain.
    """
    chains = [BoyanChain(N_STATES, N_FEATURES, GAMMA, representable, seed=10_000 + i) for i in range(n_tasks)]
    contexts = [chain.sample_context(max(lengths), 0) for chain in chains]
    fields = ("states", "rewards", "next_states", "terminated")
    asked = torch.as_tensor(np.stack([chain.features for chain in chains]))
    zero = [chain.msve(np.zeros(N_STATES)) for chain in chains]
    errors = []
    with torch.no_grad():
        for n in lengths:
            found: list[torch.Tensor] = []
            for start in range(0, n_tasks, 20):  # so many n x n matrices fit into memory
                some = slice(start, start + 20)
                context = Context(*(torch.stack([getattr(c, name)[:n] for c in contexts[some]]) for name in fields))
                if isinstance(model, LearnedTransformer):
                    found.extend(model.values(context, asked[some]))
                else:
                    found.extend(model.condition(context, most_growth=math.inf)(asked[some]))
            errors.append([c.msve(v) / z for c, v, z in zip(chains, found, zero, strict=True)])
    return errors


def boyan_length_cell(
    model: str, n_layers: int, representable: bool, lengths: list[int], n_tasks: int
) -> dict[str, Any]:
    """Value errors of a construction, see :func:`msve_by_length`.

    Args:
        model: ``"linear"``, ``"rbf"`` or ``"linear fixed point"`` (whose depth is infinite).
        n_layers: L.
        representable: Of the chains.
        lengths: Of contexts.
        n_tasks: Chains.
    """
    if model == "linear":
        transformer = linear_construction(n_layers)
    elif model == "rbf":
        transformer = InContextTransformer(RBFKernel(0.5), [1.0] * n_layers, GAMMA, offset="removed")
    else:
        transformer = InContextTransformer(LinearKernel(), gamma=GAMMA, n_layers=float("inf"), ridge=1e-2)
    return {"msve": msve_by_length(transformer, lengths, n_tasks, representable)}


def train_on_chains(
    n_layers: int, iterations: int, seed: int, n_queries: int = 16, learning_rate: float = 3e-3, n_points: int = 20
) -> tuple[LearnedTransformer, list[dict[str, float]]]:
    """Train all matrices from random ones by semi-gradient TD, on chains that come once and never again.

        minimize (r + gamma V(s'; context) - V(s; context))^2,    the first V held constant

    Args:
        n_layers: L layers with the same matrices.
        iterations: Adam's steps, on 64 new chains each.
        seed: Of matrices and chains.
        n_queries: Transitions after the context that the loss is taken over.
        learning_rate: Of Adam, falling to a tenth along a cosine.
        n_points: Times to measure along the way.

    Returns:
        The transformer, and the measures of :class:`~icrl_gym.similarity.Similarity` before, along and after training, with
        ``iteration``, ``step`` (mean step size of the closest construction) and ``msve``, over chains kept for this; ``loss`` is
        the mean since the point before (NaN at the first).
    """
    learned = LearnedTransformer(
        linear_construction(n_layers),
        N_FEATURES,
        "random",
        shared_layers=True,
        n_heads=1,
        width=2 * N_FEATURES + 1,
        seed=seed,
    )
    optimizer = torch.optim.Adam(learned.parameters(), lr=learning_rate, weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(iterations, 1), learning_rate / 10)
    rng, held_out_rng = (np.random.default_rng([seed, part]) for part in (1, 2))
    held_out = sample_chains(2 * BATCH, held_out_rng)
    held_out_context, _, _ = held_out.context(held_out.walk(N_CONTEXT + 1, held_out_rng), N_CONTEXT)
    asked, true = torch.as_tensor(held_out.features), torch.as_tensor(held_out.values)
    history: list[dict[str, float]] = []
    losses: list[float] = []

    def measure(iteration: int) -> None:
        with torch.no_grad():
            error = (learned.values(held_out_context, asked) - true).square().mean() / true.square().mean()
        history.append(
            {
                "iteration": iteration,
                "loss": float(np.mean(losses)) if losses else float("nan"),
                "msve": float(error),
                "step": float(matched_construction(learned).step_sizes.mean()),
                **similarity(learned, held_out_context, asked).as_dict(),
            }
        )
        losses.clear()

    measure(0)
    points = {round(iterations * (i + 1) / n_points) for i in range(n_points)}
    for iteration in range(1, iterations + 1):
        chains = sample_chains(BATCH, rng)
        context, states, rewards = chains.context(chains.walk(N_CONTEXT + n_queries + 1, rng), N_CONTEXT)
        values = learned.values(context, states)
        loss = (rewards + GAMMA * values[:, 1:].detach() - values[:, :-1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # Early on a single chain can ask for a step that throws the layers off.
        torch.nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if iteration in points:
            measure(iteration)
    return learned, history


def boyan_training_cell(n_layers: int, iterations: int, seed: int, lengths: list[int], n_tasks: int) -> dict[str, Any]:
    """Train from random matrices, see :func:`train_on_chains`, and measure value errors as :func:`msve_by_length` does.

    Returns:
        ``history``; ``product`` (K^T Q) and ``value`` (V) of the one head, scaled to a largest entry of 1 with the sign that makes V's
        corner positive; ``msve``, by ``"representable"`` and ``"general"``.
    """
    learned, history = train_on_chains(n_layers, iterations, seed, n_points=min(20, iterations // 20))
    product, value = shown_matrices(learned)
    kinds = {"representable": True, "general": False}
    return {
        "history": history,
        "product": product.tolist(),
        "value": value.tolist(),
        "msve": {name: msve_by_length(learned, lengths, n_tasks, kind) for name, kind in kinds.items()},
    }


def shown_matrices(learned: LearnedTransformer) -> tuple[np.ndarray, np.ndarray]:
    """K^T Q and V of a first layer of one head, up to the factors that no output tells."""
    product, value = (stack[0].numpy() for stack in matrices(learned.layers[0]))  # type: ignore[arg-type]
    sign = np.sign(value[-1, -1]) or 1.0
    return sign * product / np.abs(product).max(), sign * value / np.abs(value).max()


def boyan(config: ReproduceConfig) -> Report:
    """Value errors by context length, and the emergence of in-context TD from random matrices."""
    lengths = [5, 10, 20, 30, 50, 100, 200, 500] if not config.quick else [10, 30, 100]
    n_tasks, iterations = config.size(200, 20), config.size(4000, 100)
    constructions = [("linear", 3), ("linear", 15), ("linear", 100), ("rbf", 15), ("linear fixed point", 0)]
    sizes = {"lengths": lengths, "n_tasks": n_tasks}
    kinds = {"representable": True, "general": False}
    keys = [(model, depth, kind) for model, depth in constructions for kind in kinds]
    cells: list[dict[str, Any]] = [{"model": m, "n_layers": d, "representable": kinds[k], **sizes} for m, d, k in keys]
    fixed = run_grid(boyan_length_cell, cells, config.cache, config.workers, "boyan, constructions")
    errors = {key: np.array(result["msve"]) for key, result in zip(keys, fixed, strict=True)}  # (lengths, tasks)
    depths = (1, 3)
    runs = [(depth, seed) for depth in depths for seed in range(config.seeds)]
    cells = [{"n_layers": depth, "iterations": iterations, "seed": seed, **sizes} for depth, seed in runs]
    trained = dict(
        zip(runs, run_grid(boyan_training_cell, cells, config.cache, config.workers, "boyan, training"), strict=True)
    )
    for depth in depths:
        for kind in kinds:
            over_seeds = [trained[depth, seed]["msve"][kind] for seed in range(config.seeds)]
            # The median: a seed that found something else than TD may be off by any factor.
            errors["trained", depth, kind] = np.median(over_seeds, axis=0)

    sizes_of_rewards = {kind: _reward_sizes(n_tasks, representable) for kind, representable in kinds.items()}
    rows: list[dict[str, Any]] = []
    notes: dict[tuple[str, int, str], str] = {}  # of the length with the largest mean
    for (model, depth, kind), table in errors.items():
        for n, over_tasks in zip(lengths, table, strict=True):
            note = _note(over_tasks, sizes_of_rewards[kind] if model == "trained" else None)
            rows.append(_row("relative MSVE", model, depth, kind, "n", n, over_tasks.tolist(), note))
            if note and over_tasks.mean() == table.mean(-1).max():
                notes[model, depth, kind] = f"n = {n}: {note}"
    for depth in depths:
        histories = [trained[depth, seed]["history"] for seed in range(config.seeds)]
        for name in ("loss", "msve", "step", *MEASURES):
            limit = f"at most {MOST_OF_ONE_LAYER:.3f}: no gradient reaches what reads the query's empty s'"
            note = limit if (depth, name) == (1, "product") else ""
            for points in zip(*histories, strict=True):
                values = [point[name] for point in points]
                rows.append(_row(name, "trained", depth, "general", "iteration", points[0]["iteration"], values, note))

    ends = {depth: [trained[depth, seed]["history"][-1] for seed in range(config.seeds)] for depth in depths}
    alike = {
        depth: [end["map"] > 0.9 * (MOST_OF_ONE_LAYER if depth == 1 else 1.0) for end in ends[depth]]
        for depth in depths
    }
    as_td = {depth: [end["implicit_weight"] > 0.9 for end in ends[depth]] for depth in depths}
    falls = []
    for depth in (3, 15, 100):
        for kind in kinds:
            table = errors["linear", depth, kind]
            # The same chains at both lengths: the interval of the difference is the one that counts.
            _, _, high = interval((table[-1] - table[0]).tolist())
            falls.append(high < 0)
    found = all(map(all, (*as_td.values(), *alike.values())))
    deep = depths[-1]
    finding = (
        f"from n = {lengths[0]} to {lengths[-1]} the value error of linear layers falls for certain in {sum(falls)} of {len(falls)} "
        f"settings of depth and values. Trained from random matrices, {deep} layers have TD's matrices (cosine above 0.9) in "
        f"{sum(alike[deep])} of {config.seeds} seeds and TD's implicit weights in {sum(as_td[deep])}. "
        f"One layer has the matrices, as far as one can learn them, in {sum(alike[1])} and the implicit weights in {sum(as_td[1])}."
    )
    return Report(
        "boyan",
        "Wang et al. 2025: the value error of linear attention falls with the length of the context, and matrices trained by TD on "
        "many chains converge to those that implement TD.",
        finding,
        all(falls) and found,
        rows,
        {
            "msve": _length_figure(errors, lengths),
            "emergence": _history_figure(trained, depths, config.seeds),
            "matrices": _matrix_figure(trained, depths, config.seeds),
        },
        {
            f"boyan/{name}/{depth}_layers": [
                (int(row["at"]), row["mean"])
                for row in rows
                if row["quantity"] == name and row["layers"] == depth and row["varied"] == "iteration"
            ]
            for depth in depths
            for name in ("loss", "msve", "step", *MEASURES)
        },
        [
            {
                "model": model,
                "layers": depth or "",
                "values": kind,
                **{f"n = {n}": float(over_tasks.mean()) for n, over_tasks in zip(lengths, table, strict=True)},
                "note": notes.get((model, depth, kind), ""),
            }
            for (model, depth, kind), table in errors.items()
        ],
    )


def _row(
    quantity: str, model: str, depth: int, kind: str, varied: str, at: float, values: list[float], note: str
) -> dict[str, Any]:
    mean, low, high = interval(values)
    return {
        "quantity": quantity, "model": model, "layers": depth, "values": kind, "varied": varied, "at": at,
        "mean": mean, "95% low": low, "95% high": high, "median": float(np.median(values)), "note": note,
    }  # fmt: skip


def _reward_sizes(n_tasks: int, representable: bool) -> np.ndarray:
    """(n_tasks,) the root mean square rewards of the chains of :func:`msve_by_length`."""
    chains = [BoyanChain(N_STATES, N_FEATURES, GAMMA, representable, seed=10_000 + i) for i in range(n_tasks)]
    return np.array([np.sqrt(np.mean(np.square(chain.rewards))) for chain in chains])


def _note(errors: np.ndarray, rewards: np.ndarray | None) -> str:
    """Which chains a mean above that of the value zero comes from; of trained layers also how large their rewards are.

    Args:
        errors: (n_tasks,), relative.
        rewards: (n_tasks,) root mean squares, or None.
    """
    above = errors > 1
    if errors.mean() <= 1:
        return ""
    note = f"{above.sum()} of {len(errors)} chains above 1, the median {np.median(errors):.3g}"
    if rewards is None or above.all():
        return note
    return (
        f"{note}; rewards (root mean square) {np.median(rewards[above]):.2g} where above, {np.median(rewards[~above]):.2g} "
        f"elsewhere, {REWARDS_IN_TRAINING:.2g} in training"
    )


def _layers(depth: int) -> str:
    return f"{depth} layer" + ("s" if depth > 1 else "")


def _length_figure(errors: dict[tuple[str, int, str], np.ndarray], lengths: list[int]) -> Any:
    figure = new_figure(10, 4.2)
    if figure is None:
        return None
    for place, kind in enumerate(("representable", "general")):
        axes = figure.add_subplot(1, 2, place + 1)
        for index, (model, depth) in enumerate(dict.fromkeys(key[:2] for key in errors)):
            bounds = np.array([interval(over_tasks.tolist()) for over_tasks in errors[model, depth, kind]])
            label = f"{model}, {_layers(depth)}" if depth else model
            axes.plot(lengths, bounds[:, 0], marker=".", color=f"C{index}", label=label)
            axes.fill_between(lengths, bounds[:, 1], bounds[:, 2], color=f"C{index}", alpha=0.2, linewidth=0)
            if bounds[:, 0].min() > MOST_SHOWN:  # a few chains decide the mean, and no line would be seen
                medians = np.median(errors[model, depth, kind], axis=-1)
                axes.plot(
                    lengths, medians, "--", color=f"C{index}", label=f"{label}: median, mean above {MOST_SHOWN:g}"
                )
        axes.axhline(1.0, color="gray", linewidth=1, linestyle=":")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="transitions n",
            ylabel="MSVE / that of the value zero",
            title=f"{kind} values",
            ylim=(2e-3, MOST_SHOWN),  # beyond it, layers diverge on short contexts
        )
        if not place:
            axes.legend(fontsize="small")
    return figure


def _history_figure(trained: dict[tuple[int, int], dict[str, Any]], depths: Sequence[int], n_seeds: int) -> Any:
    figure = new_figure(10, 6)
    if figure is None:
        return None
    panels = [("map", "product", "value"), ("implicit_weight", "sensitivity"), ("value_difference", "step", "msve")]
    for row, depth in enumerate(depths):
        for column, names in enumerate(panels):
            axes = figure.add_subplot(len(depths), len(panels), row * len(panels) + column + 1)
            for index, name in enumerate(names):
                for seed in range(n_seeds):
                    history = trained[depth, seed]["history"]
                    axes.plot(
                        [point["iteration"] for point in history],
                        [point[name] for point in history],
                        color=f"C{index}",
                        alpha=0.8,
                        linestyle="--" if name == "sensitivity" else "-",  # equal to the implicit weights, if linear
                        label=None if seed else name.replace("_", " "),
                    )
            if column == 2:
                axes.set(yscale="log")
            else:
                axes.set(ylim=(-0.1, 1.05))
            axes.set(xlabel="iteration", title=_layers(depth))
            axes.legend(fontsize="small")
    return figure


def _matrix_figure(trained: dict[tuple[int, int], dict[str, Any]], depths: Sequence[int], n_seeds: int) -> Any:
    figure = new_figure(2.4 * (1 + len(depths) * n_seeds), 5)
    if figure is None:
        return None
    construction = LearnedTransformer(linear_construction(1), N_FEATURES, n_heads=1, width=2 * N_FEATURES + 1)
    columns = [("construction", *shown_matrices(construction))]
    for depth in depths:
        for seed in range(n_seeds):
            run = trained[depth, seed]
            columns.append((f"{_layers(depth)}, seed {seed}", np.array(run["product"]), np.array(run["value"])))
    axes = figure.subplots(2, len(columns))
    for column, (title, product, value) in enumerate(columns):
        for row, (name, matrix) in enumerate((("K^T Q", product), ("V", value))):
            image = axes[row, column].imshow(matrix, cmap="RdBu", vmin=-1, vmax=1)
            axes[row, column].set(title=f"{name}, {title}", xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, shrink=0.6)
    return figure
