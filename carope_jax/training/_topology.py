"""The devices of a machine that isn't here, to compile for: `v5e:16x16`, `v5p:4x4x4`, `h200:8`."""

import dataclasses
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from carope_jax.training._chips import CHIPS, Chip

_INSTALL_TPU = "pip install 'carope-jax[tpu]' (or `make .venv-tpu/.tpu`)"
_INSTALL_GPU = "pip install 'carope-jax[gpu]' (4.4 GB)"


@dataclasses.dataclass(frozen=True)
class Target:
    """Chips and how they are wired.

    Attributes:
      chip: which.
      shape: chips along each axis of a TPU slice's torus; (chips,) of one GPU node.
    """

    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def is_tpu(self) -> bool:
        """Whether it is a slice of TPUs, or else a node of GPUs."""
        return self.chip.name.startswith("v")

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_target(text: str) -> Target:
    """`CHIP:TOPOLOGY` as a target.

    Raises:
      ValueError: it is not that, or no such chip or topology can be compiled for.
    """
    known = {chip.name: chip for chip in CHIPS if chip.largest}
    found = re.fullmatch(r"([\w-]+):([1-9]\d*(?:x[1-9]\d*)*)", text)
    if found is None or found[1] not in known:
        raise ValueError(
            f"expected CHIP:TOPOLOGY with a chip of {', '.join(known)}, for instance v5e:16x16, "
            f"v5p:4x4x4 or h200:8, got {text!r}"
        )
    target = Target(known[found[1]], tuple(map(int, found[2].split("x"))))
    axes = {"v5e": 2, "v6e": 2, "v5p": 3}.get(target.chip.name, 1)
    if len(target.shape) != axes:
        raise ValueError(f"{target.chip.name} has topologies of {axes} axes, got {text!r}")
    if target.chips > target.chip.largest:
        raise ValueError(
            f"{target.chip.name} goes up to {target.chip.largest} chips, {text!r} has "
            f"{target.chips}"
        )
    return target


def target_devices(target: Target) -> list[Any]:
    """Devices that programs can be compiled for, and nothing run on.

    Raises:
      ValueError: the compiler isn't installed, or knows no such topology.
    """
    return _tpu_devices(target) if target.is_tpu else _gpu_devices(target)


def _tpu_devices(target: Target) -> list[Any]:
    # A compiler needs neither the lock of the machine's TPUs nor the cloud's word on what they are.
    for name, value in (
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=str(target))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu knows no topology {target}: {_first_line(error)}") from error
    except RuntimeError as error:
        raise ValueError(
            f"compiling for {target} needs libtpu, which is not installed: {_INSTALL_TPU}"
        ) from error
    return list(found.devices)


def _gpu_devices(target: Target) -> list[Any]:
    try:
        found = topologies.get_topology_desc(
            "", "cuda", target_config=_HOPPER, topology=f"1x1x{target.chips}"
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"XLA knows no topology {target}: {_first_line(error)}") from error
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"compiling for {target} needs jax[cuda13], which is not installed: {_INSTALL_GPU}"
        ) from error
    return list(found.devices)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


_HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 80000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "Hopper"
"""
"""XLA's description of an H100 SXM; the H200's chip is the same but for its memory."""
