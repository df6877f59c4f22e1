"""InContextCritic: a value network that is conditioned on transitions instead of trained."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from icrl_gym._typing import Bool, Float, Int
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.algorithms import AlgorithmName
from icrl_gym.context import Context
from icrl_gym.kernels import Kernel, make_kernel, spread_rows
from icrl_gym.metrics import standardization
from icrl_gym.transformer import Acceleration, InContextTransformer, Offset, StepNormalization
from icrl_gym.value_function import ValueFunction, expand

__all__ = ["Evaluation", "InContextCritic"]

_FARTHEST = 1e3
"""Deviations from the mean beyond which a standardized state is no farther."""
_MOST_GROWTH = 10.0
"""Of the TD errors of a fixed point, in units of those of the constant; on rollouts of PPO it is a few at most."""


@dataclass(frozen=True)
class Evaluation:
    """What :meth:`InContextCritic.evaluate` found, ready for :meth:`InContextCritic.adopt`.

    Attributes:
        context: The context in standardized coordinates; several tasks as a batch.
        value: Its value function, in the same coordinates.
        mean: (..., 1, d), what standardization subtracts.
        scale: (..., 1, d), and what it divides by.
    """

    context: Context
    value: ValueFunction
    mean: Tensor
    scale: Tensor


class InContextCritic(nn.Module):
    """V(s) from a context of transitions, by a transformer with fixed weights. No parameter, no gradient.

    The critic stands where Stable-Baselines3 has its value network: it maps (m, d) observations to (m, 1) values. In
    between two calls of :meth:`condition` it is a pure function of the observation.

    Args:
        n_features: d, the length of a flattened observation.
        transformer: A ready transformer (pretrained, or an :class:`~icrl_gym.adaptive.AdaptiveTransformer`), instead of the
            arguments marked * below.
        kernel: * A kernel or its name. The default's two heads compare states by their distance and by their inner product: near
            the context's states the value is what was met there, and beyond them it goes on as it rose towards them, instead of
            falling back to the mean.
        temperature: * Of a kernel given by name; ``"median"``: the median distance between states of the context.
        n_layers: * Depth; ``math.inf`` solves for the limit of infinite depth.
        step_sizes: * Of a finite depth: one number, or one a layer.
        step_normalization: * ``"row_sum"``, ``"length"`` or ``"none"``.
        ridge: * Decay of the coefficients; default 1e-4 for infinite depth, 0 for layers.
        algorithm: * ``"td"``, ``"td_lambda"``, ``"residual_gradient"``, ``"average_reward"`` or ``"monte_carlo"``
            (:mod:`icrl_gym.algorithms`); default ``"td_lambda"`` for infinite depth, ``"td"`` for layers.
        trace_decay: * lambda of ``"td_lambda"``; default 0.8.
        acceleration: * ``"none"`` or ``"conjugate"``.
        n_landmarks: * States of the context to compare with; None for all of them (and for kernels that are not positive
            definite).
        value_shift: * Reward centering; default yes (average reward has its own).
        offset: * ``"centered"``: values carry the constant offset of the literal read-out, which
            :class:`~icrl_gym.callbacks.AdvantageCenteringCallback` takes out of the advantages; ``"removed"``: they do not.
        gamma: The discount. None: the algorithm's, which the callback brings.
        standardize: Measure states in units of the context's own mean and standard deviation. A feature that hardly
            varies is measured in units of the one that varies most, so that jitter stays small (:func:`standardization`).
        oldest_weight: What the oldest transition that a window can hold counts, beside 1 for the newest; weights fall geometrically
            in between (:mod:`icrl_gym.recency`). Whoever brings the context sets them so, as the callbacks do. Default 0.1 for
            infinite depth, 1 for layers and a ready transformer.
        n_tasks: With more than 1, the last ``n_tasks`` entries of an observation are the one-hot of its task, and every
            task has a context of its own.

    Attributes:
        settings: The arguments with their defaults filled in, as far as they are none of the algorithm's: what builds the same critic
            with another version of this package too.

    Raises:
        ValueError: An argument out of its range.

    Source: He et al. 2026, section 3; the defaults are this package's own (``docs/critic.md``).
    """

    state_mean: Tensor
    state_scale: Tensor
    centers: Tensor
    coefficients: Tensor
    center_mask: Tensor
    shift: Tensor
    offset: Tensor
    constant: Tensor
    is_conditioned: Tensor

    # What a context gives and a state_dict holds; `constant` follows from it.
    _of_the_context = ("state_mean", "state_scale", "centers", "coefficients", "center_mask", "shift", "offset")

    def __init__(
        self,
        n_features: int,
        *,
        transformer: InContextTransformer | AdaptiveTransformer | None = None,
        kernel: str | Kernel = "laplacian+linear",
        temperature: float | str | None = None,
        n_layers: float | None = None,
        step_sizes: float | list[float] | None = None,
        step_normalization: StepNormalization = "row_sum",
        ridge: float | None = None,
        n_landmarks: int | None = 256,
        algorithm: AlgorithmName | None = None,
        trace_decay: float | None = None,
        acceleration: Acceleration = "none",
        value_shift: bool | None = None,
        offset: Offset = "centered",
        gamma: float | None = None,
        standardize: bool = True,
        oldest_weight: float | None = None,
        n_tasks: int = 1,
    ) -> None:
        super().__init__()
        if n_tasks < 1 or (n_tasks > 1 and n_features <= n_tasks):
            raise ValueError(
                f"n_tasks must be at least 1 and, with a one-hot of the task in the observation, smaller than its "
                f"{n_features} entries; got {n_tasks}."
            )
        if oldest_weight is not None and not 0.0 < oldest_weight <= 1.0:
            raise ValueError(f"oldest_weight must lie in (0, 1], got {oldest_weight}.")
        self.gamma_given = gamma is not None or transformer is not None
        given = kernel
        if transformer is None:
            if isinstance(kernel, str):
                kernel = make_kernel(kernel, temperature)
            elif temperature is not None:
                raise ValueError(f"temperature belongs to a kernel given by name; {kernel} has its own.")
            if (
                n_layers is None
                and acceleration == "none"
                and (step_sizes is None or isinstance(step_sizes, (int, float)))
            ):
                n_layers = math.inf
            if oldest_weight is None and n_layers == math.inf:
                oldest_weight = 0.1
            if algorithm is None:
                algorithm = "td_lambda" if n_layers == math.inf else "td"
            if algorithm == "td_lambda" and trace_decay is None:
                trace_decay = 0.8
            options: dict[str, Any] = {
                "step_sizes": step_sizes, "step_normalization": step_normalization, "n_layers": n_layers, "ridge": ridge,
                "algorithm": algorithm, "trace_decay": trace_decay, "acceleration": acceleration, "n_landmarks": n_landmarks,
                # Average reward takes the mean out of the rewards itself.
                "value_shift": algorithm != "average_reward" if value_shift is None else value_shift, "offset": offset,
            }  # fmt: skip
            transformer = InContextTransformer(kernel, gamma=0.99 if gamma is None else gamma, **options)
            own = {"kernel": given, "temperature": temperature, **options, "ridge": transformer.ridge}
        elif gamma is not None and not math.isclose(gamma, float(transformer.gamma)):
            raise ValueError(f"gamma={gamma} is not the transformer's, {float(transformer.gamma)}; leave it out.")
        else:
            own = {"transformer": transformer}
        self.transformer = transformer
        self.n_features, self.n_tasks, self.standardize = n_features, n_tasks, standardize
        self.oldest_weight = 1.0 if oldest_weight is None else float(oldest_weight)
        own |= {"gamma": gamma, "standardize": standardize, "oldest_weight": self.oldest_weight, "n_tasks": n_tasks}
        self.settings = own
        self.is_synced = False  # a callback keeps the context up to date; a matter of this process, never saved
        for name in self._of_the_context:
            self.register_buffer(name, torch.zeros(0))
        self.register_buffer("constant", torch.zeros(0), persistent=False)
        self.register_buffer("is_conditioned", torch.tensor(False))
        self.kernel: Kernel  # as the context adapts it
        self.value_function: ValueFunction | None = None
        self.context: Context | None = None
        self._known: dict[bytes, float] = {}  # values of observations under the present context
        self.condition(Context.empty(n_features))
        self.is_conditioned.fill_(False)

    @property
    def gamma(self) -> float:
        """The discount."""
        return float(self.transformer.gamma)

    def match_gamma(self, gamma: float) -> None:
        """Take the algorithm's discount, or say that it is not the one asked for.

        Raises:
            ValueError: The critic was given another discount.
        """
        if self.gamma_given and not math.isclose(gamma, self.gamma, rel_tol=0.0, abs_tol=1e-9):
            raise ValueError(
                f"the critic's gamma is {self.gamma:g} and the algorithm's is {gamma:g}: values would be of another problem. "
                f"Leave gamma out of critic_kwargs, or give both the same."
            )
        self.transformer.gamma.fill_(gamma)

    def condition(self, context: Context) -> None:
        """Evaluate the policy on these transitions; the values stay so until the next call.

        Args:
            context: See :meth:`evaluate`.

        Raises:
            ValueError: See :meth:`evaluate`.
            FloatingPointError: See :meth:`evaluate`.
        """
        self.adopt(self.evaluate(context))

    @torch.no_grad()
    def evaluate(self, context: Context) -> Evaluation:
        """What :meth:`condition` does, but for taking it over: the critic's values stay as they are.

        Nothing of the critic is written, so another thread may run this while the critic is in use.

        Args:
            context: One context of (n, d) states, in the coordinates of the observations that :meth:`forward` will get
                and the reward units of the algorithm. Several tasks are told apart by the one-hot in their states.
                Without transitions (of a task) the value (of that task) is zero.

        Raises:
            ValueError: States with another number of features, or a batch of contexts.
            FloatingPointError: The layers diverge on this context. A fixed point does not: where it does not exist, a larger ridge
                is taken, with a warning.
        """
        context, _ = self._by_itself(context, torch.zeros(len(context), dtype=torch.long))
        context, mean, scale = self._measured(context)
        return Evaluation(context, self._conditioned(context), mean, scale)

    @torch.no_grad()
    def evaluate_folds(
        self, context: Context, folds: Int[Tensor, n], n_folds: int
    ) -> tuple[Evaluation | None, list[Evaluation]]:
        """The evaluations of what is left of a context without each fold: cross-fitting.

        Where the transformer shares sums between folds (:attr:`InContextTransformer.shares_folds`; the default does) they take one
        pass over the transitions, which gives that of the whole too, and have the coordinates, the temperature and the landmarks
        that the states of the whole context give. Else each is evaluated on its own.

        Args:
            context: See :meth:`evaluate`.
            folds: (n,), 0 for a transition that is never left out, f for one of fold f; in long stretches.
            n_folds: How many.

        Returns:
            The evaluation of the whole, where it comes for nothing, else None; and those without fold 1, 2, ...

        Raises:
            ValueError: See :meth:`evaluate`.
            FloatingPointError: See :meth:`evaluate`.

        Source: Chernozhukov et al. 2018 (cross-fitting).
        """
        transformer = self.transformer
        if isinstance(transformer, InContextTransformer) and transformer.shares_folds:
            alone, of_fold = self._by_itself(context, folds)
            measured, mean, scale = self._measured(alone)
            # Where one of them is not there, or is implausible, each looks for a ridge of its own below.
            with contextlib.suppress(FloatingPointError):
                values = transformer.condition_folds(measured, of_fold, n_folds, most_growth=_MOST_GROWTH)
                for fold, value in enumerate(values):
                    self._require_plausible(value, measured, measured.mask & ((of_fold != fold) | (fold == 0)))
                whole, *without = (Evaluation(measured, value, mean, scale) for value in values)
                return whole, without
        return None, [self.evaluate(context[folds != fold]) for fold in range(1, n_folds + 1)]

    def _by_itself(self, context: Context, folds: Int[Tensor, n]) -> tuple[Context, Int[Tensor, "*b n"]]:
        """A context in the critic's type, without empty places; several tasks as a batch. And the folds, in the same places.

        Raises:
            ValueError: See :meth:`evaluate`.
        """
        if context.batch_shape or context.n_features != self.n_features:
            raise ValueError(
                f"the critic expects one context of states with {self.n_features} entries, got {context!r}."
            )
        context = context.to(self.transformer.gamma.device, self.transformer.gamma.dtype)
        folds = folds.to(context.mask.device)[context.mask]
        context = context[context.mask]
        if self.n_tasks > 1:
            task = self.tasks_of(context.states)
            own = [task == t for t in range(self.n_tasks)]
            context = Context.stack([context[rows] for rows in own])
            folds = torch.nn.utils.rnn.pad_sequence([folds[rows] for rows in own], batch_first=True)
        return context, folds

    def _measured(self, context: Context) -> tuple[Context, Tensor, Tensor]:
        """A context in its own coordinates, the mean and the scale of its states."""
        mean, scale = standardization(context.states, context.weights) if self.standardize else _unit(context.states)
        context = Context(
            self._coordinates(context.states, mean, scale),
            context.rewards,
            self._coordinates(context.next_states, mean, scale),
            context.terminated,
            context.truncated,
            context.mask,
            context.weights,
        )
        return context, mean, scale

    def _conditioned(self, context: Context) -> ValueFunction:
        """The value function of a context; a fixed point that is not there, or is implausible, is looked for with larger ridges.

        In units of the largest k(s, s) it exists on every context at rho = 1 for TD, and at (1 + gamma) / (1 - gamma lambda) with
        traces (``docs/convergence.md``), and it tends to the constant C as rho grows; so a training never ends here. The largest
        k(s, s) is 1 for RBF, Laplacian and Matern; of the linear kernel it is at most a million, of standardized states.
        """
        transformer = self.transformer
        if not isinstance(transformer, InContextTransformer) or not transformer.infinite:
            return transformer.condition(context)
        try:
            return self._plausible(transformer, context)
        except FloatingPointError as error:
            says_what_to_do = error
        if context.batch_shape:
            # Each task looks for a ridge of its own: one without a fixed point smooths no other's values.
            values = [self._conditioned(context[task]) for task in range(context.batch_shape[0])]
            return ValueFunction.stack(transformer.kernel.adapted(context.states, context.mask), values)
        stronger = copy.copy(transformer)  # the weights are shared; only the ridge is another
        for ridge in (10.0**exponent for exponent in range(-3, 9)):
            if ridge <= transformer.ridge:
                continue
            stronger.ridge = ridge
            with contextlib.suppress(FloatingPointError):
                value = self._plausible(stronger, context)
                warnings.warn(
                    f"the critic has no plausible fixed point on this context with ridge={transformer.ridge:g}; {ridge:g} was taken "
                    f"this time, for smoother values. That may happen while the context is short, and needs doing something about "
                    f"only if it goes on (docs/convergence.md).",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return value
        raise says_what_to_do

    def _plausible(self, transformer: InContextTransformer, context: Context) -> ValueFunction:
        """A fixed point whose values a policy can have.

        Raises:
            FloatingPointError: There is none, its TD errors are many times those of the constant, or some value is farther from
                the constant than two discounted sums of these rewards can be from each other: a system that is nearly singular.
        """
        value = transformer.condition(context, most_growth=_MOST_GROWTH)
        self._require_plausible(value, context, context.mask)
        return value

    def _require_plausible(self, value: ValueFunction, context: Context, mask: Bool[Tensor, "*b n"]) -> None:
        """Say so where values are farther from their constant than values can be, for the transitions in the mask.

        Raises:
            FloatingPointError: See :meth:`_plausible`.
        """
        if self.transformer.algorithm.name == "average_reward" or self.gamma == 1.0 or not len(context):
            return
        rows = spread_rows(len(context), value.centers.shape[-2], context.states.device)
        states = torch.cat([value.centers, context.next_states[..., rows, :]], -2)
        exists = torch.cat([value.center_mask, mask[..., rows]], -1)
        away = ((value(states) - value.shift.unsqueeze(-1)).abs() * exists).amax(-1)
        possible = 2.0 * (context.rewards.abs() * mask).amax(-1) / (1.0 - self.gamma)
        if bool((away > possible).any()):
            raise FloatingPointError(
                f"values of the fixed point are up to {float(away.max()):.3g} away from their constant, and discounted sums of these "
                f"rewards at most {float(possible.max()):.3g} from each other; a larger ridge helps."
            )

    @torch.no_grad()
    def adopt(self, evaluation: Evaluation) -> None:
        """Take the values of an evaluation, until the next one."""
        value = evaluation.value
        self.context, self.value_function, self.kernel = evaluation.context, value, value.kernel
        self.state_mean, self.state_scale = evaluation.mean, evaluation.scale
        self.centers, self.coefficients, self.center_mask = value.centers, value.coefficients, value.center_mask
        self.shift, self.offset = value.shift, value.offset
        self._add_up()
        self.is_conditioned.fill_(True)
        self._known.clear()

    def forward(self, observations: Float[Tensor, "m d"]) -> Float[Tensor, "m 1"]:
        """The values of observations, with the offset of the literal read-out if ``offset="centered"``.

        Raises:
            RuntimeError: The critic was never conditioned.
            ValueError: Observations of another shape.
        """
        if observations.ndim != 2 or observations.shape[-1] != self.n_features:
            raise ValueError(
                f"the critic expects observations of shape (m, {self.n_features}), got {tuple(observations.shape)}."
            )
        if not self.is_conditioned:
            raise RuntimeError(
                "the in-context critic has no context yet: nothing has conditioned it. Pass `callback=InContextCallback()` "
                "to `learn`, or call `critic.condition(context)`."
            )
        values = self._remembered(observations) if observations.device.type == "cpu" else self._evaluate(observations)
        return (values.to(observations.dtype) if observations.is_floating_point() else values).unsqueeze(-1)

    def _remembered(self, observations: Float[Tensor, "m d"], most: int = 2**16) -> Float[Tensor, m]:
        """The values of observations, computed once for each until the next context.

        An algorithm asks for the value of every observation of a rollout once while it collects and ``n_epochs`` times in its
        update; a look-up by the row's bytes is much cheaper than its kernel values, and gives the very same number.
        """
        rows = np.ascontiguousarray(observations.detach().numpy())
        keys: list[Any] = rows.view(np.dtype((np.void, rows.itemsize * self.n_features))).ravel().tolist()
        known = self._known
        values = [known.get(key) for key in keys]
        missing = [index for index, value in enumerate(values) if value is None]
        if missing:
            if len(known) > most:
                known.clear()
            fresh = self._evaluate(observations if len(missing) == len(keys) else observations[missing])
            for index, value in zip(missing, fresh.tolist(), strict=True):
                values[index] = known[keys[index]] = value
            if len(missing) == len(keys):  # while collecting, nearly always
                return fresh
        return torch.tensor(values, dtype=self.centers.dtype)

    @torch.no_grad()
    def values_of(self, evaluation: Evaluation, observations: Float[Tensor, "m d"]) -> Float[Tensor, m]:
        """V of an evaluation that need not be taken over, without the offset; the critic's own values stay as they are.

        Args:
            evaluation: Of :meth:`evaluate`.
            observations: (m, d), as for :meth:`forward`.

        Returns:
            (m,), in the reward units of the algorithm.
        """

        def values(states: Tensor) -> Tensor:
            return evaluation.value(self._coordinates(states, evaluation.mean, evaluation.scale))

        return self._by_task(values, observations.to(evaluation.mean))

    @torch.no_grad()
    def _evaluate(self, observations: Float[Tensor, "m d"]) -> Float[Tensor, m]:
        return self._by_task(self._values, observations.to(self.centers))

    def _by_task(self, values: Callable[[Tensor], Tensor], states: Float[Tensor, "m d"]) -> Float[Tensor, m]:
        """The values of states, each by its own task's value function, of a function that takes the tasks as a batch."""
        if self.n_tasks == 1:
            return values(states)
        # Rows are laid out one task a line, for one batched evaluation whatever the number of tasks.
        task = self.tasks_of(states)
        order = torch.argsort(task, stable=True)
        counts = torch.bincount(task, minlength=self.n_tasks)
        first = counts.cumsum(0) - counts
        slot = torch.empty_like(task)
        slot[order] = torch.arange(len(task), device=task.device) - first[task[order]]
        grid = states.new_zeros(self.n_tasks, int(counts.max()) if len(task) else 0, self.n_features)
        grid[task, slot] = states
        return values(grid)[task, slot]

    def offsets(self, observations: Float[Tensor, "m d"]) -> Float[Tensor, m]:
        """What :meth:`forward` adds to the value of each observation: b of its task."""
        if self.n_tasks == 1:
            return self.offset.expand(len(observations))
        return self.offset[self.tasks_of(observations)]

    def td_error_by_depth(self, depths: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 64)) -> dict[float, float]:
        """Root mean square TD error of the context after so many layers.

        A critic of infinite depth shows what layers of unit ``row_sum`` steps with its kernel would reach, and its own
        fixed point as depth ``math.inf``.
        """
        if self.context is None or self.value_function is None:
            return {}
        own, context = self.transformer, self.context
        errors = self.value_function.td_errors
        if not own.infinite:
            last = errors.shape[-2] - 1
            return {
                depth: _rms(errors[..., depth, :], context.mask) for depth in sorted({*depths, last}) if depth <= last
            }
        # A few hundred transitions tell a root mean square to some per cent, at a fraction of the cost; as many as there are
        # landmarks are as well compared with each other.
        rows = spread_rows(len(context), getattr(own, "n_landmarks", None) or 256, errors.device)
        sample = context[..., rows]
        layers = _unit_layers(own, max(depths), self.gamma).to(errors.device)
        if isinstance(layers, InContextTransformer):
            _, _, finite = layers.coefficients_by_depth(sample)  # a curve that rises is what it is there to show
        else:
            finite = layers.condition(sample).td_errors
        curve: dict[float, float] = {depth: _rms(finite[..., depth, :], sample.mask) for depth in depths}
        return {**curve, math.inf: _rms(errors[..., -1, rows], sample.mask)}

    def _values(self, states: Float[Tensor, "*t m d"]) -> Float[Tensor, "*t m"]:
        states = self._coordinates(states, self.state_mean, self.state_scale)
        # An empty center has the coefficient zero; only a kernel that is normalized over its centers must not see it.
        mask = None if self.kernel.positive_definite else self.center_mask
        return expand(self.kernel, self.centers, mask, self.coefficients, states) + self.constant

    def _coordinates(
        self, states: Float[Tensor, "*b m d"], mean: Float[Tensor, "*b 1 d"], scale: Float[Tensor, "*b 1 d"]
    ) -> Float[Tensor, "*b m d"]:
        """States as the kernel gets them."""
        if not self.standardize:
            return states
        # Farther than anything that was ever near the context: without an end, the products of a linear head have none either.
        return torch.sub(states, mean).div_(scale).clamp_(-_FARTHEST, _FARTHEST)

    def tasks_of(self, states: Float[Tensor, "m d"]) -> Tensor:
        """The number of the task that each state shows, (m,); 0 where there is only one."""
        # The largest entry, not the entry equal to 1: VecNormalize rescales the one-hot but keeps its order.
        return states[..., -self.n_tasks :].argmax(-1)

    def _add_up(self) -> None:
        """What the value of every state (of a task) contains, once: values are asked for at every step."""
        self.constant = (self.shift + self.offset).unsqueeze(-1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # The context's size is data, not architecture: buffers take the shape of what is loaded.
        for name in self._of_the_context:
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, getattr(self, name).new_empty(saved.shape, dtype=saved.dtype))
        # So do the constants of a kernel that takes them from the context.
        for name, constant in list(self.kernel.named_buffers()):
            saved = state_dict.get(f"{prefix}kernel.{name}")
            if saved is not None and saved.shape != constant.shape and "." not in name:
                setattr(self.kernel, name, constant.new_empty(saved.shape))
        self.context = self.value_function = None
        self._known.clear()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._add_up()

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        settings = f"standardize={self.standardize}, oldest_weight={self.oldest_weight:g}"
        return f"n_features={self.n_features}, n_tasks={self.n_tasks}, {settings}"


def _unit_layers(
    transformer: InContextTransformer | AdaptiveTransformer, depth: int, gamma: float
) -> InContextTransformer | AdaptiveTransformer:
    """A transformer of unit steps for one of infinite depth."""
    if isinstance(transformer, AdaptiveTransformer):
        layers = AdaptiveTransformer(
            transformer.log_bandwidths.exp(),
            transformer.log_ridges.exp(),
            transformer.metrics,
            n_layers=depth,
            gamma=gamma,
            value_shift=transformer.value_shift,
        )
        return layers
    algorithm = transformer.algorithm
    return InContextTransformer(
        transformer.kernel,
        gamma=gamma,
        n_layers=depth,
        algorithm=algorithm.name,
        trace_decay=algorithm.trace_decay if algorithm.name == "td_lambda" else None,
        value_shift=transformer.value_shift,
    )


def _unit(states: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b 1 d"], Float[Tensor, "*b 1 d"]]:
    shape = (*states.shape[:-2], 1, states.shape[-1])
    return states.new_zeros(shape), states.new_ones(shape)


def _rms(errors: Float[Tensor, "*b n"], mask: Bool[Tensor, "*b n"]) -> float:
    return float(errors[mask].square().mean().sqrt()) if bool(mask.any()) else 0.0
