"""The devices as a mesh."""

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh

from carope_jax.models import MESH_AXES


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are laid out; one axis may be -1: all devices that are left."""

    data: int = -1
    """Replicas of the model, each with a part of the batch."""
    fsdp: int = 1
    """Shards of the parameters and optimizer state, which are gathered where needed; each takes a
    part of the batch as well."""
    tensor: int = 1
    """Shards of each layer: heads, feed-forward and vocabulary."""
    context: int = 1
    """Shards of each sequence."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        for name in MESH_AXES:
            if getattr(self, name) < 1 and getattr(self, name) != -1:
                raise ValueError(f"mesh {name} must be positive or -1, got {getattr(self, name)}")
        if [getattr(self, name) for name in MESH_AXES].count(-1) > 1:
            raise ValueError("at most one mesh axis may be -1")


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices (or those given) with the axes `data`, `fsdp`, `tensor` and `context`.

    Raises:
      ValueError: the sizes don't multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, name) for name in MESH_AXES]
    known = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        shape = " x ".join(f"{n} {s}" for n, s in zip(MESH_AXES, sizes, strict=True))
        raise ValueError(f"a mesh of {shape} does not cover {len(devices)} devices")
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(tuple(sizes), MESH_AXES, axis_types=axis_types, devices=devices)
