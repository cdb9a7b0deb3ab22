"""The loss with a few logits at a time against the one with all of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_reference import stirred
from flax import nnx

from carope_jax.models import ModelConfig, token_nll

B, T, V, D = 4, 24, 160, 32
CONFIG = {"model_dim": D, "num_layers": 1, "num_heads": 2, "vocab_size": V, "max_length": T}


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T + 1)).astype(np.int32)
    counted = rng.random((B, T)) < 0.7
    return tokens[:, :-1], tokens[:, 1:], counted


def losses(config):
    """The loss's function of the parameters, chunked and whole, and the parameters."""
    tokens, targets, counted = batch()
    graph, params, rest = nnx.split(stirred(config), nnx.Param, ...)

    def chunked(params):
        return nnx.merge(graph, params, rest).summed_nll(tokens, targets, counted)[0] / 7

    def whole(params):
        nll = token_nll(nnx.merge(graph, params, rest)(tokens).logits, targets)
        return jnp.where(counted, nll, 0).sum() / 7

    return chunked, whole, params


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [None, 7, 32])
def test_loss_and_gradients_are_those_of_all_logits(tied, chunk):
    chunked, whole, params = losses(
        ModelConfig(**CONFIG, tie_embeddings=tied, loss_chunk=chunk, position="nope")
    )
    found, wanted = (jax.jit(jax.value_and_grad(f))(params) for f in (chunked, whole))
    assert found[0] == pytest.approx(float(wanted[0]), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * (1 + np.abs(b).max())),
        found[1],
        wanted[1],
    )


def test_each_targets_loss():
    model = stirred(ModelConfig(**CONFIG, loss_chunk=7, position="nope"))
    tokens, targets, _ = batch()
    np.testing.assert_allclose(
        model.nll(tokens, targets), token_nll(model(tokens).logits, targets), rtol=2e-5
    )


def test_bfloat16_is_as_near_to_float32_as_with_all_logits():
    exact = jax.grad(losses(ModelConfig(**CONFIG, position="nope"))[1])
    chunked, whole, params = losses(
        ModelConfig(**CONFIG, position="nope", dtype="bfloat16", loss_chunk=32)
    )
    wanted = exact(params)["token_embedding"]["embedding"][...]

    def error(function):
        found = jax.grad(function)(params)["token_embedding"]["embedding"][...]
        assert found.dtype == jnp.float32
        return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)

    assert error(chunked) < 1.1 * error(whole) + 1e-4


def largest_array(function, params):
    """Elements of the largest array in the compiled program."""
    text = jax.jit(jax.grad(function)).lower(params).compile().as_text()
    shapes = re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)
    return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)


def test_no_array_has_all_logits():
    chunked, whole, params = losses(ModelConfig(**CONFIG, loss_chunk=8, position="nope"))
    assert largest_array(chunked, params) < B * T * V <= largest_array(whole, params)
