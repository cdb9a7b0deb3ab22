"""Packed and padded rows: where segments begin, which tokens count, and each token's position.

Padding (segment id 0) is skipped as if it were not there, wherever in a row it is.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

# B batch, T time.


def segment_valid(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """False at padding, whose segment id is 0."""
    return segment_ids != 0


def segment_starts(
    segment_ids: Int[Array, "B T"], previous: Int[Array, " B"] | None = None
) -> Bool[Array, "B T"]:
    """True at the first token of each segment: a run of equal ids, padding between them skipped.

    Args:
      segment_ids: 0 is padding, which starts nothing.
      previous: each row's segment before the first token; None or 0: none yet.
    """
    if previous is None:
        previous = jnp.zeros_like(segment_ids[:, 0])
    index_T = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    latest_BT = lax.cummax(jnp.where(segment_valid(segment_ids), index_T, -1), axis=1)
    before_BT = jnp.concatenate([jnp.full_like(latest_BT[:, :1], -1), latest_BT[:, :-1]], axis=1)
    ids_before_BT = jnp.take_along_axis(segment_ids, jnp.maximum(before_BT, 0), axis=1)
    ids_before_BT = jnp.where(before_BT < 0, previous[:, None], ids_before_BT)
    return segment_valid(segment_ids) & (segment_ids != ids_before_BT)


def token_positions(
    shape: tuple[int, ...],
    starts: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    carry: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Positions that count a segment's tokens from 0.

    Args:
      shape: (B, T).
      starts: true at each segment's first token; None: each row goes on with the carry's segment.
      valid: false at padding, which counts nothing (its own position is the next token's).
      carry: int32 tokens that each row's segment had before the first token; None: 0.

    Returns:
      (positions, carry), int32: the carry is for the tokens that follow.
    """
    if carry is None:
        carry = jnp.zeros(shape[0], jnp.int32)
    counted_BT = jnp.ones(shape, jnp.int32) if valid is None else valid.astype(jnp.int32)
    through_BT = jnp.cumsum(counted_BT, axis=1, dtype=jnp.int32)
    before_BT = through_BT - counted_BT
    if starts is None:
        return before_BT + carry[:, None], through_BT[:, -1] + carry
    # What the row had counted when the latest segment began; -1 while none has.
    at_start_BT = lax.cummax(jnp.where(starts, before_BT, -1), axis=1)
    offset_BT = jnp.where(at_start_BT < 0, carry[:, None], -at_start_BT)
    return before_BT + offset_BT, through_BT[:, -1] + offset_BT[:, -1]
