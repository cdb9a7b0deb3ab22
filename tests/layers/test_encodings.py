import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoding_cases import (
    CASES,
    KEYS,
    ROTARY,
    B,
    D,
    H,
    K,
    N,
    Q,
    T,
    X,
    filled,
    quick_jit,
)
from flax import nnx

from carope_jax.layers import (
    ENCODINGS,
    Alibi,
    AttentionEncoding,
    AttentionInput,
    CaropeConfig,
    EmbeddingEncoding,
    EncodingChoice,
    Fox,
    FoxConfig,
    HeadDims,
    Learned,
    LearnedConfig,
    Rope,
    RopeConfig,
    Segmentation,
    SinusoidalConfig,
)
from carope_jax.positions import (
    ScalingConfig,
    accumulate_forget,
    alibi_coordinates,
    learned,
    rope_phases,
    rotate,
    sinusoidal,
)

DIMS = HeadDims(model_dim=D, heads=H, kv_heads=K, head_dim=N, max_length=T + 1)
EMBEDDING = np.random.default_rng(5).normal(size=X.shape).astype(np.float32)
IDS = jnp.asarray([[1, 1, 1, 2, 2, 0, 0, 0], [0, 0, 3, 3, 3, 3, 0, 3]])
PACKED, WHOLE = Segmentation.of(T, IDS), Segmentation.of(T, None)
TWO = (Q[:2], KEYS[:2])


def attention(config):
    return filled(lambda: AttentionEncoding(config, DIMS, rngs=nnx.Rngs(0)))


def beside(config):
    return filled(lambda: EmbeddingEncoding(config, DIMS, rngs=nnx.Rngs(0)))


@quick_jit
def turned(layer, segmentation, q=Q, k=KEYS, hidden=X, embedding=EMBEDDING, state=None):
    return layer(AttentionInput(q, k, hidden, embedding, segmentation, state))


def test_segmentation_of_packed_rows():
    np.testing.assert_array_equal(
        np.where(IDS, PACKED.positions, -1),
        [[0, 1, 2, 0, 1, -1, -1, -1], [-1, -1, 0, 1, 2, 3, -1, 4]],
    )
    np.testing.assert_array_equal(
        PACKED.starts, [[1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(PACKED.valid, IDS != 0)
    assert WHOLE.starts is WHOLE.valid is WHOLE.segment_ids is None
    np.testing.assert_array_equal(WHOLE.positions, [range(T)])


def test_every_encoding_has_a_field_of_its_name():
    assert {*ENCODINGS} == {
        *("rope", "carope", "selective_rope", "darope", "hope"),
        *("fox", "alibi", "learned", "sinusoidal", "nope"),
    }
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


@pytest.mark.parametrize("name", CASES)
def test_an_encoding_does_only_its_own_part(name):
    config = CASES[name]
    parts = set()

    # Traced, not compiled: an array that is handed through is the same object.
    def record(q, k, embedding):
        if beside(config)(embedding, WHOLE) is not embedding:
            parts.add("add")
        out = attention(config)(AttentionInput(q, k, X, embedding, WHOLE))
        if out.q is not q and out.k is not k:
            parts.add("rotate")
        else:
            assert out.q is q
            assert out.k is k
        if out.coordinate is not None:
            assert (out.coordinate.shape, out.coordinate.dtype) == ((B, T, H), jnp.float32)
            parts.add("bias")

    jax.eval_shape(record, Q, KEYS, EMBEDDING)
    if isinstance(config, SinusoidalConfig | LearnedConfig):
        assert parts == {"add"}
    elif name == "nope":
        assert not parts
    else:
        assert parts == {"rotate" if name in ROTARY else "bias"}
    assert config.biases == ("bias" in parts)


def test_rope_turns_by_position():
    rope = Rope(
        N, base=500.0, rotary_dim=4, layout="interleaved", scaling=ScalingConfig("linear", 2.0)
    )

    @quick_jit
    def both(positions):
        phases = rope_phases(positions // 2, 4, base=500.0)
        expected = rotate(Q, phases, "interleaved"), rotate(KEYS, phases, "interleaved")
        return rope(Q, KEYS, positions=positions), expected

    for ours, expected in zip(*both(2 * jnp.arange(T)[None]), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_positions_count_from_0_in_each_segment():
    @quick_jit
    def both(layer):
        q = Q[:2]
        expected = [rotate(q, rope_phases(p, N)) for p in (WHOLE.positions, PACKED.positions)]
        hook = layer(AttentionInput(q, KEYS[:2], X[:2], X[:2], PACKED))
        return (Rope(N)(q, KEYS[:2])[0], hook.q), expected

    for ours, expected in zip(*both(attention(RopeConfig())), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-6)
    slopes = alibi_coordinates(PACKED.positions, H)
    flags = {"starts": PACKED.starts, "valid": PACKED.valid}
    np.testing.assert_array_equal(Alibi(H)(X[:2], **flags), slopes)


def test_a_gate_of_its_bias_alone_forgets_at_its_decay_times():
    layer = Fox(D, H, gate="bias", shortest_decay=2.0, longest_decay=16.0, rngs=nnx.Rngs(0))
    times = np.array([2.0, 4.0, 8.0, 16.0])
    sums, _ = accumulate_forget(jnp.broadcast_to(-1 / times, (1, T, H)).astype(jnp.float32))
    np.testing.assert_allclose(layer(X[:1]), sums, rtol=1e-5)
    assert set(layer.weights) == {"bias"}


def test_rope_at_caropes_own_base():
    assert RopeConfig(base="carope").base_of(DIMS) == pytest.approx((1 + np.log(2)) ** (N / 2))


def test_the_source_of_caropes_frequencies():
    for source, felt in (("hidden", 0), ("embedding", 1)):
        layer = attention(CaropeConfig(source=source))

        def total(hidden, embedding, layer=layer):
            out = layer(AttentionInput(*TWO, hidden, embedding, PACKED))
            return (out.q * Q[:2, ..., ::-1]).sum()

        gradients = quick_jit(jax.grad(total, argnums=(0, 1)))(X[:2], EMBEDDING[:2])
        assert [bool(np.any(g)) for g in gradients] == [felt == 0, felt == 1]
        # A padded token moves nothing.
        moved = np.any(gradients[felt], axis=-1)
        assert not moved[np.asarray(IDS) == 0].any()


def test_carope_measures_its_frequencies_over_the_tokens_that_count():
    config = CaropeConfig()
    layer = attention(config)
    out = turned(layer, PACKED, *TWO, X[:2], EMBEDDING[:2])
    f = np.exp(np.asarray(config.log_frequency(layer.weights, X[:2]), np.float64))
    f = f[np.asarray(PACKED.valid)]
    assert out.measurements["f_mean"] == pytest.approx(f.mean(), rel=1e-5)
    assert out.measurements["f_std"] == pytest.approx(f.std(axis=0).mean(), rel=1e-5)


def test_sinusoids_are_added_in_the_embeddings_dtype():
    layer = beside(SinusoidalConfig(base=100.0, amplitude=0.5))
    waves = sinusoidal(PACKED.positions, D, 100.0)
    np.testing.assert_allclose(
        layer(EMBEDDING[:2], PACKED), EMBEDDING[:2] + 0.5 * np.asarray(waves), atol=1e-6
    )
    assert layer(EMBEDDING.astype(jnp.bfloat16), WHOLE).dtype == jnp.bfloat16


def test_learned_rows_are_added():
    layer = EmbeddingEncoding(LearnedConfig(std=0.5), DIMS, rngs=nnx.Rngs(0))
    table = np.asarray(layer.weights["table"])
    assert table.shape == (T + 1, D)
    assert np.std(table) == pytest.approx(0.5, rel=0.3)
    np.testing.assert_array_equal(layer(EMBEDDING, WHOLE), EMBEDDING + table[:T])
    packed = layer(EMBEDDING[:2], PACKED)
    rows = learned(jnp.asarray([[0, 1, 2, 0, 1]]), layer.weights["table"])
    np.testing.assert_array_equal(packed[:1, :5], EMBEDDING[:1, :5] + np.asarray(rows))


def test_what_is_past_a_learned_table():
    layer = Learned(3, D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"{T} positions do not fit a learned table of 3"):
        layer(X)
    long = layer(X[:2], starts=PACKED.starts, valid=PACKED.valid)
    # A segment too long is NaN, loudly, where it is; padding, however long, never.
    expected = np.where(np.asarray(IDS) != 0, np.asarray(PACKED.positions) >= 3, False)
    np.testing.assert_array_equal(np.isnan(long).any(-1), expected)
    assert expected.sum() == 2
    given = layer(X[:1], positions=jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0]])[:, :T])
    np.testing.assert_array_equal(np.isnan(given).any(-1), (np.arange(T) == 6)[None])
    assert LearnedConfig().longest(DIMS) == T + 1
    assert RopeConfig().longest(DIMS) is None


@pytest.mark.parametrize(
    "config",
    [CaropeConfig(control="mean"), FoxConfig(gate="bias", shortest_decay=2.0, longest_decay=9.0)],
    ids=["mean", "fox"],
)
def test_weights_in_bfloat16_are_computed_with_in_float32(config):
    rounded, exact = attention(config), attention(config)
    for weight in rounded.names:
        values = getattr(rounded, weight)[...].astype(jnp.bfloat16)
        setattr(rounded, weight, getattr(rounded, weight).replace(values))
        setattr(exact, weight, getattr(exact, weight).replace(values.astype(jnp.float32)))
    ours, theirs = turned(rounded, WHOLE), turned(exact, WHOLE)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
