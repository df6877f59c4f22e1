"""Steps per second of whole training runs: the in-context critic, SB3's learned one, and no critic at all, in turn.

    python benchmarks/ppo_steps_per_second.py --envs Pendulum-v1 reach-v3 --rounds 5

Runs alternate, so that a machine whose speed drifts is fair to all; quote the median ratio and its spread, not the speeds.
"none" has the in-context policy with every value zero and no callback: what is possible at best.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import tyro
from stable_baselines3.common.callbacks import BaseCallback

from icrl_gym import InContextActorCriticPolicy, InContextCritic
from icrl_gym.runs import RunFolder, versions
from icrl_gym.train import TrainConfig, train


@dataclass
class Config:
    """What to time."""

    envs: tuple[str, ...] = ("Pendulum-v1", "reach-v3")
    """Environments."""
    rounds: int = 5
    """Rounds for each, one run of each critic a round."""
    total_timesteps: int = 24_576
    """Of each run: twelve rollouts, so that the context's window is full for a third of them."""
    torch_threads: int = 1
    """Threads of torch."""
    out: str = "benchmarks/ppo_steps_per_second.json"
    """Where the figures go."""


CRITICS = ("in-context", "mlp", "none")


class _Idle(BaseCallback):
    """Stands where InContextCallback does, and leaves the critic alone."""

    def _on_training_start(self) -> None:
        assert isinstance(self.model.policy, InContextActorCriticPolicy)
        self.model.policy.critic.is_synced = True

    def _on_step(self) -> bool:
        return True


def _no_critic() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch("icrl_gym.train.InContextCallback", lambda verbose, **options: _Idle(verbose)))
    stack.enter_context(mock.patch.object(InContextCritic, "forward", lambda _, obs: torch.zeros(len(obs), 1)))
    return stack


def speed(env: str, critic: str, config: Config) -> float:
    """Steps per second of one run."""
    with contextlib.ExitStack() as stack:
        if critic == "none":
            stack.enter_context(_no_critic())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        run = TrainConfig(
            env=(env,),
            critic="mlp" if critic == "mlp" else "in-context",
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
        rounds: list[dict[str, float]] = []
        for index in range(config.rounds + 1):
            order = CRITICS if index % 2 else CRITICS[::-1]
            speeds = {critic: speed(env, critic, config) for critic in order}
            if index:  # the first round warms up imports and caches
                rounds.append(speeds)
                print(f"{env:15s} " + "   ".join(f"{c} {speeds[c]:6.0f}" for c in CRITICS) + " steps/s", flush=True)
        results[env] = {"rounds": rounds}
        for critic in ("in-context", "none"):
            ratios = [r[critic] / r["mlp"] for r in rounds]
            print(
                f"{env:15s} {critic} / mlp: median {np.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
            )
            results[env][f"{critic} / mlp"] = {"median": float(np.median(ratios)), "ratios": ratios}  # type: ignore[index]
    Path(config.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
