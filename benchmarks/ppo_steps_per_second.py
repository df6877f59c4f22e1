"""Steps per second of whole training runs, the in-context critic beside SB3's learned one, pair by pair.

    python benchmarks/ppo_steps_per_second.py --envs Pendulum-v1 reach-v3 --pairs 5

Runs alternate, so that a machine whose speed drifts is fair to both; quote the median ratio and its spread, not the speeds.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from icrl_gym.runs import RunFolder, versions
from icrl_gym.train import TrainConfig, train


@dataclass
class Config:
    """What to time."""

    envs: tuple[str, ...] = ("Pendulum-v1", "reach-v3")
    """Environments."""
    pairs: int = 5
    """Pairs of runs for each."""
    total_timesteps: int = 24_576
    """Of each run: twelve rollouts, so that the context's window is full for a third of them."""
    torch_threads: int = 1
    """Threads of torch."""
    out: str = "benchmarks/ppo_steps_per_second.json"
    """Where the figures go."""


def speed(env: str, critic: str, config: Config) -> float:
    """Steps per second of one run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = TrainConfig(
            env=(env,),
            critic=critic,  # type: ignore[arg-type]
            total_timesteps=config.total_timesteps,
            torch_threads=config.torch_threads,
            checkpoint_freq=10**9,
            run_dir=f"{folder}/run",
        )
        return float(RunFolder(train(run)).status["steps_per_second"])


def main() -> None:
    """Time, print, save."""
    config = tyro.cli(Config)
    results: dict[str, object] = {
        "versions": versions(),
        "total_timesteps": config.total_timesteps,
        "torch_threads": config.torch_threads,
    }
    for env in config.envs:
        pairs = []
        for index in range(config.pairs + 1):
            order = ("in-context", "mlp") if index % 2 else ("mlp", "in-context")
            speeds = {critic: speed(env, critic, config) for critic in order}
            if index:  # the first pair warms up imports and caches
                pairs.append(speeds)
                print(f"{env:15s} in-context {speeds['in-context']:6.0f}   mlp {speeds['mlp']:6.0f} steps/s   "
                      f"ratio {speeds['in-context'] / speeds['mlp']:.3f}", flush=True)  # fmt: skip
        ratios = [p["in-context"] / p["mlp"] for p in pairs]
        print(
            f"{env:15s} ratio in-context / mlp: median {np.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
        )
        results[env] = {"pairs": pairs, "median_ratio": float(np.median(ratios)), "ratios": ratios}
    Path(config.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
