"""How the next token is chosen from its logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

# B batch, V vocabulary.


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn: nucleus sampling
    (arXiv 1904.09751)."""
    max_tokens: int = 200
    """New tokens, at most; a text that ends by itself is shorter."""
    seed: int = 0
    """Of the draws. A prompt's text depends on it and on the prompt's place in the file."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or above, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or above, got {self.seed}")


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], temperature: float, top_p: float
) -> Int[Array, " B"]:
    """One token a row.

    Args:
      logits: float32; -inf is never drawn.
      keys: a key a row, so that a row's draw does not depend on the others.
      temperature: 0: the likeliest token.
      top_p: nucleus sampling (arXiv 1904.09751): the smallest set of likeliest tokens whose
        probability is at least this; the likeliest token is always in it.

    Returns:
      int32 token ids.
    """
    if temperature == 0:
        return logits.argmax(axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1:
        order_BV = jnp.argsort(logits, axis=-1, descending=True)
        likely_BV = jax.nn.softmax(jnp.take_along_axis(logits, order_BV, axis=-1))
        before_BV = jnp.cumsum(likely_BV, axis=-1) - likely_BV
        rank_BV = jnp.argsort(order_BV, axis=-1)
        outside_BV = jnp.take_along_axis(before_BV >= top_p, rank_BV, axis=-1)
        logits = jnp.where(outside_BV & (rank_BV > 0), -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
