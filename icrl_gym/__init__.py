"""icrl-gym: policy evaluation in context, by a transformer with fixed weights, as a critic for Stable-Baselines3."""

import icrl_gym.envs  # noqa: F401 (registers the environments)
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.context import Context
from icrl_gym.critic import InContextCritic
from icrl_gym.policy import InContextActorCriticPolicy
from icrl_gym.transformer import InContextTransformer
from icrl_gym.value_function import ValueFunction

__version__ = "0.1.0"

__all__ = [
    "AdaptiveTransformer",
    "Context",
    "InContextActorCriticPolicy",
    "InContextCritic",
    "InContextTransformer",
    "ValueFunction",
]
