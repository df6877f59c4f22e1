"""AdaptiveTransformer: heads with several metrics, temperatures and ridges, mixed by what they predict of the context itself.

No single temperature suits every domain. Here the temperatures are multiples of the context's own median distance, in several
state metrics, and every head is asked in the forward pass how well it predicts transitions that were masked out of its keys:

    V = C + sum_h w_h V_h,        w = softmax_h( - sharpness n log(held-out TD error of h) )

which is attention over heads. A head is L conjugate layers of the kernelized residual gradient
(:class:`~icrl_gym.transformer.InContextTransformer` with ``algorithm="residual_gradient"``, ``acceleration="conjugate"``), whose
system is positive semi-definite for every context whatsoever, so no context makes it diverge (``docs/convergence.md``). The
weights, a few multiples and ridges, are fixed; everything that depends on the domain is found in the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, get_args

import torch
from torch import Tensor, nn

from icrl_gym._typing import Bool, Float
from icrl_gym.algorithms import Algorithm
from icrl_gym.context import Context
from icrl_gym.distances import euclidean
from icrl_gym.kernels import Kernel, RBFKernel, median_distance
from icrl_gym.metrics import Metric, relevance, standardization
from icrl_gym.solvers import Directions
from icrl_gym.transformer import InContextTransformer, Offset
from icrl_gym.value_function import ValueFunction, expand, reward_center

__all__ = ["AdaptiveTransformer", "HeadsKernel", "Mixture"]

_LEAST_DECAY = 1e-10
"""Of the coefficients, per transition: the rounding of a kernel value, 1e-16, stays a millionth of the rewards in the values."""


class HeadsKernel(Kernel):
    """RBF kernels of several heads, each in its own coordinates; the keys come in equal blocks, one a head.

    Args:
        origin: (..., H, d), what a head subtracts from states.
        scale: (..., H, d), and what it divides by.
        temperature: (..., H), in squared units of those coordinates.
    """

    origin: Tensor
    scale: Tensor
    temperature: Tensor

    def __init__(
        self, origin: Float[Tensor, "*b H d"], scale: Float[Tensor, "*b H d"], temperature: Float[Tensor, "*b H"]
    ) -> None:
        super().__init__()
        self.register_buffer("origin", origin)
        self.register_buffer("scale", scale)
        self.register_buffer("temperature", temperature)

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`; row j is of the head of key j."""
        heads = self.temperature.shape[-1]
        blocks = keys.unflatten(-2, (heads, -1)) if heads else keys.unsqueeze(-3)[..., :0, :, :]
        values = []
        for h in range(heads):
            origin, scale = (self._of(x, h).to(keys) for x in (self.origin, self.scale))
            distance = euclidean(_measured(blocks[..., h, :, :], origin, scale), _measured(queries, origin, scale))
            values.append(torch.exp(distance.square() * (-0.5 / self.temperature[..., h, None, None].to(keys))))
        return torch.cat(values, -2) if values else keys.new_zeros(*keys.shape[:-1], queries.shape[-2])

    def head(self, h: int) -> HeadsKernel:
        """The kernel of one head alone; its keys are one block of those of all."""
        part = slice(h, h + 1)
        return HeadsKernel(self.origin[..., part, :], self.scale[..., part, :], self.temperature[..., part])

    @staticmethod
    def _of(numbers: Float[Tensor, "*b H d"], head: int) -> Float[Tensor, "*b 1 d"]:
        return numbers[..., head, None, :]


@dataclass(frozen=True)
class Mixture:
    """How the heads did on a context.

    Attributes:
        weights: (..., M, B, R): of each metric, temperature and ridge; they add up to 1.
        held_out: (..., M, B, R): mean squared TD error of transitions that were masked out of the head's keys.
    """

    weights: Float[Tensor, "*b M B R"]
    held_out: Float[Tensor, "*b M B R"]


class AdaptiveTransformer(nn.Module):
    """A transformer that takes temperature, ridge and state metric from its context, and that no context makes diverge.

    Args:
        bandwidths: B multiples of the median distance of the context's states (in the metric of the head), whose squares are
            the temperatures.
        ridges: R, each rho of :class:`~icrl_gym.transformer.InContextTransformer`.
        metrics: M of ``"raw"``, ``"standardized"``, ``"relevance"``.
        n_layers: L, of every head; ``math.inf`` for each head's fixed point.
        gamma: The discount, in [0, 1].
        n_folds: So many times a part of the context is masked, to see what the heads predict of it. Every ``n_folds``-th
            transition makes a part, or with ``contiguous_folds`` a stretch of them.
        contiguous_folds: For contexts of whole trajectories, where a transition's neighbors give it away.
        sharpness: How much a better head counts, per transition.
        value_shift: Reward centering.
        offset: See :class:`~icrl_gym.transformer.InContextTransformer`.

    Raises:
        ValueError: An argument out of its range.

    Source: this package's own (``docs/adaptive.md``); the residual gradient is Baird's (1995), weighting by held-out error is
    stacking by exponential weights (Rigollet and Tsybakov 2012).

    Example:
        >>> from icrl_gym import Context
        >>> context = Context([[0.0], [1.0]], [0.0, 1.0], [[1.0], [2.0]], [False, True])
        >>> AdaptiveTransformer(gamma=0.9, ridges=[1e-8], value_shift=False).condition(context)([[0.0], [1.0]])
        tensor([0.9000, 1.0000], dtype=torch.float64)
    """

    log_bandwidths: Tensor
    log_ridges: Tensor
    gamma: Tensor

    algorithm = Algorithm("residual_gradient")

    def __init__(
        self,
        bandwidths: Sequence[float] | Float[Tensor, "M B"] = (0.5, 1.0, 2.0, 4.0, 8.0),
        ridges: Sequence[float] | Tensor = (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        metrics: Sequence[Metric] = ("raw", "standardized", "relevance"),
        *,
        n_layers: float = 20,
        gamma: float = 0.99,
        n_folds: int = 5,
        contiguous_folds: bool = False,
        sharpness: float = 0.1,
        value_shift: bool = True,
        offset: Offset = "centered",
    ) -> None:
        super().__init__()
        unknown = [metric for metric in metrics if metric not in get_args(Metric)]
        if not metrics or unknown:
            raise ValueError(f"metrics must be some of {', '.join(get_args(Metric))}; got {tuple(metrics)!r}.")
        if not 0.0 <= float(gamma) <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
        if n_layers != math.inf and (n_layers < 0 or n_layers % 1 != 0):
            raise ValueError(f"n_layers must be a whole number or math.inf, got {n_layers}.")
        if n_folds < 2:
            raise ValueError(f"n_folds must be at least 2, got {n_folds}: a head is judged by what it has not seen.")
        if not 0.0 <= sharpness < math.inf:
            raise ValueError(f"sharpness must be finite and not negative, got {sharpness}.")
        if offset not in get_args(Offset):
            raise ValueError(f"offset must be one of {get_args(Offset)}, got {offset!r}.")
        wide = _positive("bandwidths", bandwidths)
        wide = wide.expand(len(metrics), -1) if wide.ndim == 1 else wide
        if wide.ndim != 2 or len(wide) != len(metrics):
            raise ValueError(
                f"expected bandwidths of shape ({len(metrics)}, B), a row a metric; got {tuple(wide.shape)}."
            )
        self.register_buffer("log_bandwidths", wide.log().clone())
        self.register_buffer("log_ridges", _positive("ridges", ridges).log())
        self.register_buffer("gamma", torch.as_tensor(float(gamma), dtype=torch.float64))
        self.metrics: tuple[Metric, ...] = tuple(metrics)
        self.n_layers, self.n_folds, self.contiguous_folds = n_layers, int(n_folds), bool(contiguous_folds)
        self.sharpness, self.value_shift, self.offset = float(sharpness), bool(value_shift), offset

    @property
    def infinite(self) -> bool:
        """Whether every head is solved for its fixed point."""
        return self.n_layers == math.inf

    @property
    def n_heads(self) -> int:
        """M B: metrics times temperatures; each has R ridges, which share its kernel."""
        return self.log_bandwidths.numel()

    def condition(self, context: Context) -> ValueFunction:
        """The value function of a context, in float64; a context without any transition has the value zero.

        The squared TD error of its transitions is at most that of the constant C, whatever the context.

        Args:
            context: (...) contexts of n transitions.
        """
        return self.mix(context)[0]

    def mix(self, context: Context) -> tuple[ValueFunction, Mixture]:
        """The value function of a context, and what weight every head has in it.

        Raises:
            ValueError: A context whose transitions have weights.
        """
        if context.is_weighted:
            raise ValueError(
                "an AdaptiveTransformer holds folds of its context out to weigh its heads, and counts every transition alike; got "
                "a context with weights. Leave them out (a critic's `recency=1.0`), or take an InContextTransformer."
            )
        context, unit = _in_units(context)
        gamma = self.gamma.to(context.rewards)
        rewards, shift = context.rewards * context.mask, context.rewards.new_zeros(context.batch_shape)
        if self.value_shift:
            rewards, shift = reward_center(context, gamma)
        discount = self.algorithm.discount(context, gamma)
        kept = self._kept(context)
        fits: list[Tensor] = []  # a head: coefficients (..., n, R) of all keys
        errors: list[Tensor] = []  # and TD errors by depth (..., L+1, n, R)
        held_out: list[Tensor] = []
        places: list[tuple[Tensor, Tensor, Tensor]] = []
        for metric, bandwidths in zip(self.metrics, self.log_bandwidths, strict=True):
            origin, scale = self._coordinates(metric, context)
            states, next_states = (_measured(x, origin, scale) for x in (context.states, context.next_states))
            both = torch.cat([states, next_states], -2)
            distance = euclidean(both, both).square()
            median = _median(states, context.mask)
            for log_bandwidth in bandwidths:
                temperature = (median * log_bandwidth.exp().to(median)).square()
                gram = self._gram(torch.exp(distance * (-0.5 / temperature[..., None, None])), context, discount)
                fit, error, missed = self._solve(gram, rewards, kept)
                fits.append(fit)
                errors.append(error)
                held_out.append(missed)
                places.append((origin, scale, temperature))
        missed = torch.stack(held_out, -2)  # (..., M B, R)
        weights = self._weights(missed, context)
        value = self._mixed(context, fits, errors, weights, places, shift, discount)
        value = replace(
            value,
            coefficients=value.coefficients * unit.unsqueeze(-1),
            shift=value.shift * unit,
            offset=value.offset * unit,
            td_errors=value.td_errors * unit[..., None, None],
        )
        missed = missed * unit[..., None, None].square()
        shape = (len(self.metrics), -1, missed.shape[-1])
        return value, Mixture(weights.unflatten(-2, shape[:2]), missed.unflatten(-2, shape[:2]))

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the weights (safetensors) and the configuration (JSON) into a folder. See :mod:`icrl_gym.weights`."""
        from icrl_gym.weights import save

        save(self, folder)

    @classmethod
    def from_pretrained(cls, folder_or_name: str | PathLike[str]) -> AdaptiveTransformer:
        """The transformer that :meth:`save_pretrained` wrote, or one that the package ships, by name.

        Raises:
            ValueError: What is there is a transformer of another kind.
        """
        from icrl_gym.weights import load

        transformer = load(folder_or_name)
        if not isinstance(transformer, cls):
            raise ValueError(f"{folder_or_name} holds a {type(transformer).__name__}; load it with that class.")
        return transformer

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return (
            f"metrics={self.metrics}, heads={self.n_heads}, ridges={len(self.log_ridges)}, n_layers={self.n_layers}, "
            f"gamma={float(self.gamma):g}"
        )

    def _coordinates(self, metric: Metric, context: Context) -> tuple[Float[Tensor, "*b 1 d"], Float[Tensor, "*b 1 d"]]:
        """What a metric subtracts from states and divides them by."""
        origin, scale = standardization(context.states, context.mask)
        if metric == "raw":
            # One unit for all features, so that the squares of huge and tiny states are numbers.
            return origin, scale.amax(-1, keepdim=True).expand_as(scale)
        if metric == "standardized":
            return origin, scale
        states, next_states = (_measured(x, origin, scale) for x in (context.states, context.next_states))
        moved = Context._of({**vars(context), "states": states, "next_states": next_states})
        first = InContextTransformer(
            RBFKernel(_median(states, context.mask).square()),
            gamma=float(self.gamma),
            n_layers=20,
            algorithm="residual_gradient",
            acceleration="conjugate",
            ridge=1e-2,
            value_shift=self.value_shift,
        )
        return origin, scale / relevance(first.condition(moved), moved.states, context.mask)

    def _kept(self, context: Context) -> Bool[Tensor, "*b n F1"]:
        """(..., n, F+1): what each fold leaves in the context; the first column leaves all."""
        position = context.mask.long().cumsum(-1) - 1
        if self.contiguous_folds:
            fold = position * self.n_folds // context.mask.sum(-1, keepdim=True).clamp_min(1)
        else:
            fold = position % self.n_folds
        kept = fold.unsqueeze(-1) != torch.arange(self.n_folds, device=fold.device)
        return torch.nn.functional.pad(kept, (1, 0), value=True) & context.mask.unsqueeze(-1)

    def _gram(self, values: Tensor, context: Context, discount: Tensor) -> Float[Tensor, "*b n n"]:
        """<kappa_j, kappa_i> of kappa_j = k(s_j, .) - beta_j k(s'_j, .), from k between all states and next states."""
        n, beta = len(context), discount.unsqueeze(-1)
        values = values[..., :n, :] - beta * values[..., n:, :]
        gram = values[..., :n] - values[..., n:] * beta.transpose(-1, -2)
        return gram * context.mask.unsqueeze(-1) * context.mask.unsqueeze(-2)

    def _solve(
        self, gram: Float[Tensor, "*b n n"], rewards: Float[Tensor, "*b n"], kept: Bool[Tensor, "*b n F1"]
    ) -> tuple[Float[Tensor, "*b n R"], Float[Tensor, "*b l n R"], Float[Tensor, "*b R"]]:
        """All ridges and folds of one kernel at once, as columns.

        Returns:
            Of the whole context, coefficients and TD errors by depth (before and after, for infinite depth); and the mean squared
            error on what the folds mask.
        """
        ridges = self.log_ridges.exp().to(gram)
        weight = kept.to(gram)
        sizes = (gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * weight).sum(-2)  # (..., F1)
        decay = ridges.unsqueeze(-1) * sizes.unsqueeze(-2)  # (..., R, F1)
        # Where next states are (nearly) states and gamma is 1, all differences are rounding, and so would be values made of them.
        decay = torch.maximum(decay, _LEAST_DECAY * weight.sum(-2).unsqueeze(-2)).flatten(-2)  # (..., R F1)
        keys = weight.unsqueeze(-2).expand(*weight.shape[:-1], len(ridges), -1).flatten(-2)
        right = rewards.unsqueeze(-1) * keys
        solve = self._limit if self.infinite else self._layers
        coefficients, errors = solve(gram, right, keys, decay, weight.shape[-1])
        missed = ((rewards.unsqueeze(-1) - gram @ coefficients) * (1 - keys)).square().sum(-2)
        present = weight[..., 0].sum(-1).clamp_min(1.0)
        # Empty places are in no fold: their rewards and their rows of the matrix are zero.
        missed = missed.unflatten(-1, (len(ridges), -1)).sum(-1) / present.unsqueeze(-1)
        return coefficients[..., :: weight.shape[-1]], errors, missed

    def _layers(
        self, gram: Tensor, right: Tensor, keys: Tensor, decay: Tensor, every: int
    ) -> tuple[Float[Tensor, "*b n c"], Float[Tensor, "*b l n R"]]:
        """L conjugate layers on every column (:class:`~icrl_gym.solvers.Directions` takes them as rows)."""
        target, rows, decay = right.transpose(-1, -2), keys.transpose(-1, -2), decay.unsqueeze(-1)

        def times(coefficients: Tensor) -> Tensor:
            return rows * (coefficients @ gram)

        start = now = Directions.first(target, times)
        coefficients, errors = torch.zeros_like(target), [target[..., ::every, :]]
        for _ in range(int(self.n_layers)):
            step, following = now.step(times, decay, start)
            coefficients = coefficients + step * now.direction
            now = following
            # What is left of the rewards is the residual and what the ridge holds back.
            errors.append((now.residual + decay * coefficients)[..., ::every, :])
        return coefficients.transpose(-1, -2), torch.stack(errors, -3).transpose(-1, -2)

    def _limit(
        self, gram: Tensor, right: Tensor, keys: Tensor, decay: Tensor, every: int
    ) -> tuple[Float[Tensor, "*b n c"], Float[Tensor, "*b l n R"]]:
        """The fixed point of every column."""
        rows = keys.transpose(-1, -2)
        system = gram.unsqueeze(-3) * rows.unsqueeze(-1) * rows.unsqueeze(-2)
        # A one where a key is masked, and where the matrix is zero, keeps the system regular and moves nothing.
        diagonal = decay.unsqueeze(-1) * rows + (1 - rows)
        system = system + torch.diag_embed(torch.where(diagonal > 0, diagonal, 1.0))
        solution = torch.linalg.solve(system, right.transpose(-1, -2)).transpose(-1, -2)
        errors = torch.stack([right, decay.unsqueeze(-2) * solution], -3)
        return solution, errors[..., ::every]

    def _weights(self, missed: Float[Tensor, "*b H R"], context: Context) -> Float[Tensor, "*b H R"]:
        n = context.mask.sum(-1).to(missed)[..., None, None]
        # Relative to the best, so that a context which is predicted without an error has no infinite logarithm.
        best = missed.amin((-2, -1), keepdim=True)
        worst = missed.amax((-2, -1), keepdim=True)
        floor = torch.where(worst > 0, worst * 1e-12, 1.0)
        logits = -self.sharpness * n * ((missed + floor) / (best + floor)).log()
        weights = torch.softmax(logits.flatten(-2), -1).unflatten(-1, missed.shape[-2:])
        # What counts for less than a thousandth need not be evaluated.
        weights = torch.where(weights < 1e-3 * weights.amax((-2, -1), keepdim=True), 0.0, weights)
        return weights / weights.sum((-2, -1), keepdim=True)

    def _mixed(
        self,
        context: Context,
        fits: list[Tensor],
        errors: list[Tensor],
        weights: Float[Tensor, "*b H R"],
        places: list[tuple[Tensor, Tensor, Tensor]],
        shift: Tensor,
        discount: Tensor,
    ) -> ValueFunction:
        shares = weights.unbind(-2)
        used = [h for h, share in enumerate(shares) if bool((share > 0).any())]
        coefficients: list[Tensor] = []
        td_errors = torch.zeros_like(errors[0][..., 0])
        for h in used:
            mixed = (fits[h] * shares[h].unsqueeze(-2)).sum(-1)
            coefficients += [mixed, -discount * mixed]
            td_errors = td_errors + (errors[h] * shares[h][..., None, None, :]).sum(-1)
        kernel = HeadsKernel(
            torch.cat([places[h][0] for h in used], -2),
            torch.cat([places[h][1] for h in used], -2),
            torch.stack([places[h][2] for h in used], -1),
        )
        both = torch.cat([context.states, context.next_states], -2)
        centers = torch.cat([both] * len(used), -2)
        mask = torch.cat([context.mask] * (2 * len(used)), -1)
        weight = torch.cat(coefficients, -1) * mask
        origin = centers.new_zeros(*centers.shape[:-2], 1, centers.shape[-1])
        at_origin = expand(kernel, centers, mask, weight, origin).squeeze(-1)
        gamma = self.gamma.to(at_origin) * (self.offset == "centered")
        return ValueFunction(
            kernel, centers, weight, mask, shift, -gamma * at_origin, td_errors * context.mask.unsqueeze(-2)
        )


def _measured(
    states: Float[Tensor, "*#b n d"], origin: Float[Tensor, "*#b 1 d"], scale: Float[Tensor, "*#b 1 d"]
) -> Float[Tensor, "*#b n d"]:
    """States in the coordinates of a head; farther than any kernel sees is no farther than a number can say."""
    return ((states - origin) / scale).clamp(-1e150, 1e150)


def _median(states: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    # A single state far away makes all other distances tiny beside the deviation; the square of 1e-200 would be zero.
    return median_distance(states.detach(), mask).clamp_min(1e-60)


def _in_units(context: Context) -> tuple[Context, Float[Tensor, "*b"]]:
    """The context in float64 with its rewards in units of about the largest, a power of two, and that unit (...)."""
    context = context.to(dtype=torch.float64)
    largest = (
        context.rewards.detach().abs().amax(-1) if len(context) else context.rewards.new_zeros(context.batch_shape)
    )
    largest = torch.where(largest > 0, largest, 1.0)
    # A division by a power of two is exact: values are then proportional to rewards, however large.
    unit = largest / (2 * torch.frexp(largest).mantissa)
    return Context._of({**vars(context), "rewards": context.rewards / unit.unsqueeze(-1)}), unit


def _positive(name: str, values: Any) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float64)
    if not tensor.numel() or not bool(torch.isfinite(tensor).all()) or bool((tensor <= 0).any()):
        raise ValueError(f"{name} must be positive and finite, at least one of them; got {tensor.tolist()}.")
    return tensor
