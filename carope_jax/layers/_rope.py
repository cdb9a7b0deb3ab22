"""RoPE as a layer."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from carope_jax.layers._encoding import Encoding, EncodingConfig, HeadDims, Rotated, Segmentation
from carope_jax.positions import Layout, equivalent_base, linear_scaling, rope_phases, rotate

# B batch, T time, H query heads, K key/value heads, N head dim.


class Rope(Encoding):
    """Rotary position embedding (arXiv 2104.09864). Has no parameters.

    Args:
      head_dim: features of a head.
      base: of theta_i = base^(-2i/rotary_dim).
      rotary_dim: how many leading features of a head turn; None: all.
      layout: which features are a pair.
      interpolation: positions are divided by it (arXiv 2306.15595); 1: not at all.

    Raises:
      ValueError: an odd or too large rotary dim, a base not above 0, an unknown layout, an
        interpolation below 1.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        rotary_dim: int | None = None,
        layout: Layout = "half",
        interpolation: float = 1.0,
    ) -> None:
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.base, self.layout, self.interpolation = base, layout, interpolation
        check_rotary_options(head_dim, self.rotary_dim, base, layout, interpolation)

    def __call__(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        positions: Int[Array, "#B T"] | None = None,
    ) -> tuple[Float[Array, "B T H N"], Float[Array, "B T K N"]]:
        """Rotated queries and keys; positions count from 0 unless given."""
        if positions is None:
            positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        scaling = None
        if self.interpolation != 1:
            scaling = linear_scaling(self.interpolation, self.rotary_dim // 2)
        phases = rope_phases(positions, self.rotary_dim, base=self.base, scaling=scaling)
        return rotate(q, phases, self.layout), rotate(k, phases, self.layout)

    def rotate(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        *,
        hidden: Float[Array, "B T D"],
        embedding: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> Rotated:
        """The decoder's hook: positions begin again at each segment."""
        return Rotated(*self(q, k, segmentation.positions), {})


@dataclasses.dataclass(frozen=True)
class RopeConfig(EncodingConfig):
    """RoPE's options."""

    base: float | Literal["carope"] = 10_000.0
    """Base of the frequencies; `carope` is (1 + ln 2)^(head_dim/2), which CARoPE as printed has at
    W = 0 (2.08e7 at head_dim 64): the matched control for a gain that comes from the base alone."""
    rotary_dim: int | None = None
    """How many leading features of a head turn; all by default."""
    layout: Layout = "half"
    """Which features of a head are a pair: (i, i + P) or (2i, 2i + 1)."""
    interpolation: float = 1.0
    """Position interpolation: every frequency is divided by it; at least 1."""

    def in_attention(self, dims: HeadDims, rngs: nnx.Rngs) -> Rope:
        """A `Rope` of these options."""
        base = equivalent_base(dims.head_dim) if self.base == "carope" else self.base
        return Rope(
            dims.head_dim,
            base=base,
            rotary_dim=self.rotary_dim,
            layout=self.layout,
            interpolation=self.interpolation,
        )

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for options that don't fit the head dim."""
        if isinstance(self.base, str) and self.base != "carope":
            raise ValueError(f"base must be a number or 'carope', got {self.base!r}")
        check_rotary_options(
            dims.head_dim,
            dims.head_dim if self.rotary_dim is None else self.rotary_dim,
            1.0 if self.base == "carope" else self.base,
            self.layout,
            self.interpolation,
        )


def check_rotary_options(
    head_dim: int, rotary_dim: int, base: float, layout: str, interpolation: float
) -> None:
    """Raises the ValueError that names a rotary encoding's impossible option."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2 for a rotary encoding: {head_dim}")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(
            f"rotary_dim must be even and in [2, head_dim = {head_dim}], got {rotary_dim}"
        )
    if not base > 0:
        raise ValueError(f"base must be positive, got {base}")
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
    if not interpolation >= 1:
        raise ValueError(f"interpolation must be at least 1, got {interpolation}")
