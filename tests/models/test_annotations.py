"""The shapes and types in the signatures are checked by calling what bears them."""

import subprocess
import sys

CALLS = """
import jaxtyping

hook = jaxtyping.install_import_hook("carope_jax", "beartype.beartype")
hook.__enter__()

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import carope_jax
from carope_jax.layers import ENCODINGS, CaropeConfig, RopeConfig
from carope_jax.models import Decoder, ModelConfig, Sharding, token_nll
from carope_jax.positions import *

B, T, D, H, K, N, P = 2, 6, 10, 4, 2, 8, 4
f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
u32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)
flags = jax.ShapeDtypeStruct((B, T), bool)
q, k, x = f32((B, T, H, N)), f32((B, T, K, N)), f32((B, T, D))
low_q, low_k = (jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in (q, k))
positions, increments, carry = i32((B, T)), f32((B, T, K, P)), u32((B, K, P))


def check(function, *arguments, **options):
    # Annotations are checked while tracing: nothing has to be compiled or run.
    return jax.eval_shape(lambda *a: function(*a, **options), *arguments)


try:
    check(rotate, q, positions)
except jaxtyping.TypeCheckError:
    pass
else:
    raise SystemExit("the annotations are not being checked")

check(to_turns, increments), check(to_radians, carry), check(to_turns, f32(()))
check(accumulate, increments)
check(accumulate, increments, flags, flags, carry, inclusive=False)
jax.eval_shape(jax.grad(lambda x: accumulate(x)[0].sum()), increments)
rope_frequencies(8, 500.0), check(lambda base: rope_frequencies(8, base), f32((K,)))
check(rope_phases, positions, head_dim=8)
check(lambda p, b: rope_phases(p, 8, base=b), positions, f32((K,)))
check(lambda p, f: rope_phases(p, 8, frequencies=f), i32((1, T)), f32((K, P)))
check(rope_phases, positions, head_dim=8, scaling=linear_scaling(2.0, 4))
check(rotate, q, increments), check(rotate, low_q, f32((B, T, 1, P)), layout="interleaved")
rope_bias(0.5), rope_bias(np.array([0.5, 0.2])), equivalent_base(8)
check(carope_log_frequency, x, f32((D, K))), check(carope_log_frequency, x, f32((D, K)), f32((K,)))
free = check(carope_log_frequency, x, f32((D, K, P)), f32((K, P)))
check(carope_increments, f32((B, T, K)), pairs=4, scaling=linear_scaling(2.0, 4))
check(carope_increments, free, pairs=4, exponent="free")
check(carope_rotate, low_q, low_k, f32((B, T, K)))
check(carope_rotate, q, k, free, exponent="free")
check(lambda *a: carope_rotate(*a[:3], starts=a[3], valid=a[3], carry=a[4]),
      q, k, f32((B, T, K)), flags, carry)
check(sinusoidal, positions, dim=8), check(learned, positions, f32((9, D)))
check(segment_starts, positions), check(segment_starts, positions, i32((B,)))
check(lambda *a: token_positions((B, T), *a), flags, flags, i32((B,)))
check(segment_valid, positions)

check(lambda *a: carope_jax.Rope(N)(*a), q, k)
check(lambda q, k, p: carope_jax.Rope(N)(q, k, positions=p), q, k, i32((1, T)))
for options in ({}, {"exponent": "free"}, {"control": "mean"}, {"control": "frozen"}):
    def layer(q, k, x, carry, options=options):
        scaling = ScalingConfig("linear", 2.0)
        rope = carope_jax.Carope(D, K, N, rngs=nnx.Rngs(0), scaling=scaling, **options)
        return rope(q, k, x, carry=carry), rope(q, k, x), rope.initial_carry(B)
    check(layer, q, k, x, carry)

others = [
    lambda rngs: carope_jax.SelectiveRope(
        D, H, K, N, gate="pair", bias=True, normalized=False, rngs=rngs
    ),
    lambda rngs: carope_jax.SelectiveRope(12, H, H, N, source="hidden", rank=3, rngs=rngs),
    lambda rngs: carope_jax.DaRope(D, K, N, length=50, rngs=rngs),
    lambda rngs: carope_jax.HoPe(N, length=50),
    lambda rngs: carope_jax.NoPE(),
]
for make in others:
    def turn(q, k, x, starts, valid, make=make):
        encoding = make(nnx.Rngs(0))
        carry = encoding.initial_carry(B)
        if encoding.dims.model_dim == 12:
            k, x = q, jnp.zeros((B, T, 12))
        return encoding(q, k, x), encoding(q, k, x, starts=starts, valid=valid, carry=carry)
    check(turn, q, k, x, flags, flags)
for make in (lambda rngs: carope_jax.Fox(D, H, rngs=rngs), lambda rngs: carope_jax.Alibi(H)):
    def bias(x, starts, valid, make=make):
        encoding = make(nnx.Rngs(0))
        coordinate = encoding(x)
        after = encoding(x, starts=starts, valid=valid, carry=encoding.initial_carry(B))
        return score_bias(coordinate, coordinate), after
    check(bias, x, flags, flags)

choices = [{"position": name} for name in ENCODINGS] + [
    {"position": "carope", "carope": CaropeConfig(source="embedding", init="paper")},
    {"position": "rope", "rope": RopeConfig(base="carope"), "norm": "rmsnorm"},
    {"position": "rope", "activation": "swiglu", "tie_embeddings": False, "dtype": "bfloat16"},
]
for choice in choices:
    sizes = {"num_layers": 2, "model_dim": 16, "num_heads": 4, "num_kv_heads": 2}
    config = ModelConfig(**sizes, vocab_size=9, max_length=2 * T, **choice)
    def nll(tokens, ids, config=config):
        model = Decoder(config, sharding=Sharding(), rngs=nnx.Rngs(0))
        decoded = model.decode(tokens, model.empty_cache(B, 2 * T), ids)
        return token_nll(model(tokens).logits, tokens), model(tokens, ids), decoded
    check(nll, positions, positions)
print("checked")
"""


def test_annotations_are_true():
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "checked\n"
