"""TDErrorCallback: the critic's TD errors and its state, in TensorBoard."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from icrl_gym.callbacks.rollout import RolloutCallback
from stable_baselines3.common.logger import TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

from icrl_gym.adaptive import HeadsKernel
from icrl_gym.critic import InContextCritic
from icrl_gym.kernels import spread_rows
from icrl_gym.plots import depth_figure

__all__ = ["TDErrorCallback", "effective_rank"]

LAYOUT: dict[str, dict[str, list[Any]]] = {
    "In-context critic": {
        "TD error, rms": ["Multiline", ["td_error/rollout_rms", "td_error/context_rms"]],
        "TD error by depth": ["Multiline", ["td_error_by_depth/.*"]],
        "TD error, mean": ["Multiline", ["td_error/rollout_mean", "td_error/context_mean"]],
        "explained variance": ["Multiline", ["critic/explained_variance"]],
        "context": ["Multiline", ["critic/context_fill", "critic/n_refused"]],
        "kernel": ["Multiline", ["critic/effective_rank"]],
        "offset and centering": ["Multiline", ["critic/offset", "centering/mean", "centering/rms"]],
    }
}
"""How TensorBoard's "custom scalars" page groups the tags."""


class TDErrorCallback(RolloutCallback):
    """Logs the TD errors of each rollout at ``num_timesteps``, out-of-sample and in-context.

    *Out-of-sample* errors are those of the rollout, whose transitions the critic has not seen; *in-context* ones are those
    of the transitions that it was conditioned on, which it can interpolate.

    | tag | meaning |
    | --- | --- |
    | ``td_error/rollout_rms``, ``_mean``, ``_max`` | out-of-sample, in units of the algorithm's rewards; max of the absolute value |
    | ``td_error/context_rms``, ``_mean``, ``_max`` | in-context |
    | ``td_error/n_nonfinite`` | steps left out of the above |
    | ``td_error_by_depth/<l>`` | in-context rms after l layers; ``fixed_point`` for infinite depth |
    | ``critic/explained_variance`` | 1 - Var(returns - values) / Var(returns), of the rollout |
    | ``critic/offset`` | b |
    | ``critic/context_size``, ``context_fill`` | transitions, and the part of the window that they fill |
    | ``critic/effective_rank`` | of the kernel matrix of the centers: exp of the entropy of its spectrum |
    | ``critic/n_refused`` | observations and rewards refused as not finite, since the environments were made |

    With several rollouts between two dumps of SB3's logger (A2C), the values are of all of them.

    Args:
        log_interval: Environment steps, at least, from one record to the next; 1 for every rollout.
        figure_interval: Likewise for the figure of TD error against depth; it is also drawn at the end of training. None
            for none.
        verbose: As for SB3.

    Source: He et al. 2026, section 5 (TD error against depth).
    """

    def __init__(self, log_interval: int = 1, figure_interval: int | None = 50_000, verbose: int = 0) -> None:
        super().__init__(verbose)
        for name, interval in (("log_interval", log_interval), ("figure_interval", figure_interval)):
            if interval is not None and interval < 1:
                raise ValueError(f"{name} must be at least 1 environment step, got {interval}.")
        self.log_interval, self.figure_interval = log_interval, figure_interval
        self._next_log = 0
        # Not at once: the first import of matplotlib takes seconds, and before any transition there is little to see.
        self._next_figure = figure_interval or 0
        self._pending: list[np.ndarray] = []

    def _on_training_start(self) -> None:
        # The same callback may go on with a model, or begin with another one.
        self._pending = []
        self._next_log = min(self._next_log, self._boundary(self.log_interval)) if self.num_timesteps else 0
        if self.figure_interval is not None:
            self._next_figure = min(self._next_figure, self._boundary(self.figure_interval))
        writer = self._writer()
        if writer is not None:
            writer.add_custom_scalars(LAYOUT)

    def _on_rollout_end(self) -> None:
        # A dump has emptied the logger's table since: what was recorded is out.
        if "td_error/rollout_rms" not in self.logger.name_to_value:
            self._pending = []
        self._pending.append(self.rollout_td_errors().ravel())
        if self.num_timesteps < self._next_log:
            return
        self._next_log = self._boundary(self.log_interval)
        self._record("rollout", np.concatenate(self._pending))
        critic = self.critic
        if critic.context is not None and critic.value_function is not None:
            in_context = critic.value_function.td_errors[..., -1, :][critic.context.mask]
            self._record("context", in_context.cpu().numpy())
            self.logger.record("critic/context_size", int(critic.context.mask.sum()))
            if in_context.numel():  # of an empty context there is nothing to say; zeros would look like a perfect start
                for depth, rms in critic.td_error_by_depth().items():
                    self.logger.record(f"td_error_by_depth/{_depth_name(depth)}", rms)
                self.logger.record("critic/effective_rank", effective_rank(critic))
        self.logger.record("critic/offset", float(critic.offset.mean()))
        self.logger.record("critic/explained_variance", _explained_variance(self.buffer.values, self.buffer.returns))
        snapshots = self.training_env.env_method("context_snapshot", newest=0)
        self.logger.record("critic/n_refused", int(sum(snapshot.n_refused for snapshot in snapshots)))
        if critic.context is not None:
            length = sum(snapshot.length for snapshot in snapshots)
            self.logger.record("critic/context_fill", float(critic.context.mask.sum()) / length)
        if self.figure_interval is not None and self.num_timesteps >= self._next_figure:
            self._next_figure = self._boundary(self.figure_interval)
            self._draw()

    def _on_training_end(self) -> None:
        if self.figure_interval is not None:
            self._draw()

    def _boundary(self, interval: int) -> int:
        """The first multiple of an interval after the present step."""
        return (self.num_timesteps // interval + 1) * interval

    def _record(self, name: str, errors: np.ndarray) -> None:
        finite = errors[np.isfinite(errors)]
        if name == "rollout":
            self.logger.record("td_error/n_nonfinite", int(errors.size - finite.size))
        if finite.size:
            self.logger.record(f"td_error/{name}_rms", float(np.sqrt(np.square(finite).mean())))
            self.logger.record(f"td_error/{name}_mean", float(finite.mean()))
            self.logger.record(f"td_error/{name}_max", float(np.abs(finite).max()))

    def _writer(self) -> SummaryWriter | None:
        for output in self.logger.output_formats:
            if isinstance(output, TensorBoardOutputFormat):
                return output.writer
        return None

    def _draw(self) -> None:
        writer = self._writer()
        curve = self.critic.td_error_by_depth() if writer is not None else {}
        figure = depth_figure(curve) if curve else None
        if writer is not None and figure is not None:
            writer.add_figure("td_error/by_depth", figure, self.num_timesteps)
            writer.flush()  # at the end of training no dump of SB3's logger follows that would


def effective_rank(critic: InContextCritic) -> float:
    """The effective rank of the kernel matrix of the centers: exp of the entropy of its normalized singular values.

    The largest over the tasks; of at most 256 centers, evenly spread; of several heads, the first one's.

    Source: Roy and Vetterli 2007.
    """
    kernel, n = critic.kernel, critic.centers.shape[-2]
    if isinstance(kernel, HeadsKernel):
        n //= kernel.temperature.shape[-1]
        kernel = kernel.head(0)
    rows = spread_rows(n, 256, critic.centers.device)
    centers, mask = critic.centers[..., rows, :], critic.center_mask[..., rows]
    if not bool(mask.any()):
        return 0.0
    with torch.no_grad():
        gram = kernel(centers, centers, mask) * mask.unsqueeze(-2)
        # Singular values, because softmax attention is not symmetric; elsewhere they are the eigenvalues, found faster.
        symmetric = kernel.positive_definite
        spectrum = torch.linalg.eigvalsh(gram).abs() if symmetric else torch.linalg.svdvals(gram)
        share = spectrum / spectrum.sum(-1, keepdim=True).clamp_min(1e-300)
        return float(torch.special.entr(share).sum(-1).exp().max())


def _depth_name(depth: float) -> str:
    return "fixed_point" if math.isinf(depth) else f"{int(depth):03d}"


def _explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    spread = float(np.var(returns, dtype=np.float64))
    residual = float(np.var(returns.astype(np.float64) - values))
    return 1.0 - residual / spread if spread > 0 and math.isfinite(residual) else 0.0
