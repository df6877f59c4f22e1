"""Kernels k(keys, queries): what one attention head compares states with."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from icrl_gym._typing import Bool, Float
from icrl_gym.distances import Distances, few_pairs, map_distances, plain_distances, product_error, row_blocks

__all__ = [
    "ExponentialKernel",
    "Kernel",
    "LaplacianKernel",
    "LinearKernel",
    "MaternKernel",
    "NystromKernel",
    "RBFKernel",
    "ReLUKernel",
    "SoftmaxKernel",
    "SumKernel",
    "make_kernel",
    "median_distance",
    "spread_rows",
]


class Kernel(nn.Module):
    """k(keys, queries), a number for each pair of a key state and a query state.

    A kernel has no gradient of its own accord: its constants are buffers, so that they move with ``.to(device)``, are
    saved in a ``state_dict``, and never reach an optimizer. ``kernel.temperature.requires_grad_()`` makes one trainable.
    """

    positive_definite: ClassVar[bool] = True
    """Whether every matrix k(S, S) is symmetric and positive semi-definite, as landmarks require."""

    @abstractmethod
    def pairwise(
        self, keys: Float[Tensor, "*b n d"], queries: Float[Tensor, "*b m d"], mask: Bool[Tensor, "*b n"] | None
    ) -> Float[Tensor, "*b n m"]:
        """The formula of the kernel; ``mask`` matters only to one that is normalized over its keys."""

    def forward(
        self,
        keys: Float[Tensor, "*#b n d"],
        queries: Float[Tensor, "*#b m d"],
        mask: Bool[Tensor, "*#b n"] | None = None,
    ) -> Float[Tensor, "*#b n m"]:
        """Compare every key with every query.

        Args:
            keys: (..., n, d)
            queries: (..., m, d)
            mask: (..., n) bool, False for a key that does not exist; its row is zero.

        Returns:
            (..., n, m): k(key_j, query_i) in row j, column i.
        """
        values = self.pairwise(keys, queries, mask)
        # Filled, not multiplied: an empty place may hold an overflow, and inf * 0 is not 0.
        return values if mask is None else values.masked_fill(~mask.unsqueeze(-1), 0.0)

    def expand(
        self,
        keys: Float[Tensor, "*#b n d"],
        coefficients: Float[Tensor, "*#b n"],
        queries: Float[Tensor, "*#b m d"],
        mask: Bool[Tensor, "*#b n"] | None = None,
    ) -> Float[Tensor, "*#b m"]:
        """sum_j c_j k(key_j, query_i), without keeping the kernel values.

        Args:
            keys: (..., n, d)
            coefficients: (..., n), zero for a key that does not exist.
            queries: (..., m, d)
            mask: (..., n) bool, False for a key that does not exist.

        Returns:
            (..., m)
        """
        values = self(keys, queries, mask)
        return coefficients @ values if coefficients.ndim == 1 else (coefficients.unsqueeze(-2) @ values).squeeze(-2)

    def adapted(self, states: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"] | None = None) -> Kernel:
        """The kernel with everything it takes from a context (a ``"median"`` temperature) filled in.

        Args:
            states: (..., n, d), the states of the context.
            mask: (..., n) bool, False for an empty place.
        """
        return self

    def selected(self, rows: slice | int) -> Kernel:
        """The kernel of some contexts of the batch that it was adapted to.

        Args:
            rows: Of the first dimension; a single one leaves none.
        """
        return self

    def config(self) -> dict[str, Any]:
        """What :func:`make_kernel` needs to build the same kernel again, as JSON can hold it.

        Raises:
            TypeError: A kernel of one's own, which no name stands for.
        """
        if type(self) not in _NAMES:
            raise TypeError(
                f"{type(self).__name__} is not a kernel of this package, so it cannot be saved by name; it works everywhere else. "
                f"Kernels that can be saved: {', '.join(_NAMES.values())}."
            )
        return {"name": _NAMES[type(self)]}

    def __add__(self, other: object) -> SumKernel:
        return SumKernel([self, other]) if isinstance(other, Kernel) else NotImplemented

    def __rmul__(self, weight: Any) -> SumKernel:
        return NotImplemented if isinstance(weight, Kernel) else SumKernel([self], [weight])


class _TemperatureKernel(Kernel):
    """A kernel with one temperature.

    Args:
        temperature: Positive, in the units that the kernel's formula gives it; or ``"median"``, the scale of the median
            distance between the states of the context, found anew for each context.
    """

    _power: ClassVar[int] = 1
    """The temperature has the units of a distance to this power."""

    temperature: Tensor

    def __init__(self, temperature: float | Tensor | str = 1.0) -> None:
        super().__init__()
        self.from_median = isinstance(temperature, str)
        if isinstance(temperature, str):
            if temperature != "median":
                raise ValueError(
                    f'{type(self).__name__}: temperature must be a positive number or "median", got {temperature!r}.'
                )
            temperature = 1.0
        # float64: 0.1 as a float32 is off by 1e-8, which is more than the exactness promised in float64.
        value = temperature if isinstance(temperature, Tensor) else torch.as_tensor(temperature, dtype=torch.float64)
        if not bool(torch.isfinite(value).all()) or bool((value <= 0).any()):
            raise ValueError(
                f"{type(self).__name__}: temperature must be positive and finite, got {value.tolist()}. "
                f'Use "median" to take it from the context.'
            )
        self.register_buffer("temperature", value)

    def adapted(self, states: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"] | None = None) -> Kernel:
        """See :meth:`Kernel.adapted`."""
        return type(self)(median_distance(states, mask) ** self._power) if self.from_median else self

    def selected(self, rows: slice | int) -> Kernel:
        """See :meth:`Kernel.selected`."""
        return type(self)(self.temperature[rows]) if self.temperature.ndim else self

    def _scale(self, like: Tensor) -> Tensor:
        """The temperature, ready to divide a (..., n, m) matrix."""
        temperature = self.temperature.to(like)
        return temperature[..., None, None] if temperature.ndim else temperature

    def config(self) -> dict[str, Any]:
        """See :meth:`Kernel.config`."""
        return {**super().config(), "temperature": "median" if self.from_median else self.temperature.tolist()}

    def extra_repr(self) -> str:
        """The temperature, for ``repr``."""
        if self.from_median:
            return "temperature='median'"
        shape = tuple(self.temperature.shape)
        return f"temperature=<{shape} tensor>" if shape else f"temperature={float(self.temperature):g}"


class _RadialKernel(_TemperatureKernel):
    """A kernel of the distance alone, computed block by block where that pays."""

    _most_error: ClassVar[float] = 0.0
    """Squared distances over the squared scale may be off by so much where the kernel is smooth in them; 0 where it is not."""

    @abstractmethod
    def of_distance(self, distance: Tensor, temperature: Tensor) -> Tensor:
        """The formula, of distances and a temperature ready to divide them."""

    def of_squared(self, squared: Tensor, temperature: Tensor) -> Tensor:
        """The same, of squared distances, which it may overwrite."""
        return self.of_distance(squared.sqrt_(), temperature)

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`."""
        if self._is_plain(keys, queries):
            return self.of_distance(plain_distances(keys, queries), self._scale(keys))
        temperature = self.temperature.double()
        batch = torch.broadcast_shapes(keys.shape[:-2], queries.shape[:-2], temperature.shape)
        temperatures = temperature.expand(batch).reshape(-1)
        return map_distances(
            keys.expand(*batch, *keys.shape[-2:]),
            queries,
            lambda squared, index: self.of_squared(squared, temperatures[index]),
            self._most_error * float(temperature.min()),
        )

    def expand(self, keys: Tensor, coefficients: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :meth:`Kernel.expand`: a block of kernel values is used while it is still in the processor's cache."""
        if self._is_plain(keys, queries) or (torch.is_grad_enabled() and coefficients.requires_grad):
            return super().expand(keys, coefficients, queries, mask)
        if mask is not None:
            keys, coefficients = keys.masked_fill(~mask.unsqueeze(-1), 0.0), coefficients.masked_fill(~mask, 0.0)
        temperature = self.temperature.double()
        parts = (keys.shape[:-2], queries.shape[:-2], coefficients.shape[:-1], temperature.shape)
        batch = torch.broadcast_shapes(*parts)
        sums = keys.new_empty(*batch, queries.shape[-2])
        rows = zip(
            keys.expand(*batch, *keys.shape[-2:]).reshape(-1, *keys.shape[-2:]),
            coefficients.double().expand(*batch, -1).reshape(-1, coefficients.shape[-1]),
            queries.expand(*batch, *queries.shape[-2:]).reshape(-1, *queries.shape[-2:]),
            temperature.expand(batch).reshape(-1),
            sums.reshape(-1, queries.shape[-2]),
            strict=True,
        )
        for some_keys, weights, some_queries, scale, values in rows:
            distances = Distances(some_keys)
            right, largest = distances.prepared(some_queries)
            exact = not product_error(largest) <= self._most_error * float(scale)
            for block in row_blocks(len(some_queries), len(some_keys), keys.device):
                squared = right[block] @ distances.left.T
                if exact:
                    squared = distances.renew(squared, some_queries[block], some_keys, largest)
                values[block] = self.of_squared(squared.clamp_min_(0.0), scale) @ weights
        return sums

    def _is_plain(self, keys: Tensor, queries: Tensor) -> bool:
        wants_gradient = keys.requires_grad or queries.requires_grad or self.temperature.requires_grad
        return few_pairs(keys, queries) or (torch.is_grad_enabled() and wants_gradient)


class RBFKernel(_RadialKernel):
    """k(u, w) = exp(-|u - w|^2 / (2 temperature)): nearby states have nearby values.

    Args:
        temperature: In squared units of the state, or ``"median"`` for the square of the median distance.

    Source: He et al. 2026, section 4.

    Example:
        >>> import torch
        >>> RBFKernel(temperature=0.5)(torch.tensor([[0.0]]), torch.tensor([[0.0], [1.0]]))
        tensor([[1.0000, 0.3679]])
    """

    _power = 2
    _most_error = 2e-13  # of k, half of it

    def of_distance(self, distance: Tensor, temperature: Tensor) -> Tensor:
        """exp(-|u - w|^2 / (2 temperature))."""
        return torch.exp(distance.square() * (-0.5 / temperature))

    def of_squared(self, squared: Tensor, temperature: Tensor) -> Tensor:
        """The same, of |u - w|^2."""
        return squared.mul_(-0.5 / temperature).exp_()


class LaplacianKernel(_RadialKernel):
    """k(u, w) = exp(-|u - w| / temperature): continuous values that need not be smooth.

    The norm is the Euclidean one, so this is the Matern 1/2 (Ornstein-Uhlenbeck) kernel; scikit-learn's
    ``laplacian_kernel`` takes the sum of absolute differences instead.

    Args:
        temperature: In units of the state, or ``"median"`` for the median distance.
    """

    def of_distance(self, distance: Tensor, temperature: Tensor) -> Tensor:
        """exp(-|u - w| / temperature)."""
        return torch.exp(distance / -temperature)

    def of_squared(self, squared: Tensor, temperature: Tensor) -> Tensor:
        """The same, of |u - w|^2."""
        return squared.sqrt_().div_(-temperature).exp_()


class MaternKernel(_RadialKernel):
    """k(u, w) = (1 + x) exp(-x) with x = sqrt(3) |u - w| / temperature: Matern 3/2, values with one derivative.

    Args:
        temperature: The length scale, in units of the state, or ``"median"`` for the median distance.

    Source: Rasmussen and Williams 2006, section 4.2.
    """

    def of_distance(self, distance: Tensor, temperature: Tensor) -> Tensor:
        """(1 + x) exp(-x), x = sqrt(3) |u - w| / temperature."""
        x = distance * (math.sqrt(3) / temperature)
        return torch.exp(-x).mul(1 + x)


class ExponentialKernel(_TemperatureKernel):
    """k(u, w) = exp(<u, w> / temperature): softmax attention before it is normalized.

    It grows without bound away from the origin: center the states first.

    Args:
        temperature: In squared units of the state, or ``"median"`` for the square of the median distance.

    Source: He et al. 2026, section 4.
    """

    _power = 2

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`."""
        return torch.exp(_inner(keys, queries) / self._scale(keys))


class SoftmaxKernel(_TemperatureKernel):
    """k(u_j, w) = exp(<u_j, w> / temperature) / sum_i exp(<u_i, w> / temperature): softmax attention.

    Normalized over the keys, so it depends on the whole context and is not symmetric: no landmarks.

    Args:
        temperature: In squared units of the state, or ``"median"`` for the square of the median distance.

    Source: He et al. 2026, section 4.
    """

    positive_definite = False
    _power = 2

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`."""
        logits = _inner(keys, queries) / self._scale(keys)
        if mask is not None:
            logits = logits.masked_fill(~mask.unsqueeze(-1), -math.inf)
        return torch.softmax(logits, dim=-2)


class ReLUKernel(Kernel):
    """k(u, w) = max(<u, w>, 0): ReLU attention. Not positive definite in general: no landmarks.

    Source: He et al. 2026, section 4.
    """

    positive_definite = False

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`."""
        return _inner(keys, queries).relu()


class LinearKernel(Kernel):
    """k(u, w) = <u, w>: linear attention, whose values are linear in the state.

    Args:
        per_feature: <u, w> / d, which is about 1 for a standardized state and itself, as the other kernels are, however many
            features there are.

    Source: Wang et al. 2025 (linear transformers implement TD in context).
    """

    def __init__(self, per_feature: bool = False) -> None:
        super().__init__()
        self.per_feature = bool(per_feature)

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`."""
        return _inner(keys / max(keys.shape[-1], 1) if self.per_feature else keys, queries)

    def expand(self, keys: Tensor, coefficients: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :meth:`Kernel.expand`: <sum_j c_j key_j, query>, one product of d entries a query."""
        if mask is not None:
            keys, coefficients = keys.masked_fill(~mask.unsqueeze(-1), 0.0), coefficients.masked_fill(~mask, 0.0)
        weights = (coefficients.unsqueeze(-2) @ keys).transpose(-1, -2)
        values = (queries @ weights).squeeze(-1)
        return values / max(keys.shape[-1], 1) if self.per_feature else values

    def config(self) -> dict[str, Any]:
        """See :meth:`Kernel.config`."""
        return {**super().config(), **({"per_feature": True} if self.per_feature else {})}

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return "per_feature=True" if self.per_feature else ""


class SumKernel(Kernel):
    """k = sum_h weight_h k_h: several kernels at once, for values with structure at several scales.

    The function space of the sum contains that of each part (Aronszajn 1950, section 6). Written as an operation:

        >>> RBFKernel(0.1) + 0.5 * RBFKernel(10.0)
        SumKernel(
          (kernels): ModuleList(
            (0): RBFKernel(temperature=0.1)
            (1): RBFKernel(temperature=10)
          )
        )

    Args:
        kernels: At least one kernel. Sums among them are flattened.
        weights: One a kernel, positive; default all 1.
    """

    weights: Tensor

    def __init__(self, kernels: Sequence[Kernel], weights: Sequence[float] | Tensor | None = None) -> None:
        super().__init__()
        if not kernels:
            raise ValueError("SumKernel: expected at least one kernel, got none.")
        values = torch.ones(len(kernels)).double() if weights is None else torch.as_tensor(weights, dtype=torch.float64)
        if values.shape != (len(kernels),) or not bool(torch.isfinite(values).all()) or bool((values <= 0).any()):
            raise ValueError(
                f"SumKernel: expected {len(kernels)} positive weights, one a kernel, got {values.tolist()}."
            )
        flat: list[Kernel] = []
        flat_weights: list[Tensor] = []
        for kernel, weight in zip(kernels, values, strict=True):
            flat.extend(kernel.parts if isinstance(kernel, SumKernel) else [kernel])
            flat_weights.extend(weight * w for w in (kernel.weights if isinstance(kernel, SumKernel) else [1.0]))
        self.kernels = nn.ModuleList(flat)
        self._parts = tuple(
            flat
        )  # of the same modules: a ModuleList is slow to go through, and values are asked for at every step
        self.register_buffer("weights", torch.stack(flat_weights))

    @property
    def parts(self) -> Sequence[Kernel]:
        """The kernels that are added."""
        return self._parts

    @property
    def positive_definite(self) -> bool:  # type: ignore[override]
        """Whether every part is positive definite."""
        return all(kernel.positive_definite for kernel in self.parts)

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`."""
        values = [kernel.pairwise(keys, queries, mask) for kernel in self.parts]
        return functools.reduce(torch.add, self._weighted(values))

    def _weighted(self, values: Sequence[Tensor]) -> list[Tensor]:
        if not self.weights.requires_grad and all(weight == 1.0 for weight in self.weights.tolist()):
            return list(values)
        return [w * value for w, value in zip(self.weights.to(values[0]), values, strict=True)]

    def expand(self, keys: Tensor, coefficients: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :meth:`Kernel.expand`: each part in its own way."""
        parts = [kernel.expand(keys, coefficients, queries, mask) for kernel in self.parts]
        return functools.reduce(torch.add, self._weighted(parts))

    def adapted(self, states: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"] | None = None) -> Kernel:
        """See :meth:`Kernel.adapted`."""
        kernels = [kernel.adapted(states, mask) for kernel in self.parts]
        unchanged = all(new is old for new, old in zip(kernels, self.parts, strict=True))
        return self if unchanged else SumKernel(kernels, self.weights)

    def selected(self, rows: slice | int) -> Kernel:
        """See :meth:`Kernel.selected`."""
        return SumKernel([kernel.selected(rows) for kernel in self.parts], self.weights)

    def config(self) -> dict[str, Any]:
        """See :meth:`Kernel.config`."""
        kernels = [kernel.config() for kernel in self.parts]
        return {**super().config(), "kernels": kernels, "weights": self.weights.tolist()}


class NystromKernel(Kernel):
    """k(u, Z) k(Z, Z)^+ k(Z, w): a kernel of rank at most M, through M landmark states Z.

    It is the inner product of M-dimensional features phi(u) = k(Z, Z)^(-1/2) k(Z, u), so everything that is quadratic in
    the number of transitions becomes linear. On the landmarks themselves it equals the base kernel.

    Args:
        base: A positive definite kernel.
        landmarks: (..., M, d)
        mask: (..., M) bool, False for a landmark that does not exist.

    Raises:
        ValueError: The base kernel is not positive definite.

    Source: Williams and Seeger 2001; Xiong et al. 2021 (Nystromformer) for its use in attention.
    """

    _cutoff = 1e-10
    """Eigenvalues below this part of the largest are rounding, not kernel: duplicated landmarks make them."""

    landmarks: Tensor
    mask: Tensor
    root: Tensor

    def __init__(
        self, base: Kernel, landmarks: Float[Tensor, "*b M d"], mask: Bool[Tensor, "*b M"] | None = None
    ) -> None:
        super().__init__()
        if not base.positive_definite:
            raise ValueError(
                f"landmarks need a positive definite kernel, got {base}. Use RBF, Laplacian, Matern, exponential or linear "
                f"attention, or n_landmarks=None."
            )
        self.base = base
        self.register_buffer("landmarks", landmarks)
        self.register_buffer(
            "mask", landmarks.new_ones(landmarks.shape[:-1], dtype=torch.bool) if mask is None else mask
        )
        # In float64 whatever the states are: k(Z, Z) is as good as singular for smooth kernels.
        gram = base(landmarks.double(), landmarks.double(), self.mask)
        gram = gram.masked_fill(~self.mask.unsqueeze(-2), 0.0)
        eigenvalues, eigenvectors = torch.linalg.eigh(gram)
        threshold = self._cutoff * eigenvalues.amax(-1, keepdim=True) if eigenvalues.shape[-1] else eigenvalues
        kept = (eigenvalues > threshold) & (eigenvalues > 0)
        inverse_root = torch.where(kept, eigenvalues.clamp_min(1e-300).rsqrt(), 0.0)
        self.register_buffer("root", eigenvectors * inverse_root.unsqueeze(-2))  # (..., M, M): U Lambda^(-1/2)

    def selected(self, rows: slice | int) -> Kernel:
        """See :meth:`Kernel.selected`."""
        return NystromKernel(self.base.selected(rows), self.landmarks[rows], self.mask[rows])

    def features(self, states: Float[Tensor, "*#b n d"]) -> Float[Tensor, "*#b n M"]:
        """phi(s), with k(u, w) = <phi(u), phi(w)>."""
        return self.base(self.landmarks, states, self.mask).transpose(-1, -2) @ self.root.to(states)

    def pairwise(self, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Kernel.pairwise`."""
        return self.features(keys) @ self.features(queries).transpose(-1, -2)


_NAMES: dict[type[Kernel], str] = {
    RBFKernel: "rbf",
    LaplacianKernel: "laplacian",
    MaternKernel: "matern",
    ExponentialKernel: "exponential",
    SoftmaxKernel: "softmax",
    ReLUKernel: "relu",
    LinearKernel: "linear",
    SumKernel: "sum",
    NystromKernel: "nystrom",
}


def make_kernel(name: str, temperature: float | str | None = None, **options: Any) -> Kernel:
    """A kernel by its name, as the command line and saved weights write it.

    Args:
        name: ``"rbf"``, ``"laplacian"``, ``"matern"``, ``"exponential"``, ``"softmax"``, ``"relu"``, ``"linear"`` or
            (with ``kernels`` and ``weights``) ``"sum"``. Two or more with a plus between them are added up, as in
            ``"laplacian+linear"``, a linear one ``per_feature``.
        temperature: For those that have one: positive or ``"median"``; default ``"median"``.
        options: ``per_feature`` for ``"linear"``; ``kernels``, a list of such arguments as dictionaries, and ``weights``, for
            ``"sum"``.

    Raises:
        ValueError: No kernel of that name, a temperature for one that has none, or an option that it does not know.
    """
    if "+" in name:
        if options:
            raise ValueError(
                f'the kernel {name!r} takes no {", ".join(sorted(options))}; add kernels up with "sum" for that.'
            )
        parts = name.split("+")
        if temperature is not None and set(parts) <= _WITHOUT_TEMPERATURE:
            raise ValueError(f"the {name} kernel has no temperature, got {temperature!r}; leave it out.")
        return SumKernel(
            [
                make_kernel(part, None if part in _WITHOUT_TEMPERATURE else temperature, **_AMONG_OTHERS.get(part, {}))
                for part in parts
            ]
        )
    classes: dict[str, Callable[..., Kernel]] = {n: c for c, n in _NAMES.items() if c is not NystromKernel}
    if name not in classes:
        raise ValueError(
            f"unknown kernel {name!r}; expected one of {', '.join(classes)}, or two of them with a + between them."
        )
    known = {"sum": {"kernels", "weights"}, "linear": {"per_feature"}}.get(name, set())
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"the {name} kernel takes no {', '.join(unknown)}.")
    if name == "sum" and "kernels" not in options:
        raise ValueError("the sum kernel needs kernels, a list of the arguments of each part.")
    if name in _WITHOUT_TEMPERATURE:
        if temperature is not None:
            raise ValueError(f"the {name} kernel has no temperature, got {temperature!r}; leave it out.")
        if name == "sum":
            return SumKernel([make_kernel(**config) for config in options["kernels"]], options.get("weights"))
        return classes[name](**options)
    return classes[name]("median" if temperature is None else temperature)


_WITHOUT_TEMPERATURE = {"relu", "linear", "sum"}
_AMONG_OTHERS: dict[str, dict[str, Any]] = {"linear": {"per_feature": True}}


def median_distance(
    states: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"] | None = None, most: int = 512
) -> Float[Tensor, "*b"]:
    """The median of the positive distances between states: the scale of a context.

    Of an even number of distances it is the lower of the two in the middle, one that occurs, where NumPy takes their mean.

    Args:
        states: (..., n, d)
        mask: (..., n) bool, False for an empty place.
        most: At most so many states are compared with each other, evenly spread over the context.

    Returns:
        (...): 1 where there is no pair of different states, so that the scale is always positive and finite.
    """
    batch = states.shape[:-2]
    flat = states.reshape(batch.numel(), *states.shape[-2:])
    valid = states.new_ones(flat.shape[:-1], dtype=torch.bool) if mask is None else mask.reshape(flat.shape[:-1])
    medians = []
    for rows, present in zip(flat, valid, strict=True):
        chosen = rows[present]
        chosen = chosen[spread_rows(len(chosen), most, device=chosen.device)]
        distances = torch.nn.functional.pdist(chosen) if len(chosen) > 1 else chosen.new_zeros(0)
        distances = distances[distances > 0]
        medians.append(distances.median() if len(distances) else chosen.new_ones(()))
    return torch.stack(medians).reshape(batch) if medians else states.new_ones(batch)


def spread_rows(
    n: int, most: int, device: torch.device | None = None, weights: Float[Tensor, n] | None = None
) -> Tensor:
    """At most ``most`` of n rows, one from each of as many stretches of equal length, in order.

    With weights (n,), all positive, stretches are of equal weight instead; a row that is heavier than a stretch is taken once.

    So all time, and every environment of a pooled context, is represented. Which row of its stretch is taken goes round by
    the golden ratio: a constant stride would meet episodes of a fixed length at the same few steps again and again.
    """
    count = min(n, most)
    turn = torch.arange(count, device=device, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2) % 1.0
    if weights is not None and n > most:
        reached = weights.double().cumsum(-1)
        place = (torch.arange(count, device=device) + turn) * (reached[-1] / count)
        return torch.searchsorted(reached, place, right=True).clamp_max(n - 1).unique()
    stretch = torch.arange(count + 1, device=device) * n // max(count, 1)
    start, width = stretch[:-1], stretch.diff()
    return start + (turn * width).long()


def _inner(keys: Float[Tensor, "*#b n d"], queries: Float[Tensor, "*#b m d"]) -> Float[Tensor, "*#b n m"]:
    return keys @ queries.transpose(-1, -2)
