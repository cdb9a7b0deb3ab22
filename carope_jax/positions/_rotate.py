"""The rotation itself: pairs of a head's features turned by a phase."""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# B batch, T time, H query heads, K key/value heads, G = H/K, N head dim, P rotary pairs.

Layout = Literal["half", "interleaved"]
"""Which features are a pair: "half" is (i, i + P) (GPT-NeoX, Llama), "interleaved" (2i, 2i + 1)."""


def rotate(
    x: Float[Array, "B T H N"],
    phases: Float[Array, "#B T K P"],
    layout: Layout = "half",
    scale: float = 1.0,
) -> Float[Array, "B T H N"]:
    """Turns each pair of features by its phase (arXiv 2104.09864, equation 34).

    (a, b) becomes (a cos phi - b sin phi, a sin phi + b cos phi), in float32, and is cast back.

    Args:
      x: queries or keys, any float dtype.
      phases: float32 radians. K must divide H; a query group of H/K heads shares its phase. One
        row of phases serves every row of x. Where 2P < N only the first 2P features of a head turn
        (partial rotary).
      layout: which features are a pair.
      scale: what the turned features are multiplied by (a scaling's attention factor).

    Returns:
      The rotated x, of its shape and dtype.

    Raises:
      ValueError: `phases` is not float32, K does not divide H, 2P exceeds N, or the layout is
        unknown.
    """
    check_rotary(x, phases.shape[-2], phases.shape[-1], layout)
    if phases.dtype != jnp.float32:
        raise ValueError(f"phases must be float32, got {phases.dtype}")
    cos_BTKP, sin_BTKP = scale * jnp.cos(phases), scale * jnp.sin(phases)
    return turn_pairs(x, cos_BTKP, sin_BTKP, layout)


def layout_permutation(
    head_dim: int, source: Layout, target: Layout, rotary_dim: int | None = None
) -> np.ndarray:
    """Which feature of a head in one layout is each feature in the other.

    `x[..., layout_permutation(n, "half", "interleaved")]` brings queries and keys, or the output
    features of their projections, from the half-split layout to the interleaved one: scores do not
    change if both are brought, and the encoding's layout with them.

    Args:
      head_dim: features of a head.
      source: the layout that x has.
      target: the layout wanted.
      rotary_dim: how many leading features turn; None: all. The others stay where they are.

    Returns:
      int64 indices [head_dim].

    Raises:
      ValueError: an odd or too large rotary dim, or an unknown layout.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    check_rotary_dim(rotary_dim)
    if rotary_dim > head_dim:
        raise ValueError(f"rotary_dim {rotary_dim} exceeds head_dim {head_dim}")
    for layout in (source, target):
        _check_layout(layout)
    places = np.arange(head_dim)
    if source != target:
        halves = np.arange(rotary_dim).reshape(2, -1)
        places[:rotary_dim] = (halves.T if source == "half" else halves.reshape(-1, 2).T).ravel()
    return places


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
    _check_layout(layout)
    if x.ndim != 4:
        raise ValueError(f"queries and keys must be [B, T, H, N], got shape {x.shape}")
    if x.shape[2] % kv_heads:
        raise ValueError(f"{kv_heads} key/value heads do not divide {x.shape[2]} heads")
    if 2 * pairs > x.shape[3]:
        raise ValueError(f"{pairs} rotary pairs do not fit a head dim of {x.shape[3]}")


def check_rotary_dim(dim: int) -> None:
    """Raises a ValueError unless `dim` features make whole pairs."""
    if dim < 2 or dim % 2:
        raise ValueError(f"a rotary dim must be even and at least 2, got {dim}")


def _check_layout(layout: str) -> None:
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
