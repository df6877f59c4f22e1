"""ContextSyncCallback: conditions the critic on what the environments have recorded, at the start of every rollout."""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from icrl_gym.callbacks.prior import Prior
from icrl_gym.callbacks.rollout import RolloutCallback, wrappers_of
from icrl_gym.callbacks.view import PolicyView, begin_statistics, is_unread
from icrl_gym.wrappers import ContextSnapshot
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from icrl_gym.context import Context
from icrl_gym.critic import Evaluation
from icrl_gym.recency import aged

__all__ = ["ContextSyncCallback", "Window"]


class Window(NamedTuple):
    """The raw transitions of a context.

    Attributes:
        filling: The part of the prior that stands in it.
        snapshots: What each environment has recorded.
    """

    filling: Context
    snapshots: list[ContextSnapshot]


class _Ahead(NamedTuple):
    """The evaluation for the next rollout, which runs beside the update of the last one."""

    evaluation: Future[Evaluation]
    view: PolicyView
    window: Window


class ContextSyncCallback(RolloutCallback):
    """Keeps the critic's context up to date: pull, bring to the policy's view, check, condition.

    At the start of a rollout the contexts of all environments are pooled. They hold transitions from before the rollout
    only, so that its TD errors are out-of-sample, and stay frozen until the next one, so that SB3 gets the same values
    while collecting and in the update. Before the first transition the value is zero.

    The transitions of the next context are all there when a rollout ends, so it is evaluated in a thread beside SB3's update,
    and taken over when the next rollout starts. Where anything moved in between (a context that was loaded, other statistics
    of VecNormalize) it is evaluated again.

    Args:
        verbose: 1 says once that the values of the first rollout are zero.
        prior: Raw transitions (``Context.from_minari("icrl_gym/reach-v3/low-v0")``, say) that stand in the window until recorded ones
            fill it, so that the very first rollout has a critic (:class:`~icrl_gym.callbacks.prior.Prior`). They are brought to
            the policy's view with the statistics of the moment, like all others. A VecNormalize that has seen no step yet first
            takes its statistics from those that stand in the window, as if it had seen them, so that context and observations
            are measured alike in the first rollout too; it is the only time that the prior reaches them.

    Attributes:
        waits: Another callback says when to look ahead (:meth:`look_ahead`), as cross-fitting does: it may have evaluated the next
            context along with its own.

    Raises:
        TypeError: The policy is not an :class:`~icrl_gym.policy.InContextActorCriticPolicy`; a prior that is no Context.
        ValueError: An environment has no :class:`~icrl_gym.wrappers.RollingContext`; the critic was given another gamma
            than the algorithm's; something outside RollingContext changes observations, rewards or ends; a prior of states of
            another length, or without the one-hot of their task.

    Source: DESIGN of this package (``docs/architecture.md``).
    """

    def __init__(self, verbose: int = 0, prior: Context | None = None) -> None:
        super().__init__(verbose)
        self.prior = None if prior is None else Prior(prior)
        self.n_refused = 0
        self.context_fill = 0.0
        self._said_empty = False
        self._rewards = np.zeros(0)
        self._worker: ThreadPoolExecutor | None = None
        self._ahead: _Ahead | None = None
        self._before: Window | None = None
        self._after: Window | None = None
        self._view: PolicyView | None = None
        self.waits = False

    def _init_callback(self) -> None:
        super()._init_callback()
        self.waits = False  # until a callback that comes after this one says so
        require_rolling_context(self.training_env)
        self.critic.match_gamma(float(self.model.gamma))
        if self.prior is not None:
            self.prior.check(self.critic.n_features, self.critic.n_tasks)

    def _on_training_start(self) -> None:
        self._ahead = None
        self._worker = ThreadPoolExecutor(1, "icrl_gym-evaluation")

    def _on_rollout_start(self) -> None:
        super()._on_rollout_start()
        env, critic = self.training_env, self.critic
        ahead, self._ahead = self._ahead, None
        self._begin_statistics()
        view = PolicyView(env)
        snapshots = self._snapshots(newest=0)
        self._check_observations(view, snapshots)
        if ahead is not None and _unchanged(ahead.window.snapshots, snapshots) and view.measures_like(ahead.view):
            critic.adopt(ahead.evaluation.result())
            self._before = ahead.window
        else:
            self._before = self._window(self._snapshots())
            critic.condition(pooled(view, self._before, critic.oldest_weight))
        self._after = None
        # Not before the rollout's end: of a rollout that breaks off, nothing may be learned, nor of the next one elsewhere.
        critic.is_synced = False
        self.n_refused = sum(snapshot.n_refused for snapshot in snapshots)
        assert critic.context is not None
        size = int(critic.context.mask.sum())
        self.context_fill = size / sum(snapshot.length for snapshot in snapshots)
        if not size:
            self._say_empty()

    def _on_step(self) -> bool:
        # A copy: SB3 adds the value of the last observation to the rewards of time limits.
        self._rewards = np.array(self.locals["rewards"], np.float64)
        return super()._on_step()

    def _on_rollout_end(self) -> None:
        view, snapshots = PolicyView(self.training_env), self._snapshots()
        self._check_transitions(view, snapshots)
        self._after = self._window(snapshots)
        self._view = view
        self.critic.is_synced = True
        if not self.waits:
            self.look_ahead()

    def look_ahead(self, evaluation: Evaluation | None = None) -> None:
        """Evaluate the next context in a thread, now that the rollout has ended.

        Args:
            evaluation: It has been already: of :meth:`next_context`.
        """
        if self._worker is None or self.num_timesteps >= self.model._total_timesteps:
            return
        view, (_, window) = self._view, self.windows()
        assert view is not None
        if evaluation is None:
            ahead = self._worker.submit(self.critic.evaluate, self.next_context())
        else:
            ahead = Future()
            ahead.set_result(evaluation)
        self._ahead = _Ahead(ahead, view, window)

    def next_context(self) -> Context:
        """The transitions of :meth:`windows`' second, pooled, as the policy saw them when the rollout ended.

        Raises:
            RuntimeError: No rollout has ended under this callback.
        """
        _, closing = self.windows()
        assert self._view is not None
        return pooled(self._view, closing, self.critic.oldest_weight)

    def _on_training_end(self) -> None:
        self.critic.is_synced = False
        if self._worker is not None:
            self._worker.shutdown()
        self._ahead = self._worker = self._before = self._after = self._view = None

    def windows(self) -> tuple[Window, Window]:
        """What the critic was conditioned on when the rollout began, and what it will be on now that the rollout has ended.

        Raises:
            RuntimeError: No rollout has ended under this callback.
        """
        if self._before is None or self._after is None:
            raise RuntimeError(
                "ContextSyncCallback has seen no whole rollout: pass it to `learn` too, before the callbacks that read from it."
            )
        return self._before, self._after

    def _window(self, snapshots: list[ContextSnapshot]) -> Window:
        empty = Context.empty(self.critic.n_features)
        filling = empty if self.prior is None else self.prior.filling(snapshots, self.critic.n_tasks)
        return Window(filling, snapshots)

    def _begin_statistics(self) -> None:
        """Statistics of nothing but the first observations measure neither the prior nor the rollout that comes."""
        normalize = unwrap_vec_normalize(self.training_env)
        if self.prior is None or normalize is None or not is_unread(normalize):
            return
        filling = self._window(self._snapshots()).filling
        if len(filling):
            begin_statistics(normalize, filling)
            # What the policy acts on first was normalized with the old ones.
            self.model._last_obs = normalize.normalize_obs(normalize.get_original_obs())

    def _snapshots(self, newest: int | None = None) -> list[ContextSnapshot]:
        return self.training_env.env_method("context_snapshot", newest=newest)

    def _say_empty(self) -> None:
        if not self.num_timesteps:
            if self.verbose:
                print("InContextCallback: no transitions yet; the critic's value is zero in the first rollout.")
        elif not self._said_empty:
            self._said_empty = True
            warnings.warn(
                "InContextCallback: the contexts of all environments are empty when a rollout starts, so every value is zero. "
                'With on_reset="clear" a rollout must not end with an episode: take another n_steps, or on_reset="keep".',
                stacklevel=2,
            )

    def _check_observations(self, view: PolicyView, snapshots: list[ContextSnapshot]) -> None:
        last = self.model._last_obs
        assert last is not None
        with torch.no_grad():
            seen = self.policy.critic_states(obs_as_tensor(last, self.policy.device)).cpu().numpy()
        for index, snapshot in enumerate(snapshots):
            recorded = snapshot.observation
            expected = None if recorded is None else view.states(recorded)
            if (
                expected is None
                or expected.shape != seen[index].shape
                or not np.allclose(expected, seen[index], rtol=1e-5, atol=1e-5)
            ):
                raise ValueError(
                    f"environment {index}: the policy's observation {_short(seen[index])} is not the one that RollingContext "
                    f"recorded, {_short(expected)} in the policy's units. {self._changed('observations')} Or the environment was "
                    f"reset or stepped by something else meanwhile: give evaluate_policy and the like one of their own."
                )

    def _check_transitions(self, view: PolicyView, snapshots: list[ContextSnapshot]) -> None:
        """What the algorithm got in the rollout must be what the environments recorded."""
        terminated = self.terminated
        for index, snapshot in enumerate(snapshots):
            context = snapshot.context
            newest = min(len(context), len(terminated))
            if not newest or snapshot.n_refused:
                continue  # nothing to compare, or holes in the record
            raw = float(context.rewards[-1])
            if abs(raw) > np.finfo(np.float32).max:
                raise ValueError(
                    f"environment {index}: a reward of {raw:.6g} does not fit into float32, in which the algorithm keeps rewards. "
                    f"Scale rewards inside of RollingContext (gymnasium.wrappers.TransformReward)."
                )
            recorded = float(view.rewards(context.rewards[-1].numpy()))
            if not np.isclose(recorded, self._rewards[index], rtol=1e-4, atol=1e-6):
                raise ValueError(
                    f"environment {index}: the algorithm's last reward was {self._rewards[index]:.6g} and the one that "
                    f"RollingContext recorded is {recorded:.6g} in the algorithm's units. {self._changed('rewards')}"
                )
            ends = [int(terminated[-newest:, index].sum()), int(context.terminated[-newest:].sum())]
            if ends[0] != ends[1]:
                raise ValueError(
                    f"environment {index}: of the last {newest} steps, {ends[0]} ended an episode for the algorithm and "
                    f"{ends[1]} in what RollingContext recorded. {self._changed('ends of episodes')}"
                )

    def _changed(self, what: str) -> str:
        layers = " of ".join(wrappers_of(self.training_env))
        return (
            f"Something outside RollingContext changes {what} (vector layers: {layers}). Put RollingContext outside of every "
            f"wrapper that changes {what}; of the vector wrappers, VecNormalize alone is understood."
        )


def pooled(view: PolicyView, window: Window, oldest_weight: float) -> Context:
    """The transitions of a window, the prior's first and then each environment's, as the policy sees them, weighed by their age."""
    filling = window.filling.weighted(window.filling.weights * oldest_weight)  # counts as the oldest
    recorded = [aged(snapshot.context, snapshot.length, oldest_weight) for snapshot in window.snapshots]
    return view.context(Context.cat([filling, *recorded]))


def _unchanged(before: list[ContextSnapshot], now: list[ContextSnapshot]) -> bool:
    return [snapshot.n_changes for snapshot in before] == [snapshot.n_changes for snapshot in now]


def require_rolling_context(env: VecEnv) -> None:
    """Say before the first step that an environment has no rolling context.

    Raises:
        ValueError: At least one environment has none.
    """
    if not env.has_attr("context_snapshot"):
        raise ValueError(
            "the in-context critic reads its transitions from a RollingContext around each environment, and there is none. "
            "Wrap each single environment: make_vec_env(env_id, n_envs, wrapper_class=RollingContext, "
            "wrapper_kwargs=dict(length=1024))."
        )


def _short(state: np.ndarray | None) -> str:
    if state is None:
        return "none"
    head = np.array2string(state[:4], precision=4, separator=", ")
    return head if len(state) <= 4 else f"{head[:-1]}, ...] ({len(state)} entries)"
