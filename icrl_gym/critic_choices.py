"""Critics by the names that `--critic` and `--critics` take: what each one is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from icrl_gym.algorithms import AlgorithmName
from icrl_gym.transformer import Acceleration

__all__ = ["CRITICS", "CriticChoice", "CriticConfig", "CriticName", "VariantName", "ZeroValuePolicy", "recurrent_ppo"]

CriticKernel = Literal[
    "laplacian+linear", "matern+linear", "rbf+linear",
    "laplacian", "rbf", "matern", "exponential", "softmax", "relu", "linear",
]  # fmt: skip
CriticName = Literal["in-context", "mlp", "none", "paper", "recurrent"]
VariantName = Literal[CriticName, "in-context+frozen", "in-context+prior", "in-context+frozen+prior"]
"""What `--critics` compares: critics, and the in-context one with `icrl-gym train`'s ``--no-cross-fit`` and ``--prior``."""


@dataclass
class CriticConfig:
    """Settings of the in-context critic. None: the default of InContextCritic (docs/critic.md)."""

    kernel: CriticKernel | None = None
    """What states are compared with; with a plus two heads (None: laplacian+linear)."""
    temperature: str | None = None
    """Of the kernel: a positive number, or "median" (None: median)."""
    n_layers: float | None = None
    """Depth; "inf" for the fixed point (None: inf)."""
    step_sizes: float | None = None
    """Step size of each layer of a finite depth (None: 1)."""
    step_normalization: Literal["row_sum", "length", "none"] | None = None
    """What divides the steps (None: row_sum)."""
    algorithm: AlgorithmName | None = None
    """What the layers do (None: td_lambda for the fixed point, td for layers)."""
    trace_decay: float | None = None
    """Lambda of td_lambda (None: 0.8)."""
    acceleration: Acceleration | None = None
    """Conjugate layers, of residual_gradient and monte_carlo at a finite depth (None: none)."""
    ridge: float | None = None
    """Decay of the coefficients (None: 1e-4 for the fixed point, 0 for layers)."""
    n_landmarks: int | None = None
    """States of the context to compare with; 0 for all of them (None: 256)."""
    value_shift: bool | None = None
    """Reward centering (None: yes)."""
    standardize: bool | None = None
    """States in units of the context's own mean and deviation (None: yes)."""
    oldest_weight: float | None = None
    """What the oldest transition of a full window counts, beside 1 for the newest (None: 0.1 for the fixed point, 1 for layers)."""
    offset: Literal["centered", "removed"] | None = None
    """Keep the literal read-out's constant and center it out of the advantages, or remove it at its source (None: centered)."""

    def critic_kwargs(self) -> dict[str, Any]:
        """The settings that were given, as arguments of InContextCritic."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        temperature = given.get("temperature")
        if temperature is not None and temperature != "median":
            try:
                given["temperature"] = float(temperature)
            except ValueError:
                raise ValueError(f'--temperature must be a positive number or "median", got {temperature!r}.') from None
        if given.get("n_landmarks") == 0:
            given["n_landmarks"] = None
        return given


@dataclass(frozen=True)
class CriticChoice:
    """One critic that a run can have.

    Attributes:
        in_context: It reads its values from a context: environments get a RollingContext, training its callback.
        takes_options: The settings of :class:`CriticConfig` are the user's; otherwise they are ``options``.
        options: Those settings, where they belong to the choice.
        cross_fits: Its advantages are those of cross-fitted values, unless ``--no-cross-fit`` says otherwise.
        context_length: Transitions of the context, over all environments; None: the user's ``--context-rollouts``.
    """

    in_context: bool = False
    takes_options: bool = False
    options: CriticConfig = field(default_factory=CriticConfig)
    cross_fits: bool = False
    context_length: int | None = None


CRITICS: Mapping[CriticName, CriticChoice] = MappingProxyType(
    {
        "in-context": CriticChoice(in_context=True, takes_options=True, cross_fits=True),
        "mlp": CriticChoice(),
        "none": CriticChoice(),
        # As close to the paper's as a run comes without its weights: no landmarks, reward centering or standardization of
        # its own. Its temperature is the context's median distance, because states have other units in every task.
        "paper": CriticChoice(
            in_context=True,
            options=CriticConfig(
                kernel="rbf",
                temperature="median",
                algorithm="td",
                n_layers=20.0,
                step_sizes=1.0,
                step_normalization="row_sum",
                ridge=0.0,
                n_landmarks=0,
                value_shift=False,
                standardize=False,
                offset="centered",
            ),
            context_length=1024,
        ),
        "recurrent": CriticChoice(),
    }
)
"""Every critic by its name (``docs/benchmark.md`` describes them)."""


class _Zero(nn.Module):
    """The value zero, whatever the features: (m, k) to (m, 1)."""

    def forward(self, features: Tensor) -> Tensor:
        return features.new_zeros(len(features), 1)


class ZeroValuePolicy(ActorCriticPolicy):
    """An actor without a critic: every value is zero, and advantages are discounted sums of rewards.

    The actor is SB3's own. With ``gae_lambda`` the advantage of a step is the sum of the rewards that follow in its rollout,
    with weights (gamma lambda)^l.

    Args:
        observation_space: As for SB3.
        action_space: As for SB3.
        lr_schedule: As for SB3.
        **kwargs: Arguments of SB3's ``ActorCriticPolicy``.

    Example:
        >>> from stable_baselines3 import PPO
        >>> model = PPO(ZeroValuePolicy, "CartPole-v1", n_steps=64).learn(128)
        >>> bool((model.rollout_buffer.values == 0).all())
        True
    """

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, lr_schedule: Schedule, **kwargs: Any
    ) -> None:
        if isinstance(observation_space, spaces.Dict):
            kwargs.setdefault("features_extractor_class", CombinedExtractor)
        kwargs.setdefault("net_arch", {"pi": [64, 64], "vf": []})  # no layer in front of a constant
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.value_net = _Zero()  # type: ignore[assignment]
        # Again, now without the parameters of the value network that SB3 has built in the meantime.
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]


def recurrent_ppo() -> Any:
    """sb3-contrib's RecurrentPPO.

    Raises:
        ImportError: It is not installed.
    """
    try:
        from sb3_contrib import RecurrentPPO
    except ImportError:
        raise ImportError(
            "--critic recurrent is sb3-contrib's RecurrentPPO, which is not installed: pip install sb3-contrib."
        ) from None
    return RecurrentPPO
