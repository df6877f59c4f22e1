"""How close learned matrices come to the construction, in the matrices and in what they compute.

Four measures, after Wang et al. 2025 (sections 5 and 6): the matrices themselves, the weights that a context leaves behind
(implicit weights), the values, and what the values are sensitive to. Matrices are compared by what can be told from the
outside: K and Q enter by K^T Q alone with a kernel of inner products, and with the linear kernel a factor may move between
K^T Q and V.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from icrl_gym._typing import Float
from icrl_gym.context import Context
from icrl_gym.kernels import LinearKernel
from icrl_gym.learned import LearnedLayer, LearnedTransformer
from icrl_gym.transformer import InContextTransformer

__all__ = [
    "Similarity",
    "cosine",
    "implicit_weights",
    "layer_similarity",
    "matched_construction",
    "matrices",
    "sensitivity",
    "similarity",
    "value_difference",
]

Values = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Similarity:
    """Learned matrices beside the construction; cosines are 1 for the same direction.

    Attributes:
        map: Cosine of sum_h V_h (x) K_h^T Q_h, mean over layers: the whole bilinear map of a linear layer.
        value: Cosine of V_h, mean over heads and layers.
        product: Cosine of K_h^T Q_h, likewise.
        implicit_weight: Cosine of the implicit weights, mean over contexts.
        value_difference: Mean squared difference of the values over the mean square of the construction's.
        sensitivity: Cosine of the gradients of the value with respect to the query's state, mean over queries.
    """

    map: float
    value: float
    product: float
    implicit_weight: float
    value_difference: float
    sensitivity: float

    def as_dict(self) -> dict[str, float]:
        """By name, as JSON can hold it."""
        return asdict(self)


def cosine(one: Float[Tensor, "*b k"], other: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """<one, other> / (|one| |other|) along the last dimension; NaN where either is zero."""
    return (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))


def matrices(layer: LearnedLayer) -> tuple[Float[Tensor, "h r r"], Float[Tensor, "h r r"]]:
    """K_h^T Q_h and V_h of each head: Wang et al.'s Q and P, in this package's tokens (see :mod:`icrl_gym.learned`)."""
    products = torch.stack([head.key.T @ head.query for head in layer.heads])
    return products.detach(), torch.stack([head.value for head in layer.heads]).detach()


def layer_similarity(learned: LearnedLayer, constructed: LearnedLayer, linear: bool) -> tuple[float, float, float]:
    """Cosines of the map, of V and of K^T Q between two layers of one form.

    Args:
        learned: A layer.
        constructed: What it is compared with.
        linear: The kernel is linear: (-V, -K^T Q) is the same map as (V, K^T Q), and counts as the same.

    Returns:
        ``(map, value, product)`` as :class:`Similarity` has them, the last two as means over heads.
    """
    (a, v), (b, w) = matrices(learned), matrices(constructed)
    in_map = _inner(a, v, b, w) / (_inner(a, v, a, v) * _inner(b, w, b, w)) ** 0.5
    value, product = cosine(v.flatten(1), w.flatten(1)), cosine(a.flatten(1), b.flatten(1))
    if linear:
        sign = value.sign()
        value, product = sign * value, sign * product
    return float(in_map), float(value.mean()), float(product.mean())


def matched_construction(learned: LearnedTransformer) -> InContextTransformer:
    """The construction whose step sizes are read off the learned layers.

    The map of each layer, sum_h V_h (x) K_h^T Q_h, is projected onto the construction's with a unit step, where it reads the
    states of the columns that ask: a query has no s', so with one layer nothing else is learned, and nothing else counts.
    Only with the linear kernel are scales of the matrices step sizes; with another one the construction is returned as it was
    given.

    Args:
        learned: Of L layers.

    Returns:
        A construction of L layers. A projection may be negative: such a layer climbs where TD descends.
    """
    given = learned.construction
    if not isinstance(given.kernel, LinearKernel):
        return given
    unit = learned.constructed(torch.ones_like(given.step_sizes[:1]).squeeze(0)) if learned.n_layers else None
    steps = []
    for index in range(learned.n_layers):
        assert unit is not None
        a, v = matrices(_layer(learned, index))
        b, w = matrices(unit)
        b = b * (torch.arange(b.shape[-1]) < learned.n_features)
        steps.append(_inner(a, v, b, w) / _inner(b, w, b, w))
    return InContextTransformer(
        given.kernel,
        torch.stack(steps) if steps else given.step_sizes,
        float(given.gamma),
        given.step_normalization,
        value_shift=given.value_shift,
        offset=given.offset,
    )


def implicit_weights(values: Float[Tensor, "*b m"], states: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b d"]:
    """The weights w of the best linear approximation <w, s> of values over states, by least squares.

    A linear transformer's value is linear in the query, and then it is exact.

    Args:
        values: (..., m)
        states: (..., m, d), m >= d.

    Raises:
        ValueError: Fewer states than features.
    """
    if states.shape[-2] < states.shape[-1]:
        raise ValueError(
            f"implicit weights of {states.shape[-1]} features need as many states, got {states.shape[-2]}. Ask for more queries."
        )
    # gelsd: columns may depend on each other (entries of a state that never change).
    return torch.linalg.lstsq(states, values.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)


def value_difference(learned: Float[Tensor, "*b m"], constructed: Float[Tensor, "*b m"]) -> float:
    """Mean squared difference of values, over the mean square of the construction's."""
    return float((learned - constructed).square().mean() / constructed.square().mean())


def sensitivity(values: Values, states: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
    """The gradient of each query's value with respect to its state.

    Args:
        values: From states (..., m, d) to values (..., m), each of its own state alone.
        states: (..., m, d)
    """
    asked = states.detach().clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(values(asked).sum(), asked)
    return gradient


def similarity(
    learned: LearnedTransformer,
    context: Context,
    query_states: Float[Tensor, "*b m d"],
    reference: InContextTransformer | None = None,
) -> Similarity:
    """Compare learned matrices with the construction.

    Args:
        learned: With any matrices.
        context: (...) contexts of n transitions.
        query_states: (..., m, d), m >= d.
        reference: Default :func:`matched_construction`.

    Returns:
        The measures; NaN where one has no answer (a value that is zero everywhere).

    Raises:
        ValueError: Fewer queries than features, or a form that cannot hold the construction.
        FloatingPointError: The layers of either diverge.

    Source: Wang et al. 2025, sections 5 and 6.
    """
    reference = matched_construction(learned) if reference is None else reference
    linear = isinstance(learned.construction.kernel, LinearKernel)
    states = query_states.to(context.states)
    # Steps that were learned may be such that TD's layers diverge; by how much the two differ then is the result.
    conditioned = reference.condition(context, most_growth=math.inf)

    def of_learned(asked: Tensor) -> Tensor:
        return learned.values(context, asked)

    def of_reference(asked: Tensor) -> Tensor:
        return conditioned(asked) + conditioned.offset.unsqueeze(-1)

    with torch.no_grad():
        ours, theirs = of_learned(states), of_reference(states)
    # Directions do not depend on the step sizes, and one below zero would turn the construction around.
    unit = torch.ones((), dtype=learned.construction.step_sizes.dtype)
    pairs = [
        layer_similarity(_layer(learned, index), learned.constructed(unit), linear) for index in range(learned.n_layers)
    ]
    in_map, value, product = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 3).mean(0).tolist()
    weights = cosine(implicit_weights(ours, states), implicit_weights(theirs, states))
    gradients = cosine(sensitivity(of_learned, states), sensitivity(of_reference, states))
    return Similarity(
        in_map,
        value,
        product,
        float(weights.nanmean()),
        value_difference(ours, theirs),
        float(gradients.nanmean()),
    )


def _layer(learned: LearnedTransformer, index: int) -> LearnedLayer:
    layer = learned.layers[0 if learned.shared_layers else index]
    assert isinstance(layer, LearnedLayer)
    return layer


def _inner(a: Tensor, v: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """<sum_h V_h (x) A_h, sum_g W_g (x) B_g>, without forming the tensors."""
    return (torch.einsum("hij,gij->hg", v, w) * torch.einsum("hij,gij->hg", a, b)).sum()
