"""Values over time [B, T, ...]: masked at padding, and summed within segments."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

# B batch, T time.


def like(flags: Shaped[Array, "B T"], values: Shaped[Array, "B T *X"]) -> Shaped[Array, "B T ..."]:
    """Flags of tokens with as many axes as `values` have, to broadcast over them."""
    return flags.reshape(*flags.shape, *(1,) * (values.ndim - 2))


def masked(
    values: Float[Array, "B T *X"], valid: Bool[Array, "B T"] | None
) -> Float[Array, "B T *X"]:
    """The values of valid tokens, and 0 with no gradient (even where NaN) at the others."""
    return values if valid is None else jnp.where(like(valid, values), values, 0)


def last_start(starts: Bool[Array, "B T"]) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The index of the latest start at or before each token (0 before any), and whether one is."""
    index_T = jnp.arange(starts.shape[1], dtype=jnp.int32)
    latest_BT = lax.cummax(jnp.where(starts, index_T, -1), axis=1)
    return jnp.maximum(latest_BT, 0), latest_BT >= 0


def segmented_cumsum(
    values: Float[Array, "B T *X"], starts: Bool[Array, "B T"] | None
) -> Float[Array, "B T *X"]:
    """Sums cut at the starts by a flagged scan: subtracting would leak rounding across."""
    if starts is None:
        return jnp.cumsum(values, axis=1)

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    flags = jnp.broadcast_to(like(starts, values), values.shape)
    return lax.associative_scan(combine, (flags, values), axis=1)[1]


def carry_in(
    totals: Shaped[Array, "B ..."],
    starts: Bool[Array, "B T"] | None,
    carry: Shaped[Array, "B ..."],
    axis_name: str,
) -> Shaped[Array, "B ..."]:
    """What the earlier shards of a sharded time axis hand to this one.

    An exclusive segmented sum of shard totals, of integers (exact) or floats.

    Args:
      totals: this shard's sum from its last start on (of all its tokens where it has none).
      starts: of this shard.
      carry: into the first shard, the same on every shard.
      axis_name: the `shard_map` axis over which time is sharded in order.
    """
    totals_SBX = lax.all_gather(totals, axis_name)
    begun_SB = None if starts is None else lax.all_gather(starts.any(axis=1), axis_name)
    here = lax.axis_index(axis_name)
    for shard in range(totals_SBX.shape[0] - 1):
        after = carry + totals_SBX[shard]
        if begun_SB is not None:
            begun = begun_SB[shard].reshape(-1, *(1,) * (carry.ndim - 1))
            after = jnp.where(begun, totals_SBX[shard], after)
        carry = jnp.where(shard < here, after, carry)
    return carry


def check_flags(shape: tuple[int, ...], **flags: Array | None) -> None:
    """Raises a ValueError that names the flags which are given and not bool of this shape."""
    for name, flag in flags.items():
        if flag is not None and (flag.shape != shape or flag.dtype != jnp.bool_):
            raise ValueError(
                f"{name} must be bool of shape {shape}, got {flag.dtype} of shape {flag.shape}"
            )
