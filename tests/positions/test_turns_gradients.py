import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from phase_reference import sum_matrix

from carope_jax.positions import accumulate

T = 7
flags = hnp.arrays(bool, T)


def phases_of(increments_T, starts, valid, inclusive):
    return accumulate(
        increments_T[None, :, None, None], starts[None], valid[None], inclusive=inclusive
    )[0].ravel()


@jax.jit
def jacobians(increments, starts, valid):
    """By both modes, inclusive and not."""
    return [
        [mode(lambda x, i=i: phases_of(x, starts, valid, i))(increments) for i in (True, False)]
        for mode in (jax.jacrev, jax.jacfwd)
    ]


@settings(max_examples=40, deadline=None)
@given(flags, flags)
def test_the_jacobian_is_exactly_the_sum(starts, valid):
    # Every entry exact: causality, nothing across a segment's start, nothing from padding.
    increments = np.linspace(-3, 2, T, dtype=np.float32)
    for by_mode in jacobians(increments, starts, valid):
        for inclusive, jacobian in zip((True, False), by_mode, strict=True):
            np.testing.assert_array_equal(jacobian, sum_matrix(starts, valid, inclusive))


@pytest.mark.parametrize("inclusive", [True, False])
def test_without_segments_the_jacobian_is_triangular(inclusive):
    def phases(increments):
        return accumulate(increments[None, :, None, None], inclusive=inclusive)[0].ravel()

    expected = np.tril(np.ones((T, T)), 0 if inclusive else -1)
    np.testing.assert_array_equal(jax.jit(jax.jacrev(phases))(jnp.ones(T)), expected)
    np.testing.assert_array_equal(jax.jit(jax.jacfwd(phases))(jnp.ones(T)), expected)


STARTS = np.array([1, 0, 0, 1, 0, 0, 0], bool)
VALID = np.array([0, 1, 1, 1, 1, 0, 1], bool)


def curved(phases, x):
    """A scalar with second derivatives, of the phases and of what they came from."""
    return jnp.sum(jnp.sin(phases) * jnp.arange(1.0, T + 1) + 0.1 * phases * x)


def of_accumulated(x):
    return curved(phases_of(jnp.tanh(x) ** 2, STARTS, VALID, True), x)


def of_dense(x):
    matrix = jnp.asarray(sum_matrix(STARTS, VALID, True), jnp.float32)
    return curved(jnp.matmul(matrix, jnp.tanh(x) ** 2, precision="highest"), x)


X = jnp.asarray(np.random.default_rng(0).normal(size=T), jnp.float32)


def test_gradient_matches_float64_differences():
    matrix = sum_matrix(STARTS, VALID, True)

    def value(x):
        phases = matrix @ np.tanh(x) ** 2
        return np.sum(np.sin(phases) * np.arange(1, T + 1) + 0.1 * phases * x)

    x, step = np.asarray(X, np.float64), 1e-6
    steps = step * np.eye(T)
    numeric = [(value(x + s) - value(x - s)) / (2 * step) for s in steps]
    np.testing.assert_allclose(jax.jit(jax.grad(of_accumulated))(X), numeric, rtol=2e-5, atol=2e-5)


@jax.jit
def hessians(x):
    return {
        "dense": jax.hessian(of_dense)(x),
        "forward over reverse": jax.jacfwd(jax.grad(of_accumulated))(x),
        "reverse over reverse": jax.jacrev(jax.grad(of_accumulated))(x),
        "reverse over forward": jax.jacrev(jax.jacfwd(of_accumulated))(x),
    }


def test_gradients_of_gradients():
    results = hessians(X)
    dense = results.pop("dense")
    assert np.abs(dense).max() > 0.1
    for name, value in results.items():
        np.testing.assert_allclose(value, dense, atol=2e-5, err_msg=name)


@jax.jit
def transformed_gradients(rows):
    def of_scan(rows):
        return jax.lax.scan(lambda sum, x: (sum + of_accumulated(x), None), 0.0, rows)[0]

    return {
        "vmap of grad": jax.vmap(jax.grad(of_accumulated))(rows),
        "grad of scan": jax.grad(of_scan)(rows),
        "remat": jax.vmap(jax.grad(jax.checkpoint(of_accumulated)))(rows),
    }


def test_gradients_under_vmap_scan_and_remat():
    rows = jnp.stack([X, -X, 2 * X])
    one = jax.jit(jax.grad(of_accumulated))
    each = np.stack([one(row) for row in rows])
    for name, value in transformed_gradients(rows).items():
        np.testing.assert_allclose(value, each, rtol=1e-5, atol=1e-5, err_msg=name)


def test_flags_and_carry_may_be_mapped_and_have_no_gradient():
    carry = jnp.full((3, 1, 1, 1), 2**31, jnp.uint32)
    starts = jnp.zeros((3, 1, T), bool)
    increments = jnp.ones((3, 1, T, 1, 1))

    def total(increments, starts, carry):
        return accumulate(increments, starts, None, carry)[0].sum()

    gradient = jax.jit(jax.vmap(jax.grad(total)))(increments, starts, carry)
    np.testing.assert_array_equal(gradient[:, 0, :, 0, 0], [np.arange(T, 0, -1)] * 3)
