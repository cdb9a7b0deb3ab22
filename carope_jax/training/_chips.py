"""What the chips can do, from their vendors' data sheets: for MFU and for `--compile-for`.

Sources: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e} and NVIDIA's data sheets of the A100, H100
and H200 (SXM; dense figures, no sparsity).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator chip."""

    name: str
    """As in `--compile-for NAME:TOPOLOGY`."""
    kinds: tuple[str, ...]
    """JAX's `device_kind`s of it."""
    peak_flops: float
    """Dense bfloat16 FLOP a second."""
    hbm_bytes: int
    """Memory: the data sheet's "GB" read as 2^30 bytes, as the compilers do (libtpu leaves 15.75 of
    the v5e's 16 to programs)."""
    hbm_bandwidth: float
    """Of that memory, bytes a second."""
    interconnect: float
    """Between chips, both directions together, bytes a second of a chip."""
    largest: int = 0
    """Chips of the largest slice (TPU) or node (GPU) to compile for; 0: can't be compiled for."""


CHIPS = (
    Chip("v4", ("TPU v4",), 275e12, 32 * 2**30, 1228e9, 600e9),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * 2**30, 819e9, 400e9, 256),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * 2**30, 2765e9, 1200e9, 8960),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * 2**30, 1638e9, 800e9, 256),
    Chip("a100-40", ("NVIDIA A100-SXM4-40GB",), 312e12, 40 * 2**30, 1555e9, 600e9),
    Chip("a100-80", ("NVIDIA A100-SXM4-80GB",), 312e12, 80 * 2**30, 2039e9, 600e9),
    Chip("h100", ("NVIDIA H100 80GB HBM3",), 989e12, 80 * 2**30, 3350e9, 900e9, 8),
    Chip("h200", ("NVIDIA H200",), 989e12, 141 * 2**30, 4800e9, 900e9, 8),
)
"""Those known. v4 can't be compiled for: libtpu then counts its two cores as two devices."""


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip by JAX's `device_kind`, or None where it is not known."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)
