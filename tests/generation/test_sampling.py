import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.generation import SamplingConfig, TextStream, sample

ROWS = 4000


def draws(logits, temperature, top_p):
    keys = jax.random.split(jax.random.key(0), ROWS)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (ROWS, len(logits)))
    return np.bincount(sample(rows, keys, temperature, top_p), minlength=len(logits)) / ROWS


def test_draws_have_the_tempered_probabilities():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    for temperature in (1.0, 0.5, 2.0):
        expected = np.exp(logits / temperature)
        np.testing.assert_allclose(
            draws(logits, temperature, 1.0), expected / expected.sum(), atol=0.03
        )
    np.testing.assert_array_equal(draws(logits[::-1], 0.0, 1.0), [0, 0, 0, 1])


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.49, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.95, 4), (1e-6, 1)]
)
def test_the_nucleus_is_the_smallest_set_of_that_probability(top_p, kept):
    # Binary fractions, so that the sums the edges are compared with are exact.
    shares, order = np.array([0.5, 0.25, 0.1875, 0.0625]), [2, 0, 3, 1]
    found = draws(np.log(shares)[order], 1.0, top_p)[np.argsort(order)]
    expected = np.where(np.arange(4) < kept, shares, 0)
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.03)
    assert not found[kept:].any()


@settings(max_examples=8, deadline=None)
@given(hnp.arrays(np.float32, (3, 6), elements=st.floats(-5, 5, width=32)), st.floats(0.01, 1))
def test_a_rows_draw_is_its_own_and_never_an_excluded_token(logits, top_p):
    logits[:, 4:] = -np.inf
    keys = jax.random.split(jax.random.key(1), 3)
    together = sample(jnp.asarray(logits), keys, 0.7, top_p)
    for row in range(3):
        alone = sample(jnp.asarray(logits[row : row + 1]), keys[row : row + 1], 0.7, top_p)
        assert alone[0] == together[row] < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or above, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or above, got nan"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"seed": -1}, "seed must be 0 or above, got -1"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**options)


def decode_bytes(tokens):
    return bytes(tokens).decode(errors="replace")


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=12), st.text(max_size=12))
def test_streamed_text_is_the_whole_text(prompt, text):
    stream = TextStream(decode_bytes, list(prompt.encode()))
    pieces = [stream.push(token) for token in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    # Only whole characters are given out.
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_cut_short_is_given_out_at_the_end():
    stream = TextStream(decode_bytes, [])
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == "\ufffd"
