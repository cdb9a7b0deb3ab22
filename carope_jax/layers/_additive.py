"""Encodings that are added to the token embeddings, as layers."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from carope_jax.layers._encoding import Encoding, EncodingConfig, HeadDims, Segmentation
from carope_jax.positions import learned, sinusoidal

# B batch, T time, D model.


class Sinusoidal(Encoding):
    """Sinusoidal encoding (arXiv 1706.03762, section 3.5), added to the embeddings.

    Args:
      model_dim: the model's width, even.
      base: of the wavelengths.
      amplitude: what the sinusoids are multiplied by.
    """

    def __init__(self, model_dim: int, *, base: float = 10_000.0, amplitude: float = 1.0) -> None:
        self.model_dim, self.base, self.amplitude = model_dim, base, amplitude

    def add_to_embedding(
        self, embedding: Float[Array, "B T D"], segmentation: Segmentation
    ) -> Float[Array, "B T D"]:
        """The embeddings with the sinusoids of their positions added."""
        waves = sinusoidal(segmentation.positions, self.model_dim, self.base)
        return embedding + (self.amplitude * waves).astype(embedding.dtype)


class Learned(Encoding):
    """A learned table of positions (GPT-2), added to the embeddings.

    Args:
      max_length: rows of the table.
      model_dim: the model's width.
      std: of the rows at initialisation.
      rngs: for the initialisation.
    """

    def __init__(
        self, max_length: int, model_dim: int, *, std: float = 0.02, rngs: nnx.Rngs
    ) -> None:
        table = std * jax.random.normal(rngs.params(), (max_length, model_dim))
        self.table = nnx.Param(table, axes=("length", "embed"))

    def add_to_embedding(
        self, embedding: Float[Array, "B T D"], segmentation: Segmentation
    ) -> Float[Array, "B T D"]:
        """The embeddings with their positions' rows added.

        Raises:
          ValueError: a row of one segment is longer than the table. (A packed segment that is
            comes out as NaN: its length is known at run time only.)
        """
        length, rows = embedding.shape[1], self.table.shape[0]
        positions = segmentation.positions
        if segmentation.valid is not None:
            # Padding longer than the table would be NaN, which no attention mask keeps out.
            positions = jnp.where(segmentation.valid, positions, 0)
        elif length > rows:
            raise ValueError(f"{length} positions do not fit a learned table of {rows}")
        return embedding + learned(positions, self.table[...]).astype(embedding.dtype)


@dataclasses.dataclass(frozen=True)
class SinusoidalConfig(EncodingConfig):
    """The sinusoidal encoding's options."""

    base: float = 10_000.0
    """Base of the wavelengths."""
    amplitude: float = 0.02
    """What the sinusoids are multiplied by. The original adds unit sinusoids to embeddings of about
    unit size; 0.02 keeps that ratio to GPT-2's embeddings, which start at a standard deviation of
    0.02."""

    def in_embedding(self, dims: HeadDims, rngs: nnx.Rngs) -> Sinusoidal:
        """A `Sinusoidal` of these options."""
        return Sinusoidal(dims.model_dim, base=self.base, amplitude=self.amplitude)

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for an odd model width."""
        if dims.model_dim % 2:
            raise ValueError(f"model_dim must be even for sinusoids, got {dims.model_dim}")


@dataclasses.dataclass(frozen=True)
class LearnedConfig(EncodingConfig):
    """The learned table's options."""

    std: float = 0.02
    """Standard deviation of the rows at initialisation."""

    def in_embedding(self, dims: HeadDims, rngs: nnx.Rngs) -> Learned:
        """A `Learned` table with one row a position of the longest training window."""
        return Learned(dims.max_length, dims.model_dim, std=self.std, rngs=rngs)

    def longest(self, dims: HeadDims) -> int:
        """The rows of the table."""
        return dims.max_length


@dataclasses.dataclass(frozen=True)
class NopeConfig(EncodingConfig):
    """No positional encoding at all (arXiv 2305.19466): order comes from the causal mask alone."""
