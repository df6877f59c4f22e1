"""AdvantageCenteringCallback: takes the critic's constant offset out of the advantages, exactly."""

from __future__ import annotations

import numpy as np
from icrl_gym.callbacks.rollout import RolloutCallback

from icrl_gym.advantages import center, generalized_advantages

__all__ = ["AdvantageCenteringCallback"]


class AdvantageCenteringCallback(RolloutCallback):
    """Rewrites the advantages and returns of a rollout as if the critic had no offset, then subtracts the mean.

    The literal critic's values are V + b with a known b. Its advantages are too low by b G_t, which depends on how far the
    end of the episode and of the rollout are, so the mean alone does not remove it
    (:func:`~icrl_gym.advantages.offset_effect`). Returns become those of the offset-free critic.

    A step whose reward or value is not finite has TD error zero here, so that it cannot reach the policy's parameters.

    Logged once a rollout: ``centering/mean`` and ``centering/rms``, of what was taken out of the advantages, and
    ``centering/n_nonfinite``, the steps set to zero.

    Source: He et al. 2026, section 3 (the offset); ``docs/centering.md``.
    """

    def _on_rollout_end(self) -> None:
        buffer = self.buffer
        gamma, gae_lambda = float(self.model.gamma), float(buffer.gae_lambda)
        offset = self.value_offsets()
        before = buffer.advantages.astype(np.float64)
        finite = np.isfinite(buffer.rewards) & np.isfinite(buffer.values)
        if finite.all():
            exact, centered = center(before, offset, self.terminated, self.ends, gamma, gae_lambda)
        else:
            np.copyto(buffer.rewards, 0.0, where=~finite)
            np.copyto(buffer.values, 0.0, where=~np.isfinite(buffer.values))
            errors = np.where(finite, self.rollout_td_errors(), 0.0)
            exact = generalized_advantages(
                np.nan_to_num(errors, nan=0.0, posinf=0.0, neginf=0.0), self.ends, gamma, gae_lambda
            )
            centered = exact - exact.mean()
        buffer.advantages[:] = centered
        buffer.returns[:] = exact + (buffer.values - offset)
        removed = np.where(finite, centered - np.where(np.isfinite(before), before, centered), 0.0)
        self.logger.record("centering/mean", float(-removed.mean()))
        self.logger.record("centering/rms", float(np.sqrt(np.square(removed).mean())))
        self.logger.record("centering/n_nonfinite", int((~finite).sum()))
