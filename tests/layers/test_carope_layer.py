import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoding_cases import quick_jit
from flax import nnx

from carope_jax.layers import Carope, FrozenParam, Rope
from carope_jax.positions import (
    ScalingConfig,
    carope_increments,
    carope_log_frequency,
    rope_frequencies,
)

B, T, D, H, K, N = 3, 6, 10, 4, 2, 8
P = N // 2
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


Q, KEYS, X = normal(B, T, H, N), normal(B, T, K, N), normal(B, T, D)


def make(seed=0, **options):
    return Carope(D, K, N, rngs=nnx.Rngs(seed), **options)


def stirred(layer):
    """With weights at which the frequencies depend on the token (at init="rope" they don't)."""
    layer.kernel[...] = normal(*layer.kernel.shape)
    return layer


@quick_jit
def turn(layer, q, k, x, **options):
    return layer(q, k, x, **options)


REACHABLE = [
    dict(zip(("init", "exponent", "first_exponent", "control"), values, strict=True))
    for values in itertools.product(
        ("rope", "paper"),
        ("power", "shared", "free"),
        (0, 1),
        ("none", "frozen", "constant", "shuffled", "mean"),
    )
    if (values[0] == "paper" and values[3] != "constant")
    or (values[0] == "rope" and values[1] != "shared" and values[2] == 0)
]


def test_every_option_makes_a_layer():
    def run(options):
        layer = make(
            **options, inclusive=False, layout="interleaved", scaling=ScalingConfig("linear", 2.0)
        )
        return layer(Q, KEYS, X, carry=layer.initial_carry(B))

    assert len(REACHABLE) == 34
    for options in REACHABLE:
        q, k, carry = jax.eval_shape(lambda o=options: run(o))
        assert (q.shape, k.shape, carry.shape) == (Q.shape, KEYS.shape, (B, K, P)), options
        assert carry.dtype == jnp.uint32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exponent": "shared"}, "init='rope' can't be reached with exponent='shared'"),
        ({"first_exponent": 1}, "init='rope' can't be reached with .* first_exponent=1"),
        (
            {"first_exponent": 1, "exponent": "free"},
            "init='rope' can't be reached with exponent='free', first_exponent=1",
        ),
        ({"control": "constant", "init": "paper"}, "trains the bias alone, .*='paper' has none"),
        ({"init": "ropes"}, "init must be one of .* 'ropes'"),
        ({"exponent": "powers"}, "exponent must be one of .* 'powers'"),
        ({"control": "froze"}, "control must be one of .* 'froze'"),
        ({"first_exponent": 2}, r"first_exponent must be one of \(0, 1\), got 2"),
        ({"layout": "halves"}, "layout must be one of .* 'halves'"),
        ({"base": 1.0}, "needs a base above 1, got 1.0"),
        ({"base": -1.0}, "base must be positive, got -1.0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("head_dim", [7, 0])
def test_a_head_is_whole_pairs(head_dim):
    with pytest.raises(ValueError, match=f"head_dim must be even and at least 2 .* {head_dim}"):
        Carope(D, K, head_dim, rngs=nnx.Rngs(0))


def test_impossible_calls_are_refused():
    with pytest.raises(ValueError, match="positions have no meaning where tokens accumulate"):
        make()(Q, KEYS, X, positions=jnp.arange(T)[None])
    with pytest.raises(ValueError, match="'shuffled' needs a batch of at least 2 sequences, got 1"):
        make(control="shuffled")(Q[:1], KEYS[:1], X[:1])


@pytest.mark.parametrize("exponent", ["power", "free"])
def test_at_init_carope_is_rope(exponent):
    layer = make(init="rope", exponent=exponent)
    increments = carope_increments(layer.log_frequency(X), P, exponent=exponent)
    np.testing.assert_allclose(
        increments, jnp.broadcast_to(rope_frequencies(N)[None, None], (B, T, K, P)), atol=7e-8
    )
    q, k = turn(layer, Q, KEYS, X)
    # Sums are inclusive: positions count from 1.
    their_q, their_k = quick_jit(Rope(N))(Q, KEYS, positions=jnp.arange(1, T + 1)[None])
    np.testing.assert_allclose(q, their_q, atol=1e-5)
    np.testing.assert_allclose(k, their_k, atol=1e-5)


def test_paper_start_has_no_bias_and_a_random_kernel():
    layer = Carope(4000, K, N, init="paper", rngs=nnx.Rngs(0))
    assert set(layer.weights) == {"kernel"}
    assert np.std(layer.kernel[...]) == pytest.approx(0.02, rel=0.05)
    assert np.mean(layer.kernel[...]) == pytest.approx(0, abs=1e-3)


def test_frozen_has_nothing_to_train():
    layer = make(control="frozen", init="rope")
    assert not jax.tree.leaves(nnx.state(layer, nnx.Param))
    assert len(jax.tree.leaves(nnx.state(layer, FrozenParam))) == 2
    assert np.std(layer.log_frequency(X), axis=1).min() > 1e-3
    assert jax.tree.leaves(nnx.state(make(), nnx.Param))


def test_constant_trains_the_bias_alone():
    layer = make(control="constant", init="rope")
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))] == [("bias",)]
    assert np.ptp(layer.log_frequency(X), axis=1).max() == 0


def gradient_by_token(layer, row, token):
    """[B, T], how strongly each token's x moves one rotated query."""

    @quick_jit
    def gradient(layer, x):
        def one(x):
            q, _ = layer(Q, KEYS, x)
            return (q[row, token] * Q[row, token][::-1]).sum()

        return jax.grad(one)(x)

    return np.abs(gradient(layer, X)).sum(-1)


@pytest.mark.parametrize("inclusive", [True, False])
def test_phases_come_from_the_rows_own_past(inclusive):
    felt = gradient_by_token(stirred(make(inclusive=inclusive)), 1, 3)
    expected = np.zeros((B, T), bool)
    expected[1, : 4 if inclusive else 3] = True
    np.testing.assert_array_equal(felt != 0, expected)


def test_shuffled_phases_come_from_another_rows_past():
    felt = gradient_by_token(stirred(make(control="shuffled")), 1, 3)
    expected = np.zeros((B, T), bool)
    expected[0, :4] = True
    np.testing.assert_array_equal(felt != 0, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"init": "rope"},
        {"init": "paper", "first_exponent": 1},
        {"init": "paper", "exponent": "shared"},
        {"init": "rope", "exponent": "free"},
    ],
    ids=str,
)
def test_mean_starts_at_the_increments_of_no_context(options):
    mean = stirred(make(control="mean", **options))
    plain = make(**options)
    plain.kernel[...] = jnp.zeros_like(plain.kernel[...])
    for ours, theirs in zip(turn(mean, Q, KEYS, X), turn(plain, Q, KEYS, X), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert not gradient_by_token(mean, 1, 3).any()


def test_mean_turns_by_the_increments_it_is_given():
    layer = make(control="mean")
    increments = jnp.asarray([[1.0, 0.5, 0.25, 0.01], [0.3, 0.2, 0.1, 1e-6]])
    layer.mean_increments[...] = increments
    frequencies = jnp.repeat(increments, H // K, axis=0)
    angles = np.arange(1, T + 1)[:, None, None] * np.asarray(frequencies)
    q, _ = turn(layer, Q, KEYS, X)
    first, second = np.asarray(Q[..., :P]), np.asarray(Q[..., P:])
    expected = first * np.cos(angles) - second * np.sin(angles)
    np.testing.assert_allclose(q[..., :P], expected, atol=1e-5)


@pytest.mark.parametrize("exponent", ["power", "free"])
def test_decoding_token_by_token_equals_the_whole(exponent):
    layer = stirred(make(exponent=exponent))
    whole_q, whole_k = turn(layer, Q, KEYS, X)
    carry, q, k = layer.initial_carry(B), [], []
    for t in range(T):
        now = slice(t, t + 1)
        one_q, one_k, carry = turn(layer, Q[:, now], KEYS[:, now], X[:, now], carry=carry)
        q.append(one_q)
        k.append(one_k)
    # Only the projection's last bit may differ; the sums are exact.
    np.testing.assert_allclose(jnp.concatenate(q, 1), whole_q, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate(k, 1), whole_k, atol=1e-5)


def test_segments_begin_again_and_padding_is_skipped():
    layer = stirred(make())
    starts = np.tile([False, False, False, True, False, False], (B, 1))
    valid = np.tile([False, True, True, True, True, True], (B, 1))
    q, k = turn(layer, Q, KEYS, X, starts=starts, valid=valid)
    for part in (slice(1, 3), slice(3, T)):
        alone_q, alone_k = turn(layer, Q[:, part], KEYS[:, part], X[:, part])
        np.testing.assert_allclose(q[:, part], alone_q, atol=1e-5)
        np.testing.assert_allclose(k[:, part], alone_k, atol=1e-5)


def test_interpolation_divides_the_increments():
    layer = stirred(make(scaling=ScalingConfig("linear", 4.0)))
    log_f = carope_log_frequency(X, layer.kernel[...], layer.bias[...])
    increments = np.asarray(carope_increments(log_f, P), np.float64) / 4
    angles = np.repeat(np.cumsum(increments, axis=1), H // K, axis=2)
    q, _ = turn(layer, Q, KEYS, X)
    first, second = np.asarray(Q[..., :P]), np.asarray(Q[..., P:])
    expected = first * np.cos(angles) - second * np.sin(angles)
    np.testing.assert_allclose(q[..., :P], expected, atol=1e-5)


def test_bases_a_head_are_those_of_one_head_each():
    q, k = Rope(N, head_bases=(100.0, 9.0))(Q, KEYS)
    group = Q.shape[2] // K
    for head, base in enumerate((100.0, 9.0)):
        queries = slice(head * group, (head + 1) * group)
        one_q, one_k = Rope(N, base=base)(Q[:, :, queries], KEYS[:, :, head : head + 1])
        np.testing.assert_allclose(q[:, :, queries], one_q, atol=1e-5)
        np.testing.assert_allclose(k[:, :, head : head + 1], one_k, atol=1e-5)
