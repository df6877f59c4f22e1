"""The truth: values and action values of a policy, by going on from a state several times (Monte Carlo).

    V(s)    = mean_k sum_{h<H} gamma^h r_h        all actions drawn from the policy
    Q(s, a) = mean_k sum_{h<H} gamma^h r_h        the first action is a
    A(s, a) = Q(s, a) - V(s)

Repetition k of V and of Q, at every state, draws its actions from the same random numbers (common random numbers), and every
second repetition mirrors those of another (antithetic ones); both take noise out of A without moving its expectation.

Time limits are no ends: PPO bootstraps where an episode is truncated, so its critic estimates the problem without the limit.
A state is restored with its clock set back, and only termination ends a sum before H. What comes after H steps is left out,
for all states alike: gamma^H of what the sum would go on to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy

from icrl_gym.critic_benchmark.snapshots import Snapshot

__all__ = ["Actor", "monte_carlo", "policy_actor"]

Actor = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Raw observations (m, d) and standard normal numbers (m, a) to actions (m, ...) for the environment."""

_LANES = 16  # environments side by side: the policy is asked for all of them at once


def policy_actor(policy: ActorCriticPolicy, view: Callable[[np.ndarray], np.ndarray]) -> tuple[Actor, int]:
    """A stochastic policy as a function of the observation and of the random numbers.

    Args:
        policy: With a Box action space (Gaussian) or a Discrete one.
        view: Raw observations (m, d) as the policy sees them.

    Returns:
        The function, and how many random numbers an action takes.

    Raises:
        ValueError: Another kind of action space.
    """
    space = policy.action_space

    def act(observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            distribution = policy.get_distribution(torch.as_tensor(view(observations), device=policy.device))
        if isinstance(distribution, DiagGaussianDistribution) and isinstance(space, spaces.Box):
            normal = distribution.distribution
            actions = (normal.mean + normal.stddev * torch.as_tensor(noise, dtype=normal.mean.dtype)).numpy(force=True)
            # As Stable-Baselines3 does before a step.
            return np.clip(actions.reshape(-1, *space.shape), space.low, space.high)
        assert isinstance(distribution, CategoricalDistribution) and isinstance(space, spaces.Discrete)
        probabilities = distribution.distribution.probs.numpy(force=True)
        # The normal distribution function makes uniform numbers of normal ones; a mirrored one becomes 1 - u.
        uniform = torch.special.ndtr(torch.as_tensor(noise[:, :1])).numpy()
        actions = (uniform > probabilities.cumsum(-1)).sum(-1).clip(max=probabilities.shape[-1] - 1)
        return np.asarray(actions + space.start)

    if isinstance(space, spaces.Box):
        return act, int(np.prod(space.shape))
    if isinstance(space, spaces.Discrete):
        return act, 1
    raise ValueError(f"the critic benchmark acts in Box and Discrete action spaces, got {space}.")


def monte_carlo(
    snapshots: Sequence[Snapshot],
    observations: npt.ArrayLike,
    actions: npt.ArrayLike,
    actor: Actor,
    n_noise: int,
    *,
    gamma: float,
    horizon: int,
    n_repeats: int,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns from each state, with an action of the policy first and with a given one first.

    Args:
        snapshots: m states.
        observations: (m, d), raw, of those states.
        actions: (m, ...), for the environment.
        actor: The policy.
        n_noise: Random numbers that an action takes.
        gamma: The discount.
        horizon: H, steps of each sum.
        n_repeats: K. Even: the second half mirrors the noise of the first.
        rng: Draws the noise, and the seeds of environments that have noise of their own.

    Returns:
        Two arrays (m, K) in the environment's units of reward: samples of V(s) and of Q(s, a).
    """
    observations, actions = np.asarray(observations), np.asarray(actions)
    noise = rng.standard_normal((n_repeats, horizon, n_noise))
    if n_repeats % 2 == 0:
        noise[n_repeats // 2 :] = -noise[: n_repeats // 2]
    seeds = rng.integers(2**31, size=n_repeats)
    m = len(snapshots)
    jobs = [(state, given, k) for state in range(m) for given in (False, True) for k in range(n_repeats)]
    returns = np.zeros((2, m, n_repeats))
    envs: list[gym.Env | None] = [None] * _LANES
    for first in range(0, len(jobs), _LANES):
        batch = jobs[first : first + _LANES]
        for lane, (state, _, k) in enumerate(batch):
            envs[lane] = env = snapshots[state].restore(envs[lane])
            # Every repetition has other noise of the environment, and V and Q the same.
            env.unwrapped.np_random = np.random.default_rng(seeds[k])
        seen = np.stack([observations[state] for state, _, _ in batch])
        running = list(range(len(batch)))
        for step in range(horizon):
            chosen = list(actor(seen[running], noise[[batch[lane][2] for lane in running], step]))
            going = []
            for lane, action in zip(running, chosen, strict=True):
                state, given, k = batch[lane]
                running_env = envs[lane]
                assert running_env is not None
                observation, reward, terminated, _, _ = running_env.step(
                    actions[state] if given and step == 0 else action
                )
                returns[int(given), state, k] += gamma**step * float(reward)
                seen[lane] = np.ravel(observation)
                if not terminated:
                    going.append(lane)
            running = going
            if not running:
                break
    return returns[0], returns[1]
