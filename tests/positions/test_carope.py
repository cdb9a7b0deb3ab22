import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phase_reference import angle_between, carope_phases

from carope_jax.positions import (
    Scaling,
    accumulate,
    carope_increments,
    carope_log_frequency,
    equivalent_base,
    rope_bias,
)

B, T, D, K, P = 2, 6, 5, 2, 4
rng = np.random.default_rng(0)
X = rng.normal(size=(B, T, D)).astype(np.float32)
KERNEL = rng.normal(size=(D, K)).astype(np.float32)
BIAS = np.float32([-0.5, 1.5])
log_frequency_jit = jax.jit(carope_log_frequency)
increments_jit = jax.jit(
    carope_increments, static_argnums=1, static_argnames=("exponent", "first_exponent")
)


@pytest.mark.parametrize(
    ("head_dim", "bias"), [(16, 2.0400), (32, 0.1636), (64, -0.92666), (128, -1.7873)]
)
def test_the_bias_that_makes_carope_rope(head_dim, bias):
    frequency = 1e4 ** (-2 / head_dim)
    assert rope_bias(frequency) == pytest.approx(bias, abs=6e-5)
    assert 1 / (np.log1p(np.exp(rope_bias(frequency))) + 1) == pytest.approx(frequency, rel=1e-14)


@settings(deadline=None)
@given(st.floats(1e-300, 1 - 1e-9))
def test_the_bias_inverts_the_frequency_and_never_overflows(frequency):
    bias = float(rope_bias(frequency))
    assert np.isfinite(bias)
    assert 1 / (np.logaddexp(0, bias) + 1) == pytest.approx(frequency, rel=1e-9)


@pytest.mark.parametrize("frequency", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_frequencies_no_logit_gives_are_refused(frequency):
    with pytest.raises(ValueError, match=rf"in \(0, 1\), got {frequency}"):
        rope_bias(frequency)
    with pytest.raises(ValueError, match=r"in \(0, 1\)"):
        rope_bias(np.array([0.5, frequency]))


def test_the_bias_of_an_array():
    frequencies = np.array([0.1, 0.9])
    np.testing.assert_array_equal(rope_bias(frequencies), [rope_bias(0.1), rope_bias(0.9)])


@pytest.mark.parametrize(
    ("head_dim", "base"), [(16, 67.5), (32, 4.56e3), (64, 2.08e7), (128, 4.3e14)]
)
def test_the_base_carope_has_as_printed(head_dim, base):
    assert equivalent_base(head_dim) == pytest.approx(base, rel=1e-2)
    assert equivalent_base(head_dim) == pytest.approx((1 + np.log(2)) ** (head_dim / 2), rel=1e-12)
    of_rope = rope_bias(1e4 ** (-2 / head_dim))
    assert equivalent_base(head_dim, float(of_rope)) == pytest.approx(1e4, rel=1e-9)


def test_the_frequency_at_a_logit_of_nothing():
    log_f = log_frequency_jit(X, np.zeros((D, K), np.float32))
    np.testing.assert_allclose(np.exp(log_f), 0.590616, atol=5e-7)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_increments_at_init_are_ropes(head_dim):
    bias = np.full(K, rope_bias(1e4 ** (-2 / head_dim)), np.float32)
    log_f = log_frequency_jit(X, np.zeros((D, K), np.float32), bias)
    increments = np.asarray(increments_jit(log_f, head_dim // 2))
    exact = 1e4 ** (-np.arange(0, head_dim, 2) / head_dim)
    assert np.abs(increments - exact).max() <= 7e-8


@pytest.mark.parametrize("exponent", ["power", "shared", "free"])
def test_extreme_logits_have_finite_gradients(exponent):
    logits = np.float32([-1e4, -1e3, -80, -20, -1, 0, 1, 20, 80, 1e3, 1e4])
    kernel = np.ones((1, 1, 64) if exponent == "free" else (1, 1), np.float32)

    @jax.jit
    def increments_and_gradient(x):
        def total(x):
            increments = carope_increments(carope_log_frequency(x, kernel), 64, exponent=exponent)
            return increments.sum(), increments

        return jax.value_and_grad(total, has_aux=True)(x)

    (_, increments), gradient = increments_and_gradient(logits[None, :, None])
    assert np.isfinite(increments).all()
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(
        increments[0, :, 0, 1], 1 / (np.logaddexp(0, logits.astype(np.float64)) + 1), rtol=1e-6
    )


@pytest.mark.parametrize("exponent", ["power", "free"])
def test_pair_0_is_a_fixed_clock(exponent):
    kernel = np.broadcast_to(KERNEL[..., None], (D, K, P)) if exponent == "free" else KERNEL

    @jax.jit
    def pair_0(kernel):
        log_f = carope_log_frequency(X, kernel)
        return carope_increments(log_f, P, exponent=exponent)[..., 0]

    np.testing.assert_array_equal(pair_0(kernel), np.ones((B, T, K)))
    gradient = jax.grad(lambda kernel: (pair_0(kernel) * X[..., :K]).sum())(kernel)
    np.testing.assert_array_equal(gradient, np.zeros_like(kernel))


@pytest.mark.parametrize(
    ("exponent", "first_exponent", "inclusive", "scaled"),
    [
        ("power", 0, True, False),
        ("power", 1, False, False),
        ("power", 0, False, True),
        ("shared", 0, True, True),
        ("free", 0, True, True),
        ("free", 1, False, False),
    ],
)
def test_phases_against_the_definition(exponent, first_exponent, inclusive, scaled):
    free = exponent == "free"
    kernel = rng.normal(size=(D, K, P)).astype(np.float32) if free else KERNEL
    bias = rng.normal(size=(K, P)).astype(np.float32) if free else BIAS
    factor = np.float32([1, 0.5, 0.3, 0.25]) if scaled else None

    @jax.jit
    def phases(x):
        increments = carope_increments(
            carope_log_frequency(x, kernel, bias),
            P,
            exponent=exponent,
            first_exponent=first_exponent,
            scaling=Scaling(jnp.asarray(factor)) if scaled else None,
        )
        return accumulate(increments, inclusive=inclusive)[0]

    expected = carope_phases(
        X,
        kernel,
        bias,
        P,
        exponent=exponent,
        first_exponent=first_exponent,
        inclusive=inclusive,
        factor=factor,
    )
    assert angle_between(phases(X), expected).max() < 5e-6


def test_log_frequency_is_float32_whatever_x_is():
    x = jnp.asarray(X, jnp.bfloat16)
    out = log_frequency_jit(x, KERNEL.astype(jnp.bfloat16), BIAS)
    assert out.dtype == jnp.float32
    expected = log_frequency_jit(
        x.astype(jnp.float32), KERNEL.astype(jnp.bfloat16).astype(np.float32), BIAS
    )
    np.testing.assert_array_equal(out, expected)


LOG_F = jnp.full((B, T, K), -0.5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: carope_log_frequency(X, KERNEL[1:]),
            ValueError,
            r"kernel must be \[5, kv_heads\] .* got shape \(4, 2\)",
        ),
        (lambda: carope_log_frequency(X, KERNEL[:, 0]), ValueError, r"kernel must be .* \(5,\)"),
        (
            lambda: carope_log_frequency(X, KERNEL, BIAS[:1]),
            ValueError,
            r"bias must have shape \(2,\), got \(1,\)",
        ),
        (
            lambda: carope_increments(LOG_F, P, exponent="powers"),
            ValueError,
            "exponent must be one of .* 'powers'",
        ),
        (
            lambda: carope_increments(LOG_F, P, first_exponent=2),
            ValueError,
            "first_exponent must be 0 or 1, got 2",
        ),
        (
            lambda: carope_increments(LOG_F.astype(jnp.bfloat16), P),
            ValueError,
            "log_frequency must be float32, got bfloat16",
        ),
        (
            lambda: carope_increments(LOG_F, P, exponent="free"),
            ValueError,
            r"\[B, T, K, 4\] for exponent='free', got shape \(2, 6, 2\)",
        ),
        (
            lambda: carope_increments(jnp.zeros((B, T, K, 3)), P, exponent="free"),
            ValueError,
            r"\[B, T, K, 4\] for exponent='free', got shape \(2, 6, 2, 3\)",
        ),
        (
            lambda: carope_increments(jnp.zeros((B, T, K, P)), P),
            ValueError,
            r"\[B, T, K\] for exponent='power', got shape",
        ),
        (lambda: equivalent_base(5), ValueError, "even and at least 2, got 5"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
