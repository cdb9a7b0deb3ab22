import dataclasses
import re

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
    call,
    filled,
    stirred,
)
from flax import nnx

from carope_jax.layers import (
    AlibiConfig,
    AttentionEncoding,
    AttentionInput,
    Carope,
    CaropeConfig,
    DaRope,
    DaRopeConfig,
    Fox,
    FoxConfig,
    HeadDims,
    HoPe,
    HoPeConfig,
    Learned,
    LearnedConfig,
    NoPE,
    NoPEConfig,
    Rope,
    RopeConfig,
    Segmentation,
    SelectiveRope,
    SelectiveRopeConfig,
    Sinusoidal,
    SinusoidalConfig,
)
from carope_jax.positions import (
    ScalingConfig,
)

DIMS = HeadDims(model_dim=D, heads=H, kv_heads=K, head_dim=N, max_length=T + 1)
DYNAMIC = ScalingConfig("dynamic", 2.0, original_length=4, length=T - 1)


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig(scaling=DYNAMIC),
        CaropeConfig(scaling=DYNAMIC),
        SelectiveRopeConfig(scaling=DYNAMIC),
        HoPeConfig(scaling=DYNAMIC),
        DaRopeConfig(scaling=DYNAMIC),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_dynamic_rule_is_for_no_longer_a_sequence(config):
    assert config.longest(DIMS) == T - 1
    layer = filled(lambda: AttentionEncoding(config, DIMS, rngs=nnx.Rngs(0)))

    def turned(length):
        q, k, x = (inputs[:, :length] for inputs in (Q, KEYS, X))
        segmentation = Segmentation.of(length, None)
        return layer(AttentionInput(q, k, x, x, segmentation)).q

    with pytest.raises(ValueError, match=f"{T} tokens are more than the length {T - 1}"):
        jax.eval_shape(lambda: turned(T))
    assert jax.eval_shape(lambda: turned(T - 1)).shape == (B, T - 1, H, N)


# One kind of state each: a count of tokens, turns, a convolution's window and turns, nats.
CARRIES = {
    "a count": Rope(N).initial_carry(B),
    "carope": stirred("carope").initial_carry(B),
    "selective": stirred("selective").initial_carry(B),
    "selective of another width": stirred("selective gated").initial_carry(B),
    "fox": stirred("fox").initial_carry(B),
    "a float": jnp.zeros(B),
    "of another batch": stirred("carope").initial_carry(B + 1),
    "bfloat16": stirred("fox").initial_carry(B).astype(jnp.bfloat16),
    "no arrays": (),
    "a number": 0,
}


@pytest.mark.parametrize("name", CASES)
def test_a_carry_of_another_encoding_is_refused(name):
    layer = stirred(name)
    own = jax.tree.map(lambda x: (x.shape, x.dtype), layer.initial_carry(B))
    refused = 0
    for carry in CARRIES.values():
        if jax.tree.map(lambda x: (np.shape(x), getattr(x, "dtype", 0)), carry) != own:
            with pytest.raises(ValueError, match=r"carry must be .*, got .* another encoding's"):
                call(layer, Q, KEYS, X, carry=carry)
            refused += 1
    assert refused == len(CARRIES) - (name != "selective hidden")


@pytest.mark.parametrize("name", CASES)
def test_impossible_calls_are_refused(name):
    layer, positions = stirred(name), np.arange(T)[None]

    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            call(layer, Q, KEYS, X, **options)

    if layer.config.accumulates:
        refused("positions have no meaning where tokens accumulate", positions=positions)
    else:
        refused(
            "give positions or a carry, not both",
            positions=positions,
            carry=layer.initial_carry(B),
        )
        refused("positions must be integers of shape .* got float", positions=positions * 1.0)
        refused(r"positions must be integers .*int.* of shape \(8,\)", positions=positions[0])
    for flag in ("starts", "valid"):
        refused(f"{flag} must be bool of shape .* got int", **{flag: np.ones((B, T), int)})
        refused(f"{flag} must be bool .* {re.escape('(4, 7)')}", **{flag: np.ones((B, 7), bool)})
    if layer.dims.model_dim:
        with pytest.raises(ValueError, match=f"is for model_dim {D}, got {D - 1}"):
            call(layer, Q, KEYS, X[..., 1:])


@pytest.mark.parametrize("name", ROTARY)
def test_queries_and_keys_that_do_not_fit_are_refused(name):
    layer = stirred(name)

    def refused(message, q=Q, k=KEYS, x=X, **options):
        with pytest.raises(ValueError, match=message):
            layer(q, k, x, **options)

    refused("of one sequence, .* cross-attention has no phases", q=Q[:, 1:])
    refused("of one sequence", x=X[:, 1:])
    refused(r"q must be \[B, T, heads, head_dim\], got shape", q=Q[0])
    refused(r"x must be \[B, T, model_dim\], got shape", x=X[0])
    refused("2 key/value heads do not divide 3 heads", q=Q[:, :, :3])
    refused("q and k must be of one head_dim, got 8 and 6", k=KEYS[..., :6])
    if layer.dims.head_dim:
        refused("is for head_dim 8, got 6", q=Q[..., :6], k=KEYS[..., :6])
    if layer.dims.kv_heads:
        refused("is for kv_heads 2, got 4", k=Q)
    if not layer.config.accumulates:
        refused("positions are needed over a sharded time axis, got axis_name 't'", axis_name="t")
    if name not in ("rope", "rope partial", "nope", "hope", "selective"):
        refused("needs x", x=None)


def test_the_batch_of_shuffled_has_at_least_two():
    layer = Carope(D, K, N, control="shuffled", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'shuffled' needs a batch of at least 2"):
        layer(Q[:1], KEYS[:1], X[:1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RopeConfig(rotary_dim=3), r"rotary_dim must be even and in \[2, head_dim = 8\], got 3"),
        (RopeConfig(rotary_dim=10), r"rotary_dim must be .* got 10"),
        (RopeConfig(rotary_dim=0), r"rotary_dim must be .* got 0"),
        (RopeConfig(base=0.0), "base must be positive, got 0.0"),
        (RopeConfig(base="carop"), "base must be a number or 'carope', got 'carop'"),
        (RopeConfig(head_bases=(10.0,) * 3), "one for each of 2 key/value heads, got 3"),
        (RopeConfig(head_bases=(10.0, -1.0)), r"head_bases must be positive, got \(10.0, -1.0\)"),
        (RopeConfig(base=5.0, head_bases=(10.0, 9.0)), "base 5.0 and head_bases both"),
        (RopeConfig(layout="x"), "layout must be one of .* 'x'"),
        (CaropeConfig(source="hiden"), "source must be one of .* 'hiden'"),
        (CaropeConfig(exponent="shared"), "init='rope' can't be reached"),
        (CaropeConfig(control="no"), "control must be one of .* 'no'"),
        (SelectiveRopeConfig(source="key"), "source must be one of .* 'key'"),
        (SelectiveRopeConfig(gate="pairs"), "gate must be one of .* 'pairs'"),
        (SelectiveRopeConfig(activation="relu"), "activation must be one of .* 'relu'"),
        (SelectiveRopeConfig(width=0), "width must be at least 1, got 0"),
        (SelectiveRopeConfig(rank=4), "rank must be .* for source='hidden', got 4"),
        (SelectiveRopeConfig(source="hidden", rank=0), "rank must be at least 1 .*, got 0"),
        (SelectiveRopeConfig(layout="x"), "layout must be one of .* 'x'"),
        (HoPeConfig(length=0), "length must be at least 1, got 0"),
        (DaRopeConfig(base=-1.0), "base must be positive, got -1.0"),
        (FoxConfig(gate="data"), "gate must be one of .* 'data'"),
        (FoxConfig(gate="fixed"), "gate='fixed' needs both shortest_decay and longest_decay"),
        (FoxConfig(longest_decay=2.0), r"needs both .* got \(None, 2.0\)"),
        (LearnedConfig(length=0), "length must be at least 1, got 0"),
        (SinusoidalConfig(base=0.0), "base must be positive, got 0.0"),
    ],
    ids=str,
)
def test_a_config_names_its_impossible_option(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate(DIMS)


def test_a_config_names_the_size_that_does_not_fit():
    rotary = (RopeConfig, CaropeConfig, SelectiveRopeConfig, HoPeConfig, DaRopeConfig)
    for head_dim in (5, 0):
        odd = dataclasses.replace(DIMS, head_dim=head_dim, model_dim=15)
        for config in rotary:
            with pytest.raises(ValueError, match=f"head_dim must be even .* {head_dim}"):
                config().validate(odd)
    with pytest.raises(ValueError, match="model_dim must be even for sinusoids, got 15"):
        SinusoidalConfig().validate(odd)
    for config in (LearnedConfig, NoPEConfig, AlibiConfig, FoxConfig):
        config().validate(odd)
    with pytest.raises(ValueError, match="3 key/value heads do not divide 4 heads"):
        SelectiveRopeConfig().validate(dataclasses.replace(DIMS, kv_heads=3))
    with pytest.raises(ValueError, match="4 heads do not divide the input's 15 features"):
        SelectiveRopeConfig(source="hidden").validate(dataclasses.replace(DIMS, model_dim=15))


def test_an_unknown_option_is_named():
    rngs = nnx.Rngs(0)
    for make in (
        lambda **unknown: Rope(N, **unknown),
        lambda **unknown: HoPe(N, length=4, **unknown),
        lambda **unknown: Carope(D, K, N, rngs=rngs, **unknown),
        lambda **unknown: SelectiveRope(D, H, K, N, rngs=rngs, **unknown),
        lambda **unknown: DaRope(D, K, N, length=4, rngs=rngs, **unknown),
        lambda **unknown: Fox(D, H, rngs=rngs, **unknown),
        lambda **unknown: Sinusoidal(D, **unknown),
        lambda **unknown: Learned(T, D, rngs=rngs, **unknown),
        NoPE,
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'bases'"):
            make(bases=2.0)
