"""Adam on the TD loss of held-out queries: over step sizes and temperature of a transformer, or over all of its matrices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from icrl_gym.context import Context
from icrl_gym.datasets import Transitions, contexts
from icrl_gym.kernels import Kernel, LinearKernel, ReLUKernel, make_kernel
from icrl_gym.learned import LearnedTransformer
from icrl_gym.pretrain_settings import KernelName, PretrainConfig
from icrl_gym.progress import Progress
from icrl_gym.td_loss import td_errors
from icrl_gym.transformer import InContextTransformer, Offset

__all__ = ["construction", "shown_progress", "train_matrices", "train_step_sizes"]


def train_step_sizes(
    data: Transitions, config: PretrainConfig, progress: bool = False
) -> tuple[InContextTransformer, list[float]]:
    """Minimize the TD loss of queries over step sizes and temperature.

    Both are searched by their logarithms, so they stay positive, with gradients through every layer. Held constant
    (``semi_gradient``), the bootstrap target of a query makes the fixed point of TD the aim, and the loss itself may rise; the
    default is the gradient of the loss.

    Args:
        data: Transitions of one domain; contexts are drawn within one episode, so within one goal.
        config: The settings.
        progress: Show it: a bar on a terminal, ten lines elsewhere.

    Returns:
        The trained transformer, and the normalized held-out TD loss of each iteration's batch.

    Raises:
        ValueError: Episodes shorter than a context and its queries.
    """
    log_steps = torch.zeros(config.n_layers, dtype=torch.float64, requires_grad=True)
    has_temperature = config.kernel not in ("relu", "linear")
    log_temperature = torch.tensor(math.log(config.temperature), dtype=torch.float64, requires_grad=has_temperature)

    def current() -> InContextTransformer:
        return _transformer(config, log_steps.exp(), log_temperature.exp() if has_temperature else None)

    def answers(batch: Context) -> Callable[[Tensor], Tensor]:
        # Layers that diverge have a gradient, and it leads out of there.
        return current().condition(batch, most_growth=math.inf)

    def back_off() -> None:
        log_steps.sub_(0.5)

    searched = [log_steps, *([log_temperature] if has_temperature else [])]
    losses = _minimize(data, config, searched, config.rate, answers, back_off, progress)
    for logarithm in searched:
        logarithm.requires_grad_(False)
    return current(), losses


def train_matrices(
    data: Transitions, config: PretrainConfig, progress: bool = False
) -> tuple[LearnedTransformer, list[float]]:
    """Minimize the TD loss of queries over every key, query and value matrix.

    The offset of the read-out is removed at its source, so that the loss is that of the value itself, and the temperature stays:
    the scales of K and Q do what it does.

    Args:
        data: Transitions of one domain; contexts are drawn within one episode, so within one goal.
        config: The settings.
        progress: Show it: a bar on a terminal, ten lines elsewhere.

    Returns:
        The trained transformer, and the normalized held-out TD loss of each iteration's batch.

    Raises:
        ValueError: Episodes shorter than a context and its queries.
    """
    start = construction(config, offset="removed")
    learned = LearnedTransformer(
        start, data.states.shape[-1], config.initialization, shared_layers=config.shared_layers, seed=config.seed
    )

    def back_off() -> None:
        for head in learned.heads:
            head.value *= 0.6

    def answers(batch: Context) -> Callable[[Tensor], Tensor]:
        return lambda states: learned.values(batch, states)

    losses = _minimize(
        data, config, list(learned.parameters()), config.matrix_learning_rate, answers, back_off, progress
    )
    return learned.requires_grad_(False), losses


def construction(config: PretrainConfig, offset: Offset = "centered") -> InContextTransformer:
    """Where training starts: unit steps at the temperature of the settings."""
    steps = torch.ones(config.n_layers, dtype=torch.float64)
    return _transformer(config, steps, torch.tensor(config.temperature, dtype=torch.float64), offset)


def _transformer(
    config: PretrainConfig, steps: Tensor, temperature: Tensor | None, offset: Offset = "centered"
) -> InContextTransformer:
    kernel = _kernel(config.kernel, temperature)
    return InContextTransformer(kernel, steps, config.gamma, config.step_normalization, offset=offset)


def _kernel(name: KernelName, temperature: Tensor | None) -> Kernel:
    if name in ("relu", "linear"):
        return ReLUKernel() if name == "relu" else LinearKernel()
    kernel = make_kernel(name, 1.0)
    return type(kernel)(temperature)


def _loss(errors: Tensor, queries: Context) -> Tensor:
    """The loss to differentiate, normalized: the value zero has the loss 1."""
    # One scale for the whole batch: a context whose queries happen to have next to no reward must not decide the step of all.
    return errors.square().mean() / queries.rewards.square().mean().clamp_min(1e-12)


def _minimize(
    data: Transitions,
    config: PretrainConfig,
    parameters: list[Tensor],
    learning_rate: float,
    answers: Callable[[Context], Callable[[Tensor], Tensor]],
    back_off: Callable[[], None],
    progress: bool,
) -> list[float]:
    """Adam on the TD loss of queries; the loss of each iteration, infinite where the layers overflowed.

    Args:
        data: Contexts are drawn from it.
        config: The settings.
        parameters: Changed in place.
        learning_rate: Of Adam.
        answers: From contexts to a function of states, which ``parameters`` have a gradient through.
        back_off: Makes the layers' steps smaller, called where they overflow.
        progress: Whether to show it.
    """
    gamma = torch.tensor(config.gamma, dtype=torch.float64)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    seeds = np.random.SeedSequence([config.seed, 1]).generate_state(config.iterations)
    losses: list[float] = []
    with shown_progress(seeds.tolist(), losses, progress) as shown:
        for seed in shown:
            batch, queries = contexts(data, config.n_context, config.contexts_a_step, seed, config.n_queries)
            optimizer.zero_grad()
            try:
                loss = _loss(td_errors(answers(batch), gamma, queries, config.semi_gradient), queries)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                if not bool(torch.isfinite(norm)):
                    raise FloatingPointError("the gradient overflows before the values do.")
            except FloatingPointError:
                # The layers have grown too far: back off and go on.
                with torch.no_grad():
                    back_off()
                losses.append(math.inf)
                continue
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@contextlib.contextmanager
def shown_progress(items: list[int], losses: list[float], shown: bool) -> Iterator[Iterable[int]]:
    """Walk through the items, each of which adds a loss, and show it.

    A bar on a terminal, with the extra `progress`; a line each tenth of the way otherwise.

    Args:
        items: The iterations, as their seeds.
        losses: Changed by whoever walks; the last one is shown.
        shown: False walks in silence.
    """
    if not shown:
        yield items
        return
    with contextlib.closing(Progress("pretrain", len(items), "step", n_lines=10)) as progress:

        def walked() -> Iterator[int]:
            for item in items:
                yield item
                loss = f"{losses[-1]:.3g}"
                progress.step(f"TD loss {loss}", f" iterations, TD loss of the batch {loss}")

        yield walked()
