"""Advantage centering: the exact effect of a constant in the values on generalized advantage estimates, and its removal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["center", "generalized_advantages", "offset_effect"]

Array = npt.NDArray[np.floating]


def generalized_advantages(
    td_errors: npt.ArrayLike, ends: npt.ArrayLike, gamma: float, gae_lambda: float
) -> npt.NDArray[np.float64]:
    """Generalized advantage estimates, A_t = delta_t + gamma lambda (1 - end_t) A_{t+1}.

    Args:
        td_errors: (n_steps, n_envs), delta.
        ends: (n_steps, n_envs) bool: the episode ended at this step, either way.
        gamma: The discount.
        gae_lambda: lambda.

    Returns:
        (n_steps, n_envs), in float64.

    Source: Schulman et al. 2016, equation 16.
    """
    delta = np.asarray(td_errors, np.float64)
    carried = gamma * gae_lambda * (1.0 - np.asarray(ends, np.float64))
    advantages = np.zeros_like(delta)
    following = np.zeros(delta.shape[1:])
    for t in range(len(delta) - 1, -1, -1):
        following = delta[t] + carried[t] * following
        advantages[t] = following
    return advantages


def offset_effect(
    offset: float | npt.ArrayLike, terminated: npt.ArrayLike, ends: npt.ArrayLike, gamma: float, gae_lambda: float
) -> npt.NDArray[np.float64]:
    """B G_t: how much lower the advantages are because every value is too high by b.

        G_t = sum_l (gamma lambda)^l (1 - gamma nt_{t+l})     cut at the end of the episode and of the rollout

    with nt = 0 at a terminated step and 1 otherwise. G_t is constant only where no end is near, so subtracting the mean of
    the advantages does not remove the offset.

    Args:
        offset: b, a number, or (n_steps, n_envs) where tasks have different ones (constant over an episode).
        terminated: (n_steps, n_envs) bool: nothing is bootstrapped at this step. False at a truncated one.
        ends: (n_steps, n_envs) bool: the episode ended, either way.
        gamma: The discount.
        gae_lambda: lambda.

    Returns:
        (n_steps, n_envs)

    Source: He et al. 2026, section 3 (the constant); its effect on truncated sums is this package's own
    (``docs/centering.md``).
    """
    shift = np.asarray(offset, np.float64) * (1.0 - gamma * (1.0 - np.asarray(terminated, np.float64)))
    return generalized_advantages(shift, ends, gamma, gae_lambda)


def center(
    advantages: npt.ArrayLike,
    offset: float | npt.ArrayLike,
    terminated: npt.ArrayLike,
    ends: npt.ArrayLike,
    gamma: float,
    gae_lambda: float,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The advantages that the same critic without its offset would have given, and those with their mean subtracted.

    Nothing is divided, so equal advantages, a single one and none at all give zeros.

    Args:
        advantages: (n_steps, n_envs), from values that are all too high by ``offset``.
        offset: See :func:`offset_effect`, as the following ones.
        terminated: (n_steps, n_envs) bool
        ends: (n_steps, n_envs) bool
        gamma: The discount.
        gae_lambda: lambda.

    Returns:
        Exact advantages, and centered ones; both (n_steps, n_envs).

    Example:
        >>> import numpy as np
        >>> no_end = np.zeros((2, 1), bool)
        >>> exact, centered = center([[-2.0], [1.0]], 0.0, no_end, no_end, gamma=0.9, gae_lambda=0.9)
        >>> centered.tolist()
        [[-1.5], [1.5]]
    """
    exact = np.asarray(advantages, np.float64) + offset_effect(offset, terminated, ends, gamma, gae_lambda)
    return exact, exact - exact.mean() if exact.size else exact
