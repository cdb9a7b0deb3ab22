import hypothesis.extra.numpy as hnp
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.positions import (
    learned,
    segment_starts,
    segment_valid,
    sinusoidal,
    token_positions,
)


@pytest.mark.parametrize(("dim", "base"), [(2, 1e4), (16, 1e4), (64, 100.0)])
def test_sinusoids_against_float64(dim, base):
    positions = np.array([[0, 1, 2, 100, 1000], [5, 4, 3, 2, 1]])
    expected = np.zeros((2, 5, dim))
    for i in range(dim // 2):
        angle = positions / base ** (2 * i / dim)
        expected[..., 2 * i], expected[..., 2 * i + 1] = np.sin(angle), np.cos(angle)
    out = sinusoidal(jnp.asarray(positions), dim, base)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(out[1], expected[1], atol=2e-6)


@pytest.mark.parametrize("dim", [7, 0, -2])
def test_sinusoids_come_in_pairs(dim):
    with pytest.raises(ValueError, match=f"dim must be even and at least 2, got {dim}"):
        sinusoidal(jnp.zeros((1, 1), int), dim)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_position_outside_the_table_is_nan(dtype):
    table = jnp.arange(12.0, dtype=dtype).reshape(4, 3)
    rows = learned(jnp.asarray([[0, 3, 4, -1, 1000, 1]]), table)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows[0, jnp.asarray([0, 1, 5])], table[jnp.asarray([0, 3, 1])])
    assert np.isnan(np.asarray(rows[0, 2:5], np.float32)).all()


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.int32, (2, 8), elements=st.integers(0, 3)),
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
    st.lists(st.integers(0, 99), min_size=2, max_size=2),
    st.integers(1, 7),
)
def test_segments_against_a_loop(ids, previous, carry, cut):
    starts, positions = np.zeros((2, 8), bool), np.zeros((2, 8), int)
    for b in range(2):
        segment, count = previous[b], carry[b]
        for t in range(8):
            if ids[b, t] != 0:
                starts[b, t] = ids[b, t] != segment
                segment = ids[b, t]
            count = 0 if starts[b, t] else count
            positions[b, t] = count
            count += ids[b, t] != 0
    ids, previous = jnp.asarray(ids), jnp.asarray(previous)
    found, valid = segment_starts(ids, previous), segment_valid(ids)
    np.testing.assert_array_equal(found, starts)
    np.testing.assert_array_equal(valid, ids != 0)
    np.testing.assert_array_equal(
        segment_starts(ids)[:, 0], (ids != 0)[:, 0], err_msg="a row's first token starts a segment"
    )
    carry = jnp.asarray(carry, jnp.int32)
    whole, after = token_positions(ids.shape, found, valid, carry)
    np.testing.assert_array_equal(whole, positions)
    # In two chunks, the same.
    parts = []
    for part in (slice(0, cut), slice(cut, 8)):
        shape = ids[:, part].shape
        counted, carry = token_positions(shape, found[:, part], valid[:, part], carry)
        parts.append(counted)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), positions)
    np.testing.assert_array_equal(carry, after)


def test_positions_without_flags_are_a_count():
    positions, after = token_positions((2, 3), carry=jnp.asarray([0, 5]))
    np.testing.assert_array_equal(positions, [[0, 1, 2], [5, 6, 7]])
    np.testing.assert_array_equal(after, [3, 8])
    np.testing.assert_array_equal(token_positions((1, 2))[0], [[0, 1]])
