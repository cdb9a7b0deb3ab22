import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_reference import LENGTH, TINY, VOCAB, logits, quick_jit, stirred
from flax import nnx

from carope_jax.layers import ENCODINGS, AttentionEncoding, CaropeConfig
from carope_jax.models import Decoder, ModelConfig, token_nll

rng = np.random.default_rng(0)
B = 2
TOKENS = rng.integers(0, VOCAB, (B, LENGTH))


def carope(**options):
    return dataclasses.replace(TINY, position="carope", carope=CaropeConfig(**options))


PLAIN = {name: dataclasses.replace(TINY, position=name) for name in ENCODINGS}
VARIANTS = {
    "gated values": dataclasses.replace(TINY, value_gate=True),
    "carope of embeddings": carope(source="embedding", init="paper"),
    "carope exclusive": carope(inclusive=False, exponent="free"),
    "carope shuffled": carope(control="shuffled"),
}


@quick_jit
def felt(model):
    """[B, T, B, T]: the largest derivative of a token's logits by each embedding's features."""
    directions_V = jnp.asarray(np.random.default_rng(1).normal(size=VOCAB), jnp.float32)

    def one_number_a_token(embedding):
        return model.from_embedding(embedding).logits @ directions_V

    embedding = model.token_embedding(TOKENS).astype(jnp.float32)
    return jnp.abs(jax.jacrev(one_number_a_token)(embedding)).max(-1)


@pytest.mark.parametrize("name", [*PLAIN, *VARIANTS])
def test_no_logit_depends_on_a_later_token(name):
    felt_BTBT = np.asarray(felt(stirred((PLAIN | VARIANTS)[name])))
    past = np.tril(np.ones((LENGTH, LENGTH), bool))
    for row in range(B):
        for other in range(B):
            depends = felt_BTBT[row, :, other] != 0
            if row == other:
                np.testing.assert_array_equal(depends, past)
            elif name == "carope shuffled":
                assert not depends[~past].any()
                assert depends[past].any()
            else:
                assert not depends.any()


def test_gated_values_start_as_plain_ones():
    plain, gated = (Decoder(c, rngs=nnx.Rngs(0)) for c in (TINY, VARIANTS["gated values"]))
    np.testing.assert_array_equal(logits(gated, TOKENS), logits(plain, TOKENS))
    kernel = gated.blocks.attention.value_gate_kernel
    assert kernel.shape == (TINY.num_layers, TINY.model_dim, TINY.kv_heads)
    kernel[...] = jnp.asarray(rng.normal(size=kernel.shape), jnp.float32)
    assert np.abs(logits(gated, TOKENS) - logits(plain, TOKENS)).max() > 1e-4


def test_carope_at_its_start_is_rope():
    length, vocab = 1024, 32
    config = ModelConfig(
        num_layers=2,
        model_dim=32,
        num_heads=2,
        vocab_size=vocab,
        max_length=length,
        position="carope",
    )
    ours, theirs = stirred(config), stirred(dataclasses.replace(config, position="rope"))
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    start = AttentionEncoding(config.encoding, config.dims, rngs=nnx.Rngs(0))
    encoding = ours.blocks.attention.encoding
    for name in ("kernel", "bias"):
        variable = getattr(encoding, name)
        variable[...] = jnp.broadcast_to(getattr(start, name)[...], variable.shape)
    tokens = jnp.asarray(rng.integers(0, vocab, (1, length + 1)))

    @quick_jit
    def loss_and_gradients(model):
        graph, params = nnx.split(model)

        def loss(params):
            out = nnx.merge(graph, params)(tokens[:, :-1]).logits
            return token_nll(out, tokens[:, 1:]).mean(), out

        (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return value, out, gradients

    loss, out, gradients = loss_and_gradients(ours)
    rope_loss, rope_out, rope_gradients = loss_and_gradients(theirs)
    assert loss == pytest.approx(float(rope_loss), rel=1e-5)
    np.testing.assert_allclose(out, rope_out, atol=1e-4)
    shared = dict(nnx.to_flat_state(rope_gradients))
    assert len(shared) == len(dict(nnx.to_flat_state(gradients))) - 2
    for path, gradient in nnx.to_flat_state(gradients):
        if path in shared:
            rope_gradient = shared[path][...]
            error = np.linalg.norm(gradient[...] - rope_gradient)
            assert error <= 1e-4 * np.linalg.norm(rope_gradient), path
        else:
            assert np.any(gradient[...]), path


FIRST, SECOND = TOKENS[0, :5], TOKENS[1, :3]


def rows(*parts):
    """A row of tokens and its segment ids, of (tokens, id); padding is (how many, 0)."""
    tokens = [np.full(p, 7) if i == 0 else p for p, i in parts]
    ids = [np.full(p, 0) if i == 0 else np.full(len(p), i) for p, i in parts]
    return np.concatenate(tokens), np.concatenate(ids)


LAYOUTS = {
    "packed": rows((FIRST, 1), (SECOND, 2)),
    "packed the other way": rows((SECOND, 4), (FIRST, 3)),
    "first left-padded": rows((3, 0), (FIRST, 1)),
    "first right-padded": rows((FIRST, 1), (3, 0)),
    "second left-padded": rows((5, 0), (SECOND, 1)),
    "second between padding": rows((2, 0), (SECOND, 1), (3, 0)),
}


@pytest.mark.parametrize(
    "config",
    [*PLAIN.values(), VARIANTS["carope of embeddings"], VARIANTS["carope exclusive"]],
    ids=[*PLAIN, "carope of embeddings", "carope exclusive"],
)
def test_packed_and_padded_rows_equal_plain_ones(config):
    model = stirred(config)
    tokens, ids = (np.stack(x) for x in zip(*LAYOUTS.values(), strict=True))
    together = np.asarray(logits(model, tokens, ids))
    assert np.isfinite(together).all()
    seen = 0
    for document in (FIRST, SECOND):
        # The document's own tokens come first, so what follows can't matter: one length for both.
        alone = logits(model, np.resize(document, (1, LENGTH)))[0, : len(document)]
        for name, row, row_ids, out in zip(LAYOUTS, tokens, ids, together, strict=True):
            for segment in set(row_ids) - {0}:
                where = row_ids == segment
                if np.array_equal(row[where], document):
                    np.testing.assert_allclose(out[where], alone, atol=2e-5, err_msg=name)
                    seen += 1
    assert seen == 8


def test_padding_and_other_documents_have_no_gradient():
    model = stirred(PLAIN["carope"])
    _, ids = rows((2, 0), (SECOND, 1), (TOKENS[1, :3], 2))

    @quick_jit
    def gradient(embedding):
        return jax.grad(lambda e: (model.from_embedding(e, ids[None]).logits[0, 4] ** 2).sum())(
            embedding
        )

    moved = np.any(gradient(model.token_embedding(TOKENS[:1])), axis=-1)
    np.testing.assert_array_equal(moved, [[0, 0, 1, 1, 1, 0, 0, 0]])


def test_carope_reports_its_frequencies_a_layer():
    out = quick_jit(lambda model: model(TOKENS))(stirred(PLAIN["carope"]))
    assert out.measurements.keys() == {"f_mean", "f_std"}
    assert all(m.shape == (TINY.num_layers,) for m in out.measurements.values())
    assert (out.measurements["f_std"] > 1e-3).all()
