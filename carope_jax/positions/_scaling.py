"""Rules that extend a rotary encoding past its training length, as factors a pair."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Scaling(NamedTuple):
    """What a scaling rule does to a rotary encoding.

    Attributes:
      factor: theta'_i / theta_i of each rotary pair, shape [P], positive and without unit. It
        multiplies RoPE's frequencies and CARoPE's increments alike.
      attention_factor: q and k are both multiplied by it (YaRN's temperature; 1 for the others).
    """

    factor: Float[Array, " P"]
    attention_factor: float = 1.0


def linear_scaling(alpha: float, pairs: int) -> Scaling:
    """Position interpolation (arXiv 2306.15595): every frequency divided by `alpha`.

    Args:
      alpha: how many times the training length is to be reached, at least 1.
      pairs: how many rotary pairs there are (P).

    Raises:
      ValueError: `alpha` is below 1.
    """
    if not alpha >= 1:
        raise ValueError(f"a scaling factor must be at least 1, got {alpha}")
    return Scaling(jnp.full(pairs, 1 / alpha, jnp.float32))
