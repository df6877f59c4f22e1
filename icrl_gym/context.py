"""Context: the transitions that a policy evaluation is made from, and the ring buffer that keeps the newest of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float

__all__ = ["Context", "TransitionBuffer"]


class Context:
    """A batch of transitions (s_j, r_j, s'_j, terminated_j), oldest first, as tensors.

    Leading dimensions ``...`` are batches of contexts. Contexts of unequal length are padded at the end and say so in
    ``mask``; what a padded place holds has no influence anywhere.

    Args:
        states: (..., n, d), or (..., n) for d = 1 when ``rewards`` has as many dimensions. Finite.
        rewards: (..., n), in the units of the environment. Finite.
        next_states: (..., n, d): where the transition led, *before* any reset.
        terminated: (..., n) bool. True: the episode ended here and nothing is bootstrapped past it.
        truncated: (..., n) bool, default all False. True: the episode was cut here (time limit, reset without an end).
            The value of the next state counts; only the chain of transitions is broken.
        mask: (..., n) bool, default all True. False: an empty place.
        weights: (..., n), default all 1: how much each transition counts, beside the others. Finite and not negative; a
            transition of weight 0 is an empty place.

    Tensors, arrays and lists are accepted; floats keep their precision (integers become the default dtype).

    Raises:
        ValueError: Shapes that do not fit together, a value that is not finite in a place that is not masked, or a negative weight.
        TypeError: ``terminated``, ``truncated`` or ``mask`` that hold anything but booleans.

    Source: He et al. 2026, section 3 (the context of a prompt).

    Example:
        >>> context = Context(states=[[0.0], [1.0]], rewards=[0.0, 1.0], next_states=[[1.0], [2.0]], terminated=[False, True])
        >>> context
        Context(n=2, d=1)
    """

    states: Float[Tensor, "*b n d"]
    rewards: Float[Tensor, "*b n"]
    next_states: Float[Tensor, "*b n d"]
    terminated: Bool[Tensor, "*b n"]
    truncated: Bool[Tensor, "*b n"]
    mask: Bool[Tensor, "*b n"]
    weights: Float[Tensor, "*b n"]

    def __init__(
        self,
        states: Any,
        rewards: Any,
        next_states: Any,
        terminated: Any,
        truncated: Any = None,
        mask: Any = None,
        weights: Any = None,
    ) -> None:
        self.states = _as_float("states", states)
        dtype, device = self.states.dtype, self.states.device
        self.rewards = _as_float("rewards", rewards).to(device=device, dtype=dtype)
        self.next_states = _as_float("next_states", next_states).to(device=device, dtype=dtype)
        if self.states.ndim == self.rewards.ndim:
            self.states = self.states.unsqueeze(-1)
            if self.next_states.ndim == self.rewards.ndim:
                self.next_states = self.next_states.unsqueeze(-1)
        shape = self.rewards.shape
        if self.states.ndim < 2 or self.states.shape[:-1] != shape:
            raise ValueError(
                f"Context: states must have shape (..., n, d) with one reward a transition; got states "
                f"{tuple(self.states.shape)} and rewards {tuple(shape)}."
            )
        if self.next_states.shape != self.states.shape:
            raise ValueError(
                f"Context: next_states must have the shape of states, {tuple(self.states.shape)}; "
                f"got {tuple(self.next_states.shape)}."
            )
        self.terminated = _as_bool("terminated", terminated, shape, device)
        self.truncated = _as_bool("truncated", truncated, shape, device, default=False)
        self.mask = _as_bool("mask", mask, shape, device, default=True)
        if weights is None:
            self.weights = self.mask.to(dtype)
        else:
            self.weights = self._checked_weights(weights)
            self.mask = self.mask & (self.weights > 0)
        for name in ("states", "rewards", "next_states"):
            self._require_finite(name)
            field = getattr(self, name)
            # An empty place may hold anything, NaN included; as zero it cannot leak through a product with a mask.
            empty = ~self.mask if field.ndim == len(shape) else ~self.mask.unsqueeze(-1)
            setattr(self, name, field.masked_fill(empty, 0.0))

    def _checked_weights(self, weights: Any) -> Tensor:
        """Weights in the context's type, zero in empty places."""
        shape = self.rewards.shape
        weights = _as_float("weights", weights).to(self.states)
        if weights.shape != shape:
            raise ValueError(
                f"Context: weights must have shape {tuple(shape)} like rewards, got {tuple(weights.shape)}."
            )
        bad = self.mask & ~(torch.isfinite(weights) & (weights >= 0))
        if bool(bad.any()):
            raise ValueError(
                f"Context: weights must be finite and not negative; {int(bad.sum())} of {int(self.mask.sum())} are not."
            )
        return weights.masked_fill(~self.mask, 0.0)

    def _require_finite(self, name: str) -> None:
        field = getattr(self, name)
        # A sum of large numbers can overflow, but what is not finite never adds up to what is: one fast pass for nearly all contexts.
        if bool(torch.isfinite(field.sum())):
            return
        bad = ~torch.isfinite(field)
        bad = bad.any(-1) if field.ndim > self.rewards.ndim else bad
        n_bad = int((bad & self.mask).sum())
        if n_bad:
            raise ValueError(
                f"Context: {name} must be finite; {n_bad} of {int(self.mask.sum())} transitions are not. "
                f"Drop those transitions, or set mask to False for them."
            )

    @classmethod
    def _of(cls, fields: dict[str, Tensor]) -> Context:
        """A context of parts of valid ones, which need no second look."""
        context = cls.__new__(cls)
        for name in _FIELDS:
            setattr(context, name, fields[name])
        return context

    @property
    def n_features(self) -> int:
        """The dimension d of a state."""
        return self.states.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions: () for one context."""
        return self.rewards.shape[:-1]

    @property
    def n_transitions(self) -> Tensor:
        """How many places hold a transition, a number a context: shape (...)."""
        return self.mask.sum(-1)

    @property
    def is_weighted(self) -> bool:
        """Whether any transition counts more or less than another one does by default."""
        return not torch.equal(self.weights, self.mask.to(self.weights))

    def weighted(self, weights: Any) -> Context:
        """The same transitions, with other weights.

        Args:
            weights: (..., n)

        Raises:
            ValueError: See :class:`Context`.
        """
        checked = self._checked_weights(weights)
        mask = self.mask & (checked > 0)
        fields = {name: getattr(self, name) for name in _FIELDS}
        if not torch.equal(mask, self.mask):  # what has no weight is an empty place
            for name in ("states", "rewards", "next_states"):
                field = fields[name]
                fields[name] = field.masked_fill(~mask if field.ndim == mask.ndim else ~mask.unsqueeze(-1), 0.0)
        return Context._of({**fields, "mask": mask, "weights": checked})

    def __len__(self) -> int:
        """The number n of places, empty ones included."""
        return self.rewards.shape[-1]

    def __repr__(self) -> str:
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        filled = "" if bool(self.mask.all()) else f", filled={self.n_transitions.tolist()}"
        return f"Context(n={len(self)}, d={self.n_features}{batch}{filled})"

    def __getitem__(self, index: Any) -> Context:
        """Transitions, by any index that torch understands; of a batch, contexts first and ``[..., rows]`` for transitions."""
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
            rows = index[1]
            return Context._of(
                {n: getattr(self, n)[(..., rows) if _n_dim(n) == -1 else (..., rows, slice(None))] for n in _FIELDS}
            )
        if not self.batch_shape and isinstance(index, int):
            index = slice(index, None if index == -1 else index + 1)
        return Context._of({name: getattr(self, name)[index] for name in _FIELDS})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in _FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # As arrays: a tensor would travel between processes through shared memory, one open file each.
        return Context, tuple(getattr(self, name).detach().cpu().numpy() for name in _FIELDS)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Context:
        """The same context on another device or in another floating-point type."""
        floats = {name: getattr(self, name).to(device=device, dtype=dtype) for name in _FLOATS}
        return Context._of({**floats, **{name: getattr(self, name).to(device=device) for name in _BOOLS}})

    @classmethod
    def from_minari(
        cls,
        dataset: Any,
        n: int | None = None,
        *,
        seed: int | None = None,
        episodes: Iterable[int] | None = None,
        root: str | PathLike[str] | None = None,
    ) -> Context:
        """Transitions of anybody's Minari dataset; see :func:`icrl_gym.datasets.context_from_minari`."""
        from icrl_gym.datasets import context_from_minari

        return context_from_minari(dataset, n, seed=seed, episodes=episodes, root=root)

    @staticmethod
    def cat(contexts: Sequence[Context]) -> Context:
        """One context that holds the transitions of several, one after the other (along n)."""
        if not contexts:
            raise ValueError("Context.cat: expected at least one context, got none.")
        return Context._of({n: torch.cat([getattr(c, n) for c in contexts], dim=_n_dim(n)) for n in _FIELDS})

    @staticmethod
    def stack(contexts: Sequence[Context]) -> Context:
        """A batch of contexts (a new first dimension), the shorter ones padded at the end and masked there."""
        if not contexts:
            raise ValueError("Context.stack: expected at least one context, got none.")
        n = max(len(c) for c in contexts)
        fields: dict[str, Tensor] = {}
        for name in _FIELDS:
            padded = []
            for context in contexts:
                field = getattr(context, name)
                missing = n - len(context)
                pad = (0, 0, 0, missing) if name in ("states", "next_states") else (0, missing)
                padded.append(torch.nn.functional.pad(field, pad))
            fields[name] = torch.stack(padded)
        return Context._of(fields)

    @staticmethod
    def empty(n_features: int, dtype: torch.dtype = torch.float64) -> Context:
        """A context of no transition at all, whose value is zero everywhere."""
        states = torch.zeros(0, n_features, dtype=dtype)
        return Context(states, torch.zeros(0, dtype=dtype), states, torch.zeros(0, dtype=torch.bool))


_FLOATS = ("states", "rewards", "next_states", "weights")
_BOOLS = ("terminated", "truncated", "mask")
_FIELDS = ("states", "rewards", "next_states", *_BOOLS, "weights")  # in the order of the constructor


def _n_dim(name: str) -> int:
    """The dimension of a field along which transitions are counted."""
    return -2 if name in ("states", "next_states") else -1


def as_tensor(value: Any) -> Tensor:
    """A tensor, an array (a copy of one that must not be written to: torch would warn of it) or nested lists as a tensor."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def _as_float(name: str, value: Any) -> Tensor:
    tensor = as_tensor(value)
    if tensor.is_complex():
        raise TypeError(f"Context: {name} must be real, got {tensor.dtype}.")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _as_bool(
    name: str, value: Any, shape: torch.Size, device: torch.device, default: bool | None = None
) -> Bool[Tensor, ...]:
    if value is None and default is not None:
        return torch.full(shape, default, dtype=torch.bool, device=device)
    array = as_tensor(value)
    if array.numel() == 0:
        array = array.bool()
    if array.dtype != torch.bool:
        raise TypeError(f"Context: {name} must be boolean, got {array.dtype}. Convert it with `.astype(bool)`.")
    if array.shape != shape:
        raise ValueError(f"Context: {name} must have shape {tuple(shape)} like rewards, got {tuple(array.shape)}.")
    return array.to(device)


class TransitionBuffer:
    """A ring buffer of the newest ``capacity`` transitions, behind every rolling context.

    Arrays are copied in and out: neither a reused observation buffer nor a change to what :meth:`context` returned
    reaches what is stored. Values must be finite: whoever records refuses others.

    Args:
        capacity: How many transitions are kept. At least 1.
        n_features: The dimension d of a flattened state.
        dtype: The floating-point type of the states; rewards are kept in float64.
    """

    def __init__(self, capacity: int, n_features: int, dtype: npt.DTypeLike = np.float32) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ValueError(f"the context's length must be a whole number of at least 1 transition, got {capacity!r}.")
        self.capacity, self.n_features = int(capacity), int(n_features)
        self._states = np.zeros((self.capacity, self.n_features), dtype)
        self._next_states = np.zeros((self.capacity, self.n_features), dtype)
        self._rewards = np.zeros(self.capacity, np.float64)
        self._terminated = np.zeros(self.capacity, np.bool_)
        self._truncated = np.zeros(self.capacity, np.bool_)
        self._head = 0  # where the next transition goes
        self._size = 0
        self._newest_is_last = False
        self.n_changes = 0  # moves whenever what is stored does

    def __len__(self) -> int:
        """How many transitions are stored: at most ``capacity``."""
        return self._size

    def add(
        self, state: np.ndarray, reward: float, next_state: np.ndarray, terminated: bool, truncated: bool = False
    ) -> None:
        """Store one transition, in place of the oldest when full.

        Args:
            state: (d,)
            reward: In the environment's units.
            next_state: (d,), before any reset.
            terminated: The episode ended here.
            truncated: The episode was cut here.
        """
        self.n_changes += 1
        head = self._head
        self._states[head] = state
        self._next_states[head] = next_state
        self._rewards[head] = reward
        self._terminated[head] = terminated
        self._truncated[head] = truncated
        self._head = head + 1 if head + 1 < self.capacity else 0
        if self._size < self.capacity:
            self._size += 1
        self._newest_is_last = True

    def skip(self) -> None:
        """Note that a transition was not stored: the newest one is no longer the last that happened."""
        self._newest_is_last = False

    def cut(self) -> None:
        """Mark the newest transition as truncated, if it does not end its episode already: nothing follows it."""
        newest = self._head - 1
        if self._size and self._newest_is_last and not self._terminated[newest]:
            self._truncated[newest] = True
            self.n_changes += 1

    def clear(self) -> None:
        """Forget every transition."""
        self._head = self._size = 0
        self._newest_is_last = False
        self.n_changes += 1

    def extend(self, context: Context) -> None:
        """Store the transitions of a context, oldest first, up to the capacity.

        Args:
            context: One context (no batch) of states with ``n_features`` entries.
        """
        if context.batch_shape or context.n_features != self.n_features:
            raise ValueError(f"expected one context of states with {self.n_features} entries, got {context!r}.")
        context = context[context.mask][-self.capacity :]
        for j in range(len(context)):
            self.add(
                context.states[j].numpy(force=True),
                float(context.rewards[j]),
                context.next_states[j].numpy(force=True),
                bool(context.terminated[j]),
                bool(context.truncated[j]),
            )

    def context(self, newest: int | None = None) -> Context:
        """The stored transitions, oldest first, as a :class:`Context` of copies in float64.

        Args:
            newest: Only so many of the newest ones; default all.
        """
        size = self._size if newest is None else min(int(newest), self._size)
        order = np.arange(self._head - size, self._head) % self.capacity
        return Context(
            self._states[order].astype(np.float64),
            self._rewards[order],
            self._next_states[order].astype(np.float64),
            self._terminated[order],
            self._truncated[order],
        )
