import itertools
from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phase_reference import (
    FLOAT32_ANGLE,
    RADIANS_A_UNIT,
    angle_between,
    integer_sums,
    units_off,
)

from carope_jax.positions import accumulate, to_radians, to_turns

B, T, K, P = 2, 12, 2, 3
to_turns_jit = jax.jit(to_turns)
accumulate_jit = jax.jit(accumulate, static_argnames=("axis_name", "inclusive"))

magnitudes = st.floats(float(np.float32(1e-12)), 1.6e7, width=32)
angles = st.one_of(magnitudes, magnitudes.map(lambda x: -x))
flags = hnp.arrays(bool, (B, T))
carries = hnp.arrays(np.uint32, (B, K, P))
increment_seeds = st.integers(0, 2**32 - 1)


def random_increments(seed, time=T):
    """Of every size, either sign."""
    rng = np.random.default_rng(seed)
    shape = (B, time, K, P)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 3, size=shape)).astype(np.float32)


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, 16, elements=angles))
def test_turns_are_within_half_a_unit_of_the_exact_product(radians):
    for value, turns in zip(radians, np.asarray(to_turns_jit(radians)), strict=True):
        assert units_off(turns, value) <= 0.507


def test_turns_are_exact_over_all_magnitudes():
    rng = np.random.default_rng(0)
    radians = np.exp(rng.uniform(np.log(1e-12), np.log(1.6e7), 4096)).astype(np.float32)
    radians *= rng.choice([-1, 1], 4096).astype(np.float32)
    turns = np.asarray(to_turns_jit(radians))
    assert max(map(units_off, turns, radians)) <= 0.507


def test_turns_of_zero_and_of_opposite_angles():
    radians = np.exp(np.linspace(-25, 16, 4096, dtype=np.float32))
    turns = np.asarray(to_turns_jit(radians))
    np.testing.assert_array_equal(to_turns_jit(-radians), np.uint32(0) - turns)
    assert not to_turns_jit(np.zeros(16, np.float32)).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_only_float32_angles_are_taken(dtype):
    with pytest.raises(ValueError, match=f"float32, got {jnp.dtype(dtype).name}"):
        to_turns(jnp.ones(3, dtype))
    with pytest.raises(
        ValueError, match=f"increments must be float32, got {jnp.dtype(dtype).name}"
    ):
        accumulate(jnp.ones((B, T, K, P), dtype))


@given(hnp.arrays(np.uint32, 16))
@settings(deadline=None, max_examples=30)
def test_radians_of_turns(turns):
    radians = np.asarray(to_radians(jnp.asarray(turns)))
    assert (np.abs(radians) <= np.float32(np.pi)).all()
    assert angle_between(radians, turns * RADIANS_A_UNIT).max() <= FLOAT32_ANGLE


@pytest.mark.parametrize("kind", ["random", "constant", "signed"])
def test_a_million_tokens_stay_within_the_stated_error(kind):
    length = 2**20
    rng = np.random.default_rng(3)
    if kind == "constant":
        increments = np.tile(np.float32([[1.0, 0.7071, 1e-4]]), (length, 1))
    else:
        low = -1 if kind == "signed" else 0
        increments = rng.uniform(low, 1, (length, 3)).astype(np.float32)
    phases = np.asarray(accumulate_jit(increments[None, :, None])[0][0, :, 0])
    errors = angle_between(phases, np.cumsum(increments.astype(np.float64), axis=0))
    tokens = np.arange(1, length + 1)[:, None]
    assert (errors <= tokens * 0.507 * RADIANS_A_UNIT + FLOAT32_ANGLE).all()
    if kind != "constant":
        # Independent roundings grow like a square root: the linear bound alone hides a bias.
        assert errors.max() < 6e-6


@pytest.mark.parametrize("inclusive", [True, False])
@settings(max_examples=40, deadline=None)
@given(increment_seeds, flags, flags, carries)
def test_sums_equal_an_integer_loop(inclusive, seed, starts, valid, carry):
    increments = random_increments(seed)
    phases, after = accumulate_jit(increments, starts, valid, carry, inclusive=inclusive)
    turns = np.asarray(to_turns_jit(increments))
    expected, expected_after = integer_sums(turns, starts, valid, carry, inclusive)
    same_bits(phases, to_radians(jnp.asarray(expected)))
    same_bits(after, expected_after)


@pytest.mark.parametrize("inclusive", [True, False])
@settings(max_examples=15, deadline=None)
@given(increment_seeds, flags, flags, carries, st.permutations([1, 1, 1, 3, 6]))
def test_any_chunking_gives_the_same_bits(inclusive, seed, starts, valid, carry, sizes):
    increments = random_increments(seed)
    whole, whole_after = accumulate_jit(increments, starts, valid, carry, inclusive=inclusive)
    pieces, after = [], carry
    edges = np.cumsum([0, *sizes])
    for a, b in itertools.pairwise(edges):
        piece, after = accumulate_jit(
            increments[:, a:b], starts[:, a:b], valid[:, a:b], after, inclusive=inclusive
        )
        pieces.append(piece)
    same_bits(jnp.concatenate(pieces, axis=1), whole)
    same_bits(after, whole_after)


@pytest.mark.parametrize("inclusive", [True, False])
def test_packed_documents_equal_separate_ones(inclusive):
    increments = random_increments(5)
    edges = [0, 4, 8, T]
    starts = np.zeros((B, T), bool)
    starts[:, edges[:-1]] = True
    packed, after = accumulate_jit(increments, starts, inclusive=inclusive)
    for a, b in itertools.pairwise(edges):
        alone, alone_after = accumulate_jit(increments[:, a:b], inclusive=inclusive)
        same_bits(packed[:, a:b], alone)
    same_bits(after, alone_after)


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_adds_nothing(side, inclusive):
    increments = random_increments(6)
    alone, alone_after = accumulate_jit(increments, inclusive=inclusive)
    # Whatever stands at padding, a NaN too, must not matter.
    padding = np.full((B, 4, K, P), np.nan, np.float32)
    parts = [padding, increments] if side == "left" else [increments, padding]
    valid = np.ones((B, T + 4), bool)
    tokens = slice(4, None) if side == "left" else slice(0, T)
    valid[:, :4] = side != "left"
    valid[:, T:] = valid[:, T:] & (side != "right")
    phases, after = accumulate_jit(np.concatenate(parts, axis=1), valid=valid, inclusive=inclusive)
    same_bits(phases[:, tokens], alone)
    same_bits(after, alone_after)
    assert np.isfinite(phases).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**24, -(2.0**24), 3e38])
def test_what_no_phase_can_hold_is_nan_at_its_token(bad):
    increments = random_increments(7)
    increments[1, 4, 0, 2] = bad
    phases = np.asarray(accumulate_jit(increments)[0])
    assert np.argwhere(np.isnan(phases)).tolist() == [[1, 4, 0, 2]]


def test_the_largest_angles_are_held():
    increments = random_increments(7)
    increments[0, 3] = np.nextafter(np.float32(2**24), np.float32(0))
    increments[1, 4] = -increments[0, 3]
    assert np.isfinite(accumulate_jit(increments)[0]).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"increments": jnp.ones((B, T, P))},
            ValueError,
            r"\[B, T, K, P\], got shape \(2, 12, 3\)",
        ),
        (
            {"starts": jnp.ones((B, T + 1), bool)},
            ValueError,
            r"starts must be bool of shape \(2, 12\)",
        ),
        ({"starts": jnp.ones((B, T), jnp.int32)}, ValueError, "starts must be bool .* got int32"),
        ({"valid": jnp.ones((1, T), bool)}, ValueError, "valid must be bool"),
        ({"carry": jnp.zeros((B, K, P), jnp.int32)}, ValueError, "carry must be uint32, got int32"),
        (
            {"carry": jnp.zeros((B, P, K), jnp.uint32)},
            ValueError,
            r"carry must have shape \(2, 2, 3\)",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    call = partial(accumulate, **({"increments": jnp.ones((B, T, K, P))} | arguments))
    with pytest.raises(error, match=message):
        call()
