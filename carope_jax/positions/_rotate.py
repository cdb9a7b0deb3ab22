"""The rotation itself: pairs of a head's features turned by a phase."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

# B batch, T time, H query heads, K key/value heads, G = H/K, N head dim, P rotary pairs.

Layout = Literal["half", "interleaved"]
"""Which features are a pair: "half" is (i, i + P) (GPT-NeoX, Llama), "interleaved" (2i, 2i + 1)."""


def rotate(
    x: Float[Array, "B T H N"],
    phases: Float[Array, "#B T K P"],
    layout: Layout = "half",
) -> Float[Array, "B T H N"]:
    """Turns each pair of features by its phase (arXiv 2104.09864, equation 34).

    (a, b) becomes (a cos phi - b sin phi, a sin phi + b cos phi), in float32, and is cast back.

    Args:
      x: queries or keys, any float dtype.
      phases: float32 radians. K must divide H; a query group of H/K heads shares its phase. One
        row of phases serves every row of x. Where 2P < N only the first 2P features of a head turn
        (partial rotary).
      layout: which features are a pair.

    Returns:
      The rotated x, of its shape and dtype.

    Raises:
      TypeError: `phases` is not float32.
      ValueError: K does not divide H, 2P exceeds N, or the layout is unknown.
    """
    check_rotary(x, phases.shape[-2], phases.shape[-1], layout)
    if phases.dtype != jnp.float32:
        raise TypeError(f"phases must be float32, got {phases.dtype}")
    cos_BTKP, sin_BTKP = jnp.cos(phases), jnp.sin(phases)
    return turn_pairs(x, cos_BTKP, sin_BTKP, layout)


def turn_pairs(x_BTHN: Array, cos_BTKP: Array, sin_BTKP: Array, layout: Layout) -> Array:
    """`rotate` once the cosines and sines are at hand."""
    a_BTKGP, b_BTKGP = split_pairs(x_BTHN, cos_BTKP.shape, layout)
    cos, sin = cos_BTKP[..., None, :], sin_BTKP[..., None, :]
    turned = (a_BTKGP * cos - b_BTKGP * sin, a_BTKGP * sin + b_BTKGP * cos)
    turned_BTHR = _join_pairs(turned, x_BTHN.shape[:3], layout).astype(x_BTHN.dtype)
    rotary_dim = turned_BTHR.shape[-1]
    if rotary_dim == x_BTHN.shape[-1]:
        return turned_BTHR
    return jnp.concatenate([turned_BTHR, x_BTHN[..., rotary_dim:]], axis=-1)


def split_pairs(
    x_BTHN: Array, phases_shape: tuple[int, ...], layout: Layout
) -> tuple[Array, Array]:
    """The two members of each pair that phases [B, T, K, P] turn, float32 [B, T, K, G, P] each."""
    batch, time, heads, _ = x_BTHN.shape
    kv_heads, pairs = phases_shape[-2:]
    x_BTHR = x_BTHN[..., : 2 * pairs].astype(jnp.float32)
    grouped = (batch, time, kv_heads, heads // kv_heads)
    if layout == "half":
        x_BTKG2P = x_BTHR.reshape(*grouped, 2, pairs)
        return x_BTKG2P[..., 0, :], x_BTKG2P[..., 1, :]
    x_BTKGP2 = x_BTHR.reshape(*grouped, pairs, 2)
    return x_BTKGP2[..., 0], x_BTKGP2[..., 1]


def _join_pairs(members: tuple[Array, Array], leading: tuple[int, ...], layout: Layout) -> Array:
    stacked = jnp.stack(members, axis=-2 if layout == "half" else -1)
    return stacked.reshape(*leading, -1)


def check_rotary(x: Array, kv_heads: int, pairs: int, layout: str) -> None:
    """Raises a ValueError where x [B, T, H, N] can't be turned by K x P phases in this layout."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
    if x.ndim != 4:
        raise ValueError(f"queries and keys must be [B, T, H, N], got shape {x.shape}")
    if x.shape[2] % kv_heads:
        raise ValueError(f"{kv_heads} key/value heads do not divide {x.shape[2]} heads")
    if 2 * pairs > x.shape[3]:
        raise ValueError(f"{pairs} rotary pairs do not fit a head dim of {x.shape[3]}")
