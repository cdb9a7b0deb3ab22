import itertools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.positions import rope_frequencies, selective_increments, selective_temperature

B, T, K, P, W = 2, 8, 2, 3, 3
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


PROJECTED, KERNEL, TEMPERATURE, BIAS = (
    normal(B, T, K, P),
    normal(W, K, P),
    normal(K, P),
    normal(K, P),
)
WINDOW, GATE = normal(B, W - 1, K, P), rng.uniform(0.1, 0.9, (B, T, K, 1)).astype(np.float32)
NONE = np.zeros((B, T), bool)
flags = hnp.arrays(bool, (B, T))


def reference(projected, kernel, temperature, gate, bias, activation, starts, valid, window):
    """(increments, window) by a loop that remembers each row's segment, in float64."""
    width = kernel.shape[0]
    out, after = np.zeros(projected.shape), np.zeros(window.shape)
    for b in range(len(projected)):
        # The latest token first.
        seen = [row.astype(np.float64) for row in window[b][::-1]]
        for t in range(projected.shape[1]):
            if starts[b, t]:
                seen = []
            if not valid[b, t]:
                continue
            seen.insert(0, projected[b, t].astype(np.float64))
            angle = sum(kernel[j] * seen[j] for j in range(min(width, len(seen))))
            if activation == "silu":
                angle = angle / (1 + np.exp(-angle))
            if bias is not None:
                angle = angle + np.exp(np.float64(bias))
            out[b, t] = temperature * (1.0 if gate is None else gate[b, t]) * angle
        for j in range(min(width - 1, len(seen))):
            after[b, width - 2 - j] = seen[j]
    return out, after


@pytest.mark.parametrize(
    ("width", "activation", "gate", "bias", "temperature"),
    [
        (3, "none", None, None, TEMPERATURE),
        (3, "silu", GATE, BIAS, TEMPERATURE),
        (1, "none", normal(B, T, K, P), None, TEMPERATURE[0]),
        (2, "none", None, BIAS, TEMPERATURE[0]),
    ],
)
@settings(max_examples=8, deadline=None)
@given(starts=flags, valid=flags)
def test_increments_equal_a_loop(width, activation, gate, bias, temperature, starts, valid):
    kernel, window = KERNEL[:width], WINDOW[:, W - width :]
    options = {"gate": gate, "bias": bias, "activation": activation}
    increments, after = selective_increments(
        PROJECTED, kernel, temperature, starts=starts, valid=valid, window=window, **options
    )
    assert increments.dtype == after.dtype == jnp.float32
    expected, expected_after = reference(
        PROJECTED, kernel, temperature, gate, bias, activation, starts, valid, window
    )
    np.testing.assert_allclose(increments, expected, atol=1e-5)
    np.testing.assert_array_equal(after, expected_after.astype(np.float32))


def test_what_is_left_out_is_none_of_it():
    plain, after = selective_increments(PROJECTED, KERNEL, TEMPERATURE)
    full, full_after = selective_increments(
        PROJECTED,
        KERNEL,
        TEMPERATURE,
        gate=np.ones((B, T, K, 1), np.float32),
        starts=NONE,
        valid=~NONE,
        window=np.zeros_like(WINDOW),
    )
    np.testing.assert_array_equal(plain, full)
    np.testing.assert_array_equal(after, full_after)
    np.testing.assert_array_equal(after, PROJECTED[:, 1 - W :])


@settings(max_examples=10, deadline=None)
@given(flags, flags, st.permutations([1, 1, 2, 4]))
def test_any_chunking_gives_the_same_bits(starts, valid, sizes):
    def run(a, b, window):
        return selective_increments(
            PROJECTED[:, a:b],
            KERNEL,
            TEMPERATURE,
            gate=GATE[:, a:b],
            bias=BIAS,
            activation="silu",
            starts=starts[:, a:b],
            valid=valid[:, a:b],
            window=window,
        )

    whole, whole_after = run(0, T, WINDOW)
    pieces, after = [], WINDOW
    for a, b in itertools.pairwise(np.cumsum([0, *sizes])):
        piece, after = run(a, b, after)
        pieces.append(piece)
    np.testing.assert_array_equal(
        np.concatenate(pieces, axis=1).view(np.uint32), np.asarray(whole).view(np.uint32)
    )
    np.testing.assert_array_equal(after, whole_after)


def test_padding_is_as_if_it_were_not_there():
    tokens = np.array([1, 2, 4, 7])
    valid = np.zeros((B, T), bool)
    valid[:, tokens] = True
    alone, after = selective_increments(PROJECTED[:, tokens], KERNEL, TEMPERATURE, window=WINDOW)
    padded = np.where(valid[..., None, None], PROJECTED, np.nan)
    among, among_after = selective_increments(
        padded, KERNEL, TEMPERATURE, valid=valid, window=WINDOW
    )
    np.testing.assert_array_equal(among[:, tokens], alone)
    np.testing.assert_array_equal(among_after, after)
    assert not np.asarray(among)[~valid].any()


def test_gradients_are_causal_within_segments_and_finite_beside_padding():
    starts, valid = NONE.copy(), ~NONE
    starts[:, 4] = True
    valid[:, [1, 6]] = False
    gate = np.where(valid[..., None, None], GATE, np.nan)
    projected = np.where(valid[..., None, None], PROJECTED, np.nan)

    def run(projected, kernel, temperature, gate, bias, window):
        out, _ = selective_increments(
            projected, kernel, temperature, gate=gate, bias=bias, starts=starts, valid=valid,
            activation="silu", window=window,
        )  # fmt: skip
        return out.sum(axis=(0, 2, 3))

    inputs = (projected, KERNEL, TEMPERATURE, gate, BIAS, WINDOW)
    by_token, *of_weights, by_window = jax.jit(jax.jacrev(run, argnums=range(6)))(*inputs)
    for gradient in (by_token, *of_weights, by_window):
        assert np.isfinite(gradient).all()
    # Which tokens an increment depends on: of its segment, not later, the nearest W valid ones.
    depends = (np.asarray(by_token) != 0).all(axis=(1, 3, 4))
    none = (np.asarray(by_token) == 0).all(axis=(1, 3, 4))
    reach = {0: [0], 2: [0, 2], 3: [0, 2, 3], 4: [4], 5: [4, 5], 7: [4, 5, 7]}
    for t in range(T):
        expected = np.isin(np.arange(T), reach.get(t, []))
        np.testing.assert_array_equal(depends[t], expected)
        np.testing.assert_array_equal(none[t], ~expected)
    np.testing.assert_array_equal(
        (np.asarray(by_window) != 0).all(axis=(1, 3, 4)),
        [[True, True], [False, False], [False, True]] + [[False, False]] * 5,
    )


def test_temperatures():
    np.testing.assert_array_equal(selective_temperature(4), rope_frequencies(8, 5e5)[0])
    expected = [0.25 * 100.0 ** (-2 * i / 6) for i in range(3)]
    np.testing.assert_allclose(selective_temperature(3, 100.0, 0.25), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projected": PROJECTED[0]}, r"projected must be \[B, T, K, P\], got shape \(8, 2, 3\)"),
        ({"projected": jnp.asarray(PROJECTED, jnp.bfloat16)}, "projected must be float32, got bf"),
        ({"kernel": KERNEL[0]}, r"kernel must be \[W, 2, 3\], got shape \(2, 3\)"),
        ({"kernel": KERNEL[:0]}, r"kernel must be \[W, 2, 3\], got shape \(0, 2, 3\)"),
        ({"kernel": KERNEL.astype(np.int32)}, "kernel must be of a float dtype, got int32"),
        ({"temperature": TEMPERATURE[:1]}, r"temperature must have shape \(3,\) or \(2, 3\), got"),
        ({"gate": GATE[..., 0]}, r"gate must have shape .* got \(2, 8, 2\)"),
        ({"bias": BIAS[0]}, r"bias must have shape \(2, 3\), got \(3,\)"),
        ({"window": WINDOW[:, 1:]}, r"window must have shape \(2, 2, 2, 3\), got \(2, 1, 2, 3\)"),
        ({"window": WINDOW.astype(np.float16)}, "window must be float32, got float16"),
        ({"activation": "relu"}, "activation must be one of .* got 'relu'"),
        ({"starts": NONE[:, 1:]}, r"starts must be bool of shape \(2, 8\)"),
        ({"valid": NONE.astype(np.int32)}, "valid must be bool .* got int32"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    given_ = {"projected": PROJECTED, "kernel": KERNEL, "temperature": TEMPERATURE} | arguments
    with pytest.raises(ValueError, match=message):
        selective_increments(**given_)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": 0}, "pairs must be at least 1, got 0"),
        ({"pairs": 2, "base": 0.0}, "base must be positive, got 0"),
        ({"pairs": 2, "maximum": -1.0}, "maximum must be positive, got -1"),
    ],
)
def test_wrong_temperatures_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        selective_temperature(**arguments)
