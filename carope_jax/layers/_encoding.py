"""What an encoding is before it is a module: options, the weights they ask for, pure hooks.

A Flax module (NNX or Linen) holds the weights and calls the hooks; the decoder knows three of them:
an encoding may add to the embeddings, rotate queries and keys, or bias the scores.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from carope_jax.positions import segment_starts, segment_valid, token_positions

# B batch, T time, D model, H query heads, K key/value heads, N head dim.

Weights = Mapping[str, Array]
"""An encoding's weights by name."""


class Parameter(NamedTuple):
    """A weight that an encoding asks for.

    Attributes:
      shape: of the float32 array.
      init: (key, shape, dtype) -> array, as in `jax.nn.initializers`.
      axes: the logical axis of each dimension; None: it has none.
      trained: whether an optimizer sees it.
    """

    shape: tuple[int, ...]
    init: Callable[..., Array]
    axes: tuple[str | None, ...]
    trained: bool = True


class Segmentation(NamedTuple):
    """Which tokens of a row belong together.

    Attributes:
      positions: int32 [B, T] or [1, T], from 0 at each segment's first token.
      starts: true at each segment's first token; None where each row goes on with one segment.
      valid: false at padding; None where every token counts.
      segment_ids: 0 at padding; None where each row is one segment without padding.
    """

    positions: Int[Array, "#B T"]
    starts: Bool[Array, "B T"] | None = None
    valid: Bool[Array, "B T"] | None = None
    segment_ids: Int[Array, "B T"] | None = None

    @classmethod
    def of(cls, length: int, segment_ids: Int[Array, "B T"] | None) -> "Segmentation":
        """The segmentation of rows of `length` tokens; segment id 0 is padding."""
        if segment_ids is None:
            return cls(jnp.arange(length, dtype=jnp.int32)[None])
        starts, valid = segment_starts(segment_ids), segment_valid(segment_ids)
        positions, _ = token_positions(segment_ids.shape, starts, valid)
        return cls(positions, starts, valid, segment_ids)


class AttentionInput(NamedTuple):
    """What an attention layer has at hand.

    Attributes:
      q: queries.
      k: keys.
      hidden: the block's normalised input.
      embedding: the model's token embeddings, before any block.
      segmentation: which tokens belong together.
      state: what the tokens before left, as `initial_state` has it; None: there were none.
      axis_name: the `shard_map` axis over which time is sharded, if it is.
    """

    q: Float[Array, "B T H N"]
    k: Float[Array, "B T K N"]
    hidden: Float[Array, "B T D"] | None
    embedding: Float[Array, "B T D"] | None
    segmentation: Segmentation
    state: Any = None
    axis_name: str | None = None


class Rotated(NamedTuple):
    """What an encoding makes of an attention layer's queries and keys.

    Attributes:
      q: rotated queries.
      k: rotated keys.
      coordinate: float32 [B, T, H]; the score of query i and key j is biased by c_i - c_j. None:
        no bias.
      state: what the next tokens of the same rows need, as `initial_state` has it.
      measurements: what is worth a line in the training log, scalars by name.
    """

    q: Float[Array, "B T H N"]
    k: Float[Array, "B T K N"]
    coordinate: Float[Array, "B T H"] | None = None
    state: Any = ()
    measurements: Mapping[str, Float[Array, ""]] = {}


@dataclasses.dataclass(frozen=True)
class HeadDims:
    """The sizes of the model that an encoding serves; 0 where the encoding doesn't ask.

    Attributes:
      model_dim: width of the residual stream.
      heads: query heads.
      kv_heads: key/value heads; divides `heads`.
      head_dim: features of a head.
      max_length: tokens of the longest training window.
    """

    model_dim: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    max_length: int = 0


@dataclasses.dataclass(frozen=True)
class EncodingConfig:
    """An encoding without its weights: its options, and what it does, each by default nothing."""

    accumulates: ClassVar[bool] = False
    """Whether positions are sums over the tokens before, so that position ids have no meaning."""
    biases: ClassVar[bool] = False
    """Whether `rotate` gives a coordinate that biases the scores."""
    shards_time: ClassVar[bool] = True
    """Whether `rotate` can be given a shard of the time axis (and `axis_name`); where not, it is
    given the whole sequence, which a sharded model gathers for it."""

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError where the encoding can't serve a model of these sizes."""

    def longest(self, dims: HeadDims) -> int | None:
        """The most tokens a sequence may have; None: any number."""
        return None

    def embedding_parameters(self, dims: HeadDims) -> dict[str, Parameter]:
        """The weights of the part beside the token embeddings."""
        return {}

    def attention_parameters(self, dims: HeadDims) -> dict[str, Parameter]:
        """The weights of the part in an attention layer."""
        return {}

    def initial_state(self, dims: HeadDims, batch: int) -> Any:
        """What `rotate` needs of the tokens before the first: a tree of arrays [batch, ...]."""
        return ()

    def add_to_embedding(
        self,
        weights: Weights,
        dims: HeadDims,
        embedding: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> Float[Array, "B T D"]:
        """The token embeddings with positions added."""
        return embedding

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Queries and keys turned by their phases, and the coordinate that biases their scores.

        Args:
          weights: of the part in an attention layer.
          dims: the model's sizes.
          given: what the attention layer has at hand.
        """
        return Rotated(given.q, given.k, state=() if given.state is None else given.state)
