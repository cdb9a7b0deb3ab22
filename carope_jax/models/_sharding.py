"""Where arrays live: logical axes, one table from them to the mesh's axes, and constraints."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

MESH_AXES = ("data", "fsdp", "tensor", "context")
"""The mesh's axes: replicas of the model, shards of the parameters, of a layer, of the sequence."""


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Which mesh axes each logical axis is split over; None: not split.

    `embed` is the width as a parameter has it, `width` as an activation does.
    """

    batch: tuple[str, ...] | None = ("data", "fsdp")
    time: tuple[str, ...] | None = ("context",)
    width: tuple[str, ...] | None = None
    embed: tuple[str, ...] | None = ("fsdp",)
    heads: tuple[str, ...] | None = ("tensor",)
    kv_heads: tuple[str, ...] | None = ("tensor",)
    mlp: tuple[str, ...] | None = ("tensor",)
    vocab: tuple[str, ...] | None = ("tensor",)
    head_dim: tuple[str, ...] | None = None
    pairs: tuple[str, ...] | None = None
    length: tuple[str, ...] | None = None
    layers: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh and the rules that place arrays on it. Without a mesh, everything is left alone."""

    mesh: Mesh | None = None
    rules: AxisRules = AxisRules()

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(None if a is None else getattr(self.rules, a) for a in axes))

    def named(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """The sharding of an array with these logical axes.

        Raises:
          ValueError: there is no mesh.
        """
        if self.mesh is None:
            raise ValueError("a sharding needs a mesh")
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Tells the compiler where an activation lives."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.named(axes))

    @property
    def time_axis(self) -> str | None:
        """The mesh axis over which the sequence is sharded; None: over none.

        Raises:
          ValueError: the rules shard it over several.
        """
        if self.mesh is None:
            return None
        axes = [axis for axis in self.rules.time or () if self.mesh.shape[axis] > 1]
        if len(axes) > 1:
            raise ValueError(f"time may be sharded over one mesh axis, not over {axes}")
        return axes[0] if axes else None

    def on_each_device(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """The function of each device's parts; it is not differentiated through."""
        if self.mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def of_variables(self, variables: nnx.State) -> nnx.State:
        """A NamedSharding for each variable, from the logical axes it was made with.

        Raises:
          ValueError: a dimension does not divide over its mesh axes; the variable is named.
        """
        flat = []
        for path, variable in nnx.to_flat_state(variables):
            name = "/".join(map(str, path))
            axes = logical_axes(variable)
            for size, axis in zip(variable.shape, axes, strict=True):
                if size % self.ways(axis):
                    raise ValueError(
                        f"{name}: axis {axis!r} of size {size} does not divide "
                        f"over the mesh's {self.ways(axis)} devices"
                    )
            flat.append((path, self.named(axes)))
        return nnx.from_flat_state(flat)

    def ways(self, axis: str | None) -> int:
        """Over how many devices a logical axis is split."""
        mesh_axes = () if axis is None else getattr(self.rules, axis) or ()
        return math.prod(self.mesh.shape[a] for a in mesh_axes) if self.mesh is not None else 1


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """A variable's logical axes; stacked layers have one more in front."""
    axes = tuple(variable.get_metadata("axes"))
    return ("layers",) * (len(variable.shape) - len(axes)) + axes
