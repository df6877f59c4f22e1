"""Prior: earlier transitions, of a data set or another run, that stand in the window until recorded ones fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from icrl_gym.wrappers import ContextSnapshot

from icrl_gym.context import Context

__all__ = ["Prior"]


class Prior:
    """Transitions that count as older than everything recorded.

    Of a window of W transitions, over all environments, the newest W of prior and recorded ones are the context: the prior's
    last ones stand there until as many are recorded. With several tasks this holds for each, whose window is that of the
    environments that show it. Contexts that each reset clears are never full, so that the prior stays for good.

    Args:
        context: Raw transitions (flattened states as the environments give them, rewards in their units), oldest first, with the
            one-hot of their task where there are several. Empty places are dropped.

    Raises:
        TypeError: Something else than a :class:`~icrl_gym.Context`.
        ValueError: A batch of contexts, or no transition.
    """

    def __init__(self, context: Any) -> None:
        if not isinstance(context, Context):
            raise TypeError(
                f"prior must be a Context of raw transitions, got {type(context).__name__}. Context.from_minari(dataset_id) makes "
                f"one of a data set."
            )
        if context.batch_shape:
            raise ValueError(f"prior must be one context, got a batch: {context!r}. Take one of them, or Context.cat.")
        context = context.to("cpu", torch.float64)
        self.context = context[context.mask]
        if not len(self.context):
            raise ValueError(f"prior holds no transition: {context!r}. Leave it out, or give at least one.")

    def check(self, n_features: int, n_tasks: int) -> None:
        """Say at the door that a prior is none of these environments'.

        Args:
            n_features: d, the length of a flattened observation.
            n_tasks: With more than 1, the last so many entries of a state are the one-hot of its task.

        Raises:
            ValueError: States of another length, or without the one-hot.
        """
        if self.context.n_features != n_features:
            with_code = f", of which the last {n_tasks} are the one-hot of the task" if n_tasks > 1 else ""
            raise ValueError(
                f"the states of prior have {self.context.n_features} entries, and the environments' observations, flattened, have "
                f"{n_features}{with_code}. Take raw transitions of the same environment, as RollingContext records them."
            )
        if n_tasks > 1:
            code = self.context.states[:, -n_tasks:]
            wrong = ~(((code == 0) | (code == 1)).all(-1) & (code.sum(-1) == 1))
            wrong |= (code != self.context.next_states[:, -n_tasks:]).any(-1)
            if bool(wrong.any()):
                raise ValueError(
                    f"prior: with {n_tasks} tasks the last {n_tasks} entries of states and next_states must be the one-hot of the "
                    f"task, and those of {int(wrong.sum())} of {len(wrong)} transitions are not. Append it."
                )

    def filling(self, snapshots: Sequence[ContextSnapshot], n_tasks: int) -> Context:
        """The part of the prior that stands in the window now, oldest first.

        Args:
            snapshots: What each environment has recorded.
            n_tasks: See :meth:`check`. An environment belongs to the task that its present observation shows.
        """
        free = [snapshot.length - len(snapshot.context) for snapshot in snapshots]
        if n_tasks == 1:
            return _newest(self.context, sum(free))
        task = self.context.states[:, -n_tasks:].argmax(-1)
        rooms = [0] * n_tasks
        for snapshot, room in zip(snapshots, free, strict=True):
            if snapshot.observation is not None:
                rooms[int(snapshot.observation[-n_tasks:].argmax())] += room
        return Context.cat([_newest(self.context[task == t], room) for t, room in enumerate(rooms)])


def _newest(context: Context, n: int) -> Context:
    return context[len(context) - min(n, len(context)) :]
