"""InContextTransformer: L layers of attention that are L steps of kernelized TD(0) on the context, literally.

The tokens of a prompt are the columns of Z, one a transition and a last one for the query:

    context token j : [ s_j ; s'_j ; r_j ]        query token : [ s_q ; 0 ; 0 ]

and a layer is two attention heads with a residual connection:

    Z <- Z + sum_h  V_h Z M k(K_h Z, Q_h Z) G_h / normalizer(context)

:meth:`InContextTransformer.forward` computes exactly that, matrices and all. :meth:`InContextTransformer.condition`
collapses it to a function of the query that costs n kernel values, whatever the depth (see
:mod:`icrl_gym.value_function`). Both answers agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from icrl_gym._typing import Bool, Float
from icrl_gym.context import Context, as_tensor
from icrl_gym.kernels import Kernel, NystromKernel, spread_rows
from icrl_gym.value_function import ValueFunction, divergence, fixed_point, iterate, reward_center

__all__ = ["AttentionHead", "InContextTransformer", "Layer", "Prompt"]

StepNormalization = Literal["row_sum", "length", "none"]
Offset = Literal["centered", "removed"]


@dataclass(frozen=True)
class Prompt:
    """What the transformer reads: one matrix of tokens a query, and what it may look at.

    Attributes:
        tokens: (..., m, 2d+1, n+1): Z_0, the query in the last column.
        keys: (..., m, n+1) bool, M: False for the query and for empty places.
        bootstrap: (..., m, n+1) bool, G of the bootstrap head: False where the episode terminated.
        landmarks: (..., M, d), the landmark states of the context, or None.
        landmark_mask: (..., M) bool, False for a landmark that does not exist.
    """

    tokens: Float[Tensor, "*b m r c"]
    keys: Bool[Tensor, "*b m c"]
    bootstrap: Bool[Tensor, "*b m c"]
    landmarks: Float[Tensor, "*b M d"] | None = None
    landmark_mask: Bool[Tensor, "*b M"] | None = None


class AttentionHead(nn.Module):
    """One attention head with explicit matrices: Z -> V Z M k(K Z, Q Z) G.

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
    ) -> Float[Tensor, "*b r c"]:
        """V Z M k(K Z, Q Z) G.

        Args:
            tokens: (..., 2d+1, n+1), Z.
            kernel: k.
            keys: (..., n+1) bool, M.
            columns: (..., n+1) bool, G; default all True.
        """
        update = self.value.to(tokens) @ tokens @ self.attention(tokens, kernel, keys)
        return update if columns is None else update * columns.unsqueeze(-2)


class Layer(nn.Module):
    """One step of kernelized TD(0): a head that moves V(s_i) and one that moves gamma V(s'_i), and a residual stream.

    Args:
        n_features: d.
        step_size: What multiplies the TD errors, before the normalizer.
        gamma: The discount.
    """

    def __init__(self, n_features: int, step_size: Tensor, gamma: Tensor) -> None:
        super().__init__()
        d, rows = n_features, 2 * n_features + 1
        identity = torch.eye(rows, dtype=step_size.dtype, device=step_size.device)
        state, next_state = identity[:d], identity[d : 2 * d]
        last = identity[-1].outer(identity[-1])
        self.value_head = AttentionHead(state, state, -step_size * last)
        self.bootstrap_head = AttentionHead(state, next_state, gamma * step_size * last)

    def forward(self, prompt: Prompt, kernel: Kernel, normalizer: Float[Tensor, "*b"]) -> Prompt:
        """Z + (value head + bootstrap head) / normalizer."""
        tokens = prompt.tokens
        update = self.value_head(tokens, kernel, prompt.keys) + self.bootstrap_head(
            tokens, kernel, prompt.keys, prompt.bootstrap
        )
        return Prompt(
            tokens + update / normalizer[..., None, None],
            prompt.keys,
            prompt.bootstrap,
            prompt.landmarks,
            prompt.landmark_mask,
        )


class InContextTransformer(nn.Module):
    """A transformer whose forward pass evaluates a policy from a context of its transitions, with fixed weights.

    L layers are L steps of kernelized semi-gradient TD(0) from V = 0:

        V_{l+1}(s) = V_l(s) + alpha_l sum_j delta_j k(s_j, s),      alpha_l = step_sizes[l] / normalizer(context)

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
        ridge: rho of the infinite depth, in units of the kernel's values per transition. Default 1e-4.
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
            raise ValueError(f"landmarks need a positive definite kernel, got {kernel}. Use n_landmarks=None.")
        self.infinite = n_layers == math.inf
        steps = _step_sizes(step_sizes, n_layers)
        if not self.infinite and ridge is not None:
            raise ValueError(f"ridge belongs to n_layers=math.inf; got ridge={ridge} with {len(steps)} layers.")
        if ridge is not None and not 0.0 <= ridge < math.inf:
            raise ValueError(f"ridge must be finite and not negative, got {ridge}.")
        self.kernel = kernel
        self.register_buffer("step_sizes", steps)
        self.register_buffer("gamma", torch.as_tensor(float(gamma), dtype=torch.float64))
        self.step_normalization, self.offset = step_normalization, offset
        self.ridge = (1e-4 if ridge is None else float(ridge)) if self.infinite else None
        self.value_shift, self.n_landmarks, self.n_features = bool(value_shift), n_landmarks, n_features

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
        return [Layer(self.n_features, step, self.gamma) for step in self.step_sizes]

    def embed(self, context: Context, query_states: Any) -> Prompt:
        """Write one prompt a query.

        With the value shift C, the tokens hold the shifted rewards and the query's last row starts at -C.

        Args:
            context: (...) contexts of n transitions.
            query_states: (..., m, d)

        Returns:
            Tokens (..., m, 2d+1, n+1) with their masks.
        """
        queries = as_states(query_states, context)
        rewards, shift = self._shifted(context)
        self.n_features = context.n_features
        m = queries.shape[-2]
        columns = torch.cat([context.states, context.next_states, rewards.unsqueeze(-1)], -1).transpose(-1, -2)
        columns = columns.unsqueeze(-3).expand(*columns.shape[:-2], m, *columns.shape[-2:])
        query = torch.cat(
            [queries, torch.zeros_like(queries), -shift[..., None, None].expand(*queries.shape[:-1], 1)], -1
        )
        tokens = torch.cat([columns, query.unsqueeze(-1)], -1)
        is_query = torch.zeros(tokens.shape[-1], dtype=torch.bool, device=tokens.device)
        is_query[-1] = True
        keys = torch.nn.functional.pad(context.mask, (0, 1)).unsqueeze(-2).expand(*queries.shape[:-1], -1)
        # A truncated transition does bootstrap; the query does unless the offset is to be removed at its source.
        bootstrap = torch.nn.functional.pad(~context.terminated, (0, 1), value=self.offset == "centered")
        bootstrap = bootstrap.unsqueeze(-2).expand(*queries.shape[:-1], -1)
        landmarks, landmark_mask = self._landmarks(context)
        return Prompt(tokens, keys, bootstrap, landmarks, landmark_mask)

    def forward(self, prompt: Prompt) -> Float[Tensor, "*b m r c"]:
        """The tokens after L layers, computed literally: every token attends to every context token in every layer.

        Args:
            prompt: What :meth:`embed` made.

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
        normalizer = self._normalizer(kernel, states, prompt.keys)
        for index, layer in enumerate(layers):
            before = prompt
            prompt = layer(prompt, kernel, normalizer)
            _check_finite(prompt.tokens[..., -1, :], before.tokens[..., -1, :], index, len(layers))
        return prompt.tokens

    @staticmethod
    def read_out(tokens: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
        """The answer at the bottom right, sign flipped: V_L(s_q) + b."""
        return -tokens[..., -1, -1]

    def condition(
        self, context: Context, landmarks: Any = None, landmark_mask: Bool[Tensor, "*b M"] | None = None
    ) -> ValueFunction:
        """The value function that the forward pass computes from a context, ready for any number of queries.

        Args:
            context: (...) contexts of n transitions; one without any transition has the value zero.
            landmarks: (..., M, d) states to compare through, instead of ``n_landmarks`` of the context's own.
            landmark_mask: (..., M) bool, False for a landmark that does not exist.

        Raises:
            FloatingPointError: The layers diverge, or the fixed point does not exist.
        """
        chosen, chosen_mask = (
            self._landmarks(context) if landmarks is None else (as_states(landmarks, context), landmark_mask)
        )
        kernel = self.kernel.adapted(context.states, context.mask)
        if chosen is not None:
            kernel = NystromKernel(kernel, chosen, chosen_mask)
        rewards, shift = self._shifted(context)
        gamma = self.gamma.to(rewards)
        bootstrap = self.offset == "centered"
        if self.infinite:
            assert self.ridge is not None
            return fixed_point(kernel, context, rewards, shift, gamma, self.ridge, has_offset=bootstrap)
        return iterate(
            kernel, context, rewards, shift, gamma, self.step_sizes.to(rewards), self._normalizer, has_offset=bootstrap
        )

    def layer_steps(self, context: Context) -> Float[Tensor, "*b L"]:
        """alpha_l: the step sizes of the layers on this context, divided by its normalizer.

        Without landmarks the coefficients after l layers are ``(alpha_0 delta^(0) + ... + alpha_{l-1} delta^(l-1))``, with
        the rows of :attr:`~icrl_gym.value_function.ValueFunction.td_errors` for delta.

        Args:
            context: (...) contexts.
        """
        kernel = self.kernel.adapted(context.states, context.mask)
        normalizer = self._normalizer(kernel, context.states, context.mask)
        return self.step_sizes.to(normalizer) / normalizer.unsqueeze(-1)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the weights (safetensors) and the configuration (JSON) into a folder. See :mod:`icrl_gym.weights`."""
        from icrl_gym.weights import save

        save(self, folder)

    @classmethod
    def from_pretrained(cls, folder_or_name: str | PathLike[str]) -> InContextTransformer:
        """The transformer that :meth:`save_pretrained` wrote, or one that the package ships, by name."""
        from icrl_gym.weights import load

        return load(folder_or_name)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        depth = f"n_layers={self.n_layers}"
        return f"{depth}, gamma={float(self.gamma):g}, step_normalization={self.step_normalization!r}"

    def _shifted(self, context: Context) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b"]]:
        if not self.value_shift:
            return context.rewards, context.rewards.new_zeros(context.batch_shape)
        return reward_center(context, self.gamma.to(context.rewards))

    def _landmarks(self, context: Context) -> tuple[Float[Tensor, "*b M d"] | None, Bool[Tensor, "*b M"] | None]:
        if self.n_landmarks is None:
            return None, None
        return spread_landmarks(context, self.n_landmarks)

    def _normalizer(
        self, kernel: Kernel, states: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"], gram: Tensor | None = None
    ) -> Float[Tensor, "*b"]:
        """What divides the steps, from the states of the context (and their kernel matrix, where it is at hand)."""
        n = mask.sum(-1).to(states)
        if self.step_normalization == "none":
            return torch.ones_like(n)
        if self.step_normalization == "length":
            return n.clamp_min(1.0)
        if isinstance(kernel, NystromKernel):
            # Phi^T Phi (M x M) has the eigenvalues of Phi Phi^T (n x n), and costs n M^2 instead of n^2 M.
            features = kernel.features(states) * mask.unsqueeze(-1)
            sums = (features.transpose(-1, -2) @ features).abs().sum(-1)
        else:
            gram = kernel(states, states, mask) if gram is None else gram
            sums = (gram.abs() * mask.unsqueeze(-2)).sum(-1)
        largest = sums.amax(-1) if sums.shape[-1] else torch.zeros_like(n)
        # A kernel that is zero on the whole context moves nothing, whatever the step.
        return torch.where(largest > 0, largest, 1.0)

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


def spread_landmarks(context: Context, most: int) -> tuple[Float[Tensor, "*b M d"], Bool[Tensor, "*b M"]]:
    """At most ``most`` states of each context, evenly spread over its transitions.

    Returns:
        (..., M, d) states and (..., M) bool, False where a context has fewer than M transitions.
    """
    size = min(most, len(context))
    flat = context.states.reshape(context.batch_shape.numel(), *context.states.shape[-2:])
    chosen, present = [], []
    for states, mask in zip(flat, context.mask.reshape(flat.shape[:-1]), strict=True):
        rows = mask.nonzero().squeeze(-1)
        rows = rows[spread_rows(len(rows), size, rows.device)]
        chosen.append(torch.nn.functional.pad(states[rows], (0, 0, 0, size - len(rows))))
        present.append(torch.arange(size, device=states.device) < len(rows))
    shape = (*context.batch_shape, size)
    return torch.stack(chosen).reshape(*shape, context.n_features), torch.stack(present).reshape(shape)


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


def _check_finite(now: Tensor, before: Tensor, index: int, n_layers: int) -> None:
    if not bool(torch.isfinite(now).all()):
        raise divergence(index, n_layers, float(before.abs().max()))
