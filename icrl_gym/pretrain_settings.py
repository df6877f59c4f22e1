"""What ``icrl-gym pretrain`` is asked for: the settings, what of them cannot work, and the data that follow from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from icrl_gym.datasets import CollectConfig, Transitions, collect, load_transitions
from icrl_gym.learned import Initialization
from icrl_gym.metaworld import resolve_task
from icrl_gym.transformer import StepNormalization

__all__ = ["PretrainConfig", "checked", "command", "recorded", "scaled", "split", "training_settings"]

KernelName = Literal["rbf", "laplacian", "matern", "exponential", "softmax", "relu", "linear"]


NOT_OF_HEADS = (
    "kernel", "temperature", "step_normalization", "semi_gradient", "initialization", "shared_layers", "matrix_learning_rate",
)  # fmt: skip
"""Settings that say nothing about an adaptive transformer."""


@dataclass
class PretrainConfig:
    """Train a transformer's steps and temperature, its matrices, or an adaptive one's heads, on one Meta-World domain."""

    domain: str = "pick-place-v3"
    """The Meta-World task."""
    noise: Literal["low", "medium", "high"] = "high"
    """Of the scripted expert's actions."""
    kernel: KernelName = "rbf"
    """What states are compared with."""
    temperature: float = 0.1
    """Where the search for the temperature starts."""
    n_layers: int = 20
    """Depth L."""
    step_normalization: StepNormalization = "row_sum"
    """What divides the steps; the paper's construction has "length"."""
    gamma: float = 0.9
    """Discount."""
    n_context: int = 100
    """Transitions of a context."""
    n_queries: int = 50
    """Held-out transitions beside it."""
    reward_scale: float = 0.1
    """Rewards are multiplied by this; Meta-World's reach 10."""
    iterations: int = 200
    """Adam's steps."""
    batch_size: int | None = None
    """Contexts a step; default 16, of heads 8."""
    learning_rate: float | None = None
    """Of the logarithms of step sizes and temperature (default 0.03), or of bandwidths and ridges (0.05)."""
    semi_gradient: bool = False
    """Hold the bootstrap target of a query constant, as TD does; otherwise the loss itself goes down (residual gradient)."""
    episodes: int = 10
    """Goals to record; the first half trains, the other half is held out."""
    steps: int = 200
    """Steps of each."""
    seed: int = 0
    """Of the contexts drawn, and of random matrices. The data are those of seed 0."""
    root: str | None = None
    """Where datasets are (None: Minari's own folder)."""
    out: str | None = None
    """Where the weights go; default pretrained/<domain>-<noise>-<kernel>-seed<seed>(-matrices-<initialization>), or
    pretrained/<domain>-<noise>-heads-gamma<gamma>-seed<seed>."""
    train: Literal["steps", "matrices", "heads"] = "steps"
    """Step sizes and temperature; or every key, query and value matrix (take few layers and small batches: 4 and 4, say); or
    bandwidths and ridges of an adaptive transformer's heads (20 iterations will do)."""
    initialization: Initialization = "construction"
    """What the matrices start from: unit steps of TD, or small random numbers."""
    shared_layers: bool = False
    """All layers have the same matrices."""
    matrix_learning_rate: float = 0.001
    """Of the matrices."""
    evaluate: tuple[str, ...] = ()
    """Domains to measure trained steps or heads on as well, on held-out goals at three noise levels; the card says the losses."""
    force: bool = False
    """Train again and replace the weights in --out. Data sets stay as they are."""

    @property
    def contexts_a_step(self) -> int:
        """``batch_size``, or the default of what is trained."""
        return self.batch_size if self.batch_size is not None else {"heads": 8}.get(self.train, 16)

    @property
    def rate(self) -> float:
        """``learning_rate``, or the default of what is trained."""
        return self.learning_rate if self.learning_rate is not None else {"heads": 0.05}.get(self.train, 0.03)


def checked(config: PretrainConfig) -> PretrainConfig:
    """The settings with full names of domains.

    Raises:
        ValueError: Settings that cannot work, in the words of the command line.
    """
    config = replace(
        config, domain=resolve_task(config.domain), evaluate=tuple(resolve_task(domain) for domain in config.evaluate)
    )
    if config.train == "heads":
        given = [name for name in NOT_OF_HEADS if getattr(config, name) != getattr(PretrainConfig, name)]
        if given:
            raise ValueError(
                f"{' and '.join('--' + name.replace('_', '-') for name in given)} cannot be given with --train heads, which searches "
                f"bandwidths and ridges of RBF heads by the loss itself; leave it out, or give --train steps or matrices."
            )
    values = {**asdict(config), "batch_size": config.contexts_a_step, "learning_rate": config.rate}
    least = {"iterations": 1, "n_layers": 1, "batch_size": 1, "n_context": 1, "n_queries": 1, "episodes": 2, "seed": 0}
    why = {"episodes": " (the first half of the goals trains, the other is held out)"}
    for name, low in least.items():
        if values[name] < low:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least {low}{why.get(name, '')}, got {values[name]}.")
    for name in ("temperature", "reward_scale", "learning_rate", "matrix_learning_rate"):
        if not 0 < values[name] < math.inf:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be positive and finite, got {values[name]}.")
    if not 0 <= config.gamma <= 1:
        raise ValueError(f"--gamma must be in [0, 1], got {config.gamma}.")
    if config.n_context + config.n_queries > config.steps:
        raise ValueError(
            f"--n-context {config.n_context} and --n-queries {config.n_queries} are transitions of one episode, and --steps "
            f"{config.steps} is fewer than their sum; give more --steps (at most 500), or fewer of the two."
        )
    if config.evaluate and config.train == "matrices":
        raise ValueError("--evaluate is for --train steps and heads: matrices are measured on their own domain only.")
    return config


def command(config: PretrainConfig) -> str:
    """The command line of these settings; where data and weights are is the machine's own affair."""
    words = ["icrl-gym", "pretrain"]
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in ("root", "out", "force") or (
            value == item.default and item.name not in ("domain", "noise", "seed")
        ):
            continue
        option = item.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return " ".join(words)


def training_settings(config: PretrainConfig) -> dict[str, Any]:
    """What the weights follow from, as JSON: neither where else they are measured, nor whether they replaced others."""
    without = ("evaluate", "force", *(NOT_OF_HEADS if config.train == "heads" else ()))
    defaults = {"batch_size": config.contexts_a_step, "learning_rate": config.rate}
    return {name: defaults.get(name, value) for name, value in asdict(config).items() if name not in without}


def split(config: PretrainConfig, train: bool) -> Transitions:
    """The transitions of the goals that train, or of those held out, with scaled rewards."""
    collected = CollectConfig(
        (config.domain,), (config.noise,), config.episodes, config.steps, root=config.root, jobs=1
    )
    (name,) = recorded(collected)
    half = config.episodes // 2
    episodes = range(half) if train else range(half, config.episodes)
    return scaled(load_transitions(name, episodes=episodes, root=config.root), config.reward_scale)


def recorded(config: CollectConfig, remedy: str | None = None) -> list[str]:
    """:func:`~icrl_gym.datasets.collect` for a command that is not ``collect``: its remedy is a command of its own here.

    Args:
        config: What is to be there.
        remedy: Of data that are there with other settings, for a command that has a better one.

    Returns:
        The ids of the data sets.

    Raises:
        ValueError: A data set is there with other settings, or damaged.
    """
    try:
        return collect(config)
    except ValueError as error:
        found, other, _ = str(error).partition(" Give --force ")
        if not other:
            raise
        if remedy is not None:
            raise ValueError(f"{found} {remedy}") from error
        again = (
            f"icrl-gym collect --tasks {' '.join(config.tasks)} --noise {' '.join(config.noise)} --episodes {config.episodes} "
            f"--steps {config.steps}" + (f" --root {config.root}" if config.root else "") + " --force"
        )
        raise ValueError(f"{found} Ask for what is there, give another --root, or record it again: {again}") from error


def scaled(data: Transitions, reward_scale: float) -> Transitions:
    """The same transitions with rewards in other units."""
    return Transitions(
        data.states, data.rewards * reward_scale, data.next_states, data.terminated, data.truncated, data.episode
    )
