"""Selective RoPE (arXiv 2511.17388): rotation increments of either sign from a short convolution.

    omega_t      = activation(sum_j kernel[j] * projected[t - j])      j = 0 ... W-1
    increments_t = temperature * gate_t * (omega_t + exp(bias))

and the phase is their running sum, which `accumulate` keeps.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from carope_jax.positions._rope import rope_frequencies
from carope_jax.positions._scan import check_flags, masked

# B batch, T time, K key/value heads, P rotary pairs, W taps of the convolution, S = W-1 + T.

Activation = Literal["none", "silu"]
"""What the convolution's output goes through."""


def selective_temperature(
    pairs: int, base: float = 500_000.0, maximum: float = 1.0
) -> Float[Array, " P"]:
    """What each pair's angles are multiplied by: maximum * base^(-i/P), i = 0 ... P-1.

    The "rope" temperatures of the authors' code (arXiv 2511.17388): RoPE's frequencies.

    Args:
      pairs: P, the rotary pairs of a head.
      base: of the powers.
      maximum: the first pair's.

    Raises:
      ValueError: `pairs` below 1, or a base or maximum that is not above 0.
    """
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, got {pairs}")
    if not maximum > 0:
        raise ValueError(f"maximum must be positive, got {maximum}")
    return maximum * rope_frequencies(2 * pairs, base)[0]


def selective_increments(
    projected: Float[Array, "B T K P"],
    kernel: Float[Array, "W K P"],
    temperature: Float[Array, " P"] | Float[Array, "K P"],
    *,
    gate: Float[Array, "B T K G"] | None = None,
    bias: Float[Array, "K P"] | None = None,
    activation: Activation = "none",
    starts: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    window: Float[Array, "B V K P"] | None = None,
) -> tuple[Float[Array, "B T K P"], Float[Array, "B V K P"]]:
    """temperature * gate * (conv(projected) + exp(bias)) (arXiv 2511.17388).

    The convolution is causal and depthwise. Padding is skipped as if it were not there, wherever
    it is, and no tap reaches across the start of a segment.

    Args:
      projected: float32 projections of the tokens.
      kernel: kernel[j] weighs the token j steps back; kernel[0] the token itself.
      temperature: one a pair, or one a head and pair.
      gate: in (0, 1), one a head (G = 1) or one a pair (G = P); None: 1.
      bias: its exponential is added to the convolution; None: nothing is.
      activation: of the convolution's output, before the bias.
      starts: true at the first token of each segment. None: the whole row continues the window.
      valid: false at padding, whose increment is 0. None: every token counts.
      window: float32 projections of the V = W-1 valid tokens before the first, the latest last;
        0 where there are none in the segment. None: there were none.

    Returns:
      (increments, window): float32 radians a token, and the window for the tokens that follow.
      The arithmetic is the same for any chunking.

    Raises:
      ValueError: `projected` or `window` is not float32, another argument of the wrong dtype,
        shapes that disagree, or an unknown activation.
    """
    _check(projected, kernel, temperature, gate, bias, activation, window)
    check_flags(projected.shape[:2], starts=starts, valid=valid)
    batch, time, *size = projected.shape
    width = kernel.shape[0]
    if window is None:
        window = jnp.zeros((batch, width - 1, *size), jnp.float32)
    tokens_BTKP = masked(projected, valid)
    if starts is None:
        segment_BT = jnp.zeros((batch, time), jnp.int32)
    else:
        segment_BT = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    last_B1 = segment_BT[:, -1:]
    counted_B1 = jnp.full((batch, 1), time, jnp.int32)
    if valid is not None:
        # The valid tokens come to the front, in order: padding can't be between them.
        order_BT = jnp.argsort(~valid, axis=1, stable=True)
        tokens_BTKP = jnp.take_along_axis(tokens_BTKP, order_BT[..., None, None], axis=1)
        segment_BT = jnp.take_along_axis(segment_BT, order_BT, axis=1)
        counted_B1 = valid.sum(axis=1, keepdims=True, dtype=jnp.int32)
    history_BSKP = jnp.concatenate([window, tokens_BTKP], axis=1)
    # The window is of the segment that has begun before the first start.
    segment_BS = jnp.pad(segment_BT, ((0, 0), (width - 1, 0)))

    mixed_BTKP = jnp.zeros_like(tokens_BTKP)
    for back, tap_KP in enumerate(kernel.astype(jnp.float32)):
        reach = slice(width - 1 - back, width - 1 - back + time)
        same_BT = segment_BS[:, reach] == segment_BT
        mixed_BTKP = mixed_BTKP + tap_KP * masked(history_BSKP[:, reach], same_BT)
    if valid is not None:
        place_BT = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
        mixed_BTKP = jnp.take_along_axis(mixed_BTKP, place_BT[..., None, None], axis=1)

    kept_BV = counted_B1 + jnp.arange(width - 1, dtype=jnp.int32)
    window = masked(
        jnp.take_along_axis(history_BSKP, kept_BV[..., None, None], axis=1),
        jnp.take_along_axis(segment_BS, kept_BV, axis=1) == last_B1,
    )
    angles_BTKP = jax.nn.silu(mixed_BTKP) if activation == "silu" else mixed_BTKP
    if bias is not None:
        angles_BTKP = angles_BTKP + jnp.exp(bias.astype(jnp.float32))
    if gate is not None:
        angles_BTKP = angles_BTKP * masked(gate.astype(jnp.float32), valid)
    return masked(temperature.astype(jnp.float32) * angles_BTKP, valid), window


def _check(
    projected: Array,
    kernel: Array,
    temperature: Array,
    gate: Array | None,
    bias: Array | None,
    activation: str,
    window: Array | None,
) -> None:
    if activation not in get_args(Activation):
        raise ValueError(f"activation must be one of {get_args(Activation)}, got {activation!r}")
    if projected.ndim != 4:
        raise ValueError(f"projected must be [B, T, K, P], got shape {projected.shape}")
    for name, array in (("projected", projected), ("window", window)):
        if array is not None and array.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, got {array.dtype}")
    batch, time, kv_heads, pairs = projected.shape
    size = (kv_heads, pairs)
    if kernel.ndim != 3 or kernel.shape[0] < 1 or kernel.shape[1:] != size:
        raise ValueError(f"kernel must be [W, {kv_heads}, {pairs}], got shape {kernel.shape}")
    for name, array, shapes in (
        ("kernel", kernel, (kernel.shape,)),
        ("temperature", temperature, ((pairs,), size)),
        ("gate", gate, ((batch, time, kv_heads, 1), projected.shape)),
        ("bias", bias, (size,)),
        ("window", window, ((batch, kernel.shape[0] - 1, *size),)),
    ):
        if array is None:
            continue
        if array.shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(f"{name} must have shape {wanted}, got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of a float dtype, got {array.dtype}")
