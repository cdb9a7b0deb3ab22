"""The matmul that content-dependent encodings take their logits from."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# B batch, T time, D model.


def project(x: Float[Array, "B T D"], kernel: Float[Array, " D *X"]) -> Float[Array, "B T *X"]:
    """x W over the last axis of x and the first of the kernel, in float32."""
    batch, time, dim = x.shape
    outputs = kernel.shape[1:]
    # Tokens are flattened for the CPU's sake; the highest precision because a phase sums these.
    return jnp.matmul(
        x.reshape(batch * time, dim).astype(jnp.float32),
        kernel.reshape(dim, math.prod(outputs)).astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    ).reshape(batch, time, *outputs)
