"""One update, and the loss of a batch, as pure functions of (state, batch)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array

from carope_jax.training._fingerprint import batch_fingerprint
from carope_jax.training._state import Model, TrainState

# B batch, T time, M micro-batches.

Batch = dict[str, Array]
"""int32 `inputs` and `targets` [B, T]; optionally `segment_ids` (0: padding) and a bool `mask`:
which targets count."""
Metrics = dict[str, Array]


def batch_loss(
    model: Model, params: Any, constants: Any, batch: Batch
) -> tuple[Array, tuple[Array, Metrics]]:
    """Summed loss of the targets that count, in nats.

    Returns:
      (sum, (count, measurements)): the count as an int32, and the encodings' measurements [layers].
    """
    mask_BT = _counted(batch)
    total, measurements = model.merge(params, constants).summed_nll(
        batch["inputs"], batch["targets"], mask_BT, batch.get("segment_ids")
    )
    return total, (mask_BT.sum(dtype=jnp.int32), dict(measurements))


def _counted(batch: Batch) -> Array:
    mask_BT = batch.get("mask", jnp.ones(batch["targets"].shape, bool))
    if "segment_ids" in batch:
        mask_BT = mask_BT & (batch["segment_ids"] != 0)
    return mask_BT


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    micro_batches: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """An update: the gradient of (sum of losses / sum of tokens) over all micro-batches.

    The returned function is pure and not yet jitted. Its metrics: `loss` (nats a token),
    `grad_norm` (before clipping), `learning_rate`, `tokens`, the encodings' measurements, and
    `batch_fingerprint` (uint32), the same on any mesh.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        gradient_of = jax.value_and_grad(
            lambda params, part: batch_loss(model, params, state.constants, part), has_aux=True
        )

        def add(sums: Any, part: Batch) -> tuple[Any, Metrics]:
            (total, (count, measurements)), gradient = gradient_of(state.params, part)
            return jax.tree.map(jnp.add, sums, (total, count, gradient)), measurements

        parts = jax.tree.map(lambda x: _split(model, x, micro_batches), batch)
        zeros = (
            jnp.zeros(()),
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, state.params),
        )
        (total, count, gradient), measurements = jax.lax.scan(add, zeros, parts)
        # No target at all is no reason to divide by nothing.
        tokens = jnp.maximum(count, 1).astype(jnp.float32)
        gradient = jax.tree.map(lambda g: g / tokens, gradient)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        metrics = {
            "loss": total / tokens,
            "grad_norm": optax.tree.norm(gradient),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": count,
            "batch_fingerprint": batch_fingerprint(batch),
            **jax.tree.map(lambda m: m.mean(0), measurements),
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, state.constants, optimizer_state), metrics

    return step


def _split(model: Model, x_BT: Array, micro_batches: int) -> Array:
    """[B, T] as [M, B/M, T], each part taking from every device's rows alike."""
    x_BMT = x_BT.reshape(-1, micro_batches, *x_BT.shape[1:])
    return model.sharding.constrain(jnp.swapaxes(x_BMT, 0, 1), None, "batch", "time")


def compile_step(
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    model: Model,
    state: TrainState,
    batch: dict[str, jax.ShapeDtypeStruct],
) -> jax.stages.Compiled:
    """The update compiled ahead for these shapes; the state's buffers are given to the new one."""
    shardings = jax.tree.map(lambda s: s.sharding, state)
    everywhere = model.sharding.named(())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))
    return jitted.lower(state, batch).compile()


NllOfArrays = Callable[[Any, Any, np.ndarray, np.ndarray], np.ndarray]
"""(params, constants, inputs int32 [B, T], targets int32 [B, T]) -> float32 nats [B, T]."""


def make_nll_function(model: Model) -> NllOfArrays:
    """Each target's loss, for evaluation.

    Compiled once a shape. Rows and last tokens are added where the batch does not divide over the
    mesh, and their losses dropped: they change no other loss, as attention is causal.
    """
    ways = model.sharding.ways("batch")
    context = model.sharding.ways("time")
    chunks = 2 * context if context > 1 else 1
    where = model.sharding.named(("batch", "time"))

    # Every process is handed all of it.
    @functools.partial(jax.jit, out_shardings=model.sharding.named(()))
    def nll(params: Any, constants: Any, inputs: Array, targets: Array) -> Array:
        return model.merge(params, constants).nll(inputs, targets)

    def call(params: Any, constants: Any, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        rows, length = inputs.shape
        fill = ((0, -rows % ways), (0, -length % chunks))
        placed = (_put(np.pad(x, fill), where) for x in (inputs, targets))
        return np.asarray(nll(params, constants, *placed))[:rows, :length]

    return call


def _put(x: np.ndarray, where: NamedSharding) -> Array:
    """Puts what every process has on the devices, each process on its own."""
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])
