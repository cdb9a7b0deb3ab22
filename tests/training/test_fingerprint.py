"""The fingerprint against plain Python integers, over shardings, and against small damage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from carope_jax.training._fingerprint import fingerprints

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint32", "int8", "bool"]


def fingerprint(array: jax.Array) -> int:
    return fingerprints({"x": array})["x"]


def reference(array: np.ndarray) -> int:
    """The definition, an element at a time, in integers that never wrap on their own."""
    bits = array.itemsize * 8
    total = 0
    for index, element in enumerate(array.reshape(-1)):
        word = int.from_bytes(element.tobytes(), "little")
        if array.dtype.kind == "i" and word >> (bits - 1):
            word -= 1 << bits
        weight = index
        weight = (weight ^ (weight >> 16)) * 0x85EBCA6B % 2**32
        weight = (weight ^ (weight >> 13)) * 0xC2B2AE35 % 2**32
        weight = (weight ^ (weight >> 16)) | 1
        total += word * weight
    return total % 2**32


def random_bits(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits at all: NaNs of every payload, infinities, negative zeros."""
    numpy_dtype = np.dtype(jnp.dtype(dtype))
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * numpy_dtype.itemsize
    return np.frombuffer(rng.bytes(count), numpy_dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7,), (3, 5), (2, 3, 4)])
def test_equals_the_definition(dtype, shape):
    array = random_bits(1, shape, dtype)
    assert fingerprint(jnp.asarray(array)) == reference(array)


def test_64_bit_arrays_count_both_halves():
    with jax.enable_x64(True):
        array = jnp.arange(6, dtype=jnp.int64) << 20
        high = array.at[3].add(1 << 40)
        low = array.at[3].add(1)
        real = jnp.asarray(np.array([1.0, np.nextafter(1.0, 2.0)]))
        assert len({fingerprint(x) for x in (array, high, low)}) == 3
        assert fingerprint(real) != fingerprint(jnp.ones_like(real))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(), P("a"), P("b", "a"), P(("a", "b")), P(None, "b")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_sharding_does_not_change_it(axis_type, spec, dtype):
    array = random_bits(2, (16, 24), dtype)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    assert fingerprint(jax.device_put(array, NamedSharding(mesh, spec))) == reference(array)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["float32", "bfloat16", "int8"]))
def test_every_single_bit_shows(data, dtype):
    array = random_bits(data.draw(st.integers(0, 99)), (5, 3), dtype)
    damaged = bytearray(array.tobytes())
    bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    other = np.frombuffer(bytes(damaged), array.dtype).reshape(array.shape)
    assert fingerprint(jnp.asarray(array)) != fingerprint(jnp.asarray(other))


def test_moved_elements_show():
    array = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    changed = [array[::-1], array[:, ::-1], array.T, jnp.roll(array, 1), array.at[4:].set(0)]
    assert len({fingerprint(x) for x in [array, *changed]}) == 6


@pytest.mark.parametrize("array", [jax.random.key(0), jnp.ones(2, jnp.complex64)])
def test_what_has_no_plain_bits_is_named(array):
    with pytest.raises(ValueError, match="params/x: arrays of type"):
        fingerprints({"params/x": array})
