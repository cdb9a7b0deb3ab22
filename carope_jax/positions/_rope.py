"""RoPE (arXiv 2104.09864): phases that are a position times a frequency."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from carope_jax.positions._rotate import check_rotary_dim
from carope_jax.positions._scaling import Scaling
from carope_jax.positions._turns import to_radians, to_turns

# B batch, T time, K key/value heads, P rotary pairs.


def rope_frequencies(
    rotary_dim: int, base: float | Float[Array, " K"] = 10_000.0
) -> Float[Array, "K P"]:
    """theta_i = base^(-2i/d), i = 0 ... d/2-1 (arXiv 2104.09864, section 3.3).

    Args:
      rotary_dim: d, how many features of a head turn; even and positive.
      base: one number (K is 1), or one a key/value head.

    Returns:
      float32 radians a token. For a number the powers are taken in float64 and rounded once.

    Raises:
      ValueError: an odd or non-positive `rotary_dim`, or a base that is not above 0.
    """
    check_rotary_dim(rotary_dim)
    if isinstance(base, int | float):
        if not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        return jnp.asarray(powers(rotary_dim, base), jnp.float32)[None]
    exponents_P = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    return base.astype(jnp.float32)[:, None] ** -exponents_P


def powers(dim: int, base: float) -> Float[np.ndarray, " P"]:
    """base^(-2i/dim), i = 0 ... dim/2-1, in float64."""
    return np.float64(base) ** -(np.arange(0, dim, 2) / dim)


def rope_phases(
    positions: Int[Array, "B T"],
    head_dim: int,
    *,
    base: float | Float[Array, " K"] = 10_000.0,
    frequencies: Float[Array, "K P"] | None = None,
    scaling: Scaling | None = None,
) -> Float[Array, "B T K P"]:
    """phi_i(m) = m theta_i modulo one turn, exact for every integer position.

    The frequency is rounded once to 2^-32 turn and multiplied by the position in wrapping
    integers, so the phase is that of an accumulated constant increment bit for bit.

    Args:
      positions: any integers; only differences matter to a score.
      head_dim: how many features of a head turn.
      base: of theta_i = base^(-2i/head_dim); a number, or one a key/value head. Differentiable
        frequencies are not offered: an integer product has no gradient.
      frequencies: float32 radians a token in place of the base's.
      scaling: its factor multiplies the frequencies. (Its attention factor is for the caller.)

    Returns:
      float32 radians in [-pi, pi], with K = 1 for a single base.

    Raises:
      ValueError: positions that are not integers, an odd `head_dim`, a base not above 0, or
        frequencies of another number of pairs.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers, got {positions.dtype}")
    if frequencies is None:
        frequencies = rope_frequencies(head_dim, base)
    check_rotary_dim(head_dim)
    if frequencies.shape[-1] != head_dim // 2:
        raise ValueError(
            f"head_dim {head_dim} has {head_dim // 2} pairs, "
            f"got frequencies of {frequencies.shape[-1]}"
        )
    if scaling is not None:
        frequencies = frequencies * scaling.factor
    turns_KP = to_turns(frequencies)
    return to_radians(positions.astype(jnp.uint32)[..., None, None] * turns_KP)
