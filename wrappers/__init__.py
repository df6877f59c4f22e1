"""Gymnasium wrappers that keep a rolling context of transitions."""

from icrl_gym.wrappers.rolling_context import ContextSnapshot, RollingContext
from icrl_gym.wrappers.vector_rolling_context import VectorRollingContext

__all__ = ["ContextSnapshot", "RollingContext", "VectorRollingContext"]
