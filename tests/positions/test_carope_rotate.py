import jax
import jax.numpy as jnp
import numpy as np
import pytest
from phase_reference import rotated

from carope_jax.positions import Scaling, accumulate, carope_increments, carope_rotate, rotate

B, T, H, K, N = 2, 7, 4, 2, 8
P = N // 2
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


Q, KEYS, LOG_F = normal(B, T, H, N), normal(B, T, K, N), -jnp.exp(normal(B, T, K))
FREE_LOG_F = -jnp.exp(normal(B, T, K, P))
Q_BAR, K_BAR = normal(B, T, H, N), normal(B, T, K, N)
SEGMENTS = {
    "starts": jnp.asarray(rng.random((B, T)) < 0.3),
    "valid": jnp.asarray(rng.random((B, T)) < 0.8),
    "carry": jnp.asarray(rng.integers(0, 2**32, (B, K, P), dtype=np.uint32)),
}
SCALING = Scaling(jnp.asarray([1, 0.7, 0.3, 0.25]), 1.3)


def in_steps(q, k, log_f, *, layout="half", scaling=None, **options):
    """The same by its public pieces, with JAX's own derivative of the rotation."""
    names = ("exponent", "first_exponent")
    increments = carope_increments(
        log_f, P, scaling=scaling, **{n: options.pop(n) for n in names if n in options}
    )
    phases, carry = accumulate(increments, **options)
    factor = 1 if scaling is None else scaling.attention_factor
    return factor * rotate(q, phases, layout), factor * rotate(k, phases, layout), carry


@pytest.mark.parametrize(
    "options",
    [
        {},
        SEGMENTS | {"inclusive": False, "layout": "interleaved", "scaling": SCALING},
        {"exponent": "free", "valid": SEGMENTS["valid"]},
        {"exponent": "shared", "scaling": SCALING},
        {"first_exponent": 1, "starts": SEGMENTS["starts"]},
    ],
    ids=lambda options: "+".join(options) or "default",
)
def test_one_call_equals_its_steps(options):
    log_f = FREE_LOG_F if options.get("exponent") == "free" else LOG_F

    def values_and_gradients(function):
        def loss(q, k, log_f):
            q, k, carry = function(q, k, log_f, **options)
            return (q * Q_BAR).sum() + (k * K_BAR).sum(), (q, k, carry)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)

    @jax.jit
    def both(*inputs):
        return [values_and_gradients(f)(*inputs) for f in (carope_rotate, in_steps)]

    ((_, (q, k, carry)), gradients), ((_, (q2, k2, carry2)), gradients2) = both(Q, KEYS, log_f)
    np.testing.assert_array_equal(carry, carry2)
    for ours, steps in zip((q, k, *gradients), (q2, k2, *gradients2), strict=True):
        np.testing.assert_allclose(ours, steps, rtol=1e-5, atol=1e-5)
    assert np.abs(gradients[2]).max() > 0.1


def test_rotation_against_float64():
    increments = np.exp(np.asarray(LOG_F, np.float64)[..., None] * np.arange(P))
    phases = np.cumsum(increments, axis=1)
    q, k, _ = jax.jit(carope_rotate)(Q, KEYS, LOG_F)
    np.testing.assert_allclose(q, rotated(Q, phases, "half"), atol=1e-5)
    np.testing.assert_allclose(k, rotated(KEYS, phases, "half"), atol=1e-5)


def test_bfloat16_queries_have_float32_phases():
    low = jax.jit(jax.value_and_grad(_energy, argnums=(0, 1, 2), has_aux=True))
    q, k = Q.astype(jnp.bfloat16), KEYS.astype(jnp.bfloat16)
    (_, (low_q, low_k, carry)), gradients = low(q, k, LOG_F)
    (_, (high_q, high_k, high_carry)), high_gradients = low(
        q.astype(jnp.float32), k.astype(jnp.float32), LOG_F
    )
    np.testing.assert_array_equal(carry, high_carry)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for out, high in ((low_q, high_q), (low_k, high_k)):
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(out, high.astype(jnp.bfloat16))
    for ours, high in zip(gradients, high_gradients, strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float32) - high) / np.linalg.norm(high)
        assert error < 0.01


def _energy(q, k, log_f):
    out = carope_rotate(q, k, log_f)
    q, k = (x.astype(jnp.float32) for x in out[:2])
    return (q * Q_BAR).sum() + (k * K_BAR).sum(), out


def test_gradients_of_gradients():
    def curvature(function):
        def loss(log_f):
            q, k, _ = function(Q[:1, :3], KEYS[:1, :3], log_f)
            return jnp.sum(jnp.sin(q)) + jnp.sum(jnp.cos(k))

        return jax.jacrev(jax.grad(loss))

    ours, steps = jax.jit(lambda x: (curvature(carope_rotate)(x), curvature(in_steps)(x)))(
        LOG_F[:1, :3]
    )
    assert np.abs(steps).max() > 0.1
    np.testing.assert_allclose(ours, steps, atol=5e-5)


def test_the_backward_pass_keeps_no_phases():
    time = 11  # a size nothing else has
    q, k, log_f = normal(1, time, H, N), normal(1, time, K, N), -jnp.ones((1, time, K))
    kept = jax.eval_shape(lambda *a: jax.vjp(lambda *b: carope_rotate(*b)[:2], *a)[1], q, k, log_f)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(kept))
    assert shapes == sorted([q.shape, k.shape, log_f.shape])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": Q[..., :7]}, ValueError, "even and at least 2, got 7"),
        ({"q": Q[:, :, :3]}, ValueError, "2 key/value heads do not divide 3 heads"),
        ({"k": Q}, ValueError, "log_frequency has 2 heads, k has 4"),
        ({"layout": "other"}, ValueError, "layout must be one of .* 'other'"),
        ({"exponent": "other"}, ValueError, "exponent must be one of .* 'other'"),
        ({"first_exponent": -1}, ValueError, "first_exponent must be 0 or 1, got -1"),
        ({"log_frequency": FREE_LOG_F}, ValueError, "for exponent='power', got shape"),
        ({"log_frequency": LOG_F.astype(jnp.float16)}, ValueError, "float32, got float16"),
        ({"starts": jnp.ones((B, 1), bool)}, ValueError, "starts must be bool of shape"),
        ({"carry": jnp.zeros((B, K, P))}, ValueError, "carry must be uint32, got float32"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        carope_rotate(**({"q": Q, "k": KEYS, "log_frequency": LOG_F} | arguments))
