"""Stable-Baselines3 callbacks for the in-context critic."""

from icrl_gym.callbacks.advantage_centering import AdvantageCenteringCallback
from icrl_gym.callbacks.context_sync import ContextSyncCallback
from icrl_gym.callbacks.cross_fit import CrossFitCallback
from icrl_gym.callbacks.in_context import InContextCallback
from icrl_gym.callbacks.td_error import TDErrorCallback

__all__ = [
    "AdvantageCenteringCallback",
    "ContextSyncCallback",
    "CrossFitCallback",
    "InContextCallback",
    "TDErrorCallback",
]
