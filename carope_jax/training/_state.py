"""The training state: what a checkpoint holds, and where its arrays live."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from carope_jax.data import Rows
from carope_jax.models import Decoder, ModelConfig, Sharding


class TrainState(NamedTuple):
    """What an update takes and returns.

    Attributes:
      step: updates done, int32 [].
      params: trained arrays, nested dicts by name.
      constants: the model's other arrays (a frozen control's weights), never updated.
      optimizer: optax's state.
    """

    step: Any
    params: dict[str, Any]
    constants: dict[str, Any]
    optimizer: optax.OptState


class Model(NamedTuple):
    """A decoder without its arrays: a pure function of them, and where they live."""

    graph: nnx.GraphDef[Decoder]
    sharding: Sharding
    params: dict[str, Any]
    """ShapeDtypeStructs with shardings."""
    constants: dict[str, Any]
    """The same."""

    def merge(self, params: dict[str, Any], constants: dict[str, Any]) -> Decoder:
        """The decoder with these arrays."""
        return nnx.merge(self.graph, params, constants)

    @property
    def parameters(self) -> int:
        """How many trained numbers it has."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def abstract_model(config: ModelConfig, mesh: Mesh) -> Model:
    """The decoder of a resolved config on a mesh, nothing computed.

    Raises:
      ValueError: a parameter does not divide over the mesh.
    """
    sharding = Sharding(mesh)
    decoder = nnx.eval_shape(lambda: Decoder(config, sharding=sharding, rngs=nnx.Rngs(0)))
    graph, *states = nnx.split(decoder, nnx.Param, ...)
    params, constants = states
    return Model(graph, sharding, _placed(params, sharding), _placed(constants, sharding))


def _placed(variables: nnx.State, sharding: Sharding) -> dict[str, Any]:
    return jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        nnx.to_pure_dict(variables),
        nnx.to_pure_dict(sharding.of_variables(variables)),
    )


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and shardings of the training state: the optimizer's follow the parameters'."""
    everywhere = model.sharding.named(())
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)

    def like(shape: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=param.sharding)

    optimizer_state = optax.tree.map_params(
        optimizer,
        like,
        jax.eval_shape(optimizer.init, model.params),
        model.params,
        transform_non_params=lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere),
    )
    return TrainState(step, model.params, model.constants, optimizer_state)


def initial_state(
    config: ModelConfig, model: Model, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """The state before the first update, made where it will live. The mesh changes no number."""

    def make() -> TrainState:
        decoder = Decoder(config, sharding=model.sharding, rngs=nnx.Rngs(params=seed))
        _, *states = nnx.split(decoder, nnx.Param, ...)
        params, constants = states
        trained = nnx.to_pure_dict(params)
        return TrainState(
            jnp.zeros((), jnp.int32), trained, nnx.to_pure_dict(constants), optimizer.init(trained)
        )

    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(model, optimizer))
    return jax.jit(make, out_shardings=shardings)()


def batch_shapes(
    model: Model, batch_size: int, length: int, rows: Rows = "stream"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a training batch; packed rows have segment ids.

    Raises:
      ValueError: the batch or the sequence does not divide over the mesh.
    """
    ways = model.sharding.ways("batch")
    if batch_size % ways:
        raise ValueError(f"batch_size {batch_size} does not divide over {ways} devices")
    context = model.sharding.ways("time")
    if context > 1 and length % (2 * context):
        raise ValueError(
            f"length {length} is not a multiple of {2 * context}: the mesh's context {context} "
            "takes two chunks of each sequence a device"
        )
    where = model.sharding.named(("batch", "time"))
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32, sharding=where)
    names = ("inputs", "targets", "segment_ids") if rows == "packed" else ("inputs", "targets")
    return dict.fromkeys(names, tokens)
