"""Pretraining: step sizes and temperature of a transformer, all of its matrices, or an adaptive one's heads, on one domain.

The critic itself never learns. What is learned here, once, is how far each layer steps and at what distance states count as
near; the weights that come out are fixed and serve other domains (He et al. 2026, section 4). Or, to see whether training finds
the construction, every key, query and value matrix (Wang et al. 2025, section 5; :mod:`icrl_gym.learned`). Or bandwidths and
ridges of an :class:`~icrl_gym.adaptive.AdaptiveTransformer`.

This module is the command, and the card that it writes beside the weights. Settings and data are in
:mod:`icrl_gym.pretrain_settings`, the searches in :mod:`icrl_gym.weight_search` and :mod:`icrl_gym.adaptive_pretraining`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.adaptive_pretraining import train_heads
from icrl_gym.context import Context
from icrl_gym.datasets import NOISE_LEVELS, contexts, dataset_id, load_dataset
from icrl_gym.metaworld import resolve_task
from icrl_gym.pretrain_settings import PretrainConfig, checked, command, recorded, scaled, split, training_settings
from icrl_gym.runs import versions, write_whole
from icrl_gym.similarity import similarity
from icrl_gym.td_loss import mean_squared_reward, td_errors, td_loss_by_depth
from icrl_gym.transformer import InContextTransformer
from icrl_gym.weight_search import construction, train_matrices, train_step_sizes

__all__ = [
    "PretrainConfig",
    "Pretrained",
    "held_out_losses",
    "pretrain",
    "recorded",
    "scaled",
    "split",
    "train_heads",
    "train_matrices",
    "train_step_sizes",
    "training_settings",
]


@dataclass(frozen=True)
class Pretrained:
    """A trained transformer and how it got there.

    Attributes:
        transformer: With fixed weights.
        losses: (iterations,) the TD loss of the queries of each batch, normalized by mean squared rewards.
        held_out: The mean held-out loss on goals that were not trained on, before (construction) and after.
    """

    transformer: InContextTransformer | AdaptiveTransformer
    losses: list[float]
    held_out: tuple[float, float]


def pretrain(config: PretrainConfig) -> Path:
    """Train, and write the weights with a card.

    Args:
        config: The settings.

    Returns:
        The folder, which ``from_pretrained`` reads: of :class:`~icrl_gym.transformer.InContextTransformer` for steps, of
        :class:`~icrl_gym.learned.LearnedTransformer` for matrices, of :class:`~icrl_gym.adaptive.AdaptiveTransformer` for heads.

    Raises:
        ValueError: Settings that cannot work, or weights in the folder already.
        ImportError: Minari or safetensors is missing.
    """
    config = checked(config)
    folder = Path(config.out or Path("pretrained") / _name(config))
    there = [file for file in ("config.json", "weights.safetensors", "card.json") if (folder / file).exists()]
    if there and not config.force:
        raise ValueError(
            f"{str(folder)!r} holds {', '.join(there)} already. Give --force to train again and replace it, or another --out."
        )
    if config.train == "matrices":
        return _pretrain_matrices(config, folder)
    result = pretrained(config, progress=True)
    transformer = result.transformer
    measured = held_out_losses(transformer, config)
    (folder / "card.json").unlink(missing_ok=True)  # an old card must not describe new weights, wherever this is killed
    transformer.save_pretrained(folder)
    if isinstance(transformer, InContextTransformer):
        numbers = {
            "temperature": transformer.kernel.config().get("temperature"),
            "step_sizes": transformer.step_sizes.tolist(),
        }
    else:
        bandwidths = zip(transformer.metrics, transformer.log_bandwidths.exp().tolist(), strict=True)
        numbers = {"bandwidths": dict(bandwidths), "ridges": transformer.log_ridges.exp().tolist()}
    card = {
        "trained_by": command(config),
        **_uses(result, config, measured),
        "data": _data(config),
        "config": training_settings(config),
        "versions": versions(),
        "held_out_td_loss_of_the_construction": result.held_out[0],
        "held_out_td_loss": result.held_out[1],
        "held_out_td_loss_by_domain": measured,
        **numbers,
    }
    write_whole(folder / "card.json", json.dumps(card, indent=2) + "\n")
    what = "trained heads" if config.train == "heads" else "trained steps"
    _say(config, folder, type(transformer).__name__, *result.held_out, what)
    return folder


def _name(config: PretrainConfig) -> str:
    if config.train == "heads":
        return f"{config.domain}-{config.noise}-heads-gamma{config.gamma:g}-seed{config.seed}"
    name = f"{config.domain}-{config.noise}-{config.kernel}-seed{config.seed}"
    return name + (f"-matrices-{config.initialization}" if config.train == "matrices" else "")


def _start(config: PretrainConfig) -> str:
    """What the weights are compared with, in words."""
    return "the constructor's heads" if config.train == "heads" else f"unit steps at temperature {config.temperature:g}"


def _say(config: PretrainConfig, folder: Path, kind: str, before: float, after: float, what: str) -> None:
    """The last lines of the command: what was measured, what was written, and how to load it."""
    goals = config.episodes - config.episodes // 2
    print(
        f"held-out TD loss, mean delta^2 / mean r^2 (the value zero has 1), on {goals} goal{'s' * (goals > 1)} that did not train: "
        f"{before:.4g} with {_start(config)}, {after:.4g} with the {what}\n"
        f"written: weights.safetensors, config.json and card.json in {folder}\n"
        f"load them: {kind}.from_pretrained({str(folder)!r})"
    )


def pretrained(config: PretrainConfig, progress: bool = False) -> Pretrained:
    """Train steps or heads, and measure on goals that were not trained on."""
    data = split(config, train=True)
    before: InContextTransformer | AdaptiveTransformer
    transformer: InContextTransformer | AdaptiveTransformer
    if config.train == "heads":
        before = AdaptiveTransformer(gamma=config.gamma, n_layers=config.n_layers)
        transformer, losses = train_heads(data, config, progress)
    else:
        before = construction(config)
        transformer, losses = train_step_sizes(data, config, progress)
    return Pretrained(transformer, losses, (_held_out_loss(before, config), _held_out_loss(transformer, config)))


def held_out_losses(
    transformer: InContextTransformer | AdaptiveTransformer, config: PretrainConfig
) -> dict[str, dict[str, float | None]]:
    """The mean held-out TD loss after the last layer, normalized: the value zero has the loss 1.

    Args:
        transformer: Of finite depth.
        config: Of its training; ``evaluate`` are the domains to measure on. The goals are those that the first half of a
            data set does not hold, 32 contexts of them.

    Returns:
        By domain and by noise level; None where every context has no reward at all.

    Raises:
        ValueError: An unknown domain, or a data set that is there with other settings.
    """
    losses: dict[str, dict[str, float | None]] = {}
    for domain in map(resolve_task, config.evaluate):
        losses[domain] = {}
        for level in NOISE_LEVELS:
            loss = _held_out_loss(transformer, replace(config, domain=domain, noise=level))  # type: ignore[arg-type]
            losses[domain][level] = None if math.isnan(loss) else loss  # JSON has no NaN
    return losses


def _held_out_loss(transformer: InContextTransformer | AdaptiveTransformer, config: PretrainConfig) -> float:
    batch, queries = contexts(split(config, train=False), config.n_context, 32, config.seed, config.n_queries)
    if isinstance(transformer, InContextTransformer):
        return float(td_loss_by_depth(transformer, batch, queries)[1][:, -1].nanmean())
    with torch.no_grad():
        errors = td_errors(transformer.condition(batch), transformer.gamma, queries)
    return _mean_loss(errors, queries)


def _data(config: PretrainConfig) -> dict[str, Any]:
    """What was trained on, for the card."""
    dataset = load_dataset(dataset_id(config.domain, config.noise), config.root)
    half = config.episodes // 2
    return {
        "dataset": str(dataset.id),
        "sha256": dataset.storage.metadata["icrl_gym"]["sha256"],
        "task": resolve_task(config.domain),
        "policy": "Meta-World's scripted expert with Gaussian noise on its actions, clipped to their range",
        "noise_level": config.noise,
        "noise_standard_deviation": NOISE_LEVELS[config.noise],
        "steps_of_an_episode": config.steps,
        "goals_trained_on": half,
        "goals_held_out": config.episodes - half,
        "data_seed": 0,
    }


def _uses(result: Pretrained, config: PretrainConfig, measured: dict[str, dict[str, float | None]]) -> dict[str, str]:
    """What the weights are good for, and what not, as far as it was measured."""
    transformer = result.transformer
    if isinstance(transformer, InContextTransformer):
        good, bad = _uses_of_steps(config)
    else:
        good, bad = _uses_of_heads(transformer, config)
    worst = {
        domain: max((loss for loss in levels.values() if loss is not None), default=math.nan)
        for domain, levels in measured.items()
    }
    below, above = [d for d, loss in worst.items() if loss < 1], [d for d, loss in worst.items() if loss >= 1]
    if below:
        good += (
            " Held-out TD loss below that of the value zero (1) at all three noise levels, worst level in brackets: "
            + ", ".join(f"{d} ({worst[d]:.2g})" for d in below)
            + "."
        )
    if above:
        bad += (
            " Held-out TD loss not below that of the value zero: "
            + ", ".join(f"{d} ({worst[d]:.2g})" for d in above)
            + "."
        )
    before, after = result.held_out
    if after > before:
        start = _start(config).replace("at temperature", "at the temperature")
        digits = 2 if f"{before:.2g}" != f"{after:.2g}" else 4
        bad += (
            f" On held-out goals at the noise that it was trained with, training raised the loss: {start} have "
            f"{before:.{digits}g}, these weights {after:.{digits}g}."
        )
    if not isinstance(transformer, InContextTransformer):
        return {"good_for": good, "not_good_for": bad}
    largest = float(transformer.step_sizes.abs().max()) if config.n_layers else 0.0
    if config.step_normalization == "row_sum" and largest > 2:
        bad += (
            f" No bound holds for every context: layers of steps above 2 can diverge where the top eigenvalue of the kernel "
            f"matrix comes near its largest row sum, and the largest step is {largest:.2g}. That is so with states nearly all "
            f"alike, and with states far apart against the temperature; `condition` raises an error there, naming the layer."
        )
    return {"good_for": good, "not_good_for": bad}


def _uses_of_steps(config: PretrainConfig) -> tuple[str, str]:
    return (
        f"Values at the discount {config.gamma} from a context of about {config.n_context} transitions of one goal of "
        f"{config.domain}, whose states are Meta-World's own observations as they are and whose rewards are multiplied by "
        f"{config.reward_scale}.",
        f"Other discounts: gamma is part of the weights. Standardized states, or those of other "
        f"environments: the temperature is a squared distance between raw states. Nothing was measured with contexts far from "
        f"{config.n_context} transitions, nor inside of PPO, whose critic has settings of its own.",
    )


def _uses_of_heads(transformer: AdaptiveTransformer, config: PretrainConfig) -> tuple[str, str]:
    heads, ridges, folds = transformer.n_heads, len(transformer.log_ridges), transformer.n_folds
    return (
        f"Values at the discount {config.gamma} from a context of transitions of one goal, in any unit of states and rewards: "
        f"temperatures are multiples of the context's own median distance. The matrix that its layers solve is positive "
        f"semi-definite for every context, so none makes them diverge. Trained with contexts of {config.n_context} transitions of "
        f"{config.domain}.",
        f"Other discounts: gamma is part of the weights. Transitions that are random: the layers minimize the squared TD error, "
        f"whose minimum is then biased (double sampling). Where time matters: the {heads} kernels of n x n numbers are each solved "
        f"for {ridges} ridges and {folds + 1} parts of the context, {heads * ridges * (folds + 1)} columns that each take "
        f"{config.n_layers} products with a matrix. These losses say nothing of PPO, whose critic evaluates a learning policy at its "
        f"own gamma: docs/critic.md.",
    )


def _pretrain_matrices(config: PretrainConfig, folder: Path) -> Path:
    data = split(config, train=True)
    # As many queries as it takes to tell implicit weights apart, whatever the training asked for.
    n_queries = max(config.n_queries, data.states.shape[-1])
    if config.n_context + n_queries > config.steps:
        raise ValueError(
            f"to compare matrices with the construction takes {n_queries} queries, one for each entry of a state, beside "
            f"--n-context {config.n_context} in one episode of --steps {config.steps}; give at least --steps "
            f"{config.n_context + n_queries}, or a smaller --n-context."
        )
    learned, _ = train_matrices(data, config, progress=True)
    batch, queries = contexts(split(config, train=False), config.n_context, 32, config.seed, n_queries)
    with torch.no_grad():
        untrained = learned.construction.condition(batch, most_growth=math.inf)
        gamma = learned.construction.gamma
        before = _mean_loss(td_errors(untrained, gamma, queries), queries)
        after = _mean_loss(td_errors(lambda states: learned.values(batch, states), gamma, queries), queries)
    measured = similarity(learned, batch, queries.states).as_dict()
    (folder / "card.json").unlink(missing_ok=True)
    learned.save_pretrained(folder)
    card = {
        "trained_by": command(config),
        "data": _data(config),
        "config": training_settings(config),
        "versions": versions(),
        "held_out_td_loss_of_the_construction": before,
        "held_out_td_loss": after,
        # JSON has no NaN.
        "similarity_to_the_construction": {k: v if math.isfinite(v) else None for k, v in measured.items()},
    }
    write_whole(folder / "card.json", json.dumps(card, indent=2) + "\n")
    _say(config, folder, "LearnedTransformer", before, after, "learned matrices")
    print("beside the construction: " + ", ".join(f"{k.replace('_', ' ')} {v:.3f}" for k, v in measured.items()))
    return folder


def _mean_loss(errors: Tensor, queries: Context) -> float:
    """The mean over contexts of mean delta^2 / mean r^2, as :func:`~icrl_gym.td_loss.td_loss_by_depth` has it after the last layer."""
    return float((errors.square().mean(-1) / mean_squared_reward(queries)).nanmean())
