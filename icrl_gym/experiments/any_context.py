"""How far one set of weights can be pushed: trained on each of five domains with several seeds, short contexts and long."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from icrl_gym.experiments.all_domains import (
    GAMMAS,
    QUERIES,
    build,
    cells_of,
    collected,
    draw,
    evaluate,
    known_median,
    numbers_of,
    training_domains,
    transitions_of,
    weights_cell,
)
from icrl_gym.experiments.config import ReproduceConfig
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.report import Report
from icrl_gym.metaworld import PAPER_DOMAINS
from icrl_gym.td_loss import mean_squared_reward

__all__ = ["any_context"]

CONTEXTS = {32: 8, 128: 8, 512: 2}
"""Contexts of each task, by their length; a loss is the median over them."""
LONG = {2048: 1}


@torch.no_grad()
def any_context_cell(
    weights: dict[str, Any], level: str, tasks: list[str], gamma: float, n: int, count: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """The adaptive transformer on all tasks of a noise level, with contexts of n transitions.

    Returns:
        Of each task, the median over its contexts of the held-out ``loss`` and of the best constant's (NaN where no query has a
        reward), and whether all is ``finite``.
    """
    transformer = build("adaptive", weights, gamma)
    rows = {}
    for task in tasks:
        batch, queries, _, _ = draw(transitions_of(task, level, False, sizes), n, QUERIES, count, 1, gamma)
        errors, values = evaluate(transformer, batch, queries, gamma)
        scale = mean_squared_reward(queries)
        constant = queries.rewards - queries.rewards.mean(-1, keepdim=True)
        rows[task] = {
            "loss": known_median((errors.square().mean(-1) / scale).tolist()),
            "constant": known_median((constant.square().mean(-1) / scale).tolist()),
            "finite": bool(torch.isfinite(values).all()),
        }
    return rows


def any_context(config: ReproduceConfig) -> Report:
    """The adaptive transformer trained on each of five domains with several seeds, on all tasks, with short and long contexts."""
    tasks, levels = cells_of(config)
    sizes = collected(config, tasks, levels)
    trained = [(d, s, g) for g in GAMMAS for d in training_domains(config) for s in range(config.seeds)]
    training = [
        {
            "construction": "adaptive", "domain": domain, "gamma": gamma, "seed": seed, "iterations": config.size(20, 2),
            "sizes": sizes,
        }
        for domain, seed, gamma in trained
    ]  # fmt: skip
    found = run_grid(weights_cell, training, config.cache, config.workers, "weights")
    weights = dict(zip(trained, found, strict=True))
    lengths = {**CONTEXTS, **(LONG if config.long_contexts else {})} if not config.quick else {32: 2}
    where = []
    for n in lengths:
        for domain, seed, gamma in trained:
            # Longer contexts cost n^2: fewer of the weights are tried on them, and the longest on the noise they were trained with.
            if n < 128 or (seed == 0 and (n < 512 or domain == PAPER_DOMAINS[0])):
                where += [(n, domain, seed, gamma, level) for level in levels if n not in LONG or level == "high"]
    cells = [
        {
            "weights": numbers_of(weights[domain, seed, gamma]), "level": level, "tasks": tasks, "gamma": gamma, "n": n,
            "count": lengths[n], "sizes": sizes,
        }
        for n, domain, seed, gamma, level in where
    ]  # fmt: skip
    results = run_grid(any_context_cell, cells, config.cache, config.workers, "any-context")
    groups: dict[tuple[int, str, int, float], list[dict[str, Any]]] = {}
    for (n, domain, seed, gamma, _), result in zip(where, results, strict=True):
        groups.setdefault((n, domain, seed, gamma), []).extend(result.values())
    rows = []
    for (n, domain, seed, gamma), cell in groups.items():
        rewarded = [one for one in cell if not math.isnan(one["loss"])]
        losses = np.array([one["loss"] for one in rewarded])
        constants = np.array([one["constant"] for one in rewarded])
        rows.append(
            {
                "n": n, "trained on": domain, "seed": seed, "gamma": gamma, "cells": len(cell),
                "finite": sum(one["finite"] for one in cell), "with a reward": len(rewarded), "below 1": int((losses < 1).sum()),
                "below the best constant": int((losses < constants).sum()), "median": float(np.median(losses)),
                "worst": float(losses.max()), "median of loss / constant's": float(np.median(losses / constants)),
            }
        )  # fmt: skip
    counts = ("cells", "finite", "with a reward", "below 1", "below the best constant")
    total = {name: sum(row[name] for row in rows) for name in counts}
    by_length = "; ".join(
        f"n = {n}, gamma {gamma:g}: {sum(r['below the best constant'] for r in mine)} of {sum(r['with a reward'] for r in mine)} "
        f"below the best constant, median {np.median([r['median'] for r in mine]):.3g}"
        for gamma in GAMMAS
        for n in lengths
        if (mine := [r for r in rows if r["n"] == n and r["gamma"] == gamma])
    )
    return Report(
        "any-context",
        "Beyond the paper: do weights ever diverge, whatever domain they were trained on and however long the context?",
        f"{total['finite']} of {total['cells']} cells are finite. Of {total['with a reward']} with a reward, {total['below 1']} are "
        f"below the loss of the value zero and {total['below the best constant']} below that of the constant that is best for the "
        f"queries themselves. {by_length}.",
        None,
        rows,
    )
