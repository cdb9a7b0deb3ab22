"""Encodings that are added to the token embeddings, as layers."""

import dataclasses
from typing import Any

import jax.nn
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from carope_jax.layers._encoding import (
    EncodingConfig,
    HeadDims,
    Parameter,
    Segmentation,
    Weights,
)
from carope_jax.layers._module import AdditiveEncoding
from carope_jax.positions import learned, sinusoidal

# B batch, T time, D model.


@dataclasses.dataclass(frozen=True)
class SinusoidalConfig(EncodingConfig):
    """The sinusoidal encoding (arXiv 1706.03762, section 3.5): its options."""

    base: float = 10_000.0
    """Base of the wavelengths."""
    amplitude: float = 0.02
    """What the sinusoids are multiplied by. The original adds unit sinusoids to embeddings of about
    unit size; 0.02 keeps that ratio to GPT-2's embeddings, which start at a standard deviation of
    0.02."""

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for an odd model width."""
        if dims.model_dim < 2 or dims.model_dim % 2:
            raise ValueError(f"model_dim must be even for sinusoids, got {dims.model_dim}")
        if not self.base > 0:
            raise ValueError(f"base must be positive, got {self.base}")

    def add_to_embedding(
        self,
        weights: Weights,
        dims: HeadDims,
        embedding: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> Float[Array, "B T D"]:
        """The embeddings with the sinusoids of their positions added."""
        waves = sinusoidal(segmentation.positions, dims.model_dim, self.base)
        return embedding + (self.amplitude * waves).astype(embedding.dtype)


class Sinusoidal(AdditiveEncoding):
    """Sinusoidal encoding (arXiv 1706.03762, section 3.5). Has no weights.

    Args:
      model_dim: the model's width, even.
      options: the fields of `SinusoidalConfig`.

    Raises:
      ValueError: an odd width.
    """

    def __init__(self, model_dim: int, **options: Any) -> None:
        super().__init__(SinusoidalConfig(**options), HeadDims(model_dim=model_dim))


@dataclasses.dataclass(frozen=True)
class LearnedConfig(EncodingConfig):
    """A learned table of positions (GPT-2): its options."""

    length: int | None = None
    """Rows of the table; the model's longest training window by default."""
    std: float = 0.02
    """Standard deviation of the rows at initialisation."""

    def longest(self, dims: HeadDims) -> int:
        """The rows of the table."""
        return dims.max_length if self.length is None else self.length

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for a table without rows."""
        # A model's longest window is not known (0) until it is resolved beside its data.
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")

    def embedding_parameters(self, dims: HeadDims) -> dict[str, Parameter]:
        """The table [L, D]."""
        shape, init = (self.longest(dims), dims.model_dim), jax.nn.initializers.normal(self.std)
        return {"table": Parameter(shape, init, ("length", "embed"))}

    def add_to_embedding(
        self,
        weights: Weights,
        dims: HeadDims,
        embedding: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> Float[Array, "B T D"]:
        """The embeddings with their positions' rows added.

        Raises:
          ValueError: there are more tokens than the table has rows, in one segment. (A packed
            or decoded position past it comes out as NaN: it is known at run time only.)
        """
        length, rows = embedding.shape[1], self.longest(dims)
        positions = segmentation.positions
        if segmentation.valid is not None:
            # Padding longer than the table would be NaN, which no attention mask keeps out.
            positions = jnp.where(segmentation.valid, positions, 0)
        elif segmentation.starts is None and length > rows:
            raise ValueError(f"{length} positions do not fit a learned table of {rows}")
        return embedding + learned(positions, weights["table"]).astype(embedding.dtype)


class Learned(AdditiveEncoding):
    """A learned table of positions (GPT-2).

    Args:
      length: rows of the table.
      model_dim: the model's width.
      rngs: for the initialisation.
      options: the other fields of `LearnedConfig`.

    Raises:
      ValueError: a table without rows.
    """

    def __init__(self, length: int, model_dim: int, *, rngs: nnx.Rngs, **options: Any) -> None:
        config = LearnedConfig(length=length, **options)
        super().__init__(config, HeadDims(model_dim=model_dim), rngs)
