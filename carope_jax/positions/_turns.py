"""Phases as fixed-point turns: exact sums of rotation increments, modulo one turn.

A rotary phase is a running sum of increments, needed only modulo one turn. It is kept as a
uint32 fraction of a turn: each increment is rounded once to 2^-32 turn, the sum is an integer
sum that wraps around by itself. Integer addition is associative, so a sequence summed at once,
in chunks, token by token, packed with others or sharded over devices has the same phase, bit
for bit.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from carope_jax.positions._scan import carry_in, check_flags, last_start, masked, segmented_cumsum

# B batch, T time, K key/value heads, P rotary pairs.

_RADIANS_A_UNIT = np.float32(2 * np.pi / 2**32)

# 2^32 / 2 pi, the turns (in units of 2^-32) of one radian, times 4096^j for j = 1, 0, -1, -2: the
# integer part modulo 2^32, and the fraction in units of 2^-19. A radian value in base 4096 is
# then converted digit by digit in integers. 19 bits are the most for which four digits' fractions
# still fit a uint32; they leave at most 0.006 units of error beside the rounding's 0.5.
_GUARD_BITS = 19
_DIGITS = (
    (12, 3859659065, 33445),
    (0, 683565275, 302216),
    (-12, 166886, 28106),
    (-24, 40, 389895),
)
_REST = np.float32(2**32 / (2 * np.pi) * 2**_GUARD_BITS)
_LARGEST = np.float32(2**24)


def to_turns(radians: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Rounds angles to a whole number of 2^-32 turns, modulo one turn.

    Args:
      radians: float32 angles of either sign, any shape.

    Returns:
      uint32 turns in units of 2^-32 turn, each within 0.507 units (7.4e-10 rad) of the float32
      value it stands for. What no phase can hold (NaN, infinity, |angle| >= 2^24 rad, where
      float32 has no fraction left) comes out as an arbitrary number: `accumulate` marks it.

    Raises:
      ValueError: `radians` is not float32.
    """
    if radians.dtype != jnp.float32:
        raise ValueError(f"angles must be float32, got {radians.dtype}")
    # Each step but the last is exact in float32 (a power of two, a floor, a subtraction of
    # leading bits), and the last is one product, so no compiler's fusion can change a bit.
    rest = jnp.abs(radians)
    turns = jnp.zeros(radians.shape, jnp.uint32)
    guard = jnp.full(radians.shape, 2 ** (_GUARD_BITS - 1), jnp.uint32)
    for exponent, units, fraction in _DIGITS:
        digit = jnp.floor(rest * np.float32(2.0**-exponent))
        rest = rest - digit * np.float32(2.0**exponent)
        digit = digit.astype(jnp.int32).astype(jnp.uint32)
        turns = turns + digit * np.uint32(units)
        guard = guard + digit * np.uint32(fraction)
    guard = guard + jnp.round(rest * _REST).astype(jnp.int32).astype(jnp.uint32)
    turns = turns + (guard >> _GUARD_BITS)
    return jnp.where(radians < 0, -turns, turns)


def to_radians(turns: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """The angle in [-pi, pi] of a fixed-point turn (units of 2^-32 turn), as float32 radians."""
    return lax.bitcast_convert_type(turns, jnp.int32).astype(jnp.float32) * _RADIANS_A_UNIT


class _Segments(NamedTuple):
    """Where sums begin again, and which tokens count. Either may be None: none, and all."""

    starts: Bool[Array, "B T"] | None
    valid: Bool[Array, "B T"] | None


def accumulate(
    increments: Float[Array, "B T K P"],
    starts: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    carry: UInt32[Array, "B K P"] | None = None,
    axis_name: str | None = None,
    inclusive: bool = True,
) -> tuple[Float[Array, "B T K P"], UInt32[Array, "B K P"]]:
    """Running sum of rotation increments over time, modulo one turn.

    phi(m) = sum_{s <= t <= m} increments(t), s the first token of m's segment
    (arXiv 2507.23083, section 2). The derivative is that of the sum: tangents and cotangents are
    float32 (segmented) cumulative sums, in forward and reverse mode, of any order. The carry is
    not differentiated.

    Args:
      increments: float32 radians a token, of either sign, below 2^24 in magnitude. bfloat16 is
        refused: its phase would stick after a few hundred tokens.
      starts: true at the first token of each segment: a new sum begins there, with that token's
        own increment counted. None: the whole row continues the carry.
      valid: false at padding, which adds nothing. None: every token counts.
      carry: uint32 turns (2^-32 turn) accumulated before the first token; None: zero. Over a
        sharded time axis it is the carry into the first shard, the same on every shard.
      axis_name: the `shard_map` axis over which time is sharded in order, if it is.
      inclusive: whether a token's own increment is in its phase (the paper). Where not, the sum
        is over t < m, so a score counts the key's own increment instead of the query's.

    Returns:
      (phases, carry): float32 radians in [-pi, pi], and the uint32 turns after the last token
      (of this shard; its own increment counted), to be handed to the next call. A valid increment
      that is NaN, infinite or out of range has a NaN phase at its token.

    Raises:
      ValueError: `increments` is not float32, `carry` not uint32, or the shapes disagree.
    """
    _check(increments, starts, valid, carry)
    if carry is None:
        carry = jnp.zeros(increments.shape[:1] + increments.shape[2:], jnp.uint32)
    segments = _Segments(starts, valid)
    turns = to_turns(masked(lax.stop_gradient(increments), valid))
    sums = _integer_cumsum(turns, starts, carry, axis_name)
    counted = sums if inclusive else sums - turns
    return _to_phases(increments, counted, segments, axis_name, inclusive), sums[:, -1]


def _integer_cumsum(
    turns_BTKP: Array, starts_BT: Array | None, carry_BKP: Array, axis_name: str | None
) -> Array:
    sums_BTKP = jnp.cumsum(turns_BTKP, axis=1, dtype=jnp.uint32)
    begun_BT11 = None
    if starts_BT is not None:
        # Integers may be subtracted: modulo 2^32 it is exact, and nothing leaks across.
        first_BT, begun_BT = last_start(starts_BT)
        begun_BT11 = begun_BT[..., None, None]
        before_BTKP = jnp.take_along_axis(sums_BTKP - turns_BTKP, first_BT[..., None, None], axis=1)
        sums_BTKP = sums_BTKP - jnp.where(begun_BT11, before_BTKP, 0)
    if axis_name is not None:
        carry_BKP = carry_in(sums_BTKP[:, -1], starts_BT, carry_BKP, axis_name)
    carried_B1KP = carry_BKP[:, None]
    return sums_BTKP + (
        carried_B1KP if begun_BT11 is None else jnp.where(begun_BT11, 0, carried_B1KP)
    )


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _to_phases(
    increments_BTKP: Array,
    turns_BTKP: Array,
    segments: _Segments,
    axis_name: str | None,
    inclusive: bool,
) -> Array:
    """The summed turns as radians, with the derivative of the sum of the increments."""
    # An integer would hide what is not a number.
    holds_BTKP = jnp.abs(masked(increments_BTKP, segments.valid)) < _LARGEST
    return jnp.where(holds_BTKP, to_radians(turns_BTKP), jnp.nan)


@_to_phases.defjvp
def _to_phases_jvp(
    axis_name: str | None, inclusive: bool, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    increments_BTKP, turns_BTKP, segments = primals
    phases_BTKP = _to_phases(increments_BTKP, turns_BTKP, segments, axis_name, inclusive)
    starts_BT = segments.starts
    sums_BTKP = segmented_cumsum(masked(tangents[0], segments.valid), starts_BT)
    carried_BKP = jnp.zeros_like(sums_BTKP[:, 0])
    if axis_name is not None:
        carried_BKP = carry_in(sums_BTKP[:, -1], starts_BT, carried_BKP, axis_name)
        sums_BTKP = sums_BTKP + (
            carried_BKP[:, None]
            if starts_BT is None
            else jnp.where(last_start(starts_BT)[1][..., None, None], 0, carried_BKP[:, None])
        )
    if not inclusive:
        # Shifted, not subtracted: a float difference would not cancel to exactly nothing.
        sums_BTKP = jnp.concatenate([carried_BKP[:, None], sums_BTKP[:, :-1]], axis=1)
        if starts_BT is not None:
            sums_BTKP = jnp.where(starts_BT[..., None, None], 0, sums_BTKP)
    return phases_BTKP, sums_BTKP


def _check(
    increments: Array, starts: Array | None, valid: Array | None, carry: Array | None
) -> None:
    if increments.dtype != jnp.float32:
        raise ValueError(f"increments must be float32, got {increments.dtype}")
    if increments.ndim != 4:
        raise ValueError(f"increments must be [B, T, K, P], got shape {increments.shape}")
    check_flags(increments.shape[:2], starts=starts, valid=valid)
    wanted = increments.shape[:1] + increments.shape[2:]
    if carry is not None and carry.dtype != jnp.uint32:
        raise ValueError(f"carry must be uint32, got {carry.dtype}")
    if carry is not None and carry.shape != wanted:
        raise ValueError(f"carry must have shape {wanted}, got {carry.shape}")
