"""Speed side by side: the fast paths against their slow twins, against bare torch and against peers, on the user's machine.

A row of the table is a function of a module here; ratios are measured in turns within one process (:mod:`~.timing`), and the largest
difference from the slow twin stands beside each.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from icrl_gym.runs import versions
from icrl_gym.speed_benchmark.conditioning import batch, conditioning, rolling
from icrl_gym.speed_benchmark.iteration import iteration
from icrl_gym.speed_benchmark.large import large
from icrl_gym.speed_benchmark.measured import Measured, Settings
from icrl_gym.speed_benchmark.peers import peers, value_network
from icrl_gym.speed_benchmark.ppo import ppo
from icrl_gym.speed_benchmark.report import write_report
from icrl_gym.speed_benchmark.scaling import scaling
from icrl_gym.speed_benchmark.values import evaluation, literal, query_loop
from icrl_gym.speed_benchmark.wrapper import wrapper

__all__ = ["SpeedBenchmarkConfig", "speed_benchmark"]

RowName = Literal[
    "literal", "query-loop", "evaluation", "conditioning", "rolling", "ppo", "iteration", "wrapper", "large", "batch", "peers",
    "value-network", "scaling",
]  # fmt: skip

_ROWS: dict[str, Callable[[Settings], list[Measured]]] = {
    "literal": literal,
    "query-loop": query_loop,
    "evaluation": evaluation,
    "conditioning": conditioning,
    "rolling": rolling,
    "ppo": ppo,
    "iteration": iteration,
    "wrapper": wrapper,
    "large": large,
    "batch": batch,
    "peers": peers,
    "value-network": value_network,
}


@dataclass(frozen=True)
class SpeedBenchmarkConfig:
    """Measure how fast the library is on this machine; a table of ratios beside their goals (docs/speed.md)."""

    rows: tuple[RowName, ...] = get_args(RowName)
    """Which; ppo takes most of the time, and scaling draws the figure."""
    rounds: int = 11
    """Alternating rounds of each comparison; long ones (ppo, iteration, large) take 5 at most."""
    quick: bool = False
    """Small sizes and few rounds, to see that everything works: its ratios say nothing."""
    n_features: int = 39
    """Entries of a state; Meta-World's observations have 39."""
    total_timesteps: int = 24_576
    """Of each PPO run: twelve rollouts of the defaults."""
    torch_threads: int = 1
    """Threads of torch."""
    out: str = "runs/speed"
    """Where speed.json, speed.md and speed.png go."""


def speed_benchmark(config: SpeedBenchmarkConfig) -> Path:
    """Measure the rows that are asked for and write the report.

    Args:
        config: The settings.

    Returns:
        The folder of the results.

    Raises:
        ValueError: Settings that cannot work.
    """
    for name in ("rounds", "n_features", "total_timesteps", "torch_threads"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(config, name)}.")
    if not config.rows or len(set(config.rows)) < len(config.rows):
        raise ValueError(
            f"--rows needs at least one of {', '.join(get_args(RowName))}, and each once; got {' '.join(config.rows) or 'none'}."
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(config.torch_threads)
    settings = Settings(2 if config.quick else config.rounds, config.quick, config.n_features, config.total_timesteps)
    about = {
        "processor": platform.processor() or platform.machine(),
        "threads": config.torch_threads,
        "features": config.n_features,
        "rounds": settings.rounds,
        "quick": config.quick,
        "versions": versions(),
    }
    rows: list[Measured] = []
    curves = []
    try:
        for name in config.rows:
            start = time.perf_counter()
            if name == "scaling":
                curves = scaling(settings)
            else:
                found = _ROWS[name](settings)
                # Goals are those of the full sizes.
                rows += [dataclasses.replace(row, goal=None) for row in found] if config.quick else found
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            # After every row, so that what is done is kept whatever happens.
            table = write_report(rows, curves, about, Path(config.out))
    finally:
        torch.set_num_threads(threads)
    print(table, end="")
    return Path(config.out)
