import itertools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.positions import (
    accumulate_forget,
    alibi_coordinates,
    alibi_slopes,
    fox_decay_bias,
    fox_log_forget,
    score_bias,
)

B, T, S, D, H = 2, 8, 5, 4, 3
rng = np.random.default_rng(0)
X = rng.normal(size=(B, T, D)).astype(np.float32)
KERNEL = rng.normal(size=(D, H)).astype(np.float32)
BIAS = np.float32([-1.0, 0.5, 3.0])
LOG_FORGET = -rng.exponential(size=(B, T, H)).astype(np.float32)
CARRY = -rng.exponential(size=(B, H)).astype(np.float32)
NONE = np.zeros((B, T), bool)
flags = hnp.arrays(bool, (B, T))
accumulate_jit = jax.jit(accumulate_forget)


def test_slopes():
    np.testing.assert_array_equal(alibi_slopes(8), [2.0**-h for h in range(1, 9)])
    np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])
    # The slopes of 4 heads, then the odd ones of 8.
    np.testing.assert_array_equal(
        alibi_slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    )
    expected = [2 ** (-8 * h / 16) for h in range(1, 17)] + [2 ** (-4 * h / 16) for h in (1, 3, 5)]
    np.testing.assert_allclose(alibi_slopes(19), expected, rtol=1e-7)


def test_alibi_falls_with_the_distance():
    positions = np.array([[0, 1, 2, 7, 100_000]])
    coordinates = alibi_coordinates(positions, 8)
    assert coordinates.dtype == jnp.float32
    distances = positions[0, :, None] - positions[0]
    expected = np.stack([-(2.0**-h) * distances for h in range(1, 9)])
    np.testing.assert_array_equal(score_bias(coordinates, coordinates)[0], expected)


def test_biases_are_differences():
    query = rng.normal(size=(B, T, H)).astype(np.float32)
    key = rng.normal(size=(B, S, H)).astype(np.float32)
    bias = score_bias(jnp.asarray(query), jnp.asarray(key))
    assert bias.shape == (B, H, T, S)
    for b, h, i, j in np.ndindex(bias.shape):
        assert bias[b, h, i, j] == query[b, i, h] - key[b, j, h]
    np.testing.assert_array_equal(
        score_bias(query[:1], key)[1], query[0].T[..., None] - key[1].T[:, None]
    )


def test_log_forget_against_float64():
    out = fox_log_forget(X, KERNEL, BIAS)
    assert out.dtype == jnp.float32
    logits = np.float64(X) @ KERNEL + BIAS
    np.testing.assert_allclose(out, -np.log1p(np.exp(-logits)), rtol=1e-5)
    np.testing.assert_array_equal(
        fox_log_forget(X, KERNEL), fox_log_forget(X, KERNEL, np.zeros(H, np.float32))
    )
    low = jnp.asarray(X, jnp.bfloat16)
    np.testing.assert_array_equal(
        fox_log_forget(low, KERNEL, BIAS), fox_log_forget(low.astype(jnp.float32), KERNEL, BIAS)
    )


def test_log_forget_of_extreme_logits_is_finite_with_its_gradient():
    logits = np.float32([[[-1e4], [-90], [0], [90], [1e4]]])
    value, gradient = jax.value_and_grad(lambda x: fox_log_forget(x, np.ones((1, 1))).sum())(logits)
    assert np.isfinite(value)
    np.testing.assert_allclose(gradient[0, :, 0], [1, 1, 0.5, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "shortest", "longest"), [(5, 2.0, 2048.0), (1, 7.0, 7.0), (3, 1e-3, 1e6)]
)
def test_decay_times(heads, shortest, longest):
    bias = np.float64(fox_decay_bias(heads, shortest, longest))
    times = 1 / np.logaddexp(0, -bias)
    step = (longest / shortest) ** (1 / max(heads - 1, 1))
    np.testing.assert_allclose(times, [shortest * step**h for h in range(heads)], rtol=2e-6)


def sums_by_loop(log_forget, starts, valid, carry):
    out, running = np.zeros(log_forget.shape), np.float64(carry)
    for b, t in np.ndindex(log_forget.shape[:2]):
        if starts[b, t]:
            running[b] = 0
        if valid[b, t]:
            running[b] += log_forget[b, t]
        out[b, t] = running[b]
    return out, running


@settings(max_examples=12, deadline=None)
@given(flags, flags, st.permutations([1, 1, 2, 4]))
def test_sums_equal_a_loop_in_any_chunking(starts, valid, sizes):
    log_forget = np.where(valid[..., None], LOG_FORGET, np.nan)
    expected, expected_after = sums_by_loop(log_forget, starts, valid, CARRY)
    for edges in ([0, T], np.cumsum([0, *sizes])):
        pieces, after = [], CARRY
        for a, b in itertools.pairwise(edges):
            piece, after = accumulate_jit(log_forget[:, a:b], starts[:, a:b], valid[:, a:b], after)
            pieces.append(piece)
        np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, atol=1e-5)
        np.testing.assert_allclose(after, expected_after, atol=1e-5)


def test_sums_without_flags_or_carry():
    coordinate, after = accumulate_forget(LOG_FORGET)
    assert coordinate.dtype == after.dtype == jnp.float32
    np.testing.assert_allclose(coordinate, np.cumsum(np.float64(LOG_FORGET), axis=1), rtol=1e-5)
    np.testing.assert_array_equal(after, coordinate[:, -1])


@pytest.mark.parametrize("cut", [False, True])
def test_nothing_leaks_from_the_future_or_across_segments(cut):
    starts, valid = NONE.copy(), ~NONE
    valid[:, 2] = False
    starts[:, 4] = cut
    # A value this large would leave its rounding behind if a sum were cut by subtracting.
    log_forget = LOG_FORGET.copy()
    log_forget[:, 1] = -1e9

    def run(log_forget, carry):
        return accumulate_jit(log_forget, starts if cut else None, valid, carry)[0]

    by_gate, by_carry = jax.jacrev(lambda x, c: run(x, c).sum((0, 2)), argnums=(0, 1))(
        log_forget, CARRY
    )
    expected = np.tri(T)
    expected[:, 2] = 0
    if cut:
        expected[4:, :4] = 0
        alone, _ = accumulate_forget(log_forget[:, 4:])
        np.testing.assert_allclose(run(log_forget, CARRY)[:, 4:], alone, rtol=1e-6)
    np.testing.assert_array_equal(by_gate[:, 0, :, 0], expected)
    np.testing.assert_array_equal(by_carry[:, 0, 0], np.arange(T) < (4 if cut else T))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alibi_slopes(0), "heads must be at least 1, got 0"),
        (lambda: alibi_coordinates(X[..., 0], 2), "positions must be integers, got float32"),
        (lambda: score_bias(X[0], X), r"query must be float32 \[B, T, H\], got .* shape \(8, 4\)"),
        (lambda: score_bias(X, X.astype(np.float16)), r"key must be float32 .* got float16"),
        (lambda: score_bias(X, X[..., 1:]), r"agree in batch and heads, got .* \(2, 8, 3\)"),
        (lambda: score_bias(X, np.repeat(X, 2, 0)), "agree in batch and heads"),
        (lambda: fox_log_forget(X, KERNEL[1:]), r"kernel must be \[4, heads\], got .* \(3, 3\)"),
        (lambda: fox_log_forget(X, KERNEL, BIAS[1:]), r"bias must have shape \(3,\), got \(2,\)"),
        (lambda: fox_decay_bias(0, 1.0, 2.0), "heads must be at least 1, got 0"),
        (lambda: fox_decay_bias(2, 0.0, 2.0), "decay times .* got 0.0 and 2.0"),
        (lambda: fox_decay_bias(2, 3.0, 2.0), "decay times .* got 3.0 and 2.0"),
        (lambda: fox_decay_bias(2, 1.0, float("inf")), "decay times .* got 1.0 and inf"),
        (
            lambda: accumulate_forget(jnp.asarray(LOG_FORGET, jnp.bfloat16)),
            "log_forget must be float32, got bfloat16",
        ),
        (lambda: accumulate_forget(LOG_FORGET[0]), r"\[B, T, H\], got shape \(8, 3\)"),
        (lambda: accumulate_forget(LOG_FORGET, NONE[:, 1:]), r"starts must be bool of .*\(2, 8\)"),
        (lambda: accumulate_forget(LOG_FORGET, valid=NONE * 1), "valid must be bool .* got int"),
        (lambda: accumulate_forget(LOG_FORGET, carry=CARRY[:1]), r"carry must have shape \(2, 3\)"),
        (
            lambda: accumulate_forget(LOG_FORGET, carry=CARRY.astype(np.float16)),
            "carry must be float32, got float16",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
