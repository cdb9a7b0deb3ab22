"""The language model's loss, token by token, in nats."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

# B batch, T time, V vocabulary.


def token_nll(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target, in float32 nats."""
    logits = logits.astype(jnp.float32)
    picked_BT1 = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked_BT1[..., 0]


def count_parameters(variables: nnx.State) -> int:
    """How many numbers there are."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables))
