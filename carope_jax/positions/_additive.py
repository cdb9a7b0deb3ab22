"""Encodings that are added to the token embeddings."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from carope_jax.positions._rope import powers

# B batch, T time, L table length, D model.


def sinusoidal(
    positions: Int[Array, "B T"], dim: int, base: float = 10_000.0
) -> Float[Array, "B T D"]:
    """Sinusoidal encoding (arXiv 1706.03762, section 3.5), of any position.

    Args:
      positions: integers from 0; exact in float32 below 2^24.
      dim: the model's width, even.
      base: of the wavelengths, which run from 2 pi to base * 2 pi tokens.

    Returns:
      float32 in [-1, 1]: feature 2i is sin(m base^(-2i/dim)), feature 2i + 1 its cosine.

    Raises:
      ValueError: an odd or non-positive `dim`.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be even and at least 2, got {dim}")
    frequencies_P = jnp.asarray(powers(dim, base), jnp.float32)
    angles_BTP = positions.astype(jnp.float32)[..., None] * frequencies_P
    pairs_BTP2 = jnp.stack([jnp.sin(angles_BTP), jnp.cos(angles_BTP)], axis=-1)
    return pairs_BTP2.reshape(*positions.shape, dim)


def learned(positions: Int[Array, "B T"], table: Float[Array, "L D"]) -> Float[Array, "B T D"]:
    """Rows of a learned table (arXiv 1706.03762, section 3.5; GPT-2).

    Args:
      positions: integers in [0, L).
      table: one row a position.

    Returns:
      The rows, of the table's dtype. A position outside the table has a row of NaN: a clamped
      gather would be a silent wrong number.
    """
    return table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
