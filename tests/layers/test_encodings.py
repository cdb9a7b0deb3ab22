import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from carope_jax.layers import (
    ENCODINGS,
    Carope,
    CaropeConfig,
    EmbeddingCarope,
    EncodingChoice,
    HeadDims,
    Learned,
    LearnedConfig,
    NopeConfig,
    Rope,
    RopeConfig,
    Segmentation,
    Sinusoidal,
    SinusoidalConfig,
)
from carope_jax.positions import learned, rope_phases, rotate, sinusoidal

B, T, D, H, K, N = 2, 6, 16, 4, 2, 8
DIMS = HeadDims(model_dim=D, heads=H, kv_heads=K, head_dim=N, max_length=7)
rng = np.random.default_rng(0)
Q = jnp.asarray(rng.normal(size=(B, T, H, N)), jnp.float32)
KEYS = jnp.asarray(rng.normal(size=(B, T, K, N)), jnp.float32)
EMBEDDING = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
HIDDEN = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
IDS = jnp.asarray([[1, 1, 1, 2, 2, 0], [0, 0, 3, 3, 3, 3]])
PACKED = Segmentation.of(T, IDS)
WHOLE = Segmentation.of(T, None)


def test_segmentation_of_packed_rows():
    np.testing.assert_array_equal(PACKED.positions, [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    np.testing.assert_array_equal(PACKED.starts, [[1, 0, 0, 1, 0, 1], [1, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(PACKED.valid, IDS != 0)
    assert WHOLE.starts is WHOLE.valid is WHOLE.segment_ids is None
    np.testing.assert_array_equal(WHOLE.positions, [range(T)])


def test_every_encoding_has_a_field_of_its_name():
    assert ENCODINGS == ("rope", "carope", "learned", "sinusoidal", "nope")
    for name in ENCODINGS:
        choice = EncodingChoice(position=name)
        assert choice.encoding is getattr(choice, name)


@pytest.mark.parametrize(
    ("name", "nearest"), [("carop", "carope"), ("Rope", "rope"), ("sinusoid", "sinusoidal")]
)
def test_an_unknown_encoding_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"got '{name}'; did you mean '{nearest}'"):
        _ = EncodingChoice(position=name).encoding
    with pytest.raises(ValueError, match=r"position must be one of .*, got 'zzz'$"):
        _ = EncodingChoice(position="zzz").encoding


@pytest.mark.parametrize(
    ("config", "embedding_type", "attention_type"),
    [
        (RopeConfig(), None, Rope),
        (CaropeConfig(), None, Carope),
        (CaropeConfig(source="embedding"), None, EmbeddingCarope),
        (LearnedConfig(), Learned, None),
        (SinusoidalConfig(), Sinusoidal, None),
        (NopeConfig(), None, None),
    ],
    ids=lambda x: type(x).__name__ if dataclasses.is_dataclass(x) else "",
)
def test_an_encoding_does_only_its_own_part(config, embedding_type, attention_type):
    config.validate(DIMS)
    beside = config.in_embedding(DIMS, nnx.Rngs(0))
    inside = config.in_attention(DIMS, nnx.Rngs(0))
    added = beside.add_to_embedding(EMBEDDING, WHOLE)
    turned = jax.jit(inside.rotate)(Q, KEYS, hidden=HIDDEN, embedding=EMBEDDING, segmentation=WHOLE)
    if embedding_type is None:
        assert added is EMBEDDING
    else:
        assert type(beside) is embedding_type
        assert np.abs(added - EMBEDDING).max() > 1e-3
    if attention_type is None:
        np.testing.assert_array_equal(turned.q, Q)
        np.testing.assert_array_equal(turned.k, KEYS)
    else:
        assert type(inside) is attention_type
        assert np.abs(turned.q - Q).max() > 0.1
    assert inside.score_bias(WHOLE) is None


def test_rope_turns_by_position():
    rope = Rope(N, base=500.0, rotary_dim=4, layout="interleaved", interpolation=2.0)

    @jax.jit
    def both(positions):
        phases = rope_phases(positions // 2, 4, base=500.0)
        expected = rotate(Q, phases, "interleaved"), rotate(KEYS, phases, "interleaved")
        return rope(Q, KEYS, positions), expected

    for turned, expected in zip(*both(2 * jnp.arange(T)[None]), strict=True):
        np.testing.assert_allclose(turned, expected, atol=2e-6)


def test_ropes_positions_count_from_0_in_each_segment():
    @jax.jit
    def rotated_queries(positions):
        hook = Rope(N).rotate(Q, KEYS, hidden=HIDDEN, embedding=EMBEDDING, segmentation=PACKED)
        expected = [rotate(Q, rope_phases(p, N)) for p in (positions, PACKED.positions)]
        return (Rope(N)(Q, KEYS)[0], hook.q), expected

    for turned, expected in zip(*rotated_queries(jnp.arange(T)[None]), strict=True):
        np.testing.assert_allclose(turned, expected, atol=2e-6)


def test_rope_at_caropes_own_base():
    assert RopeConfig(base="carope").in_attention(DIMS, nnx.Rngs(0)).base == pytest.approx(
        (1 + np.log(2)) ** (N / 2)
    )


def test_the_source_of_caropes_frequencies():
    for source, felt in (("hidden", 0), ("embedding", 1)):
        layer = CaropeConfig(source=source, init="paper", kernel_std=1.0).in_attention(
            DIMS, nnx.Rngs(0)
        )

        def total(hidden, embedding, layer=layer):
            out = layer.rotate(Q, KEYS, hidden=hidden, embedding=embedding, segmentation=PACKED)
            return (out.q * Q[..., ::-1]).sum()

        gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(HIDDEN, EMBEDDING)
        assert [bool(np.any(g)) for g in gradients] == [felt == 0, felt == 1]
        # A padded token moves nothing.
        np.testing.assert_array_equal(np.any(gradients[felt], axis=-1) & (IDS == 0), False)


def test_carope_measures_its_frequencies_over_the_tokens_that_count():
    layer = CaropeConfig(init="paper", kernel_std=1.0).in_attention(DIMS, nnx.Rngs(0))
    out = jax.jit(layer.rotate)(Q, KEYS, hidden=HIDDEN, embedding=EMBEDDING, segmentation=PACKED)
    f = np.exp(np.asarray(layer.log_frequency(HIDDEN), np.float64))[np.asarray(PACKED.valid)]
    assert out.measurements["f_mean"] == pytest.approx(f.mean(), rel=1e-5)
    assert out.measurements["f_std"] == pytest.approx(f.std(axis=0).mean(), rel=1e-5)


def test_sinusoids_are_added_in_the_embeddings_dtype():
    layer = Sinusoidal(D, base=100.0, amplitude=0.5)
    out = layer.add_to_embedding(EMBEDDING, PACKED)
    waves = sinusoidal(PACKED.positions, D, 100.0)
    np.testing.assert_allclose(out, EMBEDDING + 0.5 * waves, atol=1e-6)
    assert layer.add_to_embedding(EMBEDDING.astype(jnp.bfloat16), WHOLE).dtype == jnp.bfloat16


def test_learned_rows_are_added():
    layer = LearnedConfig(std=0.5).in_embedding(DIMS, nnx.Rngs(0))
    assert layer.table.shape == (7, D)
    assert np.std(layer.table[...]) == pytest.approx(0.5, rel=0.3)
    out = layer.add_to_embedding(EMBEDDING, WHOLE)
    np.testing.assert_array_equal(out, EMBEDDING + layer.table[...][:T])
    packed = layer.add_to_embedding(EMBEDDING, PACKED)
    rows = learned(jnp.asarray([[0, 1, 2, 0, 1]]), layer.table[...])
    np.testing.assert_array_equal(packed[:1, :5], EMBEDDING[:1, :5] + rows)


def test_what_is_past_a_learned_table():
    layer = Learned(3, D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="6 positions do not fit a learned table of 3"):
        layer.add_to_embedding(EMBEDDING, WHOLE)
    long = layer.add_to_embedding(EMBEDDING, PACKED)
    # A segment too long is NaN, loudly, where it is.
    np.testing.assert_array_equal(np.isnan(long).any(-1), [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]])
    # Padding has no position: however long, it is no reason for a NaN.
    padding = Segmentation.of(T, jnp.asarray([[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]))
    assert np.isfinite(layer.add_to_embedding(EMBEDDING, padding)).all()
    assert LearnedConfig().longest(DIMS) == 7
    assert RopeConfig().longest(DIMS) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RopeConfig(rotary_dim=3), r"rotary_dim must be even and in \[2, head_dim = 8\], got 3"),
        (RopeConfig(rotary_dim=10), r"rotary_dim must be .* got 10"),
        (RopeConfig(base=0.0), "base must be positive, got 0.0"),
        (RopeConfig(base="carop"), "base must be a number or 'carope', got 'carop'"),
        (RopeConfig(layout="x"), "layout must be one of .* 'x'"),
        (RopeConfig(interpolation=0.0), "interpolation must be at least 1, got 0.0"),
        (CaropeConfig(source="hiden"), "source must be one of .* 'hiden'"),
        (CaropeConfig(exponent="shared"), "init='rope' can't be reached"),
        (CaropeConfig(control="no"), "control must be one of .* 'no'"),
    ],
)
def test_a_config_names_its_impossible_option(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate(DIMS)


def test_a_config_names_the_size_that_does_not_fit():
    odd = dataclasses.replace(DIMS, head_dim=5, model_dim=15)
    for config in (RopeConfig(), CaropeConfig()):
        with pytest.raises(ValueError, match=r"head_dim must be even and at least 2 .* 5"):
            config.validate(odd)
    with pytest.raises(ValueError, match="model_dim must be even for sinusoids, got 15"):
        SinusoidalConfig().validate(odd)
    LearnedConfig().validate(odd)
    NopeConfig().validate(odd)
