"""Rows about large contexts: memory and time of a fixed point through landmarks, and its error against the exact one."""

from __future__ import annotations

import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from icrl_gym.kernels import LaplacianKernel
from icrl_gym.speed_benchmark.measured import Goal, Measured, Settings
from icrl_gym.speed_benchmark.problems import random_context, random_states
from icrl_gym.speed_benchmark.timing import Spread, spread
from icrl_gym.transformer import InContextTransformer

__all__ = ["large", "peak_memory"]

_LANDMARKS = 256


def large(settings: Settings) -> list[Measured]:
    """Time against n up to 100,000, the peak memory there, and the error of landmarks where the exact answer can be had."""
    sizes = [6_250, 12_500, 25_000, 50_000, 100_000] if not settings.quick else [500, 1_000, 2_000]
    exact_n, m, d = settings.size(4096, 256), settings.size(1024, 64), settings.n_features
    rounds = min(settings.rounds, 5)
    # A process of its own: the peak is that of the whole process, Python and torch included, and nothing else's.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(_condition_at, sizes, d, rounds, torch.get_num_threads()).result()
    exponents = [float(np.polyfit(np.log(sizes), np.log(row), 1)[0]) for row in found["seconds"]]
    last = [row[-1] for row in found["seconds"]]
    what = f"fixed point of TD(0.8), {sizes[-1]:,} transitions, {_LANDMARKS} landmarks"
    context, queries = random_context(exact_n, d), random_states(m, d)
    exact = _transformer(d, None).condition(context)(queries)
    rows = [
        Measured(
            "large", f"{what}: time, growing from {sizes[0]:,} as n to the power of", "", spread(exponents), "exponent",
            Goal("at most", 1.2), {"ours": spread(last).median},
        ),
        Measured(
            "large", f"{what}: peak memory of the process", "", _constant(found["peak"]), "GiB", Goal("at most", 2.0),
            note=f"{found['before']:.2f} GiB of it before conditioning: Python, torch and the context",
        ),
    ]  # fmt: skip
    for landmarks in (64, 256, 1024):
        if landmarks <= exact_n:
            values = _transformer(d, landmarks).condition(context)(queries)
            error = float((values - exact).square().mean().sqrt() / exact.std())
            rows.append(
                Measured("large", f"error of {landmarks} landmarks, {exact_n:,} transitions",
                         "the exact fixed point, rms of values over their deviation", _constant(error), "of it")
            )  # fmt: skip
    return rows


def _transformer(d: int, landmarks: int | None) -> InContextTransformer:
    return InContextTransformer(
        LaplacianKernel(float(d) ** 0.5), n_layers=math.inf, algorithm="td_lambda", trace_decay=0.8, value_shift=True,
        n_landmarks=landmarks,
    )  # fmt: skip


def _condition_at(sizes: list[int], d: int, rounds: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    transformer = _transformer(d, _LANDMARKS)
    whole = random_context(sizes[-1], d)
    before = peak_memory()
    transformer.condition(whole[: sizes[0]])
    seconds = []
    for _ in range(rounds):
        row = []
        for n in sizes:
            start = time.perf_counter()
            transformer.condition(whole[:n])
            row.append(time.perf_counter() - start)
        seconds.append(row)
    return {"seconds": seconds, "before": before, "peak": peak_memory()}


def peak_memory() -> float:
    """The most memory that this process has had, in GiB; NaN on a system that does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def _constant(value: object) -> Spread:
    assert isinstance(value, float)
    return Spread(value, value, value)
