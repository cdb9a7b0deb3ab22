"""A 32-bit fingerprint of an array's bits, the same however the array is laid out over devices."""

import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Fingerprints named arrays on the devices that hold them.

    The fingerprint is the sum modulo 2^32 of each element's bits times an odd pseudo-random weight
    that depends on the element's position. Wrapping integer addition is associative, so sharding,
    mesh and process count do not change it. An odd weight is invertible modulo 2^32, so a change
    confined to one element of at most 32 bits always shows; any other change goes unseen with a
    probability of about 2^-32.

    Args:
        arrays: Arrays by name, of any shape and sharding. In a run of several processes every
            process must call this with the same names in the same order.

    Returns:
        The fingerprint of each array, in [0, 2^32). It does not depend on the shape or the type:
        compare those separately.

    Raises:
        ValueError: An array's type has no plain bits to sum (PRNG keys, complex numbers).
    """
    for name, array in arrays.items():
        if not _has_plain_bits(array.dtype):
            raise ValueError(
                f"{name}: arrays of type {array.dtype} can't be fingerprinted; store their parts "
                "(jax.random.key_data for a key, real and imaginary parts for complex numbers)"
            )
    # One at a time: many small programs in flight over simulated devices, each waiting for all of
    # them, were seen to starve one another until XLA gave up and aborted.
    return {name: int(_fingerprint(array)) for name, array in arrays.items()}


def joint_fingerprint(sums: Mapping[str, int]) -> int:
    """One number for several arrays' fingerprints, each weighted by its name, in any order."""
    return sum(value * _weight(name) for name, value in sums.items()) % 2**32


def batch_fingerprint(batch: Mapping[str, jax.Array]) -> jax.Array:
    """The joint fingerprint of a batch's arrays, for use inside a compiled function: uint32 []."""
    total = jnp.zeros((), jnp.uint32)
    for name, array in batch.items():
        total += _fingerprint(array) * jnp.uint32(_weight(name))
    return total


def _weight(name: str) -> int:
    return zlib.crc32(name.encode()) | 1


def _has_plain_bits(dtype: jnp.dtype) -> bool:
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


@jax.jit
def _fingerprint(array: jax.Array) -> jax.Array:
    words = _words(array)
    # The flat index is built an axis at a time: a reshape would gather a sharded array.
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        along_axis = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index += along_axis * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * (_mix(index) | 1), dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """The array's bits as uint32, with a last axis of two where an element has 64 of them."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        bits = jnp.finfo(array.dtype).bits
        array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))
    if array.dtype.itemsize == 8:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return array.astype(jnp.uint32)


def _mix(index: jax.Array) -> jax.Array:
    """Scatters consecutive numbers over uint32 (the 32-bit finalizer of MurmurHash3)."""
    index = (index ^ (index >> 16)) * jnp.uint32(0x85EBCA6B)
    index = (index ^ (index >> 13)) * jnp.uint32(0xC2B2AE35)
    return index ^ (index >> 16)
