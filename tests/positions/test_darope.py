import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carope_jax.positions import (
    Scaling,
    darope_coordinate,
    darope_phases,
    fast_pairs,
    rope_frequencies,
    rope_phases,
)

B, T, D, K, DIM, BASE, LENGTH = 2, 6, 4, 3, 16, 1e4, 64
rng = np.random.default_rng(0)
X = rng.normal(size=(B, T, D)).astype(np.float32)
KERNEL = rng.normal(size=(D, K)).astype(np.float32)
PRIOR = np.float32([0.5, 1.0, -0.3])
POSITIONS = np.array([[0, 1, 31, 62, 63, 5], [64, 1000, -1, -7, 2**30, 2]], np.int32)


def coordinate_by_loop(x, kernel, prior, positions, length):
    out = np.zeros((*x.shape[:2], kernel.shape[1]))
    for b, t, h in np.ndindex(out.shape):
        place = np.clip(positions[b, t] + 0.5, 1e-6 * length, (1 - 1e-6) * length) / length
        logit = np.float64(x[b, t]) @ kernel[:, h] + prior[h] * np.log(place / (1 - place))
        out[b, t, h] = length / (1 + np.exp(-logit))
    return out


@pytest.mark.parametrize(
    ("dim", "base", "length"), [(16, 1e4, 64), (64, 1e4, 512), (128, 5e5, 8192), (8, 10.0, 6)]
)
def test_fast_bands_complete_a_turn_within_the_length(dim, base, length):
    turns = [base ** (-2 * j / dim) * length / (2 * np.pi) for j in range(dim // 2)]
    fast = fast_pairs(dim, base, length)
    assert all(turn >= 1 for turn in turns[:fast])
    assert all(turn < 1 for turn in turns[fast:])


@pytest.mark.parametrize("length", [LENGTH, 2_000_000])
def test_coordinates_against_float64(length):
    coordinate = darope_coordinate(X, KERNEL, PRIOR, POSITIONS, length)
    assert coordinate.dtype == jnp.float32
    expected = coordinate_by_loop(X, KERNEL, PRIOR, POSITIONS, length)
    np.testing.assert_allclose(coordinate, expected, rtol=1e-5)
    assert ((coordinate >= 0) & (coordinate <= length)).all()


def test_coordinates_are_float32_whatever_x_is_and_saturate_at_the_ends():
    low = jnp.asarray(X, jnp.bfloat16)
    np.testing.assert_array_equal(
        darope_coordinate(low, KERNEL, PRIOR, POSITIONS, LENGTH),
        darope_coordinate(low.astype(jnp.float32), KERNEL, PRIOR, POSITIONS, LENGTH),
    )
    ends = darope_coordinate(
        np.float32([[[1e6], [-1e6]]]), np.ones((1, 1), np.float32), PRIOR[:1], np.arange(2)[None], 9
    )
    np.testing.assert_array_equal(ends[0, :, 0], [9, 0])


def test_without_content_it_is_rope_half_a_token_on_within_the_training_length():
    length = 512
    positions = np.arange(length)[None]
    coordinate = darope_coordinate(
        np.ones((1, length, 1), np.float32),
        np.zeros((1, 1), np.float32),
        np.ones(1, np.float32),
        positions,
        length,
    )
    np.testing.assert_allclose(coordinate[0, :, 0], positions[0] + 0.5, atol=1e-3)
    phases = darope_phases(positions, coordinate, DIM, base=BASE, length=length)
    offset = phases - rope_phases(positions, DIM, base=BASE)
    fast = fast_pairs(DIM, BASE, length)
    np.testing.assert_array_equal(offset[..., :fast], np.zeros((1, length, 1, fast)))
    # rope_phases are modulo one turn, the slow ones here are not.
    half_a_token = np.broadcast_to(
        rope_frequencies(DIM, BASE)[0, fast:] / 2, offset[..., fast:].shape
    )
    distance = (offset[..., fast:] - half_a_token + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(distance).max() < 1e-5


@pytest.mark.parametrize("factor", [None, np.linspace(1, 0.25, DIM // 2).astype(np.float32)])
def test_fast_bands_are_ropes_and_slow_ones_the_coordinates(factor):
    scaling = None if factor is None else Scaling(jnp.asarray(factor))
    coordinate = rng.uniform(0, LENGTH, (B, T, K)).astype(np.float32)
    options = {"base": BASE, "length": LENGTH, "scaling": scaling}
    phases = darope_phases(POSITIONS, jnp.asarray(coordinate), DIM, **options)
    rope = rope_phases(POSITIONS, DIM, base=BASE, scaling=scaling)
    assert fast_pairs(DIM, BASE, LENGTH) == 3
    np.testing.assert_array_equal(phases[..., :3], np.repeat(rope[..., :3], K, axis=2))
    frequencies = BASE ** (-np.arange(0, DIM, 2) / DIM) * (1 if factor is None else factor)
    expected = np.float64(coordinate)[..., None] * frequencies[3:]
    np.testing.assert_allclose(phases[..., 3:], expected, rtol=1e-6)
    assert phases[..., 3:].max() < 2 * np.pi
    hope = darope_phases(POSITIONS, None, DIM, **options)
    np.testing.assert_array_equal(hope[..., :3], rope[..., :3])
    np.testing.assert_array_equal(hope[..., 3:], np.zeros((B, T, 1, DIM // 2 - 3)))


@pytest.mark.parametrize("length", [6, 10**6])
def test_all_bands_slow_or_fast(length):
    coordinate = jnp.ones((B, T, K))
    phases = darope_phases(POSITIONS[:1], coordinate, DIM, base=BASE, length=length)
    frequencies, rope = rope_frequencies(DIM, BASE)[0], rope_phases(POSITIONS[:1], DIM, base=BASE)
    expected = frequencies if length == 6 else rope
    np.testing.assert_array_equal(phases, np.broadcast_to(expected, phases.shape))


def test_gradients_stay_with_their_token_and_are_finite():
    positions = POSITIONS[1:]

    def slow(x, kernel, prior):
        coordinate = darope_coordinate(x, kernel, prior, positions, LENGTH)
        return darope_phases(positions, coordinate, DIM, base=BASE, length=LENGTH)[0].sum((1, 2))

    by_x, by_kernel, by_prior = jax.jit(jax.jacrev(slow, argnums=(0, 1, 2)))(X[:1], KERNEL, PRIOR)
    for gradient in (by_x, by_kernel, by_prior):
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0.01
    touched = (np.asarray(by_x)[:, 0] != 0).any(axis=-1)
    np.testing.assert_array_equal(touched, np.eye(T, dtype=bool))


ONES = np.ones((B, T, K), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fast_pairs(7, BASE, LENGTH), "even and at least 2, got 7"),
        (lambda: fast_pairs(8, 0.0, LENGTH), "base must be positive, got 0"),
        (lambda: fast_pairs(8, BASE, 0), "length must be at least 1, got 0"),
        (
            lambda: darope_coordinate(X, KERNEL[1:], PRIOR, POSITIONS, LENGTH),
            r"kernel must be \[4, kv_heads\], got shape \(3, 3\)",
        ),
        (
            lambda: darope_coordinate(X, KERNEL, PRIOR[1:], POSITIONS, LENGTH),
            r"prior must have shape \(3,\), got \(2,\)",
        ),
        (
            lambda: darope_coordinate(X, KERNEL, PRIOR, POSITIONS * 1.0, LENGTH),
            "positions must be integers, got float",
        ),
        (
            lambda: darope_coordinate(X, KERNEL, PRIOR, POSITIONS[:, 1:], LENGTH),
            r"positions must have shape \(2, 6\) or \(1, 6\), got \(2, 5\)",
        ),
        (
            lambda: darope_coordinate(X, KERNEL, PRIOR, POSITIONS, 0),
            "length must be at least 1, got 0",
        ),
        (
            lambda: darope_phases(POSITIONS, ONES.astype(np.float16), DIM, length=LENGTH),
            "coordinate must be float32, got float16",
        ),
        (
            lambda: darope_phases(POSITIONS, ONES[0], DIM, length=LENGTH),
            r"coordinate must be \[B, T, K\], got shape \(6, 3\)",
        ),
        (
            lambda: darope_phases(POSITIONS[:, 1:], ONES, DIM, length=LENGTH),
            r"positions must have shape \(2, 6\)",
        ),
        (
            lambda: darope_phases(POSITIONS * 1.0, None, DIM, length=LENGTH),
            "positions must be integers, got float",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
