"""CrossFitCallback: values of a rollout from what the other environments met in the same rollout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from icrl_gym.callbacks.context_sync import ContextSyncCallback, Window
from icrl_gym.callbacks.rollout import RolloutCallback, flat_observations
from icrl_gym.wrappers import ContextSnapshot
from stable_baselines3.common.utils import obs_as_tensor

from icrl_gym._typing import Int

__all__ = ["N_FOLDS", "CrossFitCallback", "deal", "folds_of", "require_other_environments"]

N_FOLDS = 4
"""Folds of the environments, at most: the cost of cross-fitting does not grow with the number of environments beyond that."""


class CrossFitCallback(RolloutCallback):
    """Cross-fits the values of a rollout: on-policy, and still out-of-sample.

    When a rollout ends, the values of each environment's transitions are computed again from the window as it is then, without what
    this very environment recorded in the rollout: what came before, and what *other* environments of the same task met. Raw
    transitions are brought to the policy's view with the statistics of this moment, the rollout's end; the observations that are
    asked for are those of the rollout buffer, as the policy got them.

    The buffer's values become these, without the offset, which differs from one context to the next. Its rewards at time limits
    bootstrap from them in place of the frozen critic, and SB3's own ``compute_returns_and_advantage`` gives advantages and returns.
    ``policy.cross_fitted`` says so to the callbacks that follow: none of them takes an offset out again.

    The default critic's folds share one pass over the transitions (:meth:`~icrl_gym.critic.InContextCritic.evaluate_folds`), which
    evaluates the context of the next rollout too.

    The critic itself keeps its frozen values of the rollout: what SB3's update asks for again is theirs (only its logged value loss
    reads them).

    Args:
        sync: The callback that keeps the critic's context; it must come before this one, and the centering after.
        n_folds: At most so many, at least 2. Each leaves out the environments of one fold: one of each task, where there are no
            more than ``n_folds`` of it.
        verbose: As for SB3.
        where_possible: With fewer than two environments (of a task) the rollout keeps the frozen critic's values, and nothing is
            raised.

    Raises:
        ValueError: Fewer than two environments (of a task): nothing is left to fit on; or fewer than two folds.

    Source: Chernozhukov et al. 2018 (cross-fitting); its use for advantages is this package's own (``docs/critic.md``).
    """

    def __init__(
        self, sync: ContextSyncCallback, n_folds: int = N_FOLDS, verbose: int = 0, where_possible: bool = False
    ) -> None:
        super().__init__(verbose)
        if n_folds < 2:
            raise ValueError(f"n_folds must be at least 2, so that each leaves others to fit on; got {n_folds}.")
        self.sync, self.n_folds, self.where_possible = sync, n_folds, where_possible
        self._folds: list[list[int]] = []
        self._rewards: list[np.ndarray] = []
        self._cut: list[tuple[int, int, torch.Tensor]] = []  # step, environment, its last state (1, d)

    def _init_callback(self) -> None:
        super()._init_callback()
        last = self.model._last_obs
        assert last is not None
        with torch.no_grad():
            tasks = self.critic.tasks_of(self.policy.critic_states(obs_as_tensor(last, self.policy.device)))
        counts = torch.bincount(tasks, minlength=self.critic.n_tasks)
        self._folds = []
        if int(counts.min()) < 2 and self.where_possible:
            return
        require_other_environments(int(counts.min()), self.critic.n_tasks)
        self._folds = deal(tasks.tolist(), self.n_folds)
        self.sync.waits = True

    def _on_rollout_start(self) -> None:
        super()._on_rollout_start()
        self._rewards, self._cut = [], []

    def _on_step(self) -> bool:
        if not self._folds:
            return super()._on_step()
        # A copy, and now: SB3 adds the frozen critic's value of the last observation to the rewards of time limits.
        self._rewards.append(np.array(self.locals["rewards"], np.float64))
        proceed = super()._on_step()
        for env in (self._ends[-1] & ~self._terminated[-1]).nonzero()[0].tolist():
            observation = self.policy.obs_to_tensor(self.locals["infos"][env]["terminal_observation"])[0]
            with torch.no_grad():
                self._cut.append((len(self._rewards) - 1, env, self.policy.critic_states(observation)))
        return proceed

    def _on_rollout_end(self) -> None:
        if not self._folds:
            return
        buffer, gamma = self.buffer, float(self.model.gamma)
        n_steps, n_envs = buffer.values.shape
        with torch.no_grad():
            states = self.policy.critic_states(flat_observations(self)).reshape(n_steps, n_envs, -1)
            following = self.policy.critic_states(obs_as_tensor(self.locals["new_obs"], self.policy.device))
        asked = torch.cat([states, following.unsqueeze(0)])
        rewards, last = np.array(self._rewards), np.zeros(n_envs)
        folds = folds_of(*self.sync.windows(), n_steps, self._folds)
        whole, without = self.critic.evaluate_folds(self.sync.next_context(), folds, len(self._folds))
        self.sync.look_ahead(whole)
        for held_out, evaluation in zip(self._folds, without, strict=True):
            values = self.critic.values_of(evaluation, asked[:, held_out].flatten(0, 1)).numpy(force=True)
            values = values.reshape(n_steps + 1, len(held_out))
            buffer.values[:, held_out], last[held_out] = values[:-1], values[-1]
            for step, env, state in self._cut:
                if env in held_out:
                    rewards[step, env] += gamma * float(self.critic.values_of(evaluation, state))
        buffer.rewards[:] = rewards
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is put right by the centering
            buffer.compute_returns_and_advantage(torch.from_numpy(last), self.locals["dones"])
        self.policy.cross_fitted = last


def deal(tasks: Sequence[int], n_folds: int = N_FOLDS) -> list[list[int]]:
    """Deal environments into folds, those of each task as evenly as it goes.

    Args:
        tasks: The task of each environment.
        n_folds: At most so many folds.

    Returns:
        The environments of each fold.

    Example:
        >>> deal([0, 1, 0, 1])
        [[0, 1], [2, 3]]
        >>> deal([0, 0, 0, 0, 0])
        [[0, 4], [1], [2], [3]]
    """
    folds: list[list[int]] = [[] for _ in range(n_folds)]
    for env, task in enumerate(tasks):
        folds[tasks[:env].count(task) % n_folds].append(env)
    return [envs for envs in folds if envs]


def folds_of(
    opening: Window, closing: Window, n_steps: int, held_out: Sequence[Collection[int]]
) -> Int[torch.Tensor, n]:
    """Which fold leaves a transition of the pooled window out: that of its environment, if the rollout recorded it, or 0, none.

    Args:
        opening: The window when the rollout began.
        closing: And when it had ended.
        n_steps: Steps of an environment in between.
        held_out: The environments of each fold.
    """
    parts = [torch.zeros(len(closing.filling), dtype=torch.long)]
    for env, (old, new) in enumerate(zip(opening.snapshots, closing.snapshots, strict=True)):
        folds = torch.zeros(len(new.context), dtype=torch.long)
        fold = next((index for index, envs in enumerate(held_out, 1) if env in envs), 0)
        folds[len(folds) - recorded_since(old, new, n_steps) :] = fold
        parts.append(folds)
    return torch.cat(parts)


def recorded_since(old: ContextSnapshot, new: ContextSnapshot, n_steps: int) -> int:
    """How many transitions an environment has recorded between two snapshots, as far as its window still holds them.

    Args:
        old: What it held before.
        new: What it holds now.
        n_steps: Steps of the environment in between. Those with a value that is not finite recorded nothing.
    """
    # A reset that cut or cleared the context is a change too. Both bounds are exceeded together only where a cut comes with a
    # refused value: then a transition from before counts twice, and none of the rollout is missed.
    return min(n_steps, new.n_changes - old.n_changes, len(new.context))


def require_other_environments(n_envs: int, n_tasks: int = 1) -> None:
    """Say before the first step that cross-fitting has nothing to fit on.

    Args:
        n_envs: Environments of each task, the fewest.
        n_tasks: How many tasks.

    Raises:
        ValueError: Fewer than two environments (of a task).
    """
    if n_envs < 2:
        of_tasks = f" of each of the {n_tasks} tasks" if n_tasks > 1 else ""
        raise ValueError(
            f"cross-fitting takes an environment's values from what the others met, and needs at least 2 environments{of_tasks}; "
            f"got {n_envs}. Take n_envs={2 * n_tasks} or more, or cross_fit=False."
        )
