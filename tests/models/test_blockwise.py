"""Attention tile by tile against the dense one, on one device and over a sharded sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from carope_jax.models import MESH_AXES, Sharding, blockwise_attention
from carope_jax.models import _blockwise as blockwise
from carope_jax.models._ring import owners
from carope_jax.positions import score_bias

B, H, K, N = 2, 4, 2, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(blockwise, "_TILE", 8)


def on_mesh(*sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return Sharding(jax.make_mesh(sizes, MESH_AXES, axis_types=axis_types, devices=devices))


def arrays(length, *, packed, biased, dtype=jnp.float32):
    rng = np.random.default_rng(length)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(B, length, heads, N)), dtype) for heads in (H, K, K, H)
    )
    ids = np.sort(rng.integers(0, 4, (B, length)), axis=1)[:, ::-1] if packed else None
    coordinate = jnp.asarray(rng.normal(size=(B, length, H)), jnp.float32) if biased else None
    return q, k, v, coordinate, None if ids is None else jnp.asarray(ids, jnp.int32), weight


def dense(q, k, v, coordinate, ids):
    mask = None if ids is None else (ids[:, None, :, None] == ids[:, None, None])
    bias = None if coordinate is None else score_bias(coordinate, coordinate)
    return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, is_causal=True)


def value_and_gradients(attention, q, k, v, coordinate, ids, weight):
    def loss(q, k, v, coordinate):
        out = attention(q, k, v, coordinate, ids)
        return (out * weight).astype(jnp.float32).sum(), out

    wanted = (0, 1, 2) if coordinate is None else (0, 1, 2, 3)
    both = jax.jit(jax.value_and_grad(loss, argnums=wanted, has_aux=True))
    (_, out), gradients = both(q, k, v, coordinate)
    return out, *gradients


CASES = [
    ((1, 1, 1, 1), 24, False, False),
    ((1, 1, 1, 1), 13, True, True),
    ((1, 1, 1, 2), 32, True, False),
    ((1, 1, 1, 4), 56, True, True),
    ((1, 1, 1, 8), 32, True, True),
    ((1, 1, 1, 3), 30, False, False),
    ((1, 2, 2, 2), 24, True, True),
]


@pytest.mark.parametrize(("mesh", "length", "packed", "biased"), CASES)
def test_it_is_the_dense_attention(mesh, length, packed, biased):
    sharding = None if mesh == (1, 1, 1, 1) else on_mesh(*mesh)

    def ours(q, k, v, coordinate, ids):
        return blockwise_attention(
            q, k, v, segment_ids=ids, coordinate=coordinate, sharding=sharding
        )

    given = arrays(length, packed=packed, biased=biased)
    wanted = value_and_gradients(dense, *given)
    for found, expected in zip(value_and_gradients(ours, *given), wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())


def test_bfloat16_keeps_its_sums_in_float32():
    given = arrays(64, packed=False, biased=False, dtype=jnp.bfloat16)
    exact = value_and_gradients(
        dense, *(None if x is None else x.astype(jnp.float32) for x in given)
    )

    def ours(q, k, v, coordinate, ids):
        return blockwise_attention(q, k, v)

    for found, expected in zip(value_and_gradients(ours, *given), exact, strict=True):
        assert found.dtype == jnp.bfloat16
        error = np.linalg.norm(found.astype(jnp.float32) - expected)
        assert error < 6e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("ways", [2, 3, 4, 8])
def test_every_device_gets_an_early_and_a_late_chunk(ways):
    even, odd = owners(ways)
    for pairs in (even, odd):
        assert sorted(to for _, to in pairs) == list(range(ways))
    held = {r: [] for r in range(ways)}
    for chunk_of, pairs in ((0, even), (1, odd)):
        for r, to in pairs:
            held[to].append(2 * r + chunk_of)
    assert all(sorted(chunks) == [r, 2 * ways - 1 - r] for r, chunks in held.items())
