"""State metrics: in what units a kernel measures the distance of states, each found in the context itself.

| metric         | a feature is measured in units of                                               |
| -------------- | ------------------------------------------------------------------------------- |
| `raw`          | itself                                                                          |
| `standardized` | its standard deviation over the context                                         |
| `relevance`    | the same, divided by how much a first value function changes with the feature   |

Many of the 39 features of a Meta-World observation are constant or copies of others; the last metric finds those that the
value does not depend on.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from icrl_gym._typing import Bool, Float
from icrl_gym.value_function import ValueFunction

__all__ = ["Metric", "relevance", "standardization"]

Metric = Literal["raw", "standardized", "relevance"]


def standardization(
    states: Float[Tensor, "*b n d"], weights: Float[Tensor, "*b n"] | Bool[Tensor, "*b n"], floor: float = 0.05
) -> tuple[Float[Tensor, "*b 1 d"], Float[Tensor, "*b 1 d"]]:
    """Mean and scale of each feature of a context.

    The scale is the standard deviation. A feature that hardly varies (its deviation below ``floor`` of the median one over
    the features that vary at all, or below a millionth of its mean) is jitter or rounding: it is measured in units of the
    feature that varies most, so that its noise stays small and a real change still counts. Divided by its own deviation it
    would become one of the dominant features. A context whose states are all equal has the scale 1.

    Args:
        states: (..., n, d)
        weights: (..., n), how much each state counts, 0 for an empty place; a mask will do.
        floor: What counts as hardly any variation.

    Returns:
        (..., 1, d) and (..., 1, d), the second positive.
    """
    weight = weights.to(states).unsqueeze(-1)
    total = weight.sum(-2, keepdim=True)
    share = weight / torch.where(total > 0, total, 1.0)
    mean = (states * share).sum(-2, keepdim=True)
    most = torch.finfo(states.dtype).max
    away = ((states - mean) * (weight > 0)).clamp(-most, most)
    # In units of the largest one: the square of 1e200 is no number any more.
    reach = away.abs().amax(-2, keepdim=True) if states.shape[-2] else torch.zeros_like(mean)
    reach = torch.where(reach > 0, reach, 1.0)
    deviation = reach * ((away / reach).square() * share).sum(-2, keepdim=True).sqrt()
    largest = deviation.amax(-1, keepdim=True)
    # Rounding first, so that features which are constant but for it have no say in what is usual.
    varies = (deviation > 1e-6 * mean.abs()) & (deviation > 1e-6 * largest)
    usual = deviation.masked_fill(~varies, math.nan).nanmedian(-1, keepdim=True).values
    scale = torch.where(varies & (deviation > floor * usual), deviation, largest)
    return mean, torch.where(scale > 0, scale, 1.0)


def relevance(
    value: ValueFunction, states: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"], floor: float = 1e-3
) -> Float[Tensor, "*b 1 d"]:
    """How much a value function of an RBF kernel changes with each feature, from 0 (plus a floor) to 1 for the one that matters most.

    The root mean square over the states of the derivative by each feature: the diagonal of the average gradient outer product.

    Args:
        value: With an :class:`~icrl_gym.kernels.RBFKernel`.
        states: (..., n, d), where to differentiate.
        mask: (..., n) bool, False for an empty place.
        floor: Of the mean square, in units of the largest; no feature is left out for good.

    Returns:
        (..., 1, d), in [sqrt(floor), about 1]; all ones for a value function that is constant.

    Source: Radhakrishnan et al. 2024, "Mechanism for feature learning in neural networks and backpropagation-free machine learning
    models" (recursive feature machines), for kernel regression; here for a value function, and once.
    """
    # Without the factor 1 / temperature, which is the same for all features.
    pull = value.kernel(value.centers, states, value.center_mask) * value.coefficients.unsqueeze(-1)
    pull = pull.transpose(-1, -2)  # (..., n, centers)
    gradient = pull @ value.centers - states * pull.sum(-1, keepdim=True)
    steepest = gradient.abs().amax((-2, -1), keepdim=True) if gradient.numel() else gradient.new_ones(())
    gradient = gradient / torch.where(steepest > 0, steepest, 1.0)
    square = (gradient.square() * mask.unsqueeze(-1)).sum(-2, keepdim=True)
    largest = square.amax(-1, keepdim=True)
    share = torch.where(largest > 0, square / torch.where(largest > 0, largest, 1.0), 1.0)
    return (share + floor).sqrt()
