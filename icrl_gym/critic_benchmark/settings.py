"""Settings of critics to try: what `--settings FILE.json` holds, and the list that stands in without it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.critic import InContextCritic

__all__ = ["DEFAULT_SETTINGS", "LEARNED", "ZERO", "ContextMode", "Setting", "read_settings"]

ContextMode = Literal["frozen", "cross_fitted"]

LEARNED = "learned"  # PPO's own critic, as trained so far
ZERO = "zero"
TRUTH = "truth"


@dataclass(frozen=True)
class Setting:
    """One critic to try.

    Attributes:
        name: Its name in the tables.
        critic: Arguments of :class:`~icrl_gym.critic.InContextCritic`; ``gamma`` defaults to the recording's, and advantages are
            always of the recording's.
        adaptive: Arguments of :class:`~icrl_gym.adaptive.AdaptiveTransformer`, for a critic made of one.
        window: Length of the context, in rollouts of each environment; a fraction of one for critics that compare every transition.
        context: ``"frozen"``: the transitions from before the rollout, as in training. ``"cross_fitted"``: for the values of an
            environment, the other environments' transitions of the rollout itself as well.
    """

    name: str
    critic: dict[str, Any] = field(default_factory=dict)
    adaptive: dict[str, Any] | None = None
    window: float = 8
    context: ContextMode = "frozen"

    def __post_init__(self) -> None:
        """Say what cannot work.

        Raises:
            ValueError: A name that is taken, a window that is not positive, both kinds of transformer.
        """
        if not self.name or self.name in (LEARNED, ZERO, TRUTH):
            raise ValueError(
                f"a setting needs a name other than {LEARNED!r}, {ZERO!r} and {TRUTH!r}, which are always scored; got {self.name!r}."
            )
        if not 0 < self.window < math.inf:
            raise ValueError(f"setting {self.name!r}: window must be a positive number of rollouts, got {self.window}.")
        if self.adaptive is not None and set(self.critic) - {"standardize"}:
            raise ValueError(
                f"setting {self.name!r}: beside adaptive, critic may hold standardize alone; got {sorted(self.critic)}."
            )

    def build(self, n_features: int, gamma: float) -> InContextCritic:
        """The critic, without a context.

        Args:
            n_features: d.
            gamma: The discount where the setting names none.

        Raises:
            ValueError: Arguments that the critic refuses; the message names the setting.
        """
        try:
            if self.adaptive is not None:
                transformer = AdaptiveTransformer(**{"gamma": gamma, **_numbers(self.adaptive)})
                return InContextCritic(n_features, transformer=transformer, **self.critic)
            return InContextCritic(n_features, **{"gamma": gamma, **_numbers(self.critic)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"setting {self.name!r}: {error}") from error


def _numbers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    # JSON has no word for infinity.
    return {name: math.inf if value == "inf" else value for name, value in arguments.items()}


_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("name", str, "a string"),
    ("critic", dict, "an object"),
    ("adaptive", (dict, type(None)), "an object or null"),
    ("window", (int, float), "a number"),
    ("context", str, "a string"),
)


def read_settings(file: Path) -> list[Setting]:
    """The settings of a file: a JSON list of objects with the attributes of :class:`Setting`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds something else, or a name twice.
    """
    try:
        entries = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--settings {str(file)!r} is not JSON: {error}.") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f'--settings {str(file)!r} must hold a list of objects, such as [{{"name": "rbf", "critic": {{"kernel": "rbf"}}}}].'
        )
    known = [entry.name for entry in dataclasses.fields(Setting)]
    for entry in entries:
        unknown = sorted(set(entry) - set(known))
        if unknown or "name" not in entry:
            what = f"{unknown[0]!r} is none of them" if unknown else "name is missing"
            raise ValueError(f"--settings {str(file)!r}: a setting has {', '.join(known)}; {what} in {entry}.")
    for entry in entries:
        for name, kinds, what in _KINDS:
            value = entry.get(name)
            if name in entry and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise ValueError(f"--settings {str(file)!r}: {name} must be {what}, got {value!r} in {entry}.")
        if entry.get("context", "frozen") not in get_args(ContextMode):
            raise ValueError(
                f"--settings {str(file)!r}: context must be one of {get_args(ContextMode)}, got {entry['context']!r} in {entry}."
            )
    settings = [Setting(**entry) for entry in entries]
    names = [setting.name for setting in settings]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"--settings {str(file)!r}: every setting needs a name of its own; {twice[0]!r} is there twice."
        )
    for setting in settings:
        setting.build(1, 0.9)
    return settings


def _td_laplacian(name: str, critic: Mapping[str, Any] | None = None, **options: Any) -> Setting:
    """A setting of TD(0) with the Laplacian kernel alone and no recency, but for what ``critic`` says: the defaults are others."""
    return Setting(name, {"kernel": "laplacian", "algorithm": "td", "oldest_weight": 1.0, **(critic or {})}, **options)


def _default_settings() -> list[Setting]:
    kernels = [_td_laplacian(f"td {kernel}", {"kernel": kernel}) for kernel in ("laplacian", "matern", "rbf")]
    ridges = [_td_laplacian(f"td laplacian ridge {rho:g}", {"ridge": rho}) for rho in (1e-5, 1e-3, 1e-2)]
    traces = [
        _td_laplacian(f"td_lambda {trace} laplacian", {"algorithm": "td_lambda", "trace_decay": trace})
        for trace in (0.8, 0.95)
    ]
    residual = [
        _td_laplacian(
            f"residual {kernel} ridge {rho:g}", {"algorithm": "residual_gradient", "kernel": kernel, "ridge": rho}
        )
        for kernel, rho in (("rbf", 1e-4), ("rbf", 1e-3), ("rbf", 1e-2), ("rbf", 1e-1), ("laplacian", 1e-3))
    ]
    sums = [
        _td_laplacian(f"monte_carlo laplacian ridge {rho:g}", {"algorithm": "monte_carlo", "ridge": rho})
        for rho in (1e-3, 1e-1)
    ]
    adaptive = [Setting("adaptive window 0.5", adaptive={}, window=0.5)]
    windows = [_td_laplacian(f"td laplacian window {w}", window=w) for w in (1, 2, 4, 16)]
    windows += [
        _td_laplacian(f"td_lambda 0.95 laplacian window {w}", {"algorithm": "td_lambda", "trace_decay": 0.95}, window=w)
        for w in (2, 4)
    ]
    landmarks = [_td_laplacian(f"td laplacian landmarks {m}", {"n_landmarks": m}) for m in (128, 512)]
    discounts = [_td_laplacian(f"td laplacian gamma {g}", {"gamma": g}) for g in (0.9, 0.95, 0.97)]
    crossed: list[Setting] = [
        _td_laplacian("td laplacian cross-fitted", context="cross_fitted"),
        _td_laplacian("td laplacian window 2 cross-fitted", window=2, context="cross_fitted"),
        _td_laplacian(
            "td_lambda 0.95 laplacian cross-fitted",
            {"algorithm": "td_lambda", "trace_decay": 0.95},
            context="cross_fitted",
        ),
        _td_laplacian("td laplacian gamma 0.95 cross-fitted", {"gamma": 0.95}, context="cross_fitted"),
    ]
    return [
        *kernels, *ridges, *traces, *residual, *sums, *adaptive, *windows, *landmarks, *discounts, *crossed,
    ]  # fmt: skip


DEFAULT_SETTINGS: tuple[Setting, ...] = tuple(_default_settings())
"""What is tried without ``--settings``; windows are 8 rollouts, landmarks 256, and contexts frozen where the name says nothing."""
