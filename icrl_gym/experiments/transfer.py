"""Fixed weights on other domains: the experiments noise, cross-domain, temperature and linear of He et al. 2026."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from icrl_gym.datasets import NOISE_LEVELS, CollectConfig, contexts
from icrl_gym.experiments.config import ReproduceConfig
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.report import Report, interval, mean_curve
from icrl_gym.metaworld import PAPER_DOMAINS
from icrl_gym.plots import new_figure
from icrl_gym.pretraining import PretrainConfig, recorded, split, train_step_sizes, training_settings
from icrl_gym.td_loss import td_loss_by_depth
from icrl_gym.transformer import InContextTransformer

__all__ = ["cross_domain", "linear", "noise", "temperature"]

NORMALIZATIONS = ("length", "row_sum")
TRANSFERRING = PAPER_DOMAINS[:4]
BUTTON = PAPER_DOMAINS[4]


def transfer_cell(settings: dict[str, Any], tests: list[list[str]], n_contexts: int) -> dict[str, Any]:
    """Pretrain on one domain, test on others.

    Args:
        settings: Of :class:`~icrl_gym.pretraining.PretrainConfig`.
        tests: (domain, noise) pairs. Goals that the data set's first half holds are not tested on.
        n_contexts: Contexts for each.

    Returns:
        ``temperature``, ``step_sizes``, ``training`` (losses) and for each test ``in_context`` and ``held_out``, the mean
        loss after each layer over the contexts with any reward, ``below_one``, the share of those whose held-out loss ends
        below that of the value zero,
        and ``top``, the largest step times the top eigenvalue of the contexts' kernel matrices.
    """
    config = PretrainConfig(**settings)
    transformer, losses = train_step_sizes(split(config, train=True), config)
    measured = {}
    for domain, level in tests:
        data = split(PretrainConfig(**{**settings, "domain": domain, "noise": level}), train=False)
        batch, queries = contexts(data, config.n_context, n_contexts, config.seed, config.n_queries)
        inside, outside = td_loss_by_depth(transformer, batch, queries)
        measured[f"{domain} {level}"] = {
            "in_context": inside.nanmean(0).tolist(),
            "held_out": outside.nanmean(0).tolist(),
            "below_one": float((outside[:, -1] < 1).double().sum() / (~outside[:, -1].isnan()).sum()),
            "top": top_step(transformer, batch),
        }
    temperature = transformer.kernel.config().get("temperature")
    return {
        "temperature": temperature,
        "step_sizes": transformer.step_sizes.tolist(),
        "training": losses,
        "tests": measured,
    }


def top_step(transformer: InContextTransformer, batch: Any) -> float:
    """The largest alpha_l times the top eigenvalue of K over a batch of contexts; above 2 plain regression diverges."""
    gram = transformer.kernel.adapted(batch.states, batch.mask)(batch.states, batch.states, batch.mask)
    top = torch.linalg.eigvals(gram).abs().amax(-1)
    return float((transformer.layer_steps(batch).amax(-1) * top).max())


def _settings(config: ReproduceConfig, **changes: Any) -> dict[str, Any]:
    base = PretrainConfig(
        iterations=config.size(200, 15),
        episodes=config.size(20, 4),
        steps=160,
        root=config.root,
        batch_size=config.size(16, 4),
    )
    return {**training_settings(base), "semi_gradient": config.semi_gradient, **changes}


def _collect(config: ReproduceConfig, domains: Sequence[str], levels: Sequence[str]) -> None:
    """Record the data once, before cells of a grid would all at once."""
    settings = _settings(config)
    sizes = {name: settings[name] for name in ("episodes", "steps", "root")}
    recorded(CollectConfig(tuple(domains), tuple(levels), **sizes, jobs=config.jobs))  # type: ignore[arg-type]


def _transfer_cells(config: ReproduceConfig, domains: Sequence[str]) -> dict[tuple[str, str, int], dict[str, Any]]:
    tests = [[domain, level] for domain in PAPER_DOMAINS for level in NOISE_LEVELS]
    keys = [(d, s, seed) for d in domains for s in NORMALIZATIONS for seed in range(config.seeds)]
    cells = [
        {
            "settings": _settings(config, domain=domain, step_normalization=normalization, seed=seed),
            "tests": tests,
            "n_contexts": config.size(20, 4),
        }
        for domain, normalization, seed in keys
    ]
    return dict(zip(keys, run_grid(transfer_cell, cells, config.cache, config.workers, "transfer"), strict=True))


def noise(config: ReproduceConfig) -> Report:
    """Weights trained on a domain's high-noise tasks, TD loss by depth on its own tasks at three noise levels."""
    _collect(config, PAPER_DOMAINS, list(NOISE_LEVELS))
    results = _transfer_cells(config, PAPER_DOMAINS)
    rows: list[dict[str, Any]] = []
    scalars: dict[str, list[tuple[int, float]]] = {}
    figure = new_figure(11, 5.5)
    axes = None if figure is None else figure.subplots(2, 4, sharey=True)
    for column, domain in enumerate(TRANSFERRING):
        for line, normalization in enumerate(NORMALIZATIONS):
            for level in NOISE_LEVELS:
                cells = [
                    results[domain, normalization, seed]["tests"][f"{domain} {level}"] for seed in range(config.seeds)
                ]
                curve = mean_curve([cell["held_out"] for cell in cells])
                mean, low, high = interval([cell["held_out"][-1] for cell in cells])
                inside, _, _ = interval([cell["in_context"][-1] for cell in cells])
                rows.append(
                    {
                        "domain": domain, "noise": level, "normalization": normalization, "in-context": inside,
                        "held-out": mean, "95% low": low, "95% high": high,
                        "contexts below 1": interval([cell["below_one"] for cell in cells])[0],
                    }
                )  # fmt: skip
                scalars[f"{normalization}/{domain}/{level}"] = list(enumerate(map(float, curve)))
                if axes is not None:
                    axes[line, column].plot(np.minimum(curve, 1e3), label=level)
                    axes[line, column].set(yscale="log", title=f"{domain}\n{normalization}", xlabel="layers")
    if axes is not None:
        axes[0, 0].set_ylabel("held-out TD loss (1: value zero)")
        axes[0, 0].legend(title="noise")
    rows_with_reward = [row for row in rows if not math.isnan(row["held-out"])]
    literal = [row for row in rows_with_reward if row["normalization"] == "length"]
    good = sum(row["held-out"] < 1 for row in literal)
    ours = [row for row in rows_with_reward if row["normalization"] == "row_sum"]
    return Report(
        "noise",
        "trained on the high-noise tasks of a domain, the TD loss converges at all three noise levels.",
        f"with the paper's normalization (length) the held-out loss ends below that of the value zero in {good} of "
        f"{len(literal)} cells; with row_sum in {sum(row['held-out'] < 1 for row in ours)} of {len(ours)}.",
        bool(literal) and good == len(literal),
        rows,
        {"noise": figure},
        scalars,
    )


def cross_domain(config: ReproduceConfig) -> Report:
    """Trained on each domain, tested on each at three noise levels."""
    _collect(config, PAPER_DOMAINS, list(NOISE_LEVELS))
    results = _transfer_cells(config, PAPER_DOMAINS)
    rows = []
    matrix: dict[str, np.ndarray] = {}
    for normalization in NORMALIZATIONS:
        worst = np.full((5, 5), np.nan)  # NaN stays where no noise level has a context with any reward
        for i, train in enumerate(PAPER_DOMAINS):
            for j, test in enumerate(PAPER_DOMAINS):
                for level in NOISE_LEVELS:
                    cells = [results[train, normalization, s]["tests"][f"{test} {level}"] for s in range(config.seeds)]
                    mean, low, high = interval([cell["held_out"][-1] for cell in cells])
                    inside, _, _ = interval([cell["in_context"][-1] for cell in cells])
                    rows.append(
                        {
                            "trained on": train, "tested on": test, "noise": level, "normalization": normalization,
                            "in-context": inside, "held-out": mean, "95% low": low, "95% high": high,
                            "contexts below 1": interval([cell["below_one"] for cell in cells])[0],
                            "step x top eigenvalue": float(np.max([cell["top"] for cell in cells])),
                        }
                    )  # fmt: skip
                    worst[i, j] = np.fmax(worst[i, j], mean)
        matrix[normalization] = worst
    figure = new_figure(11, 5)
    if figure is not None:
        short = [domain.removesuffix("-v3") for domain in PAPER_DOMAINS]
        for axes, (normalization, worst) in zip(figure.subplots(1, 2), matrix.items(), strict=True):
            picture = axes.imshow(np.log10(np.clip(worst, 1e-3, 1e3)), vmin=-2, vmax=2, cmap="RdYlGn_r")
            axes.set(
                xticks=range(5),
                yticks=range(5),
                yticklabels=short,
                xlabel="tested on",
                ylabel="trained on",
                title=normalization,
            )
            axes.set_xticklabels(short, rotation=30, ha="right")
            for i in range(5):
                for j in range(5):
                    shown = "no reward" if math.isnan(worst[i, j]) else f"{worst[i, j]:.2g}"
                    axes.text(j, i, shown, ha="center", va="center", fontsize=8)
        figure.colorbar(picture, ax=figure.axes, label="log10 of the held-out TD loss, worst noise level")
    four, last = slice(0, 4), 4
    literal, ours = matrix["length"], matrix["row_sum"]
    among, onto = literal[four, four], literal[four, last]
    known = (
        ~np.isnan(among),
        ~np.isnan(onto),
    )  # what has a reward is a matter of the data, the same for both normalizations
    transfers = bool(known[0].any() and (among[known[0]] < 1).all())
    button_fails = bool((onto >= 1).any())
    left_out = 20 - int(known[0].sum()) - int(known[1].sum())
    return Report(
        "cross-domain",
        "weights transfer among Pick-Place, Pick-Place-Wall, Shelf-Place and Plate-Slide and fail on Button-Press.",
        f"worst noise level, mean over seeds: with length, {int((among < 1).sum())} of the {known[0].sum()} pairs among the four end "
        f"below the loss of the value zero and {int((onto < 1).sum())} of {known[1].sum()} onto Button-Press; with row_sum "
        f"{int((ours[four, four] < 1).sum())} of {known[0].sum()} and {int((ours[four, last] < 1).sum())} of {known[1].sum()}."
        + (f" Left out: {left_out} of 20 pairs, whose contexts have no reward at all." if left_out else ""),
        transfers and button_fails,
        rows,
        {"cross_domain": figure},
        summary=[
            {
                "trained on": train,
                "normalization": normalization,
                **{test.removesuffix("-v3"): float(worst[i, j]) for j, test in enumerate(PAPER_DOMAINS)},
            }
            for normalization, worst in matrix.items()
            for i, train in enumerate(PAPER_DOMAINS)
        ],
    )


def temperature_cell(settings: dict[str, Any], temperatures: list[float], n_contexts: int) -> dict[str, Any]:
    """Held-out loss of 20 unit steps at each temperature, on a domain's own high-noise tasks."""
    from icrl_gym.kernels import RBFKernel

    config = PretrainConfig(**settings)
    batch, queries = contexts(split(config, train=False), config.n_context, n_contexts, config.seed, config.n_queries)
    losses = []
    for value in temperatures:
        transformer = InContextTransformer(
            RBFKernel(value), torch.ones(config.n_layers).double(), config.gamma, config.step_normalization
        )
        losses.append(float(td_loss_by_depth(transformer, batch, queries)[1][:, -1].nanmean()))
    return {"losses": losses}


def temperature(config: ReproduceConfig) -> Report:
    """Each domain's own best temperature: a sweep with unit steps, and the trained optimum."""
    _collect(config, PAPER_DOMAINS, list(NOISE_LEVELS))
    trained = _transfer_cells(config, PAPER_DOMAINS)
    temperatures = [float(t) for t in np.logspace(-3, 1, config.size(17, 5))]
    keys = [(domain, seed) for domain in PAPER_DOMAINS for seed in range(config.seeds)]
    cells = [
        {
            "settings": _settings(config, domain=d, seed=s),
            "temperatures": temperatures,
            "n_contexts": config.size(20, 4),
        }
        for d, s in keys
    ]
    sweep = dict(zip(keys, run_grid(temperature_cell, cells, config.cache, config.workers, "temperature"), strict=True))
    rows, best, scalars = [], {}, {}
    figure = new_figure(6, 4)
    axes = None if figure is None else figure.add_subplot()
    for domain in PAPER_DOMAINS:
        curve = np.array([sweep[domain, seed]["losses"] for seed in range(config.seeds)])
        optimum = temperatures[int(curve.mean(0).argmin())]
        found = [trained[domain, "row_sum", seed]["temperature"] for seed in range(config.seeds)]
        mean, low, high = interval(np.log10(found).tolist())
        best[domain] = 10**mean
        rows.append(
            {
                "domain": domain, "sweep's best": optimum, "its loss": float(curve.mean(0).min()),
                "trained": 10**mean, "95% low": 10**low, "95% high": 10**high,
            }
        )  # fmt: skip
        scalars[f"sweep/{domain}"] = [(i, float(v)) for i, v in enumerate(curve.mean(0))]
        if axes is not None:
            axes.plot(temperatures, curve.mean(0), label=domain)
            axes.set(xscale="log", yscale="log", xlabel="temperature", ylabel="held-out TD loss")
    if axes is not None:
        axes.legend()
    others = [best[domain] for domain in TRANSFERRING]
    far = best[BUTTON] > 2 * max(others) or best[BUTTON] < min(others) / 2
    return Report(
        "temperature",
        "Button-Press's own temperature is far from that of the other four domains.",
        f"trained temperatures (geometric mean over seeds): {', '.join(f'{d} {best[d]:.3g}' for d in PAPER_DOMAINS)}; far means "
        f"outside of the others' range by more than a factor of 2.",
        far,
        rows,
        {"temperature": figure},
        scalars,
    )


def linear(config: ReproduceConfig) -> Report:
    """The linear transformer, construction and trained, against kernels of the same depth on the same data."""
    domains = PAPER_DOMAINS if not config.quick else PAPER_DOMAINS[:1]
    _collect(config, domains, ["high"])
    starts = {"linear": 1.0, "rbf": 0.1, "exponential": 1.0, "softmax": 1.0, "relu": 1.0}
    iterations = {"construction": 0, "trained": config.size(200, 15)}
    keys = [
        (domain, kernel, kind, seed)
        for domain in domains for kernel in starts for kind in iterations for seed in range(config.seeds)
    ]  # fmt: skip
    cells = [
        {
            "settings": _settings(
                config, domain=domain, kernel=kernel, temperature=starts[kernel], iterations=iterations[kind], seed=seed
            ),
            "tests": [[domain, "high"]],
            "n_contexts": config.size(20, 4),
        }
        for domain, kernel, kind, seed in keys
    ]
    results = dict(zip(keys, run_grid(transfer_cell, cells, config.cache, config.workers, "linear"), strict=True))
    rows, ends = [], {}
    figure = new_figure(3 * len(domains) + 1, 3.5)
    axes = None if figure is None else figure.subplots(1, len(domains), sharey=True, squeeze=False)[0]
    for column, domain in enumerate(domains):
        for kernel in starts:
            for kind in iterations:
                tests = [results[domain, kernel, kind, seed]["tests"][f"{domain} high"] for seed in range(config.seeds)]
                mean, low, high = interval([test["held_out"][-1] for test in tests])
                ends[domain, kernel, kind] = mean
                rows.append(
                    {
                        "domain": domain, "kernel": kernel, "weights": kind, "held-out": mean, "95% low": low, "95% high": high,
                        "in-context": interval([test["in_context"][-1] for test in tests])[0],
                    }
                )  # fmt: skip
                if axes is not None and kind == "trained":
                    curve = mean_curve([test["held_out"] for test in tests])
                    axes[column].plot(np.minimum(curve, 1e3), label=kernel)
                    axes[column].set(yscale="log", title=domain, xlabel="layers")
    if axes is not None:
        axes[0].set_ylabel("held-out TD loss")
        axes[0].legend()
    # Without any reward there is no loss, whatever the kernel.
    counted = [d for d in domains if not math.isnan(ends[d, "linear", "trained"])]
    found = {kernel: [ends[d, kernel, "trained"] for d in counted] for kernel in starts}
    best = {kernel: float(np.mean(values)) if values else math.nan for kernel, values in found.items()}
    fails = sum(value >= 1 for value in found["linear"])
    left_out = len(domains) - len(counted)
    return Report(
        "linear",
        "the linear transformer fails to converge where non-linear attention does.",
        f"trained, mean held-out loss over {len(counted)} domain{'s' * (len(counted) != 1)}: "
        f"{', '.join(f'{kernel} {value:.3g}' for kernel, value in best.items())}; the linear one ends at or above "
        f"the loss of the value zero on {fails} of them."
        + (
            f" Left out: {left_out} of {len(domains)} domains, whose contexts have no reward at all."
            if left_out
            else ""
        ),
        bool(counted) and fails == len(counted),
        rows,
        {"linear": figure},
    )
