"""Encodings that bias attention scores, as layers."""

import dataclasses
from typing import Any, ClassVar, Literal, get_args

import jax.nn
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from carope_jax.layers._encoding import (
    AttentionInput,
    EncodingConfig,
    HeadDims,
    Parameter,
    Rotated,
    Weights,
)
from carope_jax.layers._module import BiasEncoding
from carope_jax.positions import (
    accumulate_forget,
    alibi_coordinates,
    fox_decay_bias,
    fox_log_forget,
)

# B batch, T time, D model, H query heads, K key/value heads, N head dim.

ForgetGate = Literal["content", "bias", "fixed"]
"""What a forget gate depends on: the input, a trained bias alone, or nothing."""


@dataclasses.dataclass(frozen=True)
class AlibiConfig(EncodingConfig):
    """ALiBi (arXiv 2108.12409): scores fall linearly with distance, at a fixed slope a head."""

    biases: ClassVar[bool] = True

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Queries and keys as they come, and each position times each head's slope."""
        positions = jnp.broadcast_to(given.segmentation.positions, given.q.shape[:2])
        return Rotated(given.q, given.k, alibi_coordinates(positions, dims.heads))


class Alibi(BiasEncoding):
    """Attention with linear biases (arXiv 2108.12409). Has no weights.

    Args:
      heads: query heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__(AlibiConfig(), HeadDims(heads=heads))


@dataclasses.dataclass(frozen=True)
class FoxConfig(EncodingConfig):
    """FoX, the forgetting transformer's gate (arXiv 2503.02130): scores fall by the log of each
    forget gate between key and query. No other positions by default."""

    accumulates: ClassVar[bool] = True
    biases: ClassVar[bool] = True

    gate: ForgetGate = "content"
    """What the gate depends on: the block's input, a trained bias a head, or nothing."""
    kernel_std: float = 0.02
    """Standard deviation of the gate's projection at initialisation."""
    shortest_decay: float | None = None
    """Where the biases start: the first head forgets in so many tokens, the others longer, spaced
    evenly in the logarithm. By default (gate=content only) they start at 0: half a token's."""
    longest_decay: float | None = None
    """The last head's; given with `shortest_decay`."""

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for an unknown gate or decay times that make no sense."""
        if self.gate not in get_args(ForgetGate):
            raise ValueError(f"gate must be one of {get_args(ForgetGate)}, got {self.gate!r}")
        given = (self.shortest_decay, self.longest_decay)
        if None in given and (given != (None, None) or self.gate != "content"):
            raise ValueError(
                f"gate={self.gate!r} needs both shortest_decay and longest_decay, got {given}"
            )

    def attention_parameters(self, dims: HeadDims) -> dict[str, Parameter]:
        """The gate's projection [D, H] and bias [H]."""
        parameters = {}
        if self.gate == "content":
            shape, init = (dims.model_dim, dims.heads), jax.nn.initializers.normal(self.kernel_std)
            parameters["kernel"] = Parameter(shape, init, ("embed", "heads"))
        start = jnp.zeros(dims.heads)
        if self.shortest_decay is not None and self.longest_decay is not None:
            start = fox_decay_bias(dims.heads, self.shortest_decay, self.longest_decay)

        def init_bias(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
            return jnp.asarray(start, dtype)

        trained = self.gate != "fixed"
        parameters["bias"] = Parameter((dims.heads,), init_bias, ("heads",), trained)
        return parameters

    def initial_state(self, dims: HeadDims, batch: int) -> Float[Array, "B H"]:
        """Nothing forgotten."""
        return jnp.zeros((batch, dims.heads), jnp.float32)

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Queries and keys as they come, and the running sum of the log gates."""
        if self.gate != "content":
            log_forget_H = jax.nn.log_sigmoid(weights["bias"].astype(jnp.float32))
            log_forget = jnp.broadcast_to(log_forget_H, (*given.q.shape[:2], dims.heads))
        elif given.hidden is None:
            raise ValueError("FoX needs x, what its gates depend on")
        else:
            log_forget = fox_log_forget(given.hidden, weights["kernel"], weights["bias"])
        segmentation = given.segmentation
        coordinate, carry = accumulate_forget(
            log_forget, segmentation.starts, segmentation.valid, given.state, given.axis_name
        )
        return Rotated(given.q, given.k, coordinate, carry)


class Fox(BiasEncoding):
    """The forgetting transformer's forget gate (arXiv 2503.02130).

    Args:
      model_dim: features of x.
      heads: query heads.
      rngs: for the initialisation.
      options: the fields of `FoxConfig`.

    Raises:
      ValueError: an unknown gate, or a gate without content and without decay times.
    """

    def __init__(self, model_dim: int, heads: int, *, rngs: nnx.Rngs, **options: Any) -> None:
        super().__init__(FoxConfig(**options), HeadDims(model_dim=model_dim, heads=heads), rngs)
