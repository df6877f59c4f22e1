"""KernelMRP: a Markov reward process over continuous states whose value function is in the kernel's space, exactly."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from icrl_gym.context import Context
from icrl_gym.kernels import Kernel, make_kernel

__all__ = ["KernelMRP"]

Reward = Literal["transition", "expected"]

_TEMPERATURE = 0.1  # for a kernel given by name alone
_STEP = 0.5  # the longest a move can be along one coordinate


class KernelMRP(gym.Env[np.ndarray, Any]):
    """Random moves in a box, with rewards made so that the value of a state is known exactly.

    The value function is drawn first, and the rewards follow from it by Bellman's equation:

        v(s) = sum_j w_j k(z_j, s),        z_j uniform in the box, w_j standard normal

        r(s, s') = v(s) - gamma (1 - terminated) v(s')                   reward="transition"
        r(s)     = v(s) - gamma (1 - termination) E[v(s') | s]           reward="expected"

    so v is an element of the kernel's function space (its RKHS) by construction. With ``"transition"`` EVERY transition
    has a TD error of zero under v, whatever it drew: what a method gets wrong is its own doing. With ``"expected"``
    rewards depend on the state alone, and TD errors under v have mean zero: there is noise to average.

    The box is [-1, 1]^d with opposite sides joined. One of ``n_moves`` displacements c_i, all equally likely, is added to
    the state, s' = s + c_i, and what leaves on one side comes in on the other. So E[v(s') | s] is a sum of ``n_moves`` terms,
    and the uniform distribution, from which episodes start, is the stationary one. Values need not agree across a side.
    The joint sides are the price of a stationary distribution that is known.

    States are rounded to the numbers that float32 has: an observation is the state itself, with nothing lost, and what is
    said here of states holds of observations to the precision of float64.

    A Markov reward process has nothing to choose: the one action of ``Discrete(1)`` does nothing.

    Args:
        n_features: d, the dimension of a state.
        kernel: A positive definite kernel with constants of its own, or the name of one, see
            :func:`~icrl_gym.kernels.make_kernel`.
        temperature: Of a kernel given by name; default 0.1, for those that have one.
        n_centers: How many terms v has.
        gamma: The discount, in [0, 1]; below 1 where no episode ends.
        termination: The probability that an episode terminates, at each step.
        reward: ``"transition"`` or ``"expected"``.
        n_moves: How many displacements, each uniform in [-0.5, 0.5]^d. One: each state has one successor.
        seed: Draws centers, weights and moves: which process this is. The seed of ``reset`` draws its trajectories.

    Attributes:
        kernel: k, a copy on the CPU in float64.
        centers: (n_centers, d), z.
        weights: (n_centers,), w.
        moves: (n_moves, d), c.

    ``info["value"]`` is v of the observed state; after a terminated step too, though nothing is left to gain there.
    ``reset(options={"state": s})`` starts at a given state.

    Raises:
        ValueError: An argument outside of what is said above; a kernel that is not positive definite, or that takes its
            temperature from the context (``"median"``).

    Example:
        >>> env = KernelMRP(n_features=2, gamma=0.5, seed=1)
        >>> state, info = env.reset(seed=0)
        >>> next_state, reward, terminated, truncated, next_info = env.step(0)
        >>> abs(reward + 0.5 * next_info["value"] - info["value"]) < 1e-12
        True
    """

    def __init__(
        self,
        n_features: int = 1,
        kernel: Kernel | str = "rbf",
        temperature: float | None = None,
        n_centers: int = 10,
        gamma: float = 0.9,
        termination: float = 0.0,
        reward: Reward = "transition",
        n_moves: int = 4,
        seed: int = 0,
    ) -> None:
        self.n_features = whole_number("KernelMRP", "n_features", n_features, 1)
        self.n_centers = whole_number("KernelMRP", "n_centers", n_centers, 1)
        self.n_moves = whole_number("KernelMRP", "n_moves", n_moves, 1)
        self.gamma = part_of_one("KernelMRP", "gamma", gamma)
        self.termination = part_of_one("KernelMRP", "termination", termination)
        if self.gamma == 1 and self.termination == 0:
            raise ValueError(
                "KernelMRP: with gamma=1 and termination=0 returns are infinite sums; set a smaller gamma, or a positive "
                "termination."
            )
        if reward not in get_args(Reward):
            raise ValueError(f'KernelMRP: reward must be "transition" or "expected", got {reward!r}.')
        self.reward = reward
        rng = generator("KernelMRP", seed, "structure")
        # Neither kernel, gamma, termination nor reward has a say in these: one seed, one process under all of them.
        self.moves = rng.uniform(-_STEP, _STEP, (self.n_moves, self.n_features))
        self.centers = rng.uniform(-1.0, 1.0, (self.n_centers, self.n_features))
        self.weights = rng.standard_normal(self.n_centers)
        self._center_tensor = torch.from_numpy(self.centers)
        self.kernel = self._check_kernel(kernel, temperature)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (self.n_features,), np.float32)
        self.action_space = gym.spaces.Discrete(1)
        self._state: np.ndarray | None = None  # (1, d), float64; None outside of an episode
        self._value = np.zeros(1)  # of that state

    def _check_kernel(self, kernel: Kernel | str, temperature: float | None) -> Kernel:
        """The kernel as this environment holds it."""
        if isinstance(kernel, str):
            made = make_kernel(kernel, temperature)
            # Named alone, a kernel would take its temperature from a context, and there is none.
            unset = temperature is None and self._takes_from_context(made)
            kernel = make_kernel(kernel, _TEMPERATURE) if unset else made
        elif temperature is not None:
            raise ValueError(
                f"KernelMRP: temperature is for a kernel given by name; {kernel} has its own constants. Leave temperature out."
            )
        if not kernel.positive_definite:
            raise ValueError(
                f"KernelMRP: the kernel must be positive definite, so that it has a space of functions to draw from; got "
                f"{kernel}. Use RBF, Laplacian, Matern, exponential or linear."
            )
        # A copy: the process must not change when the kernel that was passed is trained or moved.
        kernel = copy.deepcopy(kernel).to("cpu", torch.float64)
        if self._takes_from_context(kernel):
            raise ValueError(
                f"KernelMRP: the kernel must have constants of its own, got {kernel}, which takes its temperature from a "
                f"context. Set a number, temperature={_TEMPERATURE} say."
            )
        with torch.no_grad():
            shape = tuple(kernel(self._center_tensor, self._center_tensor).shape)
        if shape != (self.n_centers, self.n_centers):
            raise ValueError(
                f"KernelMRP: expected one number k(z, s) for each pair of states, got a batch of shape {shape[:-2]} from "
                f"{kernel}. Use one temperature for the whole kernel."
            )
        return kernel

    def _takes_from_context(self, kernel: Kernel) -> bool:
        return kernel.adapted(self._center_tensor) is not kernel

    def value(self, states: Any) -> np.ndarray:
        """The exact value v(s) = sum_j w_j k(z_j, s) of each state, in the units of the rewards.

        Args:
            states: (m, d), or (..., d); arrays, lists or tensors.

        Returns:
            (m,), or (...), in float64.

        Raises:
            ValueError: Their last dimension is not d.
        """
        states = states.numpy(force=True) if isinstance(states, Tensor) else states
        states = np.array(states, np.float64)
        if states.ndim < 1 or states.shape[-1] != self.n_features:
            raise ValueError(
                f"KernelMRP: expected states of shape (m, {self.n_features}), got {states.shape}. For one feature, write "
                f"states[:, None]."
            )
        rows = torch.from_numpy(states.reshape(-1, self.n_features))
        with torch.no_grad():
            values = self.kernel(self._center_tensor, rows).numpy()
        return (self.weights @ values).reshape(states.shape[:-1])

    def successors(self, states: Any) -> np.ndarray:
        """Where each state can lead, each with probability 1 / n_moves.

        Args:
            states: (m, d), or (..., d), in the box.

        Returns:
            (m, n_moves, d), or (..., n_moves, d), in float64.
        """
        moved = np.asarray(states, np.float64)[..., None, :] + self.moves
        return _on_grid((moved + 1.0) % 2.0 - 1.0)

    def sample_context(self, n: int, seed: int | np.random.Generator, iid: bool = False) -> Context:
        """A context of n transitions in float64; the environment's own episode and generator are left alone.

        Args:
            n: How many transitions.
            seed: Draws them; or a generator, which moves on.
            iid: True: n states drawn from the stationary distribution, one transition from each, marked as truncated since the
                next does not follow from it. False: one trajectory, that starts anew (from the stationary distribution)
                where it terminates; no time limit cuts it.

        Returns:
            A :class:`~icrl_gym.context.Context` of length n.

        Raises:
            ValueError: n or the seed is negative or not whole.
        """
        n = whole_number("KernelMRP", "n", n, 0)
        rng = generator("KernelMRP", seed, "context")
        starts = self._draw_starts(rng, n)
        moves = rng.integers(self.n_moves, size=n)
        terminated = rng.random(n) < self.termination
        if iid:
            states, next_states = starts, self.successors(starts)[np.arange(n), moves]
        else:
            states, next_states = np.empty_like(starts), np.empty_like(starts)
            for t in range(n):
                states[t] = starts[t] if t == 0 or terminated[t - 1] else next_states[t - 1]
                next_states[t] = self.successors(states[t])[moves[t]]
        rewards = self._rewards(states, self.value(states), self.value(next_states), terminated)
        return Context(states, rewards, next_states, terminated, truncated=~terminated if iid else None)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Restarts the generator of trajectories; it does not touch centers, weights and moves.
            options: ``{"state": s}`` starts at s, (d,) in the box, rounded to float32; default a uniformly drawn one.

        Raises:
            ValueError: Another option, or a state that is not in the box.
        """
        super().reset(seed=seed)
        state = start_option("KernelMRP", options)
        if state is None:
            self._state = self._draw_starts(self.np_random, 1)
        else:
            given = np.asarray(state, np.float64)
            if given.shape != (self.n_features,) or not bool((np.abs(given) <= 1).all()):
                raise ValueError(
                    f'KernelMRP: options["state"] must have shape ({self.n_features},) and lie in [-1, 1], got '
                    f"{given.tolist()}."
                )
            self._state = _on_grid(given[None])
        self._value = self.value(self._state)
        return self._state[0].astype(np.float32), {"value": float(self._value[0])}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Makes one transition; the action does nothing.

        Raises:
            gymnasium.error.ResetNeeded: There is no episode, or it has terminated.
        """
        if self._state is None:
            raise gym.error.ResetNeeded(
                "KernelMRP: no episode is going on; call reset() first, and after a terminated step."
            )
        next_state = self.successors(self._state)[:, self.np_random.integers(self.n_moves)]
        terminated = bool(self.np_random.random() < self.termination)
        next_value = self.value(next_state)
        reward = float(self._rewards(self._state, self._value, next_value, np.array([terminated]))[0])
        self._state, self._value = None if terminated else next_state, next_value
        return next_state[0].astype(np.float32), reward, terminated, False, {"value": float(next_value[0])}

    def _draw_starts(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """States of the uniform distribution: (n, d)."""
        return _on_grid(rng.uniform(-1.0, 1.0, (n, self.n_features)))

    def _rewards(
        self, states: np.ndarray, values: np.ndarray, next_values: np.ndarray, terminated: np.ndarray
    ) -> np.ndarray:
        """The rewards of n transitions: (n,), from the states (n, d), v(s), v(s') and ends (n,)."""
        if self.reward == "transition":
            return values - self.gamma * ~terminated * next_values
        expected = self.value(self.successors(states)).mean(-1)
        return values - self.gamma * (1 - self.termination) * expected


def _on_grid(states: np.ndarray) -> np.ndarray:
    """Rounded to what float32 can hold, in float64: what is observed is then the state itself."""
    return states.astype(np.float32).astype(np.float64)


def whole_number(owner: str, name: str, value: Any, least: int) -> int:
    """The value as an int, or a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{owner}: {name} must be a whole number of at least {least}, got {value!r}.")
    return int(value)


def part_of_one(owner: str, name: str, value: Any) -> float:
    """The value as a float in [0, 1], or a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value <= 1:
        raise ValueError(f"{owner}: {name} must be a number in [0, 1], got {value!r}.")
    return float(value)


def generator(
    owner: str, seed: int | np.random.Generator, purpose: Literal["structure", "context"]
) -> np.random.Generator:
    """A generator that shares no stream with another purpose, or with ``reset``, at the same seed.

    Of one stream, the states of a context would be the very numbers that the centers were drawn as.
    """
    if isinstance(seed, np.random.Generator):
        return seed
    key = ("structure", "context").index(purpose)
    return np.random.default_rng(np.random.SeedSequence(whole_number(owner, "seed", seed, 0), spawn_key=(key,)))


def start_option(owner: str, options: dict[str, Any] | None) -> Any:
    """The state that ``reset`` was asked to start at, or None."""
    unknown = sorted(set(options or {}) - {"state"})
    if unknown:
        raise ValueError(f'{owner}: reset knows one option, "state"; got {", ".join(map(repr, unknown))}.')
    return (options or {}).get("state")
