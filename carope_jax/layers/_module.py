"""Encodings as NNX modules: they hold the weights, and call what the encoding is."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from carope_jax.layers import _calls
from carope_jax.layers._encoding import (
    AttentionInput,
    EncodingConfig,
    HeadDims,
    Parameter,
    Rotated,
    Segmentation,
)

# B batch, T time, D model, H query heads, K key/value heads, N head dim, S keys.


class FrozenParam(nnx.Variable):
    """A weight that no optimizer sees: kept and restored with the parameters, never trained."""


class Encoding(nnx.Module):
    """An encoding's options and weights.

    Args:
      config: the encoding and its options.
      dims: the sizes it serves.
      rngs: the stream `params` initialises them; None where there are none.

    Raises:
      ValueError: the encoding can't serve these sizes.
    """

    def __init__(
        self, config: EncodingConfig, dims: HeadDims, rngs: nnx.Rngs | None = None
    ) -> None:
        config.validate(dims)
        self.config, self.dims = config, dims
        wanted = self._parameters()
        self.names = tuple(wanted)
        for name, parameter in wanted.items():
            if rngs is None:
                raise ValueError(f"rngs is needed to initialise {name}")
            variable = nnx.Param if parameter.trained else FrozenParam
            values = parameter.init(rngs.params(), parameter.shape, jnp.float32)
            setattr(self, name, variable(values, axes=parameter.axes))

    def _parameters(self) -> dict[str, Parameter]:
        """The weights to make: of the part in an attention layer, unless a subclass says other."""
        return self.config.attention_parameters(self.dims)

    @property
    def weights(self) -> dict[str, Array]:
        """The weights' arrays by name."""
        return {name: getattr(self, name)[...] for name in self.names}

    def initial_carry(self, batch: int) -> Any:
        """The carry before each row's first token."""
        return _calls.initial_carry(self.config, self.dims, batch)


class EmbeddingEncoding(Encoding):
    """The part of a decoder's encoding beside its token embeddings."""

    def _parameters(self) -> dict[str, Parameter]:
        return self.config.embedding_parameters(self.dims)

    def __call__(
        self, embedding: Float[Array, "B T D"], segmentation: Segmentation
    ) -> Float[Array, "B T D"]:
        """The token embeddings with positions added."""
        return self.config.add_to_embedding(self.weights, self.dims, embedding, segmentation)


class AttentionEncoding(Encoding):
    """The part of a decoder's encoding in one attention layer."""

    def __call__(self, given: AttentionInput) -> Rotated:
        """What becomes of the attention layer's queries and keys."""
        return self.config.rotate(self.weights, self.dims, given)


class RotaryEncoding(Encoding):
    """An encoding that replaces a rotary call in an attention of one's own.

        q, k = encoding(q, k, x)                              # a whole sequence
        q, k, carry = encoding(q, k, x, carry=carry)          # decoding, from `initial_carry`

    Its phases are a key/value head's, shared by the query heads of its group.
    """

    def __call__(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        x: Float[Array, "B T D"] | None = None,
        *,
        positions: Int[Array, "#B T"] | None = None,
        starts: Bool[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        carry: Any = None,
        axis_name: str | None = None,
    ) -> tuple[Any, ...]:
        """Queries and keys turned by their phases.

        Args:
          q: queries; each group of H/K shares its key/value head's phase.
          k: keys.
          x: what a content-dependent encoding looks at: the attention's input (or the token
            embeddings). The others don't need it.
          positions: any integers in place of the count, for encodings that have positions;
            accumulated ones refuse them.
          starts: true at each segment's first token, for packed rows.
          valid: false at padding, which is skipped wherever it is.
          carry: what the tokens before left (`initial_carry` at first); the new one is returned.
          axis_name: the `shard_map` axis over which time is sharded, for accumulated encodings.

        Returns:
          (q', k'), or (q', k', carry) where a carry was given.

        Raises:
          ValueError: positions where they have no meaning, another encoding's carry, or shapes
            that disagree: q, k and x are of one sequence (no cross-attention).
        """
        return _calls.turn(
            self.config,
            self.weights,
            self.dims,
            q,
            k,
            x,
            positions=positions,
            starts=starts,
            valid=valid,
            carry=carry,
            axis_name=axis_name,
        )


class BiasEncoding(Encoding):
    """An encoding that biases attention scores: by c_i - c_j, c a coordinate of each token.

        coordinate = encoding(x)
        bias = score_bias(coordinate, coordinate)             # [B, H, T, T]; mask it causally

    Keep the keys' coordinates beside the cached keys to decode.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        starts: Bool[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        carry: Any = None,
    ) -> Any:
        """Float32 coordinates [B, T, H]; the arguments are `RotaryEncoding`'s.

        Returns:
          The coordinates, or (coordinates, carry) where a carry was given.
        """
        return _calls.locate(
            self.config,
            self.weights,
            self.dims,
            x,
            positions=positions,
            starts=starts,
            valid=valid,
            carry=carry,
        )


class AdditiveEncoding(Encoding):
    """An encoding that is added to the token embeddings.

        x = encoding(embedding)
        x, carry = encoding(embedding, carry=carry)           # decoding, from `initial_carry`

    It comes before any block, so once a model and not once a layer.
    """

    def _parameters(self) -> dict[str, Parameter]:
        return self.config.embedding_parameters(self.dims)

    def __call__(
        self,
        embedding: Float[Array, "B T D"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        starts: Bool[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        carry: Any = None,
    ) -> Any:
        """The embeddings with positions added; the arguments are `RotaryEncoding`'s.

        Returns:
          The embeddings, or (embeddings, carry) where a carry was given.
        """
        return _calls.add(
            self.config,
            self.weights,
            self.dims,
            embedding,
            positions=positions,
            starts=starts,
            valid=valid,
            carry=carry,
        )
