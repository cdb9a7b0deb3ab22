import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phase_reference import FLOAT32_ANGLE, RADIANS_A_UNIT, angle_between, rotated, units_off

from carope_jax.positions import (
    Scaling,
    accumulate,
    linear_scaling,
    rope_frequencies,
    rope_phases,
    rotate,
    to_turns,
)

B, T, H, K, N = 2, 5, 4, 2, 8
rotate_jit = jax.jit(rotate, static_argnums=2)
rope_phases_jit = jax.jit(rope_phases, static_argnums=1, static_argnames="base")
to_turns_jit = jax.jit(to_turns)
rng = np.random.default_rng(0)
X = rng.normal(size=(B, T, H, N)).astype(np.float32)
PHASES = rng.uniform(-np.pi, np.pi, (B, T, K, N // 2)).astype(np.float32)


@pytest.mark.parametrize(("dim", "base"), [(16, 1e4), (64, 1e4), (128, 5e5), (64, 2.08e7), (2, 10)])
def test_frequencies_are_float64_powers_rounded_once(dim, base):
    expected = np.float32([base ** (-2 * i / dim) for i in range(dim // 2)])
    np.testing.assert_array_equal(rope_frequencies(dim, base), expected[None])


def test_a_base_a_head():
    bases = np.float32([100.0, 1e4, 5e5])
    expected = np.concatenate([rope_frequencies(16, float(b)) for b in bases])
    frequencies = rope_frequencies(16, jnp.asarray(bases))
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    phases = rope_phases(jnp.arange(7)[None], 16, base=jnp.asarray(bases))
    assert angle_between(phases, np.arange(7)[None, :, None, None] * expected).max() < 1e-5


@pytest.mark.parametrize(("head_dim", "base"), [(16, 1e4), (64, 2.08e7)])
def test_phases_are_bitwise_the_sums_of_constant_increments(head_dim, base):
    length = 300
    frequencies = rope_frequencies(head_dim, base)

    @jax.jit
    def both(frequencies):
        positions = jnp.arange(1, length + 1)[None]
        increments = jnp.broadcast_to(frequencies, (1, length, 1, head_dim // 2))
        return rope_phases(positions, head_dim, frequencies=frequencies), accumulate(increments)[0]

    multiplied, summed = both(frequencies)
    np.testing.assert_array_equal(multiplied, summed)
    named = rope_phases_jit(jnp.arange(1, length + 1)[None], head_dim, base=base)
    np.testing.assert_array_equal(named, summed)


@pytest.mark.parametrize(("head_dim", "base"), [(16, 1e4), (128, 5e5)])
def test_phases_against_float64(head_dim, base):
    positions = np.array([[0, 1, 2, 511, 1024, 4095, -3, -1000]])
    phases = np.asarray(rope_phases_jit(jnp.asarray(positions), head_dim, base=base))[0, :, 0]
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    # A frequency's rounding to float32 grows with the position, as in any RoPE.
    allowed = FLOAT32_ANGLE + np.abs(positions[0])[:, None] * (
        2.0**-25 * frequencies * 2 + 0.507 * RADIANS_A_UNIT
    )
    assert (angle_between(phases, positions[0][:, None] * frequencies) <= allowed).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 7))
def test_phases_are_exact_at_every_position(position, pair):
    frequency = np.asarray(rope_frequencies(16))[0, pair]
    phase = np.asarray(rope_phases_jit(jnp.full((1, 1), position), 16))[0, 0, 0, pair]
    turns = round(float(phase) / RADIANS_A_UNIT)
    error = units_off(turns, frequency, times=position)
    assert error <= abs(position) * 0.507 + FLOAT32_ANGLE / RADIANS_A_UNIT
    exact = position * int(to_turns_jit(jnp.full(1, frequency))[0]) * RADIANS_A_UNIT
    assert angle_between(phase, exact) <= FLOAT32_ANGLE + 1e-15 * abs(exact)


def test_scaling_multiplies_the_frequencies():
    positions = jnp.arange(64)[None]
    stretched = rope_phases(4 * positions, 16, scaling=linear_scaling(4, 8))
    assert angle_between(stretched, rope_phases(positions, 16)).max() < 1e-6
    factor = jnp.asarray([1, 0.5, 1, 1, 1, 1, 1, 0.25])
    np.testing.assert_array_equal(
        rope_phases(positions, 16, scaling=Scaling(factor)),
        rope_phases(positions, 16, frequencies=rope_frequencies(16) * factor),
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [N // 2, 1])
def test_rotation_against_complex_numbers(layout, pairs):
    phases = PHASES[..., :pairs]
    out = rotate_jit(X, phases, layout)
    np.testing.assert_allclose(out, rotated(X, phases, layout), atol=2e-6)
    np.testing.assert_array_equal(out[..., 2 * pairs :], X[..., 2 * pairs :])
    np.testing.assert_allclose(np.linalg.norm(out, axis=-1), np.linalg.norm(X, axis=-1), rtol=1e-6)


def test_layouts_are_one_permutation_apart():
    order = np.arange(N).reshape(2, N // 2).T.ravel()  # half's features in interleaved's order
    np.testing.assert_allclose(
        rotate_jit(X[..., order], PHASES, "interleaved"),
        np.asarray(rotate_jit(X, PHASES, "half"))[..., order],
        atol=1e-6,
    )


def test_a_query_group_shares_its_heads_phases():
    grouped = rotate_jit(X, PHASES, "half")
    repeated = rotate_jit(X, np.repeat(PHASES, H // K, axis=2), "half")
    np.testing.assert_array_equal(grouped, repeated)


def test_one_row_of_phases_serves_every_row():
    repeated = rotate_jit(X, np.repeat(PHASES[:1], B, axis=0), "half")
    np.testing.assert_array_equal(rotate_jit(X, PHASES[:1], "half"), repeated)


def test_scores_depend_on_distance_alone():
    q, k = X[:1, :1], X[1:, :1]

    def score(m, n):
        a, b = (
            np.asarray(rotate_jit(x, rope_phases_jit(jnp.full((1, 1), p), N), "half"))
            for x, p in ((q, m), (k, n))
        )
        return (a * b).sum(-1)

    reference = score(7, 3)
    assert np.abs(reference - score(8, 3)).max() > 0.01
    for shift in (-5, 1000, 2**20):
        # 2^-33 turn of rounding a token is in both phases, and cancels.
        np.testing.assert_allclose(score(7 + shift, 3 + shift), reference, atol=1e-5)


def test_bfloat16_is_turned_in_float32():
    x = jnp.asarray(X, jnp.bfloat16)
    out = rotate_jit(x, PHASES, "half")
    assert out.dtype == jnp.bfloat16
    expected = rotate_jit(x.astype(jnp.float32), PHASES, "half").astype(jnp.bfloat16)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rope_frequencies(7), ValueError, "even and at least 2, got 7"),
        (lambda: rope_frequencies(0), ValueError, "even and at least 2, got 0"),
        (lambda: rope_frequencies(8, -1.0), ValueError, "base must be positive, got -1.0"),
        (lambda: rope_frequencies(8, float("nan")), ValueError, "base must be positive, got nan"),
        (lambda: rope_phases(jnp.ones((1, 2)), 8), ValueError, "integers, got float32"),
        (lambda: rope_phases(jnp.ones((1, 2), int), 7), ValueError, "at least 2, got 7"),
        (
            lambda: rope_phases(jnp.ones((1, 2), int), 8, frequencies=jnp.ones((1, 3))),
            ValueError,
            "head_dim 8 has 4 pairs, got frequencies of 3",
        ),
        (lambda: linear_scaling(0.5, 4), ValueError, "at least 1, got 0.5"),
        (lambda: linear_scaling(float("nan"), 4), ValueError, "at least 1, got nan"),
        (lambda: rotate(X, PHASES.astype(jnp.bfloat16)), ValueError, "float32, got bfloat16"),
        (lambda: rotate(X, PHASES, "halves"), ValueError, "layout must be one of .* 'halves'"),
        (
            lambda: rotate(X[:, :, :3], PHASES),
            ValueError,
            "2 key/value heads do not divide 3 heads",
        ),
        (
            lambda: rotate(X[..., :6], PHASES),
            ValueError,
            "4 rotary pairs do not fit a head dim of 6",
        ),
        (lambda: rotate(X[0], PHASES), ValueError, r"\[B, T, H, N\], got shape \(5, 4, 8\)"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
