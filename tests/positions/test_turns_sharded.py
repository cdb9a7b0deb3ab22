from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from carope_jax.positions import accumulate, carope_rotate

SHARDS, B, K, P = 8, 2, 2, 3
T = 3 * SHARDS
TIME = PartitionSpec(None, "time")
WHOLE = PartitionSpec()


def over_time(function, in_specs, out_specs):
    mesh = jax.make_mesh((SHARDS,), ("time",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def flags(rng):
    """Shards with no start, with one and with several; a shard of padding alone."""
    starts, valid = rng.random((B, T)) < 0.15, rng.random((B, T)) < 0.8
    starts[0, 6:15] = False
    valid[1, 9:12] = False
    return jnp.asarray(starts), jnp.asarray(valid)


def arrays(seed):
    rng = np.random.default_rng(seed)
    starts, valid = flags(rng)
    return {
        "increments": jnp.asarray(rng.normal(size=(B, T, K, P)) * 3, jnp.float32),
        "weights": jnp.asarray(rng.normal(size=(B, T, K, P)), jnp.float32),
        "carry": jnp.asarray(rng.integers(0, 2**32, (B, K, P), dtype=np.uint32)),
        "starts": starts,
        "valid": valid,
    }


@pytest.mark.parametrize("segmented", [True, False], ids=["segmented", "one segment"])
@pytest.mark.parametrize("inclusive", [True, False])
def test_sums_over_a_sharded_time_axis(inclusive, segmented):
    a = arrays(0)
    segments = (a["starts"], a["valid"]) if segmented else (None, None)

    def local(increments, segments, carry, axis_name=None):
        phases, after = accumulate(
            increments, *segments, carry, axis_name=axis_name, inclusive=inclusive
        )
        return phases, after[None]

    one_device = local
    sharded = over_time(
        partial(local, axis_name="time"),
        (TIME, TIME, WHOLE),
        (TIME, PartitionSpec("time")),
    )

    @partial(jax.jit, static_argnums=0)
    def phases_and_gradient(function, increments):
        def loss(x):
            phases, after = function(x, segments, a["carry"])
            return (jnp.sin(phases) * a["weights"]).sum(), (phases, after)

        (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(increments)
        return *out, gradient

    phases, after, gradient = phases_and_gradient(one_device, a["increments"])
    their_phases, their_after, their_gradient = phases_and_gradient(sharded, a["increments"])
    np.testing.assert_array_equal(their_phases, phases)
    np.testing.assert_array_equal(their_after[-1], after[0])
    np.testing.assert_allclose(their_gradient, gradient, atol=1e-5)
    # The two agree on which gradients are nothing at all, too.
    np.testing.assert_array_equal(their_gradient == 0, gradient == 0)
    assert (gradient == 0).any() == (segmented or not inclusive)


def test_rotation_over_a_sharded_time_axis():
    a = arrays(1)
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(B, T, 2 * K, 2 * P)), jnp.float32)
    k = jnp.asarray(rng.normal(size=(B, T, K, 2 * P)), jnp.float32)
    log_f = -jnp.exp(a["increments"][..., 0] / 3)

    def one_device(q, k, log_f, segments, carry, axis_name=None):
        starts, valid = segments
        return carope_rotate(
            q, k, log_f, starts=starts, valid=valid, carry=carry, axis_name=axis_name
        )[:2]

    sharded = over_time(
        partial(one_device, axis_name="time"), (TIME, TIME, TIME, TIME, WHOLE), (TIME, TIME)
    )

    @partial(jax.jit, static_argnums=0)
    def values_and_gradients(function, q, k, log_f):
        def loss(q, k, log_f):
            out = function(q, k, log_f, (a["starts"], a["valid"]), a["carry"])
            return sum((jnp.sin(x) * (1 + jnp.arange(x.shape[-1]))).sum() for x in out), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, log_f)

    (_, out), gradients = values_and_gradients(one_device, q, k, log_f)
    (_, their_out), their_gradients = values_and_gradients(sharded, q, k, log_f)
    for ours, theirs in zip((*out, *gradients), (*their_out, *their_gradients), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=2e-5)
