"""What a decoder keeps of the tokens it has read, to read on."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from carope_jax.layers import EncodingConfig, Rotated, Segmentation
from carope_jax.models._config import ModelConfig
from carope_jax.positions import segment_starts, segment_valid, token_positions

# L layers, B batch, T time (new tokens), S slots, H query heads, K key/value heads, N head dim.


class LayerMemory(NamedTuple):
    """The attention layers' part of a cache, stacked over the layers.

    Attributes:
      keys: rotated keys, in the compute type.
      values: values, likewise.
      coordinates: float32 coordinates that bias the scores; None where nothing does.
      state: what the encoding needs of the tokens before (CARoPE's carry).
    """

    keys: Float[Array, "L B S K N"]
    values: Float[Array, "L B S K N"]
    coordinates: Float[Array, "L B S H"] | None
    state: Any

    def write(self, layer: Array, slot: Array, rotated: Rotated, values: Array) -> "LayerMemory":
        """With a layer's new tokens in the slots from `slot` on."""

        def put(memory: Array, new: Array) -> Array:
            starts = (layer, 0, slot) + (0,) * (memory.ndim - 3)
            return lax.dynamic_update_slice(memory, new.astype(memory.dtype)[None], starts)

        return LayerMemory(
            put(self.keys, rotated.k),
            put(self.values, values),
            None
            if self.coordinates is None or rotated.coordinate is None
            else put(self.coordinates, rotated.coordinate),
            jax.tree.map(
                lambda old, new: lax.dynamic_update_index_in_dim(old, new, layer, 0),
                self.state,
                rotated.state,
            ),
        )

    def of_layer(self, layer: Array) -> "LayerMemory":
        """One layer's part, without the leading axis."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), self)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose a cache is: no array, but compared when it is used."""

    encoding: EncodingConfig


class Cache(NamedTuple):
    """What a decoder keeps of the tokens it has read.

    Attributes:
      layers: the attention layers' part.
      segment_ids: the segment of the token in each slot; 0: padding, or none yet.
      segment: int32, each row's segment so far; 0: none yet.
      positions: int32, how many tokens each row's segment has.
      filled: int32, slots written.
      owner: whose it is.
    """

    layers: LayerMemory
    segment_ids: Int[Array, "B S"]
    segment: Int[Array, " B"]
    positions: Int[Array, " B"]
    filled: Int[Array, ""]
    owner: Owner

    @property
    def slots(self) -> int:
        """How many tokens a row has room for, padding counted."""
        return self.segment_ids.shape[1]

    def check(self, config: ModelConfig, batch: int, tokens: int) -> None:
        """Raises a ValueError where this cache can't take these tokens of this model.

        Under `jit` the slots already filled are not known: what would not fit then comes out as
        NaN (see `Decoder.decode`).
        """
        if self.owner.encoding != config.encoding:
            raise ValueError(
                f"the cache is of {self.owner.encoding}, the model's encoding is {config.encoding}"
            )
        if batch != self.segment_ids.shape[0]:
            raise ValueError(f"the cache has {self.segment_ids.shape[0]} rows, got {batch}")
        filled = 0 if isinstance(self.filled, jax.core.Tracer) else int(self.filled)
        if filled + tokens > self.slots:
            raise ValueError(
                f"{tokens} tokens do not fit the cache: {filled} of its {self.slots} slots are full"
            )

    def read(
        self, length: int, segment_ids: Int[Array, "B T"] | None
    ) -> tuple[Segmentation, "Cache"]:
        """Where the next tokens are, and the cache that knows of them (their keys still missing).

        Args:
          length: T, how many tokens a row.
          segment_ids: each token's segment, 0 for padding; None: each row's segment goes on.
        """
        batch = self.segment.shape[0]
        if segment_ids is None:
            starts = valid = None
            segment = jnp.maximum(self.segment, 1)
            ids = jnp.broadcast_to(segment[:, None], (batch, length))
        else:
            ids = segment_ids.astype(jnp.int32)
            starts, valid = segment_starts(ids, self.segment), segment_valid(ids)
            last = jnp.where(valid, jnp.arange(length), -1).max(axis=1)
            latest = jnp.take_along_axis(ids, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
            segment = jnp.where(last < 0, self.segment, latest)
        positions, after = token_positions((batch, length), starts, valid, self.positions)
        known = self._replace(
            segment_ids=lax.dynamic_update_slice(self.segment_ids, ids, (0, self.filled)),
            segment=segment,
            positions=after,
            filled=self.filled + length,
        )
        return Segmentation(positions, starts, valid, ids), known

    def mask(self, length: int) -> Bool[Array, "B 1 T S"]:
        """Which slots each of the last `length` tokens may see: earlier ones of their segment.
        Padding sees itself, so that no row is empty."""
        first = self.filled - length
        ids_BT = lax.dynamic_slice_in_dim(self.segment_ids, first, length, axis=1)
        slot_S, own_T = jnp.arange(self.slots), first + jnp.arange(length)
        same_BTS = ids_BT[:, :, None] == self.segment_ids[:, None]
        seen_BTS = same_BTS & segment_valid(ids_BT)[:, :, None] & (slot_S <= own_T[:, None])
        return (seen_BTS | (slot_S == own_T[:, None]))[:, None]


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """A cache before the first token.

    Args:
      config: the model's.
      batch: rows.
      slots: how many tokens a row has room for, padding counted.

    Raises:
      ValueError: no rows or slots, or more slots than the encoding has positions.
    """
    if batch < 1 or slots < 1:
        raise ValueError(f"a cache needs rows and slots, got batch {batch} and slots {slots}")
    if config.longest is not None and slots > config.longest:
        raise ValueError(
            f"a cache of {slots} slots crosses the {config.longest} positions that "
            f"{config.position} has"
        )
    dims, dtype = config.dims, jnp.dtype(config.dtype)
    stack = (config.num_layers, batch, slots)
    state = config.encoding.initial_state(dims, batch)
    layers = LayerMemory(
        jnp.zeros((*stack, dims.kv_heads, dims.head_dim), dtype),
        jnp.zeros((*stack, dims.kv_heads, dims.head_dim), dtype),
        jnp.zeros((*stack, dims.heads)) if config.encoding.biases else None,
        jax.tree.map(lambda x: jnp.broadcast_to(x, (config.num_layers, *x.shape)), state),
    )
    return Cache(
        layers,
        jnp.zeros((batch, slots), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((), jnp.int32),
        Owner(config.encoding),
    )
