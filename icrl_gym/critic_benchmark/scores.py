"""Scores: how well a critic's values, and the advantages that PPO would take from them, agree with the truth.

For each rollout with a truth, over its sampled states:

value         correlation of V with the true values
error         rms(V - c - truth) / std(truth), with the best constant c; a constant value has the error 1
error_scaled  the same with the best scale of V as well: sqrt(1 - correlation^2)
difference    correlation of V(s_{t+16}) - V(s_t) along trajectories with the true difference
advantage     correlation of the GAE advantages with the true Q - V

What is judged is out of sample: a critic is conditioned on what came before the rollout, or comes from other environments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from icrl_gym.advantages import generalized_advantages
from icrl_gym.callbacks.cross_fit import deal
from icrl_gym.context import Context
from icrl_gym.critic import Evaluation
from icrl_gym.critic_benchmark.recording import LAG, Recording
from icrl_gym.critic_benchmark.settings import LEARNED, TRUTH, ZERO, Setting
from icrl_gym.recency import aged

__all__ = ["SCORES", "critic_values", "gae", "score_cell", "score_rollout", "scores_of"]

SCORES = ("value", "error", "error_scaled", "difference", "advantage")

Array = npt.NDArray[np.float64]


def critic_values(recording: Recording, k: int, setting: Setting) -> tuple[Array, Array, Array]:
    """The values that a critic would have in rollout k, conditioned as training conditions it.

    Args:
        recording: What was recorded.
        k: The rollout.
        setting: The critic.

    Returns:
        V(s_t) of the rollout's observations as the policy got them, (n, E); V of what followed each, before any reset, (n, E);
        and the critic's offset, which both contain, (E,). In the units of normalized rewards.

    Raises:
        FloatingPointError: The critic diverges.
        ValueError: A window of less than one transition.
    """
    n_steps, n_envs = recording.config.n_steps, recording.config.n_envs
    length = round(setting.window * n_steps)
    if length < 1:
        raise ValueError(
            f"setting {setting.name!r}: a window of {setting.window} rollouts of {n_steps} steps holds no transition."
        )
    rows = recording.rollout(k)
    seen, following = recording.seen[rows], _following(recording, k)
    critic = setting.build(seen.shape[-1], recording.config.gamma)

    def window(stop: int) -> list[Context]:
        raw = [recording.transitions(env, stop - length, stop) for env in range(n_envs)]
        return [aged(context, length, critic.oldest_weight) for context in raw]

    values, next_values, offsets = np.zeros((n_steps, n_envs)), np.zeros((n_steps, n_envs)), np.zeros(n_envs)

    def ask(columns: Any, evaluation: Evaluation) -> None:
        offsets[columns] = offset = float(evaluation.value.offset)
        for target, observations in ((values, seen), (next_values, following)):
            flat = torch.from_numpy(observations[:, columns].reshape(-1, seen.shape[-1]))
            found = critic.values_of(evaluation, flat).numpy(force=True) + offset
            target[:, columns] = found.reshape(n_steps, -1)

    if setting.context == "frozen":
        ask(slice(None), critic.evaluate(recording.view(k).context(Context.cat(window(rows.start)))))
        return values, next_values, offsets
    # At the rollout's end, with the statistics of that moment.
    held_out, parts = deal([0] * n_envs), window(rows.stop)
    folds = [torch.zeros(len(part), dtype=torch.long) for part in parts]
    for fold, envs in enumerate(held_out, 1):
        for env in envs:
            folds[env][-n_steps:] = fold
    _, without = critic.evaluate_folds(
        recording.view(k + 1).context(Context.cat(parts)), torch.cat(folds), len(held_out)
    )
    for envs, evaluation in zip(held_out, without, strict=True):
        ask(envs, evaluation)
    return values, next_values, offsets


def gae(recording: Recording, k: int, values: npt.ArrayLike, next_values: npt.ArrayLike) -> Array:
    """The advantages that Stable-Baselines3 would compute in rollout k from a critic's values.

    Rewards are those that PPO got, normalized with the statistics of their step. Nothing is bootstrapped where the episode
    terminated; where it was truncated, and at the rollout's end, the value of what followed is.

    Args:
        recording: What was recorded.
        k: The rollout.
        values: (n, E), V(s_t), without an offset.
        next_values: (n, E), V of what followed.

    Returns:
        (n, E)
    """
    rows, config = recording.rollout(k), recording.config
    goes_on = 1.0 - recording.terminated[rows]
    errors = recording.seen_rewards[rows] + config.gamma * goes_on * np.asarray(next_values) - np.asarray(values)
    return generalized_advantages(errors, recording.ends[rows], config.gamma, config.gae_lambda)


def scores_of(
    values: npt.ArrayLike,
    advantages: npt.ArrayLike,
    true_values: npt.ArrayLike,
    true_advantages: npt.ArrayLike,
    pairs: npt.ArrayLike,
) -> dict[str, float]:
    """The scores of one rollout; NaN where the truth, or what is judged, does not vary.

    Args:
        values: (S,), of the critic, in the units of the truth.
        advantages: (S,), in any unit.
        true_values: (S,)
        true_advantages: (S,)
        pairs: (p, 2), indices of states that are 16 steps apart, the earlier one first.
    """
    v, truth, of = np.asarray(values, float), np.asarray(true_values, float), np.asarray(pairs, int).reshape(-1, 2)
    together = correlation(v, truth)
    spread = float(np.std(truth))
    return {
        "value": together,
        "error": float(np.std(v - truth)) / spread if spread > 0 else math.nan,
        "error_scaled": math.sqrt(max(0.0, 1 - (0.0 if math.isnan(together) else together) ** 2))
        if spread > 0
        else math.nan,
        "difference": correlation(v[of[:, 1]] - v[of[:, 0]], truth[of[:, 1]] - truth[of[:, 0]]),
        "advantage": correlation(np.asarray(advantages, float), np.asarray(true_advantages, float)),
    }


def correlation(x: Array, y: Array) -> float:
    """Pearson's; NaN for fewer than two points or where one does not vary beyond rounding."""
    if len(x) < 2 or any(np.ptp(a) <= 1e-12 * np.abs(a).max() for a in (x, y)):
        return math.nan
    a, b = x - x.mean(), y - y.mean()
    # Each in its own unit: the square of a tiny number is zero.
    a, b = a / np.abs(a).max(), b / np.abs(b).max()
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def score_rollout(recording: Recording, index: int, setting: Setting | str) -> dict[str, float]:
    """The scores of a critic at one of the rollouts with a truth.

    Args:
        recording: What was recorded.
        index: Which of ``recording.rollouts``.
        setting: An in-context critic; or ``"learned"``, PPO's own critic as trained so far; ``"zero"``, the value zero; ``"truth"``,
            what is the most that any critic can be expected to reach against so few returns: sqrt(2 r / (1 + r)), r the
            correlation of the truth's two halves.

    Returns:
        :data:`SCORES`, ``"failed"`` (1 if the critic diverged, whose correlations then count as 0) and ``"seconds"``.
    """
    k = int(recording.rollouts[index])
    samples, action_samples = recording.values[index], recording.action_values[index]
    truth, advantage = samples.mean(-1), (action_samples - samples).mean(-1)
    pairs = _pairs(recording, index)
    if setting == TRUTH:
        return {**_ceiling(samples, action_samples, pairs), "failed": 0.0, "seconds": 0.0}
    start, failed = time.perf_counter(), False
    rows = recording.rollout(k)
    if setting == LEARNED:
        values, advantages = recording.learned_values[rows], recording.learned_advantages[rows]
    elif setting == ZERO:
        values = np.zeros(recording.rewards[rows].shape)
        advantages = gae(recording, k, values, values)
    else:
        assert isinstance(setting, Setting)
        try:
            values, next_values, offsets = critic_values(recording, k, setting)
        except FloatingPointError:
            values = next_values = np.zeros(recording.rewards[rows].shape)
            offsets, failed = np.zeros(recording.config.n_envs), True
        # What AdvantageCenteringCallback does in training: the advantages of the values without their offset.
        values = values - offsets
        advantages = gae(recording, k, values, next_values - offsets)
    seconds = time.perf_counter() - start
    at = (recording.steps[index], recording.envs[index])
    scores = scores_of(values[at] * recording.reward_scale(k), advantages[at], truth, advantage, pairs)
    if failed:
        known = {"value": np.ptp(truth) > 0, "difference": np.ptp(truth) > 0, "advantage": np.ptp(advantage) > 0}
        scores = {**scores, **{name: 0.0 for name, varies in known.items() if varies}}
    return {**scores, "failed": float(failed), "seconds": seconds}


def score_cell(recording: str, name: str, setting: dict[str, Any] | None) -> dict[str, Any]:
    """The scores of a critic at every rollout of a recording: one cell of the grid.

    Args:
        recording: The file.
        name: Of the setting.
        setting: Its attributes; None for one of those that are no in-context critic.
    """
    loaded = _loaded(recording)
    which: Setting | str = name if setting is None else Setting(**setting)
    rows = [{"rollout": int(k), **score_rollout(loaded, index, which)} for index, k in enumerate(loaded.rollouts)]
    return {"rows": rows}


def as_cell(recording: Path, setting: Setting | str) -> dict[str, Any]:
    """The arguments of :func:`score_cell`."""
    if isinstance(setting, str):
        return {"recording": str(recording), "name": setting, "setting": None}
    return {"recording": str(recording), "name": setting.name, "setting": dataclasses.asdict(setting)}


@functools.lru_cache(maxsize=1)
def _loaded(recording: str) -> Recording:
    return Recording.load(Path(recording))


def _following(recording: Recording, k: int) -> np.ndarray:
    """(n, E, d): what followed each observation of rollout k, as the policy would have got it; the last of its episode at an end."""
    rows = recording.rollout(k)
    following = recording.seen[rows.start + 1 : rows.stop + 1].copy()
    step, env = np.nonzero(recording.ends)
    of_rollout = (step >= rows.start) & (step < rows.stop)
    following[step[of_rollout] - rows.start, env[of_rollout]] = recording.seen_last[of_rollout]
    return following


def _pairs(recording: Recording, index: int) -> np.ndarray:
    """(p, 2): sampled states LAG steps apart in one episode."""
    steps, envs = recording.steps[index], recording.envs[index]
    ends = recording.ends[recording.rollout(int(recording.rollouts[index]))]
    place = {(int(step), int(env)): i for i, (step, env) in enumerate(zip(steps, envs, strict=True))}
    return np.array(
        [
            (i, place[step + LAG, env])
            for (step, env), i in place.items()
            if (step + LAG, env) in place and not ends[step : step + LAG, env].any()
        ],
        int,
    ).reshape(-1, 2)


def _ceiling(values: Array, action_values: Array, pairs: np.ndarray) -> dict[str, float]:
    n = values.shape[-1]
    result = dict.fromkeys(SCORES, math.nan)
    if n < 4 or n % 4:
        return result  # no two halves that keep mirrored noise together
    order = np.arange(n).reshape(2, -1)  # a column: a repetition and its mirror image
    halves = [order[:, 0::2].ravel(), order[:, 1::2].ravel()]
    v = [values[:, half].mean(-1) for half in halves]
    a = [(action_values - values)[:, half].mean(-1) for half in halves]
    for name, (x, y) in {
        "value": (v[0], v[1]),
        "difference": (v[0][pairs[:, 1]] - v[0][pairs[:, 0]], v[1][pairs[:, 1]] - v[1][pairs[:, 0]]),
        "advantage": (a[0], a[1]),
    }.items():
        r = correlation(x, y)
        result[name] = math.sqrt(2 * r / (1 + r)) if r > 0 else (0.0 if r <= 0 else math.nan)
    return result
