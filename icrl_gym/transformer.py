"""InContextTransformer: L layers of attention that are L steps of kernelized TD on the context, literally.

The tokens of a prompt are the columns of Z, one a transition and a last one for the query:

    context token j : [ s_j ; s'_j ; r_j ]        query token : [ s_q ; 0 ; 0 ]

and a layer is two attention heads with a residual connection:

    Z <- Z + sum_h  V_h Z M k(K_h Z, Q_h Z) G_h / normalizer(context)

The residual gradient has two more heads, whose keys are next states. TD(lambda) has a matrix for M, with (gamma lambda)^l on the
side of the diagonal where later transitions are. Monte Carlo and average reward read their targets in a layer of their own
first. Conjugate layers carry one more row, the direction that they move along: [ s ; s' ; p ; e ].

:meth:`InContextTransformer.forward` computes exactly that, matrices and all. :meth:`InContextTransformer.condition`
collapses it to a function of the query that costs n kernel values, whatever the depth (see
:mod:`icrl_gym.value_function`). Both answers agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from icrl_gym._typing import Bool, Float, Int
from icrl_gym.algorithms import Algorithm, AlgorithmName
from icrl_gym.context import Context, as_tensor
from icrl_gym.distances import row_blocks
from icrl_gym.fixed_points import fixed_point
from icrl_gym.kernels import Kernel, NystromKernel
from icrl_gym.landmark_fixed_points import landmark_fixed_points, leaves_out
from icrl_gym.landmarks import choose_landmarks
from icrl_gym.solvers import (
    Directions,
    System,
    conjugate,
    conjugate_ratio,
    iterate,
    system,
    trace,
)
from icrl_gym.value_function import MOST_GROWTH, ValueFunction, check_growth, reward_center

__all__ = ["Acceleration", "AttentionHead", "ConjugateLayer", "InContextTransformer", "Layer", "Prompt"]

StepNormalization = Literal["row_sum", "length", "none"]
Offset = Literal["centered", "removed"]
Acceleration = Literal["none", "conjugate"]


@dataclass(frozen=True)
class Prompt:
    """What the transformer reads: one matrix of tokens a query, and what it may look at.

    Attributes:
        tokens: (..., m, 2d+1, n+1): Z_0, the query in the last column.
        keys: (..., m, n+1) bool, M: False for the query and for empty places.
        bootstrap: (..., m, n+1) bool, G of the bootstrap head: False where the episode terminated.
        weights: (..., m, n+1), how much each key counts, beside M; None where all count alike.
        landmarks: (..., M, d), the landmark states of the context, or None.
        landmark_mask: (..., M) bool, False for a landmark that does not exist.
        traces: (..., m, n+1, n+1), what stands beside M of TD(lambda): (gamma lambda)^l from a transition to those before it.
        reading: (..., m, n+1, n+1), what the first layer multiplies the last row by: rewards to returns, or to what they are
            above their mean.
    """

    tokens: Float[Tensor, "*b m r c"]
    keys: Bool[Tensor, "*b m c"]
    bootstrap: Bool[Tensor, "*b m c"]
    weights: Float[Tensor, "*b m c"] | None = None
    landmarks: Float[Tensor, "*b M d"] | None = None
    landmark_mask: Bool[Tensor, "*b M"] | None = None
    traces: Float[Tensor, "*b m c c"] | None = None
    reading: Float[Tensor, "*b m c c"] | None = None

    @property
    def key_weights(self) -> Float[Tensor, "*b m c"]:
        """How much each column counts as a key: 0 for the query and for empty places, 1 where nothing else is said."""
        return self.keys.to(self.tokens) if self.weights is None else self.weights


class AttentionHead(nn.Module):
    """One attention head with explicit matrices: Z -> V Z M k(K Z, Q Z) G.

    With weights, M is their diagonal: in a softmax their logarithms would be a positional bias.

    Attributes:
        key: (d, 2d+1), K: picks what a token is compared by as a key.
        query: (d, 2d+1), Q: picks what a token is compared by as a query.
        value: (2d+1, 2d+1), V: what a key token gives.
    """

    key: Tensor
    query: Tensor
    value: Tensor

    def __init__(self, key: Float[Tensor, "d r"], query: Float[Tensor, "d r"], value: Float[Tensor, "r r"]) -> None:
        super().__init__()
        self.register_buffer("key", key)
        self.register_buffer("query", query)
        self.register_buffer("value", value)

    def attention(
        self, tokens: Float[Tensor, "*b r c"], kernel: Kernel, keys: Bool[Tensor, "*b c"]
    ) -> Float[Tensor, "*b c c"]:
        """M k(K Z, Q Z): row j is key token j, column i is query token i."""
        as_keys = (self.key.to(tokens) @ tokens).transpose(-1, -2)
        as_queries = (self.query.to(tokens) @ tokens).transpose(-1, -2)
        return kernel(as_keys, as_queries, keys)

    def forward(
        self,
        tokens: Float[Tensor, "*b r c"],
        kernel: Kernel,
        keys: Bool[Tensor, "*b c"],
        columns: Bool[Tensor, "*b c"] | None = None,
        traces: Float[Tensor, "*b c c"] | None = None,
        weights: Float[Tensor, "*b c"] | None = None,
    ) -> Float[Tensor, "*b r c"]:
        """V Z M k(K Z, Q Z) G.

        Args:
            tokens: (..., 2d+1, n+1), Z.
            kernel: k.
            keys: (..., n+1) bool, M.
            columns: (..., n+1) bool, G; default all True.
            traces: (..., n+1, n+1), a factor of M that is no diagonal.
            weights: (..., n+1), a factor of M that is one.
        """
        given = self.value.to(tokens) @ tokens
        given = given if traces is None else given @ traces
        given = given if weights is None else given * weights.unsqueeze(-2)
        update = given @ self.attention(tokens, kernel, keys)
        return update if columns is None else update * columns.unsqueeze(-2)


class Layer(nn.Module):
    """One step of kernelized TD: a head that moves V(s_i) and one that moves gamma V(s'_i), and a residual stream.

    Args:
        n_features: d.
        step_size: What multiplies the TD errors, before the normalizer.
        gamma: The discount.
        differences: Two more heads, with next states for keys: the step follows the gradient of the squared TD errors.
        has_direction: The tokens have one more row (:class:`ConjugateLayer`).
        gives: The row that the heads read; the one that takes is always the last.
    """

    def __init__(
        self,
        n_features: int,
        step_size: Tensor,
        gamma: Tensor,
        differences: bool = False,
        has_direction: bool = False,
        gives: int = -1,
    ) -> None:
        super().__init__()
        d, rows = n_features, 2 * n_features + 1 + has_direction
        identity = torch.eye(rows, dtype=step_size.dtype, device=step_size.device)
        state, next_state = identity[:d], identity[d : 2 * d]
        moves = identity[-1].outer(identity[gives])
        self.value_head = AttentionHead(state, state, -step_size * moves)
        self.bootstrap_head = AttentionHead(state, next_state, gamma * step_size * moves)
        if differences:
            self.next_value_head = AttentionHead(next_state, state, gamma * step_size * moves)
            self.next_bootstrap_head = AttentionHead(next_state, next_state, -(gamma**2) * step_size * moves)

    def update(self, prompt: Prompt, kernel: Kernel) -> Float[Tensor, "*b m r c"]:
        """The sum of the heads."""
        tokens, keys, columns = prompt.tokens, prompt.keys, prompt.bootstrap
        traces, weights = prompt.traces, prompt.weights
        update = self.value_head(tokens, kernel, keys, None, traces, weights)
        update = update + self.bootstrap_head(tokens, kernel, keys, columns, traces, weights)
        if hasattr(self, "next_value_head"):
            # A next state is no key where nothing comes after it.
            update = update + self.next_value_head(tokens, kernel, keys & columns, None, None, weights)
            update = update + self.next_bootstrap_head(tokens, kernel, keys & columns, columns, None, weights)
        return update

    def forward(
        self, prompt: Prompt, kernel: Kernel, normalizer: Float[Tensor, "*b"], decay: Float[Tensor, "*b"] | None = None
    ) -> Prompt:
        """Z + (sum of the heads) / normalizer.

        Args:
            prompt: Z, and what of it may be looked at.
            kernel: k.
            normalizer: (...), what divides the step.
            decay: (...), rho n: the last row of the context's tokens shrinks by so much of a step (a ridge).
        """
        tokens = prompt.tokens
        update = self.update(prompt, kernel)
        if decay is not None:
            update = update + (self.value_head.value.to(tokens) @ tokens) * (
                decay.unsqueeze(-1) * prompt.keys
            ).unsqueeze(-2)
        return replace(prompt, tokens=tokens + update / normalizer[..., None, None])


class ConjugateLayer(Layer):
    """One step of the conjugate gradient method: it moves along the row p of its tokens, as far as is best.

    Its heads look three times: what e and p make of all tokens, and then what the new e does. What it multiplies rows by are sums
    over the tokens of the context, so the weights are fixed here too (:class:`~icrl_gym.solvers.Directions`).

    Args:
        n_features: d.
        gamma: The discount.
        differences: See :class:`Layer`.
    """

    def __init__(self, n_features: int, gamma: Tensor, differences: bool) -> None:
        one = torch.ones_like(gamma)
        super().__init__(n_features, one, gamma, differences, has_direction=True, gives=-2)
        self.of_residual = Layer(n_features, one, gamma, differences, has_direction=True, gives=-1)

    def step(self, prompt: Prompt, kernel: Kernel, decay: Float[Tensor, "*b"], start: Directions) -> Prompt:
        """The tokens after one step.

        Args:
            prompt: Tokens [ s ; s' ; p ; e ], p and e zero at the query at first.
            kernel: k.
            decay: (...), rho n.
            start: Where the tokens stood before the first layer.
        """
        tokens, keys, ridge = prompt.tokens, prompt.keys, decay.unsqueeze(-1)
        residual, direction = tokens[..., -1, :] * keys, tokens[..., -2, :] * keys
        # Heads subtract: at the query this is what its value changes by.
        taken = -self.update(prompt, kernel)[..., -1, :]
        now = Directions(residual, self.reach(prompt, kernel), direction, taken * keys, prompt.weights)
        step = now.best_step(ridge, start)
        last = tokens[..., -1, :] - step * (taken + ridge * direction)
        prompt = replace(prompt, tokens=torch.cat([tokens[..., :-1, :], last.unsqueeze(-2)], -2))
        square = now.weighted_sum(last * keys * self.reach(prompt, kernel))
        direction = last * keys + conjugate_ratio(step, square, now.square) * direction
        rows = torch.stack([direction, last], -2)
        return replace(prompt, tokens=torch.cat([tokens[..., :-2, :], rows], -2))

    def reach(self, prompt: Prompt, kernel: Kernel) -> Float[Tensor, "*b c"]:
        """A w e, at the tokens of the context."""
        return -self.of_residual.update(prompt, kernel)[..., -1, :] * prompt.keys


class InContextTransformer(nn.Module):
    """A transformer whose forward pass evaluates a policy from a context of its transitions, with fixed weights.

    L layers are L steps of kernelized semi-gradient TD(0) from V = 0:

        V_{l+1}(s) = V_l(s) + alpha_l sum_j delta_j k(s_j, s),      alpha_l = step_sizes[l] / normalizer(context)

    or of another algorithm (:mod:`icrl_gym.algorithms`).

    Args:
        kernel: What states are compared with.
        step_sizes: L numbers, or one number for each of ``n_layers``. Default 1.
        gamma: The discount, in [0, 1].
        step_normalization: ``"row_sum"`` divides the steps by the largest absolute row sum of the context's kernel
            matrix (through landmarks: of the M x M matrix with the same eigenvalues), an upper bound of its top
            eigenvalue; ``"length"`` by the number of transitions, as Wang et al.
            2025; ``"none"`` by nothing.
        n_layers: L, if ``step_sizes`` is one number; ``math.inf`` for the limit of infinite depth, solved directly
            (:meth:`condition` only: a forward pass has an end).
        algorithm: What a layer is a step of: ``"td"``, ``"td_lambda"``, ``"residual_gradient"``, ``"average_reward"`` (values are
            then relative to the mean reward, and ``gamma`` has no part in the layers) or ``"monte_carlo"``.
        trace_decay: lambda of ``"td_lambda"``; default 0.9.
        acceleration: ``"none"``: plain steps. ``"conjugate"``: conjugate directions and the best step along each, computed in the
            context, for ``"residual_gradient"`` and ``"monte_carlo"``; it takes no ``step_sizes``, and no context makes it diverge.
        ridge: rho, the decay of the coefficients, in units of the kernel's values per transition (of the residual gradient: of
            the mean square of its differences k(s, .) - gamma k(s', .), whatever gamma and the temperature make of them).
            Default 1e-4 for infinite depth, 0 for layers.
        value_shift: Take the slow constant mode of TD out of the rewards first (reward centering), exactly:
            V = U + C and the layers find U.
        n_landmarks: Compare through so many states of the context (Nystrom), which makes every layer linear in the
            number of transitions. None: through all of them.
        offset: ``"centered"``: the literal construction, whose read-out is V + b with b = -gamma V(0), a constant that
            centering takes out of the advantages; ``"removed"``: the query does not bootstrap, and b = 0.
        n_features: d, for :attr:`layers` before a prompt has been read. The weights work for any d.

    Raises:
        ValueError: An argument out of its range.

    Source: He et al. 2026, section 3; Wang et al. 2025, section 4 (linear attention); Naik et al. 2024 (reward
    centering).

    Example:
        >>> from icrl_gym import Context
        >>> from icrl_gym.kernels import RBFKernel
        >>> context = Context([[0.0], [1.0]], [0.0, 1.0], [[1.0], [2.0]], [False, True])
        >>> transformer = InContextTransformer(RBFKernel(0.1), step_sizes=[1.0] * 50, gamma=0.9)
        >>> value = transformer.condition(context)
        >>> value([[0.0], [1.0]])
        tensor([0.9000, 1.0000], dtype=torch.float64)
        >>> prompt = transformer.embed(context, [[0.0], [1.0]])
        >>> transformer.read_out(transformer(prompt)) - value.offset
        tensor([0.9000, 1.0000], dtype=torch.float64)
    """

    step_sizes: Tensor
    gamma: Tensor

    def __init__(
        self,
        kernel: Kernel,
        step_sizes: float | Sequence[float] | Tensor | None = None,
        gamma: float = 0.99,
        step_normalization: StepNormalization = "row_sum",
        *,
        n_layers: float | None = None,
        algorithm: AlgorithmName = "td",
        trace_decay: float | None = None,
        acceleration: Acceleration = "none",
        ridge: float | None = None,
        value_shift: bool = False,
        n_landmarks: int | None = None,
        offset: Offset = "centered",
        n_features: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"kernel must be a Kernel of icrl_gym.kernels, got {kernel!r}. make_kernel(name) makes one."
            )
        if not 0.0 <= float(gamma) <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
        if step_normalization not in get_args(StepNormalization):
            raise ValueError(
                f"step_normalization must be one of {get_args(StepNormalization)}, got {step_normalization!r}."
            )
        if offset not in get_args(Offset):
            raise ValueError(f"offset must be one of {get_args(Offset)}, got {offset!r}.")
        if n_landmarks is not None and n_landmarks < 1:
            raise ValueError(f"n_landmarks must be at least 1, or None for every transition; got {n_landmarks}.")
        if n_landmarks is not None and not kernel.positive_definite:
            raise ValueError(
                f"landmarks need a positive definite kernel, got {kernel}. Use n_landmarks=None "
                "(`--n-landmarks 0` on the command line)."
            )
        if trace_decay is None:
            trace_decay = 0.9 if algorithm == "td_lambda" else 0.0
        self.algorithm = Algorithm(algorithm, float(trace_decay))
        self.infinite = n_layers == math.inf
        steps = _step_sizes(step_sizes, n_layers)
        self._check_algorithm(kernel, acceleration, step_sizes, ridge, value_shift)
        if ridge is not None and not 0.0 <= ridge < math.inf:
            raise ValueError(f"ridge must be finite and not negative, got {ridge}.")
        self.kernel = kernel
        self.register_buffer("step_sizes", steps)
        self.register_buffer("gamma", torch.as_tensor(float(gamma), dtype=torch.float64))
        self.step_normalization, self.offset, self.acceleration = step_normalization, offset, acceleration
        self.ridge = (1e-4 if self.infinite else 0.0) if ridge is None else float(ridge)
        self.value_shift, self.n_landmarks, self.n_features = bool(value_shift), n_landmarks, n_features

    def _check_algorithm(
        self, kernel: Kernel, acceleration: str, step_sizes: Any, ridge: float | None, value_shift: bool
    ) -> None:
        algorithm = self.algorithm
        if acceleration not in get_args(Acceleration):
            raise ValueError(f"acceleration must be one of {get_args(Acceleration)}, got {acceleration!r}.")
        if acceleration == "conjugate":
            if not algorithm.positive:
                raise ValueError(
                    f"conjugate layers need a positive semi-definite system, of algorithm='residual_gradient' or "
                    f"'monte_carlo'; got {algorithm.name!r}."
                )
            if step_sizes is not None or self.infinite:
                raise ValueError(
                    "conjugate layers find their steps in the context and end somewhere: give a finite n_layers and no "
                    "step_sizes."
                )
        if (algorithm.differences or acceleration == "conjugate") and not kernel.positive_definite:
            raise ValueError(
                f"algorithm={algorithm.name!r} with acceleration={acceleration!r} needs a positive definite kernel, got {kernel}. "
                f"Use RBF, Laplacian, Matern, exponential or linear attention."
            )
        if algorithm.name == "average_reward" and value_shift:
            raise ValueError("average_reward already takes the mean out of the rewards; leave value_shift out.")
        if ridge and algorithm.has_trace and not self.infinite:
            raise ValueError(
                f"a ridge with traces needs n_layers=math.inf (tokens hold one of errors and coefficients); got ridge={ridge}."
            )

    @property
    def n_layers(self) -> float:
        """L; ``math.inf`` for the fixed point."""
        return math.inf if self.infinite else len(self.step_sizes)

    @property
    def layers(self) -> list[Layer]:
        """The L layers with their explicit matrices, for states of ``n_features`` entries.

        Raises:
            ValueError: The depth is infinite, or d is not known yet.
        """
        if self.infinite:
            raise ValueError("a transformer of infinite depth has no layers to list; use a finite n_layers.")
        if self.n_features is None:
            raise ValueError("the number of features is not known yet: pass n_features, or embed a context first.")
        # Built on demand from the step sizes, so that the weights fit any d and training reaches them.
        gamma, differences = self.algorithm.bootstrap_gamma(self.gamma), self.algorithm.differences
        if self.acceleration == "conjugate":
            return [ConjugateLayer(self.n_features, gamma, differences) for _ in self.step_sizes]
        return [Layer(self.n_features, step, gamma, differences) for step in self.step_sizes]

    def embed(self, context: Context, query_states: Any) -> Prompt:
        """Write one prompt a query.

        With the value shift C, the tokens hold the shifted rewards and the query's last row starts at -C.

        Args:
            context: (...) contexts of n transitions.
            query_states: (..., m, d)

        Returns:
            Tokens (..., m, 2d+1, n+1) with their masks; with conjugate layers (..., m, 2d+2, n+1), the last row but one zero.
        """
        queries = as_states(query_states, context)
        rewards, shift = self._shifted(context)
        self.n_features = context.n_features
        m = queries.shape[-2]
        rows = [context.states, context.next_states, rewards.unsqueeze(-1)]
        if self.acceleration == "conjugate":
            rows.insert(2, torch.zeros_like(rows[2]))
        columns = torch.cat(rows, -1).transpose(-1, -2)
        columns = columns.unsqueeze(-3).expand(*columns.shape[:-2], m, *columns.shape[-2:])
        last = -shift[..., None, None].expand(*queries.shape[:-1], 1)
        empty = queries.new_zeros(*queries.shape[:-1], columns.shape[-2] - context.n_features - 1)
        query = torch.cat([queries, empty, last], -1)
        tokens = torch.cat([columns, query.unsqueeze(-1)], -1)
        is_query = torch.zeros(tokens.shape[-1], dtype=torch.bool, device=tokens.device)
        is_query[-1] = True
        keys = torch.nn.functional.pad(context.mask, (0, 1)).unsqueeze(-2).expand(*queries.shape[:-1], -1)
        # A truncated transition does bootstrap; the query does unless the offset is to be removed at its source.
        bootstrap = torch.nn.functional.pad(~context.terminated, (0, 1), value=self.offset == "centered")
        bootstrap = bootstrap.unsqueeze(-2).expand(*queries.shape[:-1], -1)
        weights = None
        if context.is_weighted:
            weights = torch.nn.functional.pad(context.weights, (0, 1)).unsqueeze(-2).expand(*queries.shape[:-1], -1)
        landmarks, landmark_mask = self._landmarks(context)
        gamma = self.gamma.to(rewards)

        def with_query(matrix: Tensor) -> Tensor:
            # The query's own row and column are those of the identity.
            padded = torch.nn.functional.pad(matrix, (0, 1, 0, 1))
            padded[..., -1, -1] = 1.0
            return padded.unsqueeze(-3).expand(*queries.shape[:-1], *padded.shape[-2:])

        algorithm = self.algorithm
        reads = algorithm.name in ("average_reward", "monte_carlo")
        return Prompt(
            tokens,
            keys,
            bootstrap,
            weights,
            landmarks,
            landmark_mask,
            with_query(algorithm.trace_matrix(context, gamma)) if algorithm.has_trace else None,
            with_query(algorithm.return_matrix(context, gamma)) if reads else None,
        )

    def forward(self, prompt: Prompt, *, most_growth: float = MOST_GROWTH) -> Float[Tensor, "*b m r c"]:
        """The tokens after L layers, computed literally: every token attends to every context token in every layer.

        Args:
            prompt: What :meth:`embed` made.
            most_growth: See :meth:`condition`.

        Returns:
            (..., m, 2d+1, n+1): in the last row, the TD error of every transition, and minus the value of the query.

        Raises:
            ValueError: The depth is infinite.
            FloatingPointError: The layers diverge.
        """
        if self.infinite:
            raise ValueError("a forward pass needs a finite n_layers; n_layers=math.inf is solved by `condition`.")
        d = (prompt.tokens.shape[-2] - 1) // 2
        self.n_features = d
        states = prompt.tokens[..., :d, :].transpose(-1, -2)
        kernel = self._prompt_kernel(prompt, states)
        layers = self.layers
        gram = self._prompt_gram(prompt, kernel) if self.algorithm.differences else None
        decay = self.ridge * (prompt.key_weights.sum(-1).to(states) if gram is None else trace(gram))
        normalizer = self._prompt_normalizer(prompt, kernel, gram, decay)
        if prompt.reading is not None:
            read = (prompt.tokens[..., -1:, :] @ prompt.reading).where(
                (prompt.keys | _is_last(prompt.keys)).unsqueeze(-2), 0.0
            )
            prompt = replace(prompt, tokens=torch.cat([prompt.tokens[..., :-1, :], read], -2))
        start: Directions | None = None
        if self.acceleration == "conjugate" and layers:
            # The first direction is the residual itself.
            first = prompt.tokens[..., -1:, :] * prompt.keys.unsqueeze(-2)
            prompt = replace(
                prompt, tokens=torch.cat([prompt.tokens[..., :-2, :], first, prompt.tokens[..., -1:, :]], -2)
            )
            assert isinstance(layers[0], ConjugateLayer)
            reach = layers[0].reach(prompt, kernel)
            start = Directions.first(first.squeeze(-2), lambda _: reach, prompt.weights)
        rows = [prompt.tokens[..., -1, :]]
        for layer in layers:
            if isinstance(layer, ConjugateLayer):
                assert start is not None
                prompt = layer.step(prompt, kernel, decay, start)
            else:
                prompt = layer(prompt, kernel, normalizer, decay if self.ridge else None)
            rows.append(prompt.tokens[..., -1, :])
        last = torch.stack(rows, -2)
        # Whatever is finite will do: of the query too. Growth is that of the context, whose errors have a size to begin with.
        check_growth(
            last if math.isinf(most_growth) else last.masked_fill(~prompt.keys.unsqueeze(-2), 0.0),
            most_growth,
            "prompt",
        )
        return prompt.tokens

    @staticmethod
    def read_out(tokens: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
        """The answer at the bottom right, sign flipped: V_L(s_q) + b."""
        return -tokens[..., -1, -1]

    def condition(
        self,
        context: Context,
        landmarks: Any = None,
        landmark_mask: Bool[Tensor, "*b M"] | None = None,
        *,
        most_growth: float = MOST_GROWTH,
    ) -> ValueFunction:
        """The value function that the forward pass computes from a context, ready for any number of queries.

        Args:
            context: (...) contexts of n transitions; one without any transition has the value zero.
            landmarks: (..., M, d) states to compare through, instead of ``n_landmarks`` of the context's own.
            landmark_mask: (..., M) bool, False for a landmark that does not exist.
            most_growth: The layers diverge if the norm of the context's TD errors after the last is more than so many times that
                before the first. ``math.inf`` takes whatever is finite, as training has to, whose gradients lead out of there.

        Raises:
            FloatingPointError: The layers diverge, or the fixed point does not exist.
        """
        kernel, rewards, shift, gamma = self._given(context, landmarks, landmark_mask)
        values = [
            self._conditioned(context[rows], kernel.selected(rows), rewards[rows], shift[rows], gamma, most_growth)
            for rows in _groups(context, kernel)
        ] or [self._conditioned(context, kernel, rewards, shift, gamma, most_growth)]
        value = values[0] if len(values) == 1 else ValueFunction.cat(kernel, values)
        if not self.infinite:
            check_growth(value.td_errors, most_growth)
        return value

    def _conditioned(
        self, context: Context, kernel: Kernel, rewards: Tensor, shift: Tensor, gamma: Tensor, most_growth: float
    ) -> ValueFunction:
        has_offset = self.offset == "centered"
        if self.infinite:
            return fixed_point(
                kernel, context, self.algorithm, rewards, shift, gamma, self.ridge, has_offset, most_growth
            )
        problem, path, errors = self._layers_on(context, kernel, rewards, shift, gamma)
        return problem.value_function(path[..., -1, :], errors, has_offset)

    @property
    def shares_folds(self) -> bool:
        """Whether :meth:`condition_folds` has an answer: infinite depth, landmarks, and TD with or without traces."""
        return self.infinite and self.n_landmarks is not None and leaves_out(self.algorithm)

    def condition_folds(
        self, context: Context, folds: Int[Tensor, "*b n"], n_folds: int, *, most_growth: float = MOST_GROWTH
    ) -> list[ValueFunction]:
        """The value function of a context, and those of what is left of it without each fold, in one pass over the transitions.

        All share what the whole context's states give: the kernel's temperature and the landmarks.

        Args:
            context: (...) contexts of n transitions, no or one batch dimension.
            folds: (..., n), 0 for a transition that is never left out, f for one of fold f; in long stretches.
            n_folds: How many.
            most_growth: See :meth:`condition`.

        Returns:
            1 + n_folds of them: of the whole, and without fold 1, 2, ...

        Raises:
            ValueError: The transformer is none that :attr:`shares_folds`.
            FloatingPointError: A fixed point does not exist.
        """
        if not self.shares_folds:
            raise ValueError(
                f"folds share their sums at infinite depth, through landmarks, for td and td_lambda; this is {self}."
            )
        kernel = self._given(context)[0]
        assert isinstance(kernel, NystromKernel)

        def of_one(own: Kernel, context: Context, folds: Tensor) -> list[ValueFunction]:
            assert isinstance(own, NystromKernel)
            return landmark_fixed_points(
                own, context, self.algorithm, folds, n_folds, self.value_shift, self.gamma.to(context.rewards), self.ridge,
                self.offset == "centered", most_growth,
            )  # fmt: skip

        if not context.batch_shape:
            return of_one(kernel, context, folds)
        each = [of_one(kernel.selected(index), context[index], folds[index]) for index in range(context.batch_shape[0])]
        return [ValueFunction.stack(kernel.base, values) for values in zip(*each, strict=True)]

    def coefficients_by_depth(
        self, context: Context
    ) -> tuple[System, Float[Tensor, "*b L1 n"], Float[Tensor, "*b L1 n"]]:
        """The linear system of a context, and what the layers make of it, also where they diverge, as long as numbers are finite.

        Args:
            context: (...) contexts of n transitions.

        Returns:
            The system, and the coefficients c and errors delta after 0, 1, ..., L layers, (..., L+1, n) each.

        Raises:
            ValueError: The depth is infinite.
            FloatingPointError: Numbers overflow.
        """
        if self.infinite:
            raise ValueError("a transformer of infinite depth has no layers to follow; use a finite n_layers.")
        problem, path, errors = self._layers_on(context, *self._given(context))
        check_growth(errors, math.inf)
        return problem, path if problem.weights is None else path * problem.weights.unsqueeze(-2), errors

    def layer_steps(self, context: Context) -> Float[Tensor, "*b L"]:
        """alpha_l: the step sizes of the layers on this context, divided by its normalizer.

        Args:
            context: (...) contexts.
        """
        kernel, rewards, shift, gamma = self._given(context)
        problem, gram = system(kernel, context, self.algorithm, rewards, shift, gamma, self.ridge)
        return self._alpha(problem, gram)

    def _given(
        self, context: Context, landmarks: Any = None, landmark_mask: Bool[Tensor, "*b M"] | None = None
    ) -> tuple[Kernel, Float[Tensor, "*b n"], Float[Tensor, "*b"], Tensor]:
        """The kernel as the context adapts it, rewards and shift, and the discount."""
        chosen, chosen_mask = (
            self._landmarks(context) if landmarks is None else (as_states(landmarks, context), landmark_mask)
        )
        kernel = self.kernel.adapted(context.states, context.mask)
        if chosen is not None:
            kernel = NystromKernel(kernel, chosen, chosen_mask)
        rewards, shift = self._shifted(context)
        return kernel, rewards, shift, self.gamma.to(rewards)

    def _layers_on(
        self, context: Context, kernel: Kernel, rewards: Tensor, shift: Tensor, gamma: Tensor
    ) -> tuple[System, Tensor, Tensor]:
        problem, gram = system(kernel, context, self.algorithm, rewards, shift, gamma, self.ridge)
        if self.acceleration == "conjugate":
            return problem, *conjugate(problem, len(self.step_sizes))
        return problem, *iterate(problem, self._alpha(problem, gram))

    def _alpha(self, problem: System, gram: Tensor) -> Float[Tensor, "*b L"]:
        context = problem.context
        normalizer = self._normalizer(problem.kernel, context.states, context.mask, gram, context.weights)
        if self.step_normalization == "row_sum":
            normalizer = normalizer + problem.ridge
            if self.algorithm.has_trace:
                present = context.mask.to(problem.targets)
                reach = self.algorithm.traced(present, context, problem.gamma)
                # At least a transition itself; without any, nothing moves whatever the step.
                normalizer = normalizer * (reach.amax(-1).clamp_min(1.0) if reach.shape[-1] else 1.0)
        return self.step_sizes.to(normalizer) / normalizer.unsqueeze(-1)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the weights (safetensors) and the configuration (JSON) into a folder. See :mod:`icrl_gym.weights`."""
        from icrl_gym.weights import save

        save(self, folder)

    @classmethod
    def from_pretrained(cls, folder_or_name: str | PathLike[str]) -> InContextTransformer:
        """The transformer that :meth:`save_pretrained` wrote, or one that the package ships, by name.

        Raises:
            ValueError: What is there is a transformer of another kind, or damaged.
            FileNotFoundError: There is none.
        """
        from icrl_gym.weights import load

        transformer = load(folder_or_name)
        if not isinstance(transformer, cls):
            raise ValueError(f"{folder_or_name} holds a {type(transformer).__name__}; load it with that class.")
        return transformer

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        depth = f"n_layers={self.n_layers}"
        algorithm = f"algorithm={self.algorithm.name!r}, acceleration={self.acceleration!r}"
        return f"{depth}, gamma={float(self.gamma):g}, step_normalization={self.step_normalization!r}, {algorithm}"

    def _shifted(self, context: Context) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b"]]:
        if not self.value_shift:
            return context.rewards, context.rewards.new_zeros(context.batch_shape)
        return reward_center(context, self.gamma.to(context.rewards))

    def _landmarks(self, context: Context) -> tuple[Float[Tensor, "*b M d"] | None, Bool[Tensor, "*b M"] | None]:
        if self.n_landmarks is None:
            return None, None
        return choose_landmarks(context, self.n_landmarks)

    def _normalizer(
        self,
        kernel: Kernel,
        states: Float[Tensor, "*b n d"],
        mask: Bool[Tensor, "*b n"],
        gram: Tensor | None,
        weights: Float[Tensor, "*b n"],
    ) -> Float[Tensor, "*b"]:
        """What divides the steps, from the states and weights of the context (and their kernel matrix, where it is at hand)."""
        n = weights.sum(-1).to(states)
        if self.step_normalization == "none":
            return torch.ones_like(n)
        if self.step_normalization == "length":
            return torch.where(n > 0, n, 1.0)
        if gram is not None:
            sums = _row_sums(gram)
        elif isinstance(kernel, NystromKernel):
            # Phi^T Phi (M x M) has the eigenvalues of Phi Phi^T (n x n), and costs n M^2 instead of n^2 M.
            features = kernel.features(states) * weights.to(states).sqrt().unsqueeze(-1)
            sums = (features.transpose(-1, -2) @ features).abs().sum(-1)
        else:
            sums = (kernel(states, states, mask).abs() * weights.to(states).unsqueeze(-2)).sum(-1)
        largest = sums.amax(-1) if sums.shape[-1] else torch.zeros_like(n)
        if self.algorithm.differences:
            # With gamma = 1 and next states that are states but for rounding, all differences are rounding, and so is their sum.
            largest = torch.maximum(largest, 1e-10 * n * (largest > 0))
        # A kernel that is zero on the whole context moves nothing, whatever the step.
        return torch.where(largest > 0, largest, 1.0)

    def _prompt_gram(self, prompt: Prompt, kernel: Kernel) -> Float[Tensor, "*b m k k"]:
        """<kappa_j, kappa_i> w_i from what the tokens hold; through landmarks the M x M matrix of the same eigenvalues."""
        d = (prompt.tokens.shape[-2] - 1) // 2
        states = prompt.tokens[..., :d, :].transpose(-1, -2)
        next_states = prompt.tokens[..., d : 2 * d, :].transpose(-1, -2)
        beta = (self.gamma.to(states) * (prompt.bootstrap & prompt.keys)).unsqueeze(-1)
        if isinstance(kernel, NystromKernel):
            root = prompt.key_weights.to(states).sqrt().unsqueeze(-1)
            features = (kernel.features(states) - beta * kernel.features(next_states)) * root
            return features.transpose(-1, -2) @ features
        both, mask = torch.cat([states, next_states], -2), torch.cat([prompt.keys, prompt.keys], -1)
        values = kernel(both, both, mask) * mask.unsqueeze(-2)
        n = states.shape[-2]
        values = values[..., :n, :] - beta * values[..., n:, :]
        values = values[..., :n] - values[..., n:] * beta.transpose(-1, -2)
        return values * prompt.key_weights.to(values).unsqueeze(-2)

    def _prompt_normalizer(
        self, prompt: Prompt, kernel: Kernel, gram: Tensor | None, decay: Float[Tensor, "*b m"]
    ) -> Float[Tensor, "*b m"]:
        """The normalizer from what the tokens hold."""
        d = (prompt.tokens.shape[-2] - 1) // 2
        states = prompt.tokens[..., :d, :].transpose(-1, -2)
        normalizer = self._normalizer(kernel, states, prompt.keys, gram, prompt.key_weights)
        if self.step_normalization == "row_sum":
            normalizer = normalizer + decay
            if prompt.traces is not None:
                columns = (prompt.traces * prompt.keys.unsqueeze(-1)).sum(-2)
                normalizer = normalizer * (columns * prompt.keys).amax(-1).clamp_min(1.0)
        return normalizer

    def _prompt_kernel(self, prompt: Prompt, states: Float[Tensor, "*b c d"]) -> Kernel:
        kernel = self.kernel.adapted(states, prompt.keys)
        if prompt.landmarks is None:
            return kernel
        landmarks = prompt.landmarks.unsqueeze(-3).expand(*prompt.keys.shape[:-1], *prompt.landmarks.shape[-2:])
        mask = prompt.landmark_mask
        return NystromKernel(
            kernel, landmarks, None if mask is None else mask.unsqueeze(-2).expand(landmarks.shape[:-1])
        )


def as_states(states: Any, context: Context) -> Float[Tensor, "*b m d"]:
    """States (..., m, d) as a tensor of the context's type and device, with its batch dimensions.

    Raises:
        ValueError: Their last dimension is not the context's d.
    """
    tensor = as_tensor(states).to(context.states)
    if tensor.ndim < 2 or tensor.shape[-1] != context.n_features:
        raise ValueError(
            f"expected states of shape (..., m, {context.n_features}) like those of the context, got {tuple(tensor.shape)}."
        )
    return tensor.expand(*context.batch_shape, *tensor.shape[-2:])


def _row_sums(gram: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b k"]:
    """Sums of absolute values, of one large matrix without a copy of all of it."""
    if gram.numel() and bool(gram.amin() >= 0):
        return gram.sum(-1)  # most kernels are nowhere negative
    if gram.ndim > 2 or gram.requires_grad:
        return gram.abs().sum(-1)
    blocks = [gram[rows].abs().sum(-1) for rows in row_blocks(len(gram), len(gram), gram.device)]
    return torch.cat(blocks) if blocks else gram.sum(-1)


def _groups(context: Context, kernel: Kernel, most: int = 2**18) -> list[slice]:
    """Contexts of a batch whose matrices, at most two megabytes, stay in the processor's cache; empty: all at once."""
    n, batch = len(context), context.batch_shape
    if isinstance(kernel, NystromKernel) or len(batch) != 1 or context.states.device.type != "cpu":
        return []
    size = max(1, most // max(n * n, 1))
    return [slice(start, start + size) for start in range(0, batch[0], size)] if batch[0] > size else []


def _is_last(keys: Bool[Tensor, "*b c"]) -> Bool[Tensor, "*b c"]:
    """True in the column of the query."""
    last = torch.zeros_like(keys)
    last[..., -1] = True
    return last


def _step_sizes(step_sizes: float | Sequence[float] | Tensor | None, n_layers: float | None) -> Tensor:
    if n_layers == math.inf:
        if step_sizes is not None:
            raise ValueError("n_layers=math.inf is solved directly and takes no step_sizes; leave them out.")
        return torch.zeros(0, dtype=torch.float64)
    if isinstance(step_sizes, Tensor) and step_sizes.is_floating_point():
        steps = step_sizes
    else:
        steps = torch.as_tensor(1.0 if step_sizes is None else step_sizes, dtype=torch.float64)
    if steps.ndim == 0:
        if n_layers is None:
            raise ValueError("expected one step size a layer, or n_layers beside a single step size; got neither.")
        if not n_layers >= 0 or n_layers % 1 != 0:
            raise ValueError(f"n_layers must be a whole number or math.inf, got {n_layers}.")
        steps = steps.repeat(int(n_layers))
    if steps.ndim != 1 or (n_layers is not None and len(steps) != n_layers):
        raise ValueError(f"expected {n_layers} step sizes, one a layer; got shape {tuple(steps.shape)}.")
    if not bool(torch.isfinite(steps).all()):
        raise ValueError(f"step_sizes must be finite, got {steps.tolist()}.")
    return steps
