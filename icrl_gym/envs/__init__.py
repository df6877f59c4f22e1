"""Synthetic Markov reward processes as Gymnasium environments, whose values are known exactly.

There is nothing to choose in them (one action, which does nothing): they are there to evaluate, and to be compared with
the truth. `import icrl_gym` registers

    icrl_gym/KernelMRP-v0     continuous states; the values lie in the function space of a kernel
    icrl_gym/BoyanChain-v0    the random chains of Wang et al. 2025; features of few states

and every constructor argument passes through `gymnasium.make(id, ...)`.
"""

import gymnasium as gym

from icrl_gym.envs.boyan_chain import BoyanChain
from icrl_gym.envs.kernel_mrp import KernelMRP

__all__ = ["BoyanChain", "KernelMRP"]

for _id, _entry_point in (
    # As strings, so that a spec can be pickled and written as JSON.
    ("icrl_gym/KernelMRP-v0", "icrl_gym.envs.kernel_mrp:KernelMRP"),
    ("icrl_gym/BoyanChain-v0", "icrl_gym.envs.boyan_chain:BoyanChain"),
):
    # Gymnasium warns of an id that is registered twice, as reloading this module would.
    if _id not in gym.registry:
        gym.register(_id, entry_point=_entry_point, max_episode_steps=200)
