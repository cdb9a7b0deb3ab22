"""The loss of next tokens from the model's last activations, without all of their logits.

The logits of a few tokens at a time are made, used and forgotten, so no [B, T, V] array exists.
Where the loss is differentiated its gradient is made in the same pass, for a cotangent of 1: it
takes the three matrix products that it takes with all logits at hand, and none twice.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from carope_jax.models._sharding import Sharding

# B batch, T time, D model, V vocabulary, C tokens of a chunk; V and D a device's part of them.

_LOGITS = 2**26
"""How many logits a device holds at a time by default: 256 MiB in float32."""


class Head(NamedTuple):
    """The output projection, logits = x table^T + bias.

    Attributes:
      table: float32.
      bias: float32; None: 0.
    """

    table: Float[Array, "V D"]
    bias: Float[Array, " V"] | None = None


class HeadOptions(NamedTuple):
    """What a loss is compiled for.

    Attributes:
      sharding: where activations and the projection live.
      chunk: tokens a device makes logits of at a time; None: as many as give 256 MiB.
    """

    sharding: Sharding
    chunk: int | None = None

    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes over which tokens are split."""
        rules = self.sharding.rules
        return () if self.sharding.mesh is None else (*(rules.batch or ()), *(rules.time or ()))

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes over which a logical axis is split."""
        return () if self.sharding.mesh is None else getattr(self.sharding.rules, name) or ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed_nll(
    options: HeadOptions,
    x: Float[Array, "B T D"],
    head: Head,
    targets: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """Summed negative log-likelihood of the targets that count, in float32 nats.

    Args:
      options: where it is computed, and how much of it at a time.
      x: the model's last activations, in the compute type that the projection is cast to.
      head: the output projection.
      targets: below the vocabulary's size.
      counted: which targets count.

    Returns:
      The sum. Differentiable once, in reverse mode, in `x` and `head`.
    """
    return jnp.where(counted, each_nll(options, x, head, targets), 0).sum()


def each_nll(
    options: HeadOptions, x: Float[Array, "B T D"], head: Head, targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target, the arguments those of `summed_nll`."""

    def local(x_BTD: Array, head: Head, targets_BT: Array) -> Array:
        head = _gathered(options, head, x_BTD.dtype)
        chunks = _chunks(options, head, x_BTD, targets_BT)
        nll = lax.map(lambda part: _chunk(options, head, *part)[0], chunks)
        return nll.reshape(-1)[: targets_BT.size].reshape(targets_BT.shape)

    specs = _specs(options)
    function = options.sharding.on_each_device(local, in_specs=specs[:3], out_specs=specs[2])
    return function(x, head, targets)


def _forward(
    options: HeadOptions, x: Array, head: Head, targets: Array, counted: Array
) -> tuple[Array, tuple[Array, Head]]:
    def local(x_BTD: Array, stored: Head, targets_BT: Array, counted_BT: Array) -> tuple:
        head = _gathered(options, stored, x_BTD.dtype)

        def add(sums: tuple, part: tuple) -> tuple[tuple, Array]:
            total, table_bar_VD, bias_bar_V = sums
            x_CD, targets_C, counted_C = part
            nll_C, logits_bar_CV = _chunk(options, head, x_CD, targets_C)
            logits_bar_CV = jnp.where(counted_C[:, None], logits_bar_CV, 0)
            if bias_bar_V is not None:
                bias_bar_V += logits_bar_CV.sum(0)
            logits_bar_CV = logits_bar_CV.astype(x_CD.dtype)
            x_bar_CD = lax.psum(_dot(logits_bar_CV, head.table, 1, 0), options.axes("vocab"))
            table_bar_VD += _dot(logits_bar_CV, x_CD, 0, 0)
            total += jnp.where(counted_C, nll_C, 0).sum()
            return (total, table_bar_VD, bias_bar_V), x_bar_CD.astype(x_CD.dtype)

        zeros = (
            jnp.zeros(()),
            jnp.zeros(head.table.shape),
            None if head.bias is None else jnp.zeros(head.bias.shape),
        )
        chunks = _chunks(options, head, x_BTD, targets_BT, counted_BT)
        (total, table_bar_VD, bias_bar_V), x_bar = lax.scan(add, zeros, chunks)
        width = x_BTD.shape[-1]
        x_bar_BTD = x_bar.reshape(-1, width)[: targets_BT.size].reshape(x_BTD.shape)
        # Summed over the devices once, and cut as the table is stored.
        for axis in options.axes("embed"):
            table_bar_VD = lax.psum_scatter(table_bar_VD, axis, scatter_dimension=1, tiled=True)
        rest = tuple(a for a in options.token_axes() if a not in options.axes("embed"))
        table_bar_VD = lax.psum(table_bar_VD, rest)
        if bias_bar_V is not None:
            bias_bar_V = lax.psum(bias_bar_V, options.token_axes())
        total = lax.psum(total, options.token_axes())
        return total, x_bar_BTD, Head(table_bar_VD, bias_bar_V)

    specs = _specs(options)
    function = options.sharding.on_each_device(
        local, in_specs=(*specs, specs[2]), out_specs=(options.sharding.spec(()), *specs[:2])
    )
    total, *gradients = function(x, head, targets, counted)
    return total, tuple(gradients)


def _backward(options: HeadOptions, gradients: tuple[Array, Head], cotangent: Array) -> tuple:
    scaled = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
    return *scaled, None, None


summed_nll.defvjp(_forward, _backward)


def _specs(options: HeadOptions) -> tuple:
    """Of x, the head and the targets."""
    spec = options.sharding.spec
    head: Any = Head(*map(spec, (("vocab", "embed"), ("vocab",))))  # type: ignore[arg-type]
    return spec(("batch", "time", None)), head, spec(("batch", "time"))


def _gathered(options: HeadOptions, head: Head, dtype: jnp.dtype) -> Head:
    """The projection in the compute type, whole but for the shards of the vocabulary."""
    table_VD = head.table.astype(dtype)
    for axis in options.axes("embed"):
        table_VD = lax.all_gather(table_VD, axis, axis=1, tiled=True)
    return head._replace(table=table_VD)


def _chunks(options: HeadOptions, head: Head, x_BTD: Array, *of_tokens: Array) -> tuple:
    """[number, C, ...] of each array's tokens, filled up with zeros."""
    tokens = math.prod(x_BTD.shape[:2])
    most = options.chunk or max(1, _LOGITS // head.table.shape[0])
    number = -(-tokens // most)
    size = -(-tokens // number)

    def cut(x: Array) -> Array:
        x = x.reshape(tokens, *x.shape[2:])
        if number * size != tokens:
            x = jnp.pad(x, ((0, number * size - tokens), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(number, size, *x.shape[1:])

    return tuple(cut(x) for x in (x_BTD, *of_tokens))


def _chunk(options: HeadOptions, head: Head, x_CD: Array, targets_C: Array) -> tuple[Array, Array]:
    """Each token's loss, and its gradient: softmax less one at the target."""
    axes = options.axes("vocab")
    logits_CV = _dot(x_CD, head.table, 1, 1)
    if head.bias is not None:
        logits_CV += head.bias
    top_C, here_C = logits_CV.max(-1), targets_C
    if axes:
        top_C = lax.pmax(top_C, axes)
        here_C = targets_C - lax.axis_index(axes) * logits_CV.shape[1]
    total_C = lax.psum(jnp.exp(logits_CV - top_C[:, None]).sum(-1), axes)
    log_sum_C = jnp.log(total_C) + top_C
    # One of the vocabulary's shards has the target.
    place_C = jnp.clip(here_C, 0, logits_CV.shape[1] - 1)
    picked_C = jnp.take_along_axis(logits_CV, place_C[:, None], axis=1)[:, 0]
    picked_C = lax.psum(jnp.where(place_C == here_C, picked_C, 0), axes)
    is_target_CV = jnp.arange(logits_CV.shape[1]) == here_C[:, None]
    # Made again rather than kept from the sum: one pass over the logits less.
    return log_sum_C - picked_C, jnp.exp(logits_CV - log_sum_C[:, None]) - is_target_CV


def _dot(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    dimensions = (((axis_of_a,), (axis_of_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
