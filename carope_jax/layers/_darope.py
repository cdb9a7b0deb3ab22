"""DaRoPE and HoPE as layers: RoPE on the fast bands, something bounded on the slow ones."""

import dataclasses
from typing import Any

import jax.nn
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from carope_jax.layers._encoding import (
    AttentionInput,
    HeadDims,
    Parameter,
    Rotated,
    Weights,
)
from carope_jax.layers._module import RotaryEncoding
from carope_jax.layers._rope import RotaryConfig
from carope_jax.positions import darope_coordinate, darope_phases

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


@dataclasses.dataclass(frozen=True)
class HoPeConfig(RotaryConfig):
    """HoPE (arXiv 2410.21216; as in arXiv 2609.34556, equation 2): pairs that do not complete a
    turn within the training length do not turn."""

    length: int | None = None
    """L, the training length in tokens, which parts fast bands from slow ones; the model's longest
    training window by default."""
    base: float = 10_000.0
    """Base of the frequencies."""

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for options that don't fit the sizes."""
        self.check_rotary(dims.head_dim, dims.head_dim, self.base)
        # A model's longest window is not known (0) until it is resolved beside its data.
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Fast bands turned by position; slow ones by the coordinate, if there is one."""
        length = dims.max_length if self.length is None else self.length
        scaling = self.scaled(given.q.shape[1], dims.head_dim // 2, self.base)
        phases = darope_phases(
            given.segmentation.positions,
            self._coordinate(weights, given, length),
            dims.head_dim,
            base=self.base,
            length=length,
            scaling=scaling,
        )
        return self.turned(given, phases, scaling)

    def _coordinate(
        self, weights: Weights, given: AttentionInput, length: int
    ) -> Float[Array, "B T K"] | None:
        return None


class HoPe(RotaryEncoding):
    """HoPE (arXiv 2410.21216): RoPE without its slow bands. Has no weights.

    Args:
      head_dim: features of a head.
      length: training length in tokens.
      options: the other fields of `HoPeConfig`.

    Raises:
      ValueError: an odd head_dim, a length below 1, an unknown layout.
    """

    def __init__(self, head_dim: int, *, length: int, **options: Any) -> None:
        super().__init__(HoPeConfig(length=length, **options), HeadDims(head_dim=head_dim))


@dataclasses.dataclass(frozen=True)
class DaRopeConfig(HoPeConfig):
    """DaRoPE (arXiv 2609.34556, equations 4 to 6): slow bands turn by a bounded coordinate of the
    token, L sigma(x w + alpha beta), instead of its position."""

    kernel_std: float = 0.1
    """Standard deviation of w at initialisation; with 0, and a prior of 1, DaRoPE starts as RoPE
    within the training length."""
    prior: float = 0.5
    """alpha at initialisation: how much of the position is in the coordinate."""

    def attention_parameters(self, dims: HeadDims) -> dict[str, Parameter]:
        """w [D, K] and alpha [K]."""
        normal = jax.nn.initializers.normal(self.kernel_std)
        constant = jax.nn.initializers.constant(self.prior)
        return {
            "kernel": Parameter((dims.model_dim, dims.kv_heads), normal, ("embed", "kv_heads")),
            "prior": Parameter((dims.kv_heads,), constant, ("kv_heads",)),
        }

    def _coordinate(
        self, weights: Weights, given: AttentionInput, length: int
    ) -> Float[Array, "B T K"] | None:
        hidden = given.hidden
        if hidden is None:
            raise ValueError("DaRoPE needs x, what its coordinates depend on")
        positions = jnp.broadcast_to(given.segmentation.positions, hidden.shape[:2])
        kernel, prior = weights["kernel"], weights["prior"]
        return darope_coordinate(hidden, kernel, prior, positions, length)


class DaRope(RotaryEncoding):
    """Data-aware RoPE (arXiv 2609.34556).

    Args:
      model_dim: features of x.
      kv_heads: key/value heads, which the coordinates belong to.
      head_dim: features of a head.
      length: training length in tokens.
      rngs: for the initialisation.
      options: the other fields of `DaRopeConfig`.

    Raises:
      ValueError: an odd head_dim, a length below 1, an unknown layout.
    """

    def __init__(
        self,
        model_dim: int,
        kv_heads: int,
        head_dim: int,
        *,
        length: int,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        dims = HeadDims(model_dim=model_dim, kv_heads=kv_heads, head_dim=head_dim)
        super().__init__(DaRopeConfig(length=length, **options), dims, rngs)
