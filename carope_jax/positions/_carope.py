"""CARoPE (arXiv 2507.23083, section 2): rotation increments that depend on the token.

Three quantities are kept apart by name:

    logits      u = x W + bias                  any real number
    frequency   f = 1 / (softplus(u) + 1)       in (0, 1), one a token and key/value head
    increments  f^i, i = 0 ... P-1              radians a token, one a rotary pair

and the phase of pair i at position m is the sum of the increments up to m. `i` is an exponent, so
within a head the increments fall geometrically over the pairs, as RoPE's frequencies do.
"""

from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from carope_jax.positions._projection import project
from carope_jax.positions._rotate import (
    Layout,
    check_rotary,
    check_rotary_dim,
    split_pairs,
    turn_pairs,
)
from carope_jax.positions._scaling import Scaling
from carope_jax.positions._turns import accumulate

# B batch, T time, D model, H query heads, K key/value heads, G = H/K, N head dim, P rotary pairs.

Exponent = Literal["power", "shared", "free"]
"""How pairs come by their increments: f^i (the paper), f for every pair, or one output a pair."""


def rope_bias(frequency: float | Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The logit at which CARoPE's frequency is a given one: the inverse of 1 / (softplus(u) + 1).

    With W = 0 and this bias at theta_1 = base^(-2/d), CARoPE is RoPE of that base. In float64, and
    written so that it never overflows: y + log(1 - exp(-y)), y = 1/frequency - 1.

    Args:
      frequency: in (0, 1), radians a token; a number or an array.

    Raises:
      ValueError: a frequency outside (0, 1), which no logit gives.
    """
    frequency = np.asarray(frequency, np.float64)
    if not ((frequency > 0) & (frequency < 1)).all():
        raise ValueError(f"a frequency must be in (0, 1), got {frequency}")
    softplus = 1 / frequency - 1
    return np.asarray(softplus + np.log(-np.expm1(-softplus)))


def equivalent_base(head_dim: int, bias: float = 0.0) -> float:
    """The RoPE base that CARoPE has at W = 0: (1 + softplus(bias))^(d/2).

    As the paper prints CARoPE (no bias) it is (1 + ln 2)^(d/2): 67.5 at d = 16, 4.56e3 at 32,
    2.08e7 at 64. RoPE of this base is the control for "a gain that comes from the base alone".
    """
    check_rotary_dim(head_dim)
    return (1 + float(np.logaddexp(0, bias))) ** (head_dim / 2)


def carope_log_frequency(
    x: Float[Array, "B T D"],
    kernel: Float[Array, " D K *P"],
    bias: Float[Array, " K *P"] | None = None,
) -> Float[Array, "B T K *P"]:
    """log f = -log(1 + softplus(x W + bias)), always in float32.

    Args:
      x: what the frequencies depend on, any float dtype.
      kernel: W, [D, K], or [D, K, P] for `exponent="free"`.
      bias: [K] or [K, P]; None: as the paper prints it, without.

    Returns:
      float32 log radians a token, [B, T, K] or [B, T, K, P]; finite with finite gradients for
      logits up to 1e4 in magnitude and beyond.

    Raises:
      ValueError: shapes that disagree.
    """
    if kernel.ndim not in (2, 3) or kernel.shape[0] != x.shape[-1]:
        raise ValueError(
            f"kernel must be [{x.shape[-1]}, kv_heads] or [{x.shape[-1]}, kv_heads, pairs], "
            f"got shape {kernel.shape}"
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"bias must have shape {kernel.shape[1:]}, got {bias.shape}")
    logits = project(x, kernel)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return -jnp.log1p(jax.nn.softplus(logits))


def carope_increments(
    log_frequency: Float[Array, "B T K *P"],
    pairs: int,
    *,
    exponent: Exponent = "power",
    first_exponent: int = 0,
    scaling: Scaling | None = None,
) -> Float[Array, "B T K P"]:
    """f^i in radians a token, as exp(i log f).

    Args:
      log_frequency: float32 log f, [B, T, K]; [B, T, K, P] for `exponent="free"`.
      pairs: P, the rotary pairs of a head.
      exponent: "power" (the paper): f^i. "shared": f for every pair. "free": every pair has an f
        of its own.
      first_exponent: 0, where pair 0 turns by exactly 1 rad a token whatever the token (as RoPE's
        does), with gradient exactly 0; or 1.
      scaling: its factor multiplies the increments.

    Raises:
      ValueError: an unknown option, or a `log_frequency` that is not float32 or of the wrong rank
        for `exponent`.
    """
    if exponent not in get_args(Exponent):
        raise ValueError(f"exponent must be one of {get_args(Exponent)}, got {exponent!r}")
    if first_exponent not in (0, 1):
        raise ValueError(f"first_exponent must be 0 or 1, got {first_exponent!r}")
    if log_frequency.dtype != jnp.float32:
        raise ValueError(f"log_frequency must be float32, got {log_frequency.dtype}")
    rank = 4 if exponent == "free" else 3
    if log_frequency.ndim != rank or (rank == 4 and log_frequency.shape[-1] != pairs):
        wanted = f"[B, T, K, {pairs}]" if rank == 4 else "[B, T, K]"
        raise ValueError(
            f"log_frequency must be {wanted} for exponent={exponent!r}, "
            f"got shape {log_frequency.shape}"
        )
    match exponent:
        case "power":
            powers_P = jnp.arange(first_exponent, first_exponent + pairs, dtype=jnp.float32)
            increments = jnp.exp(log_frequency[..., None] * powers_P)
        case "shared":
            increments = jnp.exp(log_frequency)[..., None]
        case "free":
            increments = jnp.exp(log_frequency)
            if first_exponent == 0:
                increments = increments.at[..., 0].set(1.0)
    if scaling is not None:
        increments = increments * scaling.factor
    return jnp.broadcast_to(increments, (*log_frequency.shape[:3], pairs))


def carope_rotate(
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T K N"],
    log_frequency: Float[Array, "B T K *P"],
    *,
    exponent: Exponent = "power",
    first_exponent: int = 0,
    inclusive: bool = True,
    layout: Layout = "half",
    scaling: Scaling | None = None,
    starts: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    carry: UInt32[Array, "B K P"] | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "B T H N"], Float[Array, "B T K N"], UInt32[Array, "B K P"]]:
    """Rotates queries and keys by their accumulated phases: increments, sum and turn in one.

    Lean in memory: for the backward pass it keeps `log_frequency` and the rotated q and k (which
    attention keeps anyway) and computes the phases again. Differentiable in reverse mode, of any
    order; for forward mode call `carope_increments`, `accumulate` and `rotate`.

    Args:
      q: queries; each group of H/K of them shares its key/value head's phase. With fewer
        key/value heads than heads this departs from the paper's one frequency a query head: a
        cached key has one rotation.
      k: keys.
      log_frequency: what `carope_log_frequency` returns.
      exponent: as in `carope_increments`, as `first_exponent` and `scaling` are.
      scaling: q and k are also multiplied by its attention factor.
      inclusive: as in `accumulate`, as `starts`, `valid`, `carry` and `axis_name` are.
      layout: as in `rotate`.

    Returns:
      (q', k', carry), the first two of the shapes and dtypes given.

    Raises:
      ValueError: an odd head dim, heads that don't divide, or what the pieces raise.
    """
    check_rotary_dim(q.shape[-1])
    pairs = q.shape[-1] // 2
    for x in (q, k):
        check_rotary(x, log_frequency.shape[2], pairs, layout)
    if k.shape[2] != log_frequency.shape[2]:
        raise ValueError(f"log_frequency has {log_frequency.shape[2]} heads, k has {k.shape[2]}")
    options = _Options(
        exponent,
        first_exponent,
        inclusive,
        layout,
        1.0 if scaling is None else float(scaling.attention_factor),
        axis_name,
    )
    context = _Context(starts, valid, carry, None if scaling is None else scaling.factor)
    return _rotate_lean(options, q, k, log_frequency, context)


class _Options(NamedTuple):
    """What a rotation is compiled for."""

    exponent: Exponent
    first_exponent: int
    inclusive: bool
    layout: Layout
    attention_factor: float
    axis_name: str | None


class _Context(NamedTuple):
    """The arrays that the phases depend on and that have no gradient."""

    starts: Array | None
    valid: Array | None
    carry: Array | None
    factor: Array | None


def _phases(options: _Options, log_frequency: Array, pairs: int, context: _Context) -> tuple:
    increments_BTKP = carope_increments(
        log_frequency,
        pairs,
        exponent=options.exponent,
        first_exponent=options.first_exponent,
        scaling=None if context.factor is None else Scaling(context.factor),
    )
    return accumulate(
        increments_BTKP,
        context.starts,
        context.valid,
        context.carry,
        options.axis_name,
        options.inclusive,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate_lean(
    options: _Options, q_BTHN: Array, k_BTKN: Array, log_frequency: Array, context: _Context
) -> tuple[Array, Array, Array]:
    phases_BTKP, carry_BKP = _phases(options, log_frequency, q_BTHN.shape[-1] // 2, context)
    scale = options.attention_factor
    cos, sin = scale * jnp.cos(phases_BTKP), scale * jnp.sin(phases_BTKP)
    rotated = (turn_pairs(x, cos, sin, options.layout) for x in (q_BTHN, k_BTKN))
    return *rotated, carry_BKP


def _rotate_lean_forward(
    options: _Options, q_BTHN: Array, k_BTKN: Array, log_frequency: Array, context: _Context
) -> tuple:
    rotated_q, rotated_k, carry = _rotate_lean(options, q_BTHN, k_BTKN, log_frequency, context)
    return (rotated_q, rotated_k, carry), (rotated_q, rotated_k, log_frequency, context)


def _rotate_lean_backward(options: _Options, kept: tuple, cotangents: tuple) -> tuple:
    rotated_q, rotated_k, log_frequency, context = kept
    pairs = rotated_q.shape[-1] // 2
    phases_BTKP, pull_back = jax.vjp(
        lambda log_f: _phases(options, log_f, pairs, context)[0], log_frequency
    )
    scale = options.attention_factor
    cos, sin = scale * jnp.cos(phases_BTKP), scale * jnp.sin(phases_BTKP)
    unturned = []
    phases_bar_BTKP = jnp.zeros_like(phases_BTKP)
    for rotated, bar in zip((rotated_q, rotated_k), cotangents[:2], strict=True):
        unturned.append(turn_pairs(bar, cos, -sin, options.layout))
        # A turned pair (a', b') moves with its phase as (-b', a'): the unturned one isn't needed.
        a, b = split_pairs(rotated, phases_BTKP.shape, options.layout)
        a_bar, b_bar = split_pairs(bar, phases_BTKP.shape, options.layout)
        phases_bar_BTKP += (a * b_bar - b * a_bar).sum(axis=-2)
    return *unturned, *pull_back(phases_bar_BTKP), None


_rotate_lean.defvjp(_rotate_lean_forward, _rotate_lean_backward)
