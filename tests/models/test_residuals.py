"""What a training step keeps for its backward pass, without compiling or computing anything."""

import jax
import jax.numpy as jnp
import pytest
from decoder_reference import abstract
from flax import nnx

from carope_jax.models import ModelConfig, token_nll


def bytes_kept(position, dtype):
    """Of all arrays that the gradient of the loss keeps, GPT-2 small's blocks at length 512."""
    graph, *states = nnx.split(
        abstract(ModelConfig(position=position, dtype=dtype, vocab_size=128, max_length=512)),
        nnx.Param,
        ...,
    )
    tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)

    def pull_back(params, constants, tokens):
        def loss(params):
            return token_nll(nnx.merge(graph, params, constants)(tokens).logits, tokens).mean()

        return jax.vjp(loss, params)[1]

    kept = jax.eval_shape(pull_back, *states, tokens)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_carope_keeps_hardly_more_than_rope(dtype):
    assert bytes_kept("carope", dtype) < 1.005 * bytes_kept("rope", dtype)
