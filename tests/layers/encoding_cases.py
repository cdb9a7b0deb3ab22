"""Every encoding, with the options that change what it does, and one way to call them all."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from carope_jax.layers import (
    AdditiveEncoding,
    Alibi,
    AlibiConfig,
    BiasEncoding,
    Carope,
    CaropeConfig,
    DaRope,
    DaRopeConfig,
    Encoding,
    EncodingConfig,
    Fox,
    FoxConfig,
    HoPe,
    HoPeConfig,
    Learned,
    LearnedConfig,
    NoPE,
    NoPEConfig,
    Rope,
    RopeConfig,
    SelectiveRope,
    SelectiveRopeConfig,
    Sinusoidal,
    SinusoidalConfig,
)
from carope_jax.positions import ScalingConfig

B, T, D, H, K, N = 4, 8, 12, 4, 2, 8

CASES: dict[str, EncodingConfig] = {
    "rope": RopeConfig(base=100.0),
    "rope partial": RopeConfig(
        rotary_dim=6,
        layout="interleaved",
        scaling=ScalingConfig("yarn", 4.0, original_length=4),
    ),
    "nope": NoPEConfig(),
    "carope": CaropeConfig(),
    "carope exclusive": CaropeConfig(inclusive=False, exponent="free", layout="interleaved"),
    "carope shared": CaropeConfig(init="paper", exponent="shared", control="frozen"),
    "selective": SelectiveRopeConfig(base=100.0),
    "selective gated": SelectiveRopeConfig(
        width=3, normalized=False, activation="silu", gate="pair", bias=True, layout="interleaved"
    ),
    "selective hidden": SelectiveRopeConfig(
        source="hidden", width=1, rank=3, gate="head", train_temperature=True
    ),
    # Of four pairs, two are fast.
    "darope": DaRopeConfig(length=20, base=100.0),
    "hope": HoPeConfig(length=20, base=100.0),
    "fox": FoxConfig(),
    "fox fixed": FoxConfig(gate="fixed", shortest_decay=2.0, longest_decay=9.0),
    "alibi": AlibiConfig(),
    "sinusoidal": SinusoidalConfig(base=50.0, amplitude=0.7),
    "learned": LearnedConfig(length=T),
}
ROTARY = [
    name
    for name, config in CASES.items()
    if not config.biases and not isinstance(config, SinusoidalConfig | LearnedConfig)
]


def make(name: str, kv_heads: int) -> Encoding:
    """The NNX module of a case, its weights as they are at the start."""
    config, rngs = CASES[name], nnx.Rngs(0)
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    match config:
        case RopeConfig():
            return Rope(N, **options)
        case NoPEConfig():
            return NoPE()
        case CaropeConfig():
            return Carope(D, kv_heads, N, rngs=rngs, **options)
        case SelectiveRopeConfig():
            return SelectiveRope(D, H, kv_heads, N, rngs=rngs, **options)
        case DaRopeConfig():
            return DaRope(D, kv_heads, N, rngs=rngs, **options)
        case HoPeConfig():
            return HoPe(N, **options)
        case FoxConfig():
            return Fox(D, H, rngs=rngs, **options)
        case AlibiConfig():
            return Alibi(H)
        case SinusoidalConfig():
            return Sinusoidal(D, **options)
        case LearnedConfig():
            return Learned(model_dim=D, rngs=rngs, **options)
    raise AssertionError(f"no module for {config}")


def filled(make_layer: Callable[[], Encoding]) -> Encoding:
    """A layer of random weights: at the start many are 0 or alike, which would hide faults.

    They are made without running (or compiling) any initialisation.
    """
    layer, rng = nnx.eval_shape(make_layer), np.random.default_rng(1)
    for name in layer.names:
        variable = getattr(layer, name)
        values = 0.5 * rng.normal(size=variable.shape)
        # Increments are above 0.
        values = np.exp(values) if name == "mean_increments" else values
        setattr(layer, name, variable.replace(jnp.asarray(values, jnp.float32)))
    return layer


@functools.cache
def stirred(name: str, kv_heads: int = K) -> Encoding:
    """A case's NNX module of random weights."""
    return filled(lambda: make(name, kv_heads))


def call(layer, q, k, x, **options):
    """(outputs, carry): rotated q and k, coordinates, or embeddings; None without a carry."""
    if isinstance(layer, BiasEncoding | AdditiveEncoding):
        out = layer(x, **options)
        return ((out[0],), out[1]) if "carry" in options else ((out,), None)
    out = layer(q, k, x, **options)
    return (out[:2], out[2]) if "carry" in options else (out, None)


# What these tests cost is compilation, so code that runs once is not worth optimizing.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
compiled = quick_jit(call)


def run(layer, q, k, x, **options):
    """`call`, compiled, with NumPy's arrays as the results: theirs compile nothing more."""
    return jax.device_get(compiled(layer, q, k, x, **options))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, KEYS, X = normal(B, T, H, N), normal(B, T, K, N, seed=1), normal(B, T, D, seed=2)
