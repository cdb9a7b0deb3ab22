"""DaRoPE and HoPE (arXiv 2609.34556): RoPE on the fast bands, another phase on the slow ones.

A band (pair) is fast if it completes a turn within the training length L: theta_j >= 2 pi / L. The
slow ones turn by a bounded coordinate of the token in place of its position (DaRoPE), or not at
all (HoPE, first in arXiv 2410.21216), so no phase is met beyond L that training has not shown.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from carope_jax.positions._projection import project
from carope_jax.positions._rope import powers, rope_frequencies, rope_phases
from carope_jax.positions._rotate import check_rotary_dim
from carope_jax.positions._scaling import Scaling

# B batch, T time, D model, K key/value heads, P rotary pairs.

_EPSILON = 1e-6


def fast_pairs(rotary_dim: int, base: float, length: int) -> int:
    """How many bands are fast: #{j : base^(-2j/d) >= 2 pi / L} (arXiv 2609.34556, equation 2).

    They are the first ones. In float64.

    Args:
      rotary_dim: d, how many features of a head turn.
      base: of the frequencies.
      length: L, the training length in tokens.

    Raises:
      ValueError: an odd or non-positive `rotary_dim`, a base not above 0, or a length below 1.
    """
    check_rotary_dim(rotary_dim)
    if not base > 0:
        raise ValueError(f"base must be positive, got {base}")
    _check_length(length)
    return int((powers(rotary_dim, base) >= 2 * np.pi / length).sum())


def darope_coordinate(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "D K"],
    prior: Float[Array, " K"],
    positions: Int[Array, "#B T"],
    length: int,
) -> Float[Array, "B T K"]:
    """c = L sigmoid(x w + alpha beta_m) (arXiv 2609.34556, equations 4 and 5), always in float32.

    beta_m = logit((m + 1/2) / L), with m + 1/2 clipped to [1e-6 L, (1 - 1e-6) L]. With w = 0 and
    alpha = 1 the coordinate is m + 1/2: within the training length DaRoPE is then RoPE.

    Args:
      x: what the coordinates depend on, any float dtype.
      kernel: w of each key/value head.
      prior: alpha of each key/value head.
      positions: integers m; from L on the prior sees the last place.
      length: L, the training length in tokens.

    Returns:
      float32 tokens in [0, L].

    Raises:
      ValueError: shapes that disagree, positions that are not integers, or a length below 1.
    """
    _check_length(length)
    _check_positions(positions, x.shape[:2])
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1]:
        raise ValueError(f"kernel must be [{x.shape[-1]}, kv_heads], got shape {kernel.shape}")
    if prior.shape != kernel.shape[1:]:
        raise ValueError(f"prior must have shape {kernel.shape[1:]}, got {prior.shape}")
    # Both distances to the ends are taken in integers: 1 - (m + 1/2) / L would cancel.
    places_BT = jnp.clip(positions.astype(jnp.int32), -1, length)
    ends = (_EPSILON * length, (1 - _EPSILON) * length)
    behind_BT = jnp.clip(places_BT.astype(jnp.float32) + 0.5, *ends)
    ahead_BT = jnp.clip((length - places_BT).astype(jnp.float32) - 0.5, *ends)
    beta_BT = jnp.log(behind_BT) - jnp.log(ahead_BT)
    logits_BTK = project(x, kernel) + beta_BT[..., None] * prior.astype(jnp.float32)
    return length * jax.nn.sigmoid(logits_BTK)


def darope_phases(
    positions: Int[Array, "#B T"],
    coordinate: Float[Array, "B T K"] | None,
    rotary_dim: int,
    *,
    base: float = 10_000.0,
    length: int,
    scaling: Scaling | None = None,
) -> Float[Array, "#B T K P"]:
    """m theta_j on the fast bands and c theta_j on the slow ones (arXiv 2609.34556, equation 6).

    The fast bands' phases are `rope_phases`', bit for bit. The gradient flows through the
    coordinate.

    Args:
      positions: any integers m.
      coordinate: float32 c, what `darope_coordinate` returns; None (HoPE): slow bands do not turn.
      rotary_dim: how many features of a head turn.
      base: of theta_j = base^(-2j/rotary_dim).
      length: L, the training length in tokens, which parts fast bands from slow ones.
      scaling: its factor multiplies the frequencies; which bands are fast is the unscaled base's
        matter. (Its attention factor is for the caller.)

    Returns:
      float32 radians: in [-pi, pi] on the fast bands. On the slow ones in [0, 2 pi] and not
      wrapped, which would tear a smooth function for nothing (a factor above 1 raises the bound).
      K = 1 and a batch of the positions' for None.

    Raises:
      ValueError: positions that are not integers, a coordinate that is not float32 or of another
        shape, an odd `rotary_dim`, a base not above 0, or a length below 1.
    """
    fast = fast_pairs(rotary_dim, base, length)
    rope_BTKP = rope_phases(positions, rotary_dim, base=float(base), scaling=scaling)
    if coordinate is None:
        return rope_BTKP.at[..., fast:].set(0.0)
    if coordinate.dtype != jnp.float32:
        raise ValueError(f"coordinate must be float32, got {coordinate.dtype}")
    if coordinate.ndim != 3:
        raise ValueError(f"coordinate must be [B, T, K], got shape {coordinate.shape}")
    _check_positions(positions, coordinate.shape[:2])
    frequencies_P = rope_frequencies(rotary_dim, float(base))[0]
    if scaling is not None:
        frequencies_P = frequencies_P * scaling.factor
    slow_BTKP = coordinate[..., None] * frequencies_P[fast:]
    fast_BTKP = jnp.broadcast_to(rope_BTKP[..., :fast], (*coordinate.shape, fast))
    return jnp.concatenate([fast_BTKP, slow_BTKP], axis=-1)


def _check_length(length: int) -> None:
    if not length >= 1:
        raise ValueError(f"length must be at least 1, got {length}")


def _check_positions(positions: Array, shape: tuple[int, ...]) -> None:
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers, got {positions.dtype}")
    if positions.shape not in (shape, (1, *shape[1:])):
        raise ValueError(
            f"positions must have shape {shape} or {(1, *shape[1:])}, got {positions.shape}"
        )
