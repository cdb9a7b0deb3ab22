"""RoPE, and no encoding at all, as layers."""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from carope_jax.layers._encoding import (
    AttentionInput,
    EncodingConfig,
    HeadDims,
    Rotated,
    Weights,
)
from carope_jax.layers._module import RotaryEncoding
from carope_jax.positions import (
    Layout,
    Scaling,
    ScalingConfig,
    equivalent_base,
    rope_phases,
    rotate,
)

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


@dataclasses.dataclass(frozen=True)
class RotaryConfig(EncodingConfig):
    """What every encoding that turns pairs of features has."""

    layout: Layout = "half"
    """Which features of a head are a pair: (i, i + P) or (2i, 2i + 1)."""
    scaling: ScalingConfig = ScalingConfig()
    """A rule that extends the context: its factors multiply the frequencies or increments."""

    def longest(self, dims: HeadDims) -> int | None:
        """A dynamic rule's declared length: its factors are for no longer a sequence."""
        return self.scaling.longest

    def scaled(self, length: int, pairs: int, base: float) -> Scaling | None:
        """The rule's factors for a sequence of this length; None: there is no rule.

        Raises:
          ValueError: a dynamic rule's factors are for shorter sequences.
        """
        longest = self.scaling.longest
        if longest is not None and length > longest:
            raise ValueError(
                f"{length} tokens are more than the length {longest} that the dynamic rule declares"
            )
        return self.scaling.scaling(pairs, base)

    def turned(
        self,
        given: AttentionInput,
        phases: Float[Array, "#B T K P"],
        scaling: Scaling | None,
        state: Any = (),
    ) -> Rotated:
        """Queries and keys turned by their phases, the rule's attention factor applied."""
        scale = 1.0 if scaling is None else scaling.attention_factor
        q, k = (rotate(x, phases, self.layout, scale) for x in (given.q, given.k))
        return Rotated(q, k, state=state)

    def check_rotary(self, head_dim: int, rotary_dim: int, base: float) -> None:
        """Raises the ValueError that names a rotary encoding's impossible option."""
        if head_dim < 2 or head_dim % 2:
            raise ValueError(
                f"head_dim must be even and at least 2 for a rotary encoding: {head_dim}"
            )
        if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim must be even and in [2, head_dim = {head_dim}], got {rotary_dim}"
            )
        if not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout must be one of {get_args(Layout)}, got {self.layout!r}")


@dataclasses.dataclass(frozen=True)
class RopeConfig(RotaryConfig):
    """RoPE (arXiv 2104.09864): its options."""

    base: float | Literal["carope"] = 10_000.0
    """Base of the frequencies; `carope` is (1 + ln 2)^(head_dim/2), which CARoPE as printed has at
    W = 0 (2.08e7 at head_dim 64): the matched control for a gain that comes from the base alone."""
    rotary_dim: int | None = None
    """How many leading features of a head turn; all by default."""
    head_bases: tuple[float, ...] = ()
    """In place of `base`: one a key/value head, whose query group shares it."""

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
        self.check_rotary(dims.head_dim, self.turning(dims), base)
        if not self.head_bases:
            return
        if dims.kv_heads and len(self.head_bases) != dims.kv_heads:
            raise ValueError(
                f"head_bases must be one for each of {dims.kv_heads} key/value heads, "
                f"got {len(self.head_bases)}"
            )
        if not all(base > 0 for base in self.head_bases):
            raise ValueError(f"head_bases must be positive, got {self.head_bases}")
        if self.base != RopeConfig.base:
            raise ValueError(f"base {self.base} and head_bases both say it: give one")
        if self.scaling.rule in ("yarn", "llama3"):
            raise ValueError(f"the rule {self.scaling.rule!r} is for one base, not head_bases")

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Turned by position, which begins again at each segment."""
        turning, base = self.turning(dims), self.base_of(dims)
        scaling = self.scaled(given.q.shape[1], turning // 2, base)
        positions = given.segmentation.positions
        bases = jnp.asarray(self.head_bases, jnp.float32) if self.head_bases else base
        phases = rope_phases(positions, turning, base=bases, scaling=scaling)
        return self.turned(given, phases, scaling)


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
