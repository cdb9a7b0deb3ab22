"""RoPE, and no encoding at all, as layers."""

import dataclasses
from typing import Any, Literal, get_args

from jaxtyping import Array, Float

from carope_jax.layers._encoding import (
    EncodingConfig,
    HeadDims,
    Rotated,
    Segmentation,
    Weights,
)
from carope_jax.layers._module import RotaryEncoding
from carope_jax.positions import Layout, ScalingConfig, equivalent_base, rope_phases, rotate

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


@dataclasses.dataclass(frozen=True)
class RopeConfig(EncodingConfig):
    """RoPE (arXiv 2104.09864): its options."""

    base: float | Literal["carope"] = 10_000.0
    """Base of the frequencies; `carope` is (1 + ln 2)^(head_dim/2), which CARoPE as printed has at
    W = 0 (2.08e7 at head_dim 64): the matched control for a gain that comes from the base alone."""
    rotary_dim: int | None = None
    """How many leading features of a head turn; all by default."""
    layout: Layout = "half"
    """Which features of a head are a pair: (i, i + P) or (2i, 2i + 1)."""
    scaling: ScalingConfig = ScalingConfig()
    """A rule that extends the context."""

    def turning(self, dims: HeadDims) -> int:
        """How many features of a head turn."""
        return dims.head_dim if self.rotary_dim is None else self.rotary_dim

    def base_of(self, dims: HeadDims) -> float:
        """The base as a number."""
        return equivalent_base(dims.head_dim) if self.base == "carope" else self.base

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for options that don't fit the head dim."""
        if isinstance(self.base, str) and self.base != "carope":
            raise ValueError(f"base must be a number or 'carope', got {self.base!r}")
        base = 1.0 if self.base == "carope" else self.base
        check_rotary_options(dims.head_dim, self.turning(dims), base, self.layout)

    def longest(self, dims: HeadDims) -> int | None:
        """A dynamic rule's declared length: its frequencies are for no longer a sequence."""
        return self.scaling.longest

    def rotate(
        self,
        weights: Weights,
        dims: HeadDims,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        *,
        hidden: Float[Array, "B T D"] | None,
        embedding: Float[Array, "B T D"] | None,
        segmentation: Segmentation,
        state: Any = None,
        axis_name: str | None = None,
    ) -> Rotated:
        """Turned by position, which begins again at each segment."""
        check_length(q.shape[1], self.scaling.longest)
        turning, base = self.turning(dims), self.base_of(dims)
        scaling = self.scaling.scaling(turning // 2, base)
        phases = rope_phases(segmentation.positions, turning, base=base, scaling=scaling)
        scale = 1.0 if scaling is None else scaling.attention_factor
        q, k = (rotate(x, phases, self.layout, scale) for x in (q, k))
        return Rotated(q, k)


class Rope(RotaryEncoding):
    """Rotary position embedding (arXiv 2104.09864). Has no weights.

    Args:
      head_dim: features of a head.
      options: the fields of `RopeConfig`.

    Raises:
      ValueError: an odd or too large rotary dim, a base not above 0, an unknown layout.
    """

    def __init__(self, head_dim: int, **options: Any) -> None:
        super().__init__(RopeConfig(**options), HeadDims(head_dim=head_dim))


@dataclasses.dataclass(frozen=True)
class NoPEConfig(EncodingConfig):
    """No positional encoding at all (arXiv 2305.19466): order comes from the causal mask alone."""


class NoPE(RotaryEncoding):
    """No positional encoding (arXiv 2305.19466): queries and keys as they come."""

    def __init__(self) -> None:
        super().__init__(NoPEConfig(), HeadDims())


def check_rotary_options(head_dim: int, rotary_dim: int, base: float, layout: str) -> None:
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


def check_length(length: int, longest: int | None) -> None:
    """Raises a ValueError where a dynamic rule's frequencies are for shorter sequences."""
    if longest is not None and length > longest:
        raise ValueError(
            f"{length} tokens are more than the length {longest} that the dynamic rule declares"
        )
