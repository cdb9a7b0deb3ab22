"""Packed and padded rows: where segments begin and which tokens count."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

# B batch, T time.


def segment_starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the first token of each run of equal segment ids (so also at each row's first)."""
    first_B1 = jnp.ones_like(segment_ids[:, :1], dtype=bool)
    return jnp.concatenate([first_B1, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def segment_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """int32 positions that begin again from 0 at each segment's first token."""
    index_T = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts_BT = segment_starts(segment_ids)
    return index_T - lax.cummax(jnp.where(starts_BT, index_T, 0), axis=1)


def segment_valid(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """False at padding, whose segment id is 0."""
    return segment_ids != 0
