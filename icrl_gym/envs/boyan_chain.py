"""BoyanChain: the random Markov reward processes that in-context TD was first shown on, with exact values."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from torch import Tensor

from icrl_gym.context import Context
from icrl_gym.envs.kernel_mrp import generator, part_of_one, start_option, whole_number

__all__ = ["BoyanChain"]


class BoyanChain(gym.Env[np.ndarray, Any]):
    """A random chain of m states, seen through random features; each seed is another task.

    Everything about a task is drawn once, by ``seed``:

        P(i+1 | i) = eps_i, P(i+2 | i) = 1 - eps_i     for all but the last two states
        P(m | m-1) = 1                                 the second to last (counted from 1 here)
        P(. | m)                                       any state: the chain never ends
        phi(i) uniform in [-1, 1]^d                    the features, which is all that is observed
        r(i) uniform in [-1, 1]                        the reward on leaving i, wherever to

    The values are v = (I - gamma P)^-1 r. With ``representable`` a standard normal w* is drawn in place of rewards, and
    r = (I - gamma P) Phi w*, so that v = Phi w* is linear in the features. Transitions and features of a seed are the same
    either way.

    Decisions. Probabilities (eps_i; the last row and the initial distribution, before they are normalized) are uniform in
    [0.01, 0.99], as in the code that Wang et al. published, so that no state is out of reach. Features are rounded to the
    numbers that float32 has, so that an observation is phi(i) itself. There is no termination: ``gymnasium.make`` cuts
    episodes by a time limit (truncated), and past such a cut the value of the next state counts.

    A Markov reward process has nothing to choose: the one action of ``Discrete(1)`` does nothing.

    Args:
        n_states: m, at least 2.
        n_features: d.
        gamma: The discount, in [0, 1).
        representable: Whether the values are linear in the features.
        seed: Draws the task. The seed of ``reset`` draws its trajectories.

    Attributes:
        transitions: (m, m), P; row i holds the probabilities of what follows state i (counted from 0).
        initial: (m,), the distribution of the first state.
        stationary: (m,), the distribution mu = mu P of the state in the long run.
        features: (m, d), Phi.
        rewards: (m,), r.
        weights: (d,), w* of a representable task, or None.
        values: (m,), v.

    ``info`` holds the ``"state"`` (an index) that was observed and its ``"value"``. ``reset(options={"state": i})`` starts at a
    given one.

    Raises:
        ValueError: An argument outside of what is said above.

    Source: Boyan 1999 (the chain); Wang et al. 2025, "Transformers Can Learn Temporal Difference Methods for In-Context
    Reinforcement Learning" (the random tasks).

    Example:
        >>> chain = BoyanChain(n_states=5, n_features=2, representable=True, seed=3)
        >>> bool(np.allclose(chain.values, chain.features @ chain.weights))
        True
        >>> chain.sample_context(30, seed=0)
        Context(n=30, d=2)
    """

    def __init__(
        self,
        n_states: int = 10,
        n_features: int = 4,
        gamma: float = 0.9,
        representable: bool = False,
        seed: int = 0,
    ) -> None:
        self.n_states = m = whole_number("BoyanChain", "n_states", n_states, 2)
        self.n_features = d = whole_number("BoyanChain", "n_features", n_features, 1)
        self.gamma = part_of_one("BoyanChain", "gamma", gamma)
        if self.gamma == 1:
            raise ValueError("BoyanChain: gamma must be below 1, since the chain never ends; got 1. Set 0.9, say.")
        self.representable = bool(representable)
        rng = generator("BoyanChain", seed, "structure")

        transitions = np.zeros((m, m))
        for i, eps in enumerate(rng.uniform(0.01, 0.99, m - 2)):
            transitions[i, i + 1], transitions[i, i + 2] = eps, 1 - eps
        transitions[-2, -1] = 1.0
        transitions[-1] = _distribution(rng, m)
        initial = _distribution(rng, m)
        features = rng.uniform(-1.0, 1.0, (m, d)).astype(np.float32).astype(np.float64)
        system = np.eye(m) - self.gamma * transitions
        weights = rng.standard_normal(d) if representable else None
        rewards = rng.uniform(-1.0, 1.0, m) if weights is None else system @ features @ weights
        self.transitions, self.initial, self.features = transitions, initial, features
        self.weights, self.rewards = weights, rewards
        self.values = np.linalg.solve(system, rewards)
        # mu (I - P) = 0 and mu 1 = 1, added into one regular system: every state reaches the last, and it reaches every state.
        self.stationary = np.linalg.solve((np.eye(m) - transitions + 1.0).T, np.ones(m))
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (d,), np.float32)
        self.action_space = gym.spaces.Discrete(1)
        self._state: int | None = None

    def value(self, states: Any) -> np.ndarray:
        """The exact values of states, in the units of the rewards.

        Args:
            states: (k,) whole numbers in 0 ... m-1, or any other shape of them.

        Returns:
            As many values, in that shape.

        Raises:
            ValueError: There is no such state.
        """
        indices = _numpy(states)
        if not np.issubdtype(indices.dtype, np.integer) or ((indices < 0) | (indices >= self.n_states)).any():
            raise ValueError(
                f"BoyanChain: states are whole numbers in 0 ... {self.n_states - 1}, got {indices.tolist()}. Features do not "
                f'tell a state; info["state"] does.'
            )
        return np.asarray(self.values[indices])

    def msve(self, predicted: Any, weights: Any = None) -> float:
        """The mean squared value error, sum_i weights_i (predicted_i - v_i)^2.

        Args:
            predicted: (m,), a value for each state, such as a value function's answer to ``features``.
            weights: (m,), default the stationary distribution.

        Raises:
            ValueError: Shapes other than (m,).

        Source: Sutton and Barto 2018, section 9.2.
        """
        predicted = _numpy(predicted)
        weights = self.stationary if weights is None else _numpy(weights)
        for name, array in (("predicted", predicted), ("weights", weights)):
            if array.shape != (self.n_states,):
                raise ValueError(
                    f"BoyanChain: {name} must have shape ({self.n_states},), a number a state; got {array.shape}."
                )
        return float(weights @ (predicted - self.values) ** 2)

    def sample_context(self, n: int, seed: int | np.random.Generator, iid: bool = False) -> Context:
        """A context of n transitions in float64; the environment's own episode and generator are left alone.

        Args:
            n: How many transitions.
            seed: Draws them; or a generator, which moves on.
            iid: True: n states drawn from the stationary distribution, one transition from each, marked as truncated since the
                next does not follow from it. False: one trajectory from the initial distribution, as in Wang et al. 2025.

        Returns:
            A :class:`~icrl_gym.context.Context` of length n, with features for states.

        Raises:
            ValueError: n or the seed is negative or not whole.
        """
        n = whole_number("BoyanChain", "n", n, 0)
        rng = generator("BoyanChain", seed, "context")
        if iid:
            states = rng.choice(self.n_states, size=n, p=self.stationary)
            next_states = np.array([self._next(rng, int(i)) for i in states], dtype=int)
        else:
            path = [int(rng.choice(self.n_states, p=self.initial))]
            for _ in range(n):
                path.append(self._next(rng, path[-1]))
            states, next_states = np.array(path[:-1], dtype=int), np.array(path[1:], dtype=int)
        terminated = np.zeros(n, np.bool_)
        truncated = np.full(n, iid)
        return Context(self.features[states], self.rewards[states], self.features[next_states], terminated, truncated)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Restarts the generator of trajectories; it does not touch the task.
            options: ``{"state": i}`` starts at state i; default one of the initial distribution.

        Raises:
            ValueError: Another option, or no such state.
        """
        super().reset(seed=seed)
        state = start_option("BoyanChain", options)
        if state is None:
            state = self.np_random.choice(self.n_states, p=self.initial)
        else:
            state = whole_number("BoyanChain", 'options["state"]', state, 0)
            self.value(state)
        self._state = int(state)
        return self._observe(self._state)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Makes one transition; the action does nothing.

        Raises:
            gymnasium.error.ResetNeeded: There was no reset.
        """
        if self._state is None:
            raise gym.error.ResetNeeded("BoyanChain: no episode is going on; call reset() first.")
        reward = float(self.rewards[self._state])
        self._state = self._next(self.np_random, self._state)
        observation, info = self._observe(self._state)
        return observation, reward, False, False, info

    def _observe(self, state: int) -> tuple[np.ndarray, dict[str, Any]]:
        return self.features[state].astype(np.float32), {"state": state, "value": float(self.values[state])}

    def _next(self, rng: np.random.Generator, state: int) -> int:
        return int(rng.choice(self.n_states, p=self.transitions[state]))


def _distribution(rng: np.random.Generator, m: int) -> np.ndarray:
    weights = rng.uniform(0.01, 0.99, m)
    return weights / weights.sum()


def _numpy(values: Any) -> np.ndarray:
    return values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)
