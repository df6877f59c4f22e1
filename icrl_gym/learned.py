"""LearnedTransformer: the layers of :class:`~icrl_gym.transformer.InContextTransformer` with every matrix trainable.

    Z <- Z + sum_h  V_h Z M k(K_h Z, Q_h Z) G_h / normalizer(context)

In the construction, K_h and Q_h pick states and V_h writes the last row alone. Here they are parameters, so training can find
the construction, or something else. The rows of the states may change from layer to layer and nothing collapses to a function
of the query: there is the literal forward pass only. The query is masked out of the keys whatever the matrices are, so any
number of queries share one prompt.

**Wang et al.'s form.** Their layer is Z + (1/n) P Z M (Z^T Q Z). It is one head with the linear kernel,
``step_normalization="length"`` and ``width`` 2d+1:

    P = V,      Q = K^T Q

Their tokens hold gamma s'_j where ours hold s'_j. With D = diag(I_d, gamma I_d, 1), their tokens are D Z, and ours move alike
with V = D^-1 P D and K^T Q = D Q D. So their construction, P = e e^T on the last row and Q = [[-I, I, 0], [0, 0, 0], [0, 0, 0]], has
here the blocks -I and gamma I. Two heads of width d are the same map: V_h and K_h^T Q_h enter as the sum of their products.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from icrl_gym._typing import Float
from icrl_gym.context import Context
from icrl_gym.kernels import Kernel, LinearKernel
from icrl_gym.transformer import AttentionHead, InContextTransformer, Layer, Prompt, as_states
from icrl_gym.value_function import divergence

__all__ = ["Initialization", "LearnedLayer", "LearnedTransformer"]

Initialization = Literal["construction", "random"]


class LearnedLayer(Layer):
    """A layer whose key, query and value matrices are parameters.

    Args:
        heads: The value head and the bootstrap head; or one head, which is both.
    """

    def __init__(self, *heads: AttentionHead) -> None:
        # Not Layer's own constructor: it would build the matrices anew from a step size.
        nn.Module.__init__(self)
        for head in heads:
            for name in ("key", "query", "value"):
                matrix = getattr(head, name)
                delattr(head, name)
                setattr(head, name, nn.Parameter(matrix.detach().clone()))
        self.value_head = heads[0]
        if len(heads) == 2:
            self.bootstrap_head = heads[1]

    @property
    def heads(self) -> list[AttentionHead]:
        """The heads, value head first."""
        return [head for head in self.children() if isinstance(head, AttentionHead)]

    def forward(
        self, prompt: Prompt, kernel: Kernel, normalizer: Float[Tensor, "*b"], decay: Float[Tensor, "*b"] | None = None
    ) -> Prompt:
        """Z + (sum of the heads) / normalizer.

        Args:
            prompt: Z, and what of it may be looked at.
            kernel: k.
            normalizer: (...), what divides the step.
            decay: Of other layers; there is none here.
        """
        tokens, keys, weights = prompt.tokens, prompt.keys, prompt.weights
        update = self.value_head(tokens, kernel, keys, weights=weights)
        if len(self.heads) == 2:
            update = update + self.bootstrap_head(tokens, kernel, keys, prompt.bootstrap, weights=weights)
        return replace(prompt, tokens=prompt.tokens + update / normalizer[..., None, None])


class LearnedTransformer(nn.Module):
    """A transformer that starts as a construction, or as noise, and may be trained in every matrix.

    Args:
        construction: What it has the kernel, normalizer, discount, depth and offset of, and starts from: a transformer of
            finite depth, with plain TD layers and without landmarks.
        n_features: d. Other than the construction's, these weights are for states of d entries.
        initialization: ``"construction"``: the same outputs as the construction. ``"random"``: independent normal entries,
            with standard deviation ``gain / sqrt(2d+1)`` in V, and such a one in K and Q that K^T Q has it too.
        shared_layers: One layer's matrices for all L of them (a looped transformer).
        n_heads: 2: a value head and a bootstrap head, which is masked where episodes terminated. 1: one head for both, as in
            Wang et al. 2025; where an episode terminated, the token's s' is zero instead.
        width: Rows of K and Q. Default d; 2d+1 lets K^T Q be any matrix.
        gain: Of random values.
        seed: Of random values.

    Raises:
        TypeError: The construction is no InContextTransformer.
        ValueError: A construction of infinite depth, with landmarks or of another algorithm, or an argument out of its range;
            a construction that the form cannot hold (one head with a kernel that is not linear, a width below d, shared layers with
            different step sizes).

    Source: Wang et al. 2025, sections 3 to 5 (linear attention, looped transformers); He et al. 2026, section 3 (kernels).

    Example:
        >>> from icrl_gym import Context, InContextTransformer
        >>> context = Context([[0.0], [1.0]], [0.0, 1.0], [[1.0], [2.0]], [False, True])
        >>> construction = InContextTransformer(LinearKernel(), step_sizes=[1.0] * 50, gamma=0.9)
        >>> learned = LearnedTransformer(construction, n_features=1)
        >>> bool((learned.values(context, [[1.0]]) - construction.condition(context)([[1.0]])).abs() < 1e-12)
        True
        >>> sum(parameter.numel() for parameter in learned.parameters())  # 50 layers, 2 heads, K, Q (1, 3) and V (3, 3)
        1500
    """

    def __init__(
        self,
        construction: InContextTransformer,
        n_features: int,
        initialization: Initialization = "construction",
        *,
        shared_layers: bool = False,
        n_heads: int = 2,
        width: int | None = None,
        gain: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(construction, InContextTransformer):
            raise TypeError(
                f"construction must be an InContextTransformer, got {construction!r}. Build one with the kernel and depth wanted."
            )
        if construction.infinite or construction.n_landmarks is not None:
            raise ValueError(
                f"matrices are learned of a finite transformer without landmarks; got {construction} with "
                f"n_landmarks={construction.n_landmarks}. Set n_layers to a number and n_landmarks to None."
            )
        if construction.algorithm.name != "td" or construction.acceleration != "none" or construction.ridge:
            raise ValueError(
                f"matrices are learned of plain TD layers, got algorithm={construction.algorithm.name!r}, "
                f"acceleration={construction.acceleration!r} and ridge={construction.ridge}. Leave those at their defaults."
            )
        if initialization not in get_args(Initialization):
            raise ValueError(f"initialization must be one of {get_args(Initialization)}, got {initialization!r}.")
        if n_heads not in (1, 2):
            raise ValueError(f"n_heads must be 1 or 2, got {n_heads}.")
        self.n_features, self.n_heads = operator.index(n_features), n_heads
        self.width = self.n_features if width is None else operator.index(width)
        for name, number in (("n_features", self.n_features), ("width", self.width)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        if not 0.0 < float(gain) < math.inf:
            raise ValueError(f"gain must be positive and finite, got {gain}.")
        self.construction, self.shared_layers = construction, bool(shared_layers)
        steps = construction.step_sizes.detach()
        count = min(len(steps), 1) if shared_layers else len(steps)
        if initialization == "construction":
            if shared_layers and bool((steps != steps[:1]).any()):
                raise ValueError(
                    f"shared layers have one step size, got {steps.tolist()}. Use shared_layers=False, or equal step sizes."
                )
            layers = [self.constructed(step) for step in steps[:count]]
        else:
            generator = torch.Generator().manual_seed(seed)
            layers = [self._random(float(gain), generator, steps) for _ in range(count)]
        self.layers = nn.ModuleList(layers)

    @property
    def heads(self) -> list[AttentionHead]:
        """Every head of every layer; of one layer, if all are the same."""
        return [head for layer in self.layers if isinstance(layer, LearnedLayer) for head in layer.heads]

    @property
    def n_layers(self) -> int:
        """L."""
        return len(self.construction.step_sizes)

    def constructed(self, step_size: Tensor) -> LearnedLayer:
        """A layer of this form with the matrices of the construction.

        Args:
            step_size: (), what multiplies the TD errors.

        Raises:
            ValueError: The form cannot hold them.
        """
        if self.width < self.n_features:
            raise ValueError(
                f"the construction compares all {self.n_features} features and needs width >= {self.n_features}, got "
                f'{self.width}. Widen it, or use initialization="random".'
            )
        if self.n_heads == 1 and not isinstance(self.construction.kernel, LinearKernel):
            raise ValueError(
                f"one head holds the construction with the linear kernel only, got {self.construction.kernel}. Use n_heads=2, "
                f'or initialization="random".'
            )
        gamma = self.construction.gamma.to(step_size)
        layer = Layer(self.n_features, step_size, gamma)
        value, bootstrap = layer.value_head, layer.bootstrap_head
        if self.n_heads == 1:
            # k(K z_j, Q_v z_i) enters with -step, k(K z_j, Q_b z_i) with gamma step: by linearity, one product.
            matrices = [(value.key, gamma * bootstrap.query - value.query, -value.value)]
        else:
            matrices = [(head.key, head.query, head.value) for head in (value, bootstrap)]
        rows = (0, 0, 0, self.width - self.n_features)
        pad = nn.functional.pad
        return LearnedLayer(*(AttentionHead(pad(key, rows), pad(query, rows), v) for key, query, v in matrices))

    def embed(self, context: Context, query_states: Any) -> Prompt:
        """Write one prompt for all queries: n columns of the context and m of queries, none of which is a key.

        Args:
            context: (...) contexts of n transitions.
            query_states: (..., m, d)

        Returns:
            Tokens (..., 1, 2d+1, n+m) with their masks.

        Raises:
            ValueError: States of other than d entries.
        """
        if context.n_features != self.n_features:
            raise ValueError(
                f"these matrices are for states of {self.n_features} entries, got a context with {context.n_features}."
            )
        queries = as_states(query_states, context)
        m, d = queries.shape[-2], self.n_features
        one = self.construction.embed(context, queries.new_zeros(*context.batch_shape, 1, d))
        tokens = one.tokens
        if self.n_heads == 1:
            ended = (~one.bootstrap[..., :-1]).unsqueeze(-2)
            following = tokens[..., d : 2 * d, :-1].masked_fill(ended, 0.0)
            tokens = torch.cat(
                [tokens[..., :d, :], nn.functional.pad(following, (0, 1)), tokens[..., 2 * d :, :]], dim=-2
            )
        rest = tokens[..., d:, -1:].expand(*tokens.shape[:-2], d + 1, m)  # zero, or where the value shift starts
        columns = torch.cat([queries.transpose(-1, -2).unsqueeze(-3), rest], -2)
        repeats = torch.ones(tokens.shape[-1], dtype=torch.long, device=tokens.device)
        repeats[-1] = m
        return Prompt(
            torch.cat([tokens[..., :-1], columns], -1),
            one.keys.repeat_interleave(repeats, -1),
            one.bootstrap.repeat_interleave(repeats, -1),
            None if one.weights is None else one.weights.repeat_interleave(repeats, -1),
        )

    def forward(self, prompt: Prompt) -> Float[Tensor, "*b p r c"]:
        """The tokens after L layers.

        Args:
            prompt: What :meth:`embed` made, or :meth:`InContextTransformer.embed` (with two heads).

        Returns:
            (..., 2d+1, n+m), the shape of the prompt's tokens.

        Raises:
            FloatingPointError: The layers diverge.
        """
        states = prompt.tokens[..., : self.n_features, :].transpose(-1, -2)
        kernel = self.construction._prompt_kernel(prompt, states)
        normalizer = self.construction._normalizer(kernel, states, prompt.keys, None, prompt.key_weights)
        for index in range(self.n_layers):
            before = prompt.tokens
            prompt = self.layers[0 if self.shared_layers else index](prompt, kernel, normalizer)
            if not bool(torch.isfinite(prompt.tokens).all()):
                raise divergence(index, self.n_layers, float(before.detach()[..., -1, :].abs().max()))
        return prompt.tokens

    def values(self, context: Context, query_states: Any) -> Float[Tensor, "*b m"]:
        """The literal answers to queries: minus the last row of their columns after L layers.

        Args:
            context: (...) contexts of n transitions.
            query_states: (..., m, d)

        Returns:
            (..., m): from the construction's matrices V_L(s) + b, with b = 0 if its offset is ``"removed"``.

        Raises:
            ValueError: States of other than d entries.
            FloatingPointError: The layers diverge.
        """
        tokens = self(self.embed(context, query_states))
        return -tokens[..., 0, -1, len(context) :]

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the matrices (safetensors) and the configuration (JSON) into a folder. See :mod:`icrl_gym.weights`."""
        from icrl_gym.weights import save_learned

        save_learned(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> LearnedTransformer:
        """The transformer that :meth:`save_pretrained` wrote."""
        from icrl_gym.weights import load_learned

        return load_learned(folder)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        form = f"n_features={self.n_features}, n_heads={self.n_heads}, width={self.width}"
        return f"{form}, n_layers={self.n_layers}, shared_layers={self.shared_layers}"

    def _random(self, gain: float, generator: torch.Generator, like: Tensor) -> LearnedLayer:
        rows = 2 * self.n_features + 1
        # An entry of K^T Q is a sum of `width` products; this makes its deviation gain / sqrt(rows), like V's.
        deviation = math.sqrt(gain / math.sqrt(rows * self.width))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)

        return LearnedLayer(
            *(
                AttentionHead(
                    deviation * normal(self.width, rows),
                    deviation * normal(self.width, rows),
                    gain / math.sqrt(rows) * normal(rows, rows),
                )
                for _ in range(self.n_heads)
            )
        )
