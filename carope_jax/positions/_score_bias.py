"""Biases of attention scores that are differences of a coordinate: bias_ij = c_i - c_j.

A coordinate is one number a token and head, so a cached key keeps its own and no bias needs a
matrix before attention does. ALiBi's falls with the position; FoX's is a running sum.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from carope_jax.positions._projection import project
from carope_jax.positions._scan import (
    carry_in,
    check_flags,
    last_start,
    like,
    masked,
    segmented_cumsum,
)

# B batch, T time, S keys, D model, H query heads.


def score_bias(
    query: Float[Array, "#B T H"], key: Float[Array, "#B S H"]
) -> Float[Array, "#B H T S"]:
    """c_i - c_j for every query i and key j; what may not be attended to is for the caller's mask.

    Args:
      query: float32 coordinates of the queries.
      key: float32 coordinates of the keys.

    Returns:
      float32 nats, to be added to the scores before the softmax.

    Raises:
      ValueError: coordinates that are not float32 [B, T, H], or of other heads or batches.
    """
    for name, coordinate in (("query", query), ("key", key)):
        if coordinate.ndim != 3 or coordinate.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32 [B, T, H], "
                f"got {coordinate.dtype} of shape {coordinate.shape}"
            )
    batches = {query.shape[0], key.shape[0]} - {1}
    if query.shape[2] != key.shape[2] or len(batches) > 1:
        raise ValueError(
            f"query and key must agree in batch and heads, got shapes {query.shape} and {key.shape}"
        )
    return query.swapaxes(1, 2)[..., :, None] - key.swapaxes(1, 2)[..., None, :]


def alibi_slopes(heads: int) -> Float[Array, " H"]:
    """Each head's slope: 2^(-8h/H), h = 1 ... H, for a power of two (arXiv 2108.12409, section 3).

    For another number of heads, as in the authors' code: the slopes of the largest power of two
    below it, then every other slope of the next one.

    Args:
      heads: H, query heads.

    Returns:
      float32 nats a token.

    Raises:
      ValueError: `heads` below 1.
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    whole = 1 << (heads.bit_length() - 1)
    exponents = np.arange(1, whole + 1) / whole
    between = np.arange(0.5, heads - whole) / whole
    return jnp.asarray(2.0 ** (-8 * np.concatenate([exponents, between])), jnp.float32)


def alibi_coordinates(positions: Int[Array, "#B T"], heads: int) -> Float[Array, "#B T H"]:
    """c = -slope * position, so that c_i - c_j = -slope (i - j) (arXiv 2108.12409, section 3).

    Args:
      positions: integers.
      heads: H, query heads.

    Returns:
      float32 nats; a difference of two is exact to 2^-23 of the larger, and exact below 2^24 tokens
      where the slopes are powers of two.

    Raises:
      ValueError: positions that are not integers, or `heads` below 1.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers, got {positions.dtype}")
    return -positions.astype(jnp.float32)[..., None] * alibi_slopes(heads)


def fox_log_forget(
    x: Float[Array, "B T D"], kernel: Float[Array, "D H"], bias: Float[Array, " H"] | None = None
) -> Float[Array, "B T H"]:
    """log f = log sigmoid(x w + b) (arXiv 2503.02130, section 3), always in float32.

    Args:
      x: what the forget gates depend on, any float dtype.
      kernel: w of each query head.
      bias: b of each query head; None: 0.

    Returns:
      float32 nats, not above 0.

    Raises:
      ValueError: shapes that disagree.
    """
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1]:
        raise ValueError(f"kernel must be [{x.shape[-1]}, heads], got shape {kernel.shape}")
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"bias must have shape {kernel.shape[1:]}, got {bias.shape}")
    logits_BTH = project(x, kernel)
    if bias is not None:
        logits_BTH = logits_BTH + bias.astype(jnp.float32)
    return jax.nn.log_sigmoid(logits_BTH)


def fox_decay_bias(heads: int, shortest: float, longest: float) -> Float[Array, " H"]:
    """Gate biases b at which head h forgets in t_h tokens: -1 / log sigmoid(b) = t_h.

    The authors' initialisation of gates that do not depend on the data (arXiv 2503.02130): t_h
    runs from `shortest` to `longest`, evenly in the logarithm.

    Args:
      heads: H, query heads.
      shortest: the first head's decay time in tokens, above 0.
      longest: the last head's, not below `shortest`.

    Returns:
      float32 logits.

    Raises:
      ValueError: `heads` below 1, or decay times that are not finite, positive and in order.
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    if not 0 < shortest <= longest < math.inf:
        raise ValueError(
            f"decay times must be finite with 0 < shortest <= longest, got {shortest} and {longest}"
        )
    rates_H = 1 / np.geomspace(shortest, longest, heads)
    # -log(exp(rate) - 1), written so that a large rate does not overflow.
    return jnp.asarray(-rates_H - np.log(-np.expm1(-rates_H)), jnp.float32)


def accumulate_forget(
    log_forget: Float[Array, "B T H"],
    starts: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    carry: Float[Array, "B H"] | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "B T H"], Float[Array, "B H"]]:
    """Running sum of the log gates: c_i - c_j = sum_{j < t <= i} log f_t (arXiv 2503.02130).

    Args:
      log_forget: float32 log f. bfloat16 is refused: its sum would stick after a few hundred
        tokens.
      starts: true at the first token of each segment: a new sum begins there, with that token's
        own gate counted. None: the whole row continues the carry.
      valid: false at padding, which forgets nothing. None: every token counts.
      carry: float32 sum before the first token; None: 0. Over a sharded time axis it is the carry
        into the first shard, the same on every shard.
      axis_name: the `shard_map` axis over which time is sharded in order, if it is.

    Returns:
      (coordinate, carry): float32 nats, and the sum after the last token (of this shard), to be
      handed to the next call. Where sums are cut nothing crosses, neither value nor gradient. As
      a float32 sum a coordinate is rounded to about 1e-7 of its size, so to 0.1 nats at a million.

    Raises:
      ValueError: `log_forget` or `carry` is not float32, or the shapes disagree.
    """
    for name, array in (("log_forget", log_forget), ("carry", carry)):
        if array is not None and array.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, got {array.dtype}")
    if log_forget.ndim != 3:
        raise ValueError(f"log_forget must be [B, T, H], got shape {log_forget.shape}")
    check_flags(log_forget.shape[:2], starts=starts, valid=valid)
    wanted = (log_forget.shape[0], log_forget.shape[2])
    if carry is not None and carry.shape != wanted:
        raise ValueError(f"carry must have shape {wanted}, got {carry.shape}")
    sums_BTH = segmented_cumsum(masked(log_forget, valid), starts)
    if axis_name is not None:
        before = jnp.zeros_like(sums_BTH[:, -1]) if carry is None else carry
        carry = carry_in(sums_BTH[:, -1], starts, before, axis_name)
    if carry is not None:
        carried_B1H = carry[:, None]
        if starts is not None:
            carried_B1H = jnp.where(like(last_start(starts)[1], sums_BTH), 0, carried_B1H)
        sums_BTH = sums_BTH + carried_B1H
    return sums_BTH, sums_BTH[:, -1]
