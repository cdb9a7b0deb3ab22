"""One truth, in any chunks: a decoder with a cache gives the logits of the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_reference import LENGTH, TINY, VOCAB, logits, quick_jit, stirred
from flax import nnx

from carope_jax.layers import ENCODINGS, CaropeConfig, RopeConfig, SelectiveRopeConfig
from carope_jax.models import Decoder
from carope_jax.positions import ScalingConfig

rng = np.random.default_rng(0)
B = 4
TOKENS = jnp.asarray(rng.integers(0, VOCAB, (B, LENGTH)))
# Plain, packed, padded in front, and padded in the middle and at the end of a segment.
IDS = jnp.asarray(
    [[1] * 8, [1, 1, 1, 0, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1], [3, 3, 0, 3, 3, 3, 0, 0]]
)
YARN = ScalingConfig("yarn", 4.0, original_length=4)
CONFIGS = {name: dataclasses.replace(TINY, position=name) for name in ENCODINGS} | {
    "gated values": dataclasses.replace(TINY, value_gate=True),
    "carope of embeddings": dataclasses.replace(
        TINY,
        position="carope",
        carope=CaropeConfig(source="embedding", exponent="free", inclusive=False, scaling=YARN),
    ),
    "selective rope of the input": dataclasses.replace(
        TINY,
        position="selective_rope",
        selective_rope=SelectiveRopeConfig(
            source="hidden", gate="pair", bias=True, activation="silu", train_temperature=True
        ),
    ),
}


@functools.partial(quick_jit, static_argnames="last_only")
def decode(model, tokens, cache, segment_ids=None, last_only=False):
    return model.decode(tokens, cache, segment_ids, last_only=last_only)


def in_chunks(model, sizes, ids=None, slots=LENGTH):
    cache, out, at = model.empty_cache(B, slots), [], 0
    for size in sizes:
        part = slice(at, at + size)
        piece, cache = decode(model, TOKENS[:, part], cache, None if ids is None else ids[:, part])
        out.append(piece)
        at += size
    return np.concatenate(out, axis=1), cache


@pytest.mark.parametrize("name", CONFIGS)
def test_any_chunks_are_the_whole(name):
    model, seen = stirred(CONFIGS[name]), np.asarray(IDS != 0)
    whole = logits(model, TOKENS, IDS)[seen]
    prefilled, cache = in_chunks(model, [5, 1, 1, 1], IDS)
    np.testing.assert_allclose(prefilled[seen], whole, atol=3e-5)
    alone, other = in_chunks(model, [1] * 8, IDS)
    np.testing.assert_allclose(alone[seen], whole, atol=3e-5)
    assert int(cache.filled) == LENGTH
    np.testing.assert_array_equal(cache.segment_ids, IDS)
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(ours.dtype, jnp.floating):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_rows_go_on_after_padding_of_either_side():
    """A prompt padded left, right or not at all is the same prompt to what follows it."""
    model = stirred(CONFIGS["carope"])
    prompt, rest = TOKENS[:1, :4], TOKENS[:1, 4:]
    whole = logits(model, TOKENS[:1])
    filler = jnp.full((1, 3), 7)
    tokens = jnp.concatenate(
        [jnp.concatenate(row, axis=1) for row in ([filler, prompt], [prompt, filler])]
    )
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    last, cache = decode(model, tokens, model.empty_cache(2, 16), ids, last_only=True)
    assert last.shape == (2, 1, VOCAB)
    np.testing.assert_allclose(last[:, 0], np.repeat(whole[:, 3], 2, 0), atol=3e-5)
    np.testing.assert_array_equal(cache.positions, [4, 4])
    out = []
    for t in range(4):
        piece, cache = decode(model, jnp.repeat(rest[:, t : t + 1], 2, axis=0), cache)
        out.append(piece)
    after = np.concatenate(out, axis=1)
    np.testing.assert_allclose(after, np.repeat(whole[:, 4:], 2, axis=0), atol=3e-5)


def test_caropes_carry_is_the_whole_sequences_bit_for_bit():
    """Given the same log f: constant frequencies leave no matrix product to differ."""
    model = nnx.clone(stirred(CONFIGS["carope"]))
    kernel = model.blocks.attention.encoding.kernel
    kernel[...] = jnp.zeros(kernel.shape)
    carries = [in_chunks(model, sizes, IDS)[1].layers.state for sizes in ([5, 3], [1] * 8)]
    np.testing.assert_array_equal(*carries)


def test_a_cache_says_what_it_can_not_do():
    model = stirred(CONFIGS["carope"])
    cache = model.empty_cache(B, 12)
    other = stirred(CONFIGS["rope"])
    with pytest.raises(ValueError, match=r"the cache is of CaropeConfig.* encoding is RopeConfig"):
        other.decode(TOKENS, cache)
    with pytest.raises(ValueError, match="the cache has 4 rows, got 1"):
        model.decode(TOKENS[:1], cache)
    with pytest.raises(ValueError, match="13 tokens do not fit the cache: 0 of its 12 slots"):
        model.decode(jnp.zeros((B, 13), int), cache)
    _, cache = in_chunks(model, [8], slots=12)
    with pytest.raises(ValueError, match="8 tokens do not fit the cache: 8 of its 12 slots"):
        model.decode(TOKENS, cache)
    # Under jit the slots that are full are not known: the logits say it.
    assert np.isnan(decode(model, TOKENS, cache)[0]).all()
    assert np.isfinite(decode(model, TOKENS[:, :4], cache)[0]).all()


def test_a_cache_has_no_more_slots_than_there_are_positions():
    learned = stirred(CONFIGS["learned"])
    with pytest.raises(ValueError, match="a cache of 9 slots crosses the 8 positions that learned"):
        learned.empty_cache(1, 9)
    scaling = ScalingConfig("dynamic", 2.0, original_length=4, length=10)
    config = dataclasses.replace(TINY, position="rope", rope=RopeConfig(scaling=scaling))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="a cache of 11 slots crosses the 10 positions that rope"):
        model.empty_cache(1, 11)
    with pytest.raises(ValueError, match="needs rows and slots, got batch 0 and slots 4"):
        model.empty_cache(0, 4)


def test_a_dynamic_rule_has_one_set_of_frequencies_for_its_declared_length():
    scaling = ScalingConfig("dynamic", 2.0, original_length=4, length=10)
    config = dataclasses.replace(TINY, position="rope", rope=RopeConfig(scaling=scaling))
    model = stirred(config)
    whole = quick_jit(lambda model: model(TOKENS).logits)(model)
    np.testing.assert_allclose(in_chunks(model, [5, 3], slots=10)[0], whole, atol=3e-5)
    with pytest.raises(ValueError, match="11 tokens are more than the length 10"):
        model(jnp.zeros((1, 11), int))
