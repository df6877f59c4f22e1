"""InContextCallback: everything that the in-context critic needs while an algorithm learns."""

from __future__ import annotations

from icrl_gym.callbacks.advantage_centering import AdvantageCenteringCallback
from icrl_gym.callbacks.context_sync import ContextSyncCallback
from icrl_gym.callbacks.cross_fit import CrossFitCallback
from icrl_gym.callbacks.td_error import TDErrorCallback
from stable_baselines3.common.callbacks import CallbackList

from icrl_gym.context import Context

__all__ = ["InContextCallback"]


class InContextCallback(CallbackList):
    """Context sync, cross-fitting, advantage centering and TD-error monitoring in one.

    Args:
        monitor: Whether to log TD errors; False saves their (small) cost.
        log_interval: See :class:`~icrl_gym.callbacks.TDErrorCallback`.
        figure_interval: See :class:`~icrl_gym.callbacks.TDErrorCallback`.
        verbose: As for SB3.
        cross_fit: Take advantages from cross-fitted values (:class:`~icrl_gym.callbacks.CrossFitCallback`), where there are at least
            two environments of each task; where there are not, or with False, from the critic as it was when the rollout began.
        prior: See :class:`~icrl_gym.callbacks.ContextSyncCallback`.

    Example:
        >>> import gymnasium as gym
        >>> from stable_baselines3 import PPO
        >>> from icrl_gym import InContextActorCriticPolicy
        >>> from icrl_gym.wrappers import RollingContext
        >>> env = RollingContext(gym.make("CartPole-v1"), length=512)
        >>> model = PPO(InContextActorCriticPolicy, env, n_steps=64).learn(128, callback=InContextCallback())
        >>> int(model.policy.critic.context.n_transitions[0])
        64
    """

    def __init__(
        self,
        monitor: bool = True,
        log_interval: int = 1,
        figure_interval: int | None = 50_000,
        verbose: int = 0,
        cross_fit: bool = True,
        prior: Context | None = None,
    ) -> None:
        self.sync = ContextSyncCallback(verbose, prior)
        self.cross_fit = CrossFitCallback(self.sync, verbose=verbose, where_possible=True) if cross_fit else None
        self.centering = AdvantageCenteringCallback(verbose)
        self.td_error = TDErrorCallback(log_interval, figure_interval, verbose) if monitor else None
        # Centering after the values that it is to center; the monitor after both: it reads returns that are free of the offset.
        parts = (self.sync, self.cross_fit, self.centering, self.td_error)
        super().__init__([part for part in parts if part is not None])
