import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_reference import (
    LENGTH,
    TINY,
    VOCAB,
    abstract,
    by_name,
    logits,
    quick_jit,
    reference_logits,
    stirred,
)
from flax import nnx

from carope_jax.layers import CaropeConfig
from carope_jax.models import Decoder, ModelConfig, count_parameters, token_nll

rng = np.random.default_rng(0)
TOKENS = jnp.asarray(rng.integers(0, VOCAB, (2, LENGTH)))
TARGETS = jnp.asarray(rng.integers(0, VOCAB, (2, LENGTH)))
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "use_bias": False, "tie_embeddings": False}


def tiny(**options):
    return dataclasses.replace(TINY, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"position": "learned", "num_kv_heads": None},  # GPT-2
        {"position": "rope"} | LLAMA,
        {"position": "carope", "head_dim": 6, "mlp_dim": 20, "tie_embeddings": False},
        {"position": "sinusoidal"},
        {"position": "nope", "activation": "swiglu"},
        {"position": "hope", "head_dim": 8},
        {"position": "darope", "head_dim": 8},
        {"position": "selective_rope"},
        {"position": "fox"},
        {"position": "alibi"},
    ],
    ids=lambda options: options["position"],
)
def test_logits_against_dense_float64(options):
    config = tiny(**options)
    model = stirred(config)
    out = logits(model, TOKENS)
    assert out.dtype == jnp.float32
    expected = reference_logits(config, by_name(model), np.asarray(TOKENS))
    assert np.std(expected) > 1
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_token_nll_against_float64():
    scores = 30 * rng.normal(size=(2, LENGTH, VOCAB))
    log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, np.asarray(TARGETS)[..., None], axis=-1)[..., 0]
    out = jax.jit(token_nll)(jnp.asarray(scores, jnp.float32), TARGETS)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    low = jax.ShapeDtypeStruct(scores.shape, jnp.bfloat16)
    assert jax.eval_shape(token_nll, low, TARGETS).dtype == jnp.float32
    assert np.isfinite(
        token_nll(jnp.full((1, 1, 3), 1e30).at[0, 0, 1].set(-1e30), TARGETS[:1, :1] % 3)
    ).all()


def number_of_parameters(config):
    return count_parameters(nnx.state(abstract(config), nnx.Param))


def gpt2_parameters(layers, width, vocab, positions):
    attention = 4 * (width * width + width)
    mlp = (width * 4 * width + 4 * width) + (4 * width * width + width)
    norms = 2 * 2 * width
    return (vocab + positions) * width + layers * (attention + mlp + norms) + 2 * width


def test_gpt2_small_has_124_million_parameters():
    small = ModelConfig(position="learned", vocab_size=50304, max_length=512)
    count = number_of_parameters(small)
    assert count == gpt2_parameters(12, 768, 50304, 512) == 124_082_688
    assert round(count / 1e6) == 124
    carope = dataclasses.replace(small, position="carope")
    assert number_of_parameters(carope) == count - 512 * 768 + 12 * (768 * 12 + 12)
    printed = dataclasses.replace(carope, carope=CaropeConfig(init="paper"))
    assert number_of_parameters(printed) == count - 512 * 768 + 12 * 768 * 12


def test_gpt2_tiny_has_44_million_parameters():
    config = ModelConfig(
        position="learned",
        num_layers=6,
        model_dim=512,
        num_heads=8,
        vocab_size=50304,
        max_length=512,
    )
    count = number_of_parameters(config)
    assert count == gpt2_parameters(6, 512, 50304, 512)
    assert count // 10**6 == 44


def test_weights_start_as_gpt2s():
    config = tiny(num_layers=8, model_dim=64, init_std=0.02)
    rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))  # the quickest to compile
    weights = by_name(nnx.jit(lambda rngs: Decoder(config, rngs=rngs))(rngs))
    for name, value in weights.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            residual = "attention/out" in name or "mlp/down" in name
            expected = 0.02 / 4 if residual else 0.02
            assert np.std(value) == pytest.approx(expected, rel=0.1), name
    layers = weights["blocks/mlp/up/linear/kernel"]
    assert np.abs(layers[0] - layers[1]).max() > 0.01


def test_bfloat16_compute_keeps_float32_where_it_matters():
    high, low = tiny(position="carope"), tiny(position="carope", dtype="bfloat16")
    model = stirred(low)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    out, exact = logits(model, TOKENS), logits(stirred(high), TOKENS)
    assert out.dtype == jnp.float32
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.03


@quick_jit
def loss_and_gradients(model):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        out = nnx.merge(graph, params, rest)(TOKENS)
        return token_nll(out.logits, TARGETS).mean()

    return jax.value_and_grad(loss)(params)


def test_remat_and_unrolling_change_nothing():
    config = tiny(position="carope", num_layers=2)
    loss, gradients = loss_and_gradients(stirred(config))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    for options in ({"remat": "dots"}, {"remat": "full", "scan_unroll": 2}):
        model = stirred(dataclasses.replace(config, **options))
        their_loss, theirs = loss_and_gradients(model)
        assert their_loss == pytest.approx(float(loss), rel=1e-6)
        for ours, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(other, ours, rtol=1e-4, atol=1e-6, err_msg=str(options))
