"""How much arithmetic a token costs, and how much a chip can do: for MFU."""

import math

import jax

from carope_jax.models import ModelConfig
from carope_jax.training._chips import CHIPS, chip_of_kind


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Training FLOPs a token (arXiv 2204.02311, appendix B): 6 a weight that multiplies it, and
    12 x layers x heads x head_dim x length for the attention's two products.

    The embedding's look-up multiplies nothing; the output projection does, tied or not. What
    remat recomputes is not counted, and neither is what the causal mask makes unnecessary.
    """
    dims = config.dims
    query, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    attention = dims.model_dim * (2 * query + 2 * kv)
    matrices = 3 if config.activation == "swiglu" else 2
    feed_forward = matrices * dims.model_dim * config.feed_forward_dim
    output = dims.model_dim * (config.vocab_size or 0)
    encoding = sum(
        math.prod(parameter.shape)
        for name, parameter in config.encoding.attention_parameters(dims).items()
        if name.endswith("kernel")
    )
    if config.value_gate:
        encoding += dims.model_dim * dims.kv_heads
    weights = config.num_layers * (attention + feed_forward + encoding) + output
    return 6.0 * weights + 12.0 * config.num_layers * query * length


def peak_flops_of(chip: str) -> float:
    """Dense bfloat16 FLOP a second of a chip by its `device_kind`.

    Raises:
      ValueError: it is not known; those that are, are named.
    """
    found = chip_of_kind(chip)
    if found is None:
        kinds = ", ".join(kind for known in CHIPS for kind in known.kinds)
        raise ValueError(f"chip must be one of {kinds}, got {chip!r}")
    return found.peak_flops


def peak_flops(device: jax.Device) -> float | None:
    """Dense bfloat16 FLOP a second of a chip, or None where it is not known."""
    chip = chip_of_kind(device.device_kind)
    return None if chip is None else chip.peak_flops
