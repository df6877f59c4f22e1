"""icrl-gym: policy evaluation in context, by a transformer with fixed weights, as a critic for Stable-Baselines3."""

from icrl_gym.context import Context

__version__ = "0.1.0"

__all__ = ["Context"]
