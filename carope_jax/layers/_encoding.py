"""What the decoder asks of a positional encoding: three hooks, each doing nothing by default."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from carope_jax.positions import segment_positions, segment_starts, segment_valid

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


class FrozenParam(nnx.Variable):
    """A weight that no optimizer sees: kept and restored with the parameters, never trained."""


class Segmentation(NamedTuple):
    """Which tokens of a row belong together.

    Attributes:
      positions: int32 [B, T] or [1, T], from 0 at each segment's first token.
      starts: true at each segment's first token; None where each row is one segment.
      valid: false at padding; None where every token counts.
      segment_ids: 0 at padding; None where each row is one segment without padding.
    """

    positions: Int[Array, "#B T"]
    starts: Bool[Array, "B T"] | None
    valid: Bool[Array, "B T"] | None
    segment_ids: Int[Array, "B T"] | None

    @classmethod
    def of(cls, length: int, segment_ids: Int[Array, "B T"] | None) -> "Segmentation":
        """The segmentation of rows of `length` tokens; segment id 0 is padding."""
        if segment_ids is None:
            return cls(jnp.arange(length, dtype=jnp.int32)[None], None, None, None)
        return cls(
            segment_positions(segment_ids),
            segment_starts(segment_ids),
            segment_valid(segment_ids),
            segment_ids,
        )


class Rotated(NamedTuple):
    """Rotated queries and keys, and what is worth a line in the training log (scalars by name)."""

    q: Float[Array, "B T H N"]
    k: Float[Array, "B T K N"]
    measurements: dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class HeadDims:
    """The sizes of the model that an encoding serves.

    Attributes:
      model_dim: width of the residual stream.
      heads: query heads.
      kv_heads: key/value heads; divides `heads`.
      head_dim: features of a head.
      max_length: tokens of the longest training window: the size of a learned table.
    """

    model_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int


class Encoding(nnx.Module):
    """A positional encoding as a decoder sees it. A subclass overrides the hooks it needs."""

    def add_to_embedding(
        self, embedding: Float[Array, "B T D"], segmentation: Segmentation
    ) -> Float[Array, "B T D"]:
        """The token embeddings with positions added."""
        return embedding

    def rotate(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        *,
        hidden: Float[Array, "B T D"],
        embedding: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> Rotated:
        """Queries and keys turned by their phases.

        Args:
          q: queries.
          k: keys.
          hidden: the block's normalised input.
          embedding: the model's token embeddings, before any block.
          segmentation: which tokens belong together.
        """
        return Rotated(q, k, {})

    def score_bias(self, segmentation: Segmentation) -> Float[Array, "B H T S"] | None:
        """What is added to the attention scores before the softmax, float32; None: nothing."""
        return None


@dataclasses.dataclass(frozen=True)
class EncodingConfig:
    """The options of one encoding, and how a decoder builds it from them.

    An encoding lives either beside the embeddings, once, or in each attention layer.
    """

    def in_embedding(self, dims: HeadDims, rngs: nnx.Rngs) -> Encoding:
        """The encoding's part that is added to the embeddings (by default it does nothing)."""
        return Encoding()

    def in_attention(self, dims: HeadDims, rngs: nnx.Rngs) -> Encoding:
        """The encoding's part in one attention layer (by default it does nothing)."""
        return Encoding()

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError where the encoding can't serve a model of these sizes."""

    def longest(self, dims: HeadDims) -> int | None:
        """The most tokens a sequence may have; None: any number."""
        return None
