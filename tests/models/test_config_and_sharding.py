import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_reference import LENGTH, TINY, VOCAB, abstract, logits, stirred
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from carope_jax.layers import CaropeConfig, RopeConfig
from carope_jax.models import MESH_AXES, AxisRules, Decoder, ModelConfig, Sharding, logical_axes

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 10}, "num_heads 10 does not divide model_dim 768"),
        ({"num_kv_heads": 5}, "num_kv_heads 5 does not divide num_heads 12"),
        ({"head_dim": 7}, "head_dim must be even and at least 2 .* 7"),
        ({"model_dim": 36, "position": "carope"}, "head_dim must be even and at least 2 .* 3"),
        ({"model_dim": 9, "num_heads": 3, "position": "sinusoidal"}, "model_dim must be even .* 9"),
        ({"position": "carop"}, "position must be one of .* 'carop'; did you mean 'carope'"),
        ({"norm": "layer"}, "norm must be one of .* 'layer'"),
        ({"activation": "relu"}, "activation must be one of .* 'relu'"),
        ({"attention": "flash"}, "attention must be one of .* 'flash'"),
        ({"dtype": "float16"}, "dtype must be one of .* 'float16'"),
        ({"remat": "all"}, "remat must be one of .* 'all'"),
        ({"rope": RopeConfig(rotary_dim=66)}, "rotary_dim must be .* got 66"),
        (
            {"position": "carope", "carope": CaropeConfig(exponent="shared")},
            "init='rope' can't be reached with exponent='shared'",
        ),
    ]
    + [
        ({name: 0}, f"{name} must be at least 1, got 0")
        for name in (
            "num_layers",
            "model_dim",
            "num_heads",
            "scan_unroll",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "vocab_size",
            "max_length",
        )
    ],
    ids=str,
)
def test_an_impossible_model_names_field_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_what_is_left_out_is_derived():
    config = ModelConfig(model_dim=96, num_heads=6).resolved(vocab_size=50257, length=512)
    assert (config.vocab_size, config.max_length) == (50304, 512)
    assert (config.kv_heads, config.dims.head_dim, config.feed_forward_dim) == (6, 16, 384)
    given = ModelConfig(vocab_size=100, max_length=9, mlp_dim=5, num_kv_heads=3, head_dim=4)
    assert given.resolved(vocab_size=128, length=512) == given
    assert (given.kv_heads, given.dims.head_dim, given.feed_forward_dim) == (3, 4, 5)
    assert config.longest is None
    assert dataclasses.replace(config, position="learned").longest == 512


@pytest.mark.parametrize("name", ["vocab_size", "max_length"])
def test_a_decoder_wants_its_sizes(name):
    with pytest.raises(ValueError, match="vocab_size and max_length must be resolved"):
        Decoder(dataclasses.replace(TINY, **{name: None}), rngs=nnx.Rngs(0))


def test_a_sequence_past_the_learned_table_is_refused():
    model = stirred(dataclasses.replace(TINY, position="learned"))
    tokens = np.zeros((1, LENGTH + 1), int)
    with pytest.raises(ValueError, match="9 positions do not fit a learned table of 8"):
        logits(model, tokens)
    # A packed row may be as long as it likes, padding and all.
    ids = np.array([[1] * 5 + [0] * 12])
    long = logits(model, np.zeros((1, 17), int), ids)[:, :5]
    np.testing.assert_allclose(long, logits(model, tokens[:, :LENGTH])[:, :5], atol=2e-5)


def mesh(*shape):
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def test_rules_place_logical_axes():
    sharding = Sharding(mesh(2, 2, 2, 1))
    assert sharding.spec(("batch", None, "mlp")) == PartitionSpec(
        ("data", "fsdp"), None, ("tensor",)
    )
    assert [sharding.ways(a) for a in ("batch", "embed", "time", None)] == [4, 2, 1, 1]
    assert sharding.named(("embed",)).spec == PartitionSpec(("fsdp",))
    other = Sharding(mesh(1, 1, 8, 1), AxisRules(time=("tensor",), mlp=None))
    assert (other.ways("time"), other.ways("mlp"), other.ways("vocab")) == (8, 1, 8)


def test_without_a_mesh_everything_is_left_alone():
    sharding = Sharding()
    x = jnp.ones((3, 5))
    assert sharding.constrain(x, "batch", "mlp") is x
    assert sharding.ways("batch") == 1
    with pytest.raises(ValueError, match="a sharding needs a mesh"):
        sharding.named(("batch",))


CAROPE = dataclasses.replace(TINY, position="carope", vocab_size=16, tie_embeddings=False)


def test_every_variable_of_a_decoder_has_a_place():
    variables = nnx.state(abstract(CAROPE))
    placed = dict(nnx.to_flat_state(Sharding(mesh(2, 2, 2, 1)).of_variables(variables)))
    for path, variable in nnx.to_flat_state(variables):
        assert len(logical_axes(variable)) == variable.ndim
        assert (logical_axes(variable)[0] == "layers") == (path[0] == "blocks")
        assert placed[path].shard_shape(variable.shape)
    up = placed["blocks", "mlp", "up", "linear", "kernel"].spec
    assert up == PartitionSpec(None, ("fsdp",), ("tensor",))


def test_a_variable_that_does_not_divide_is_named():
    variables = nnx.state(abstract(TINY))
    message = "token_embedding/embedding: axis 'vocab' of size 13 does not divide .* 2 devices"
    with pytest.raises(ValueError, match=message):
        Sharding(mesh(4, 1, 2, 1)).of_variables(variables)
    # Two key/value heads of 4 features are 8 columns, but the frequencies are 2.
    message = "blocks/attention/encoding/.*: axis 'kv_heads' of size 2 does not divide .* 4 devices"
    with pytest.raises(ValueError, match=message):
        Sharding(mesh(2, 1, 4, 1)).of_variables(nnx.state(abstract(CAROPE)))


def test_a_mesh_changes_no_logits():
    sharding = Sharding(mesh(2, 2, 2, 1))
    graph, variables = nnx.split(stirred(CAROPE, sharding))
    places = sharding.of_variables(variables)
    spread = nnx.merge(graph, jax.device_put(variables, places))
    kernel = spread.blocks.mlp.up.linear.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (2, 8, 32)
    tokens = jax.device_put(TOKENS, sharding.named(("batch", "time")))
    out = logits(spread, tokens)
    assert out.sharding.spec[0] == ("data", "fsdp")
    np.testing.assert_allclose(out, logits(stirred(CAROPE), TOKENS), atol=1e-5)
