"""The three ways a model of one's own calls an encoding, once for NNX and Linen alike.

A rotary encoding replaces the rotary call, a bias encoding gives what is added to the scores, an
additive one is added to the embeddings. Each takes and returns a carry for decoding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from carope_jax.layers._encoding import (
    AttentionInput,
    EncodingConfig,
    HeadDims,
    Segmentation,
    Weights,
)
from carope_jax.positions import check_flags, token_positions

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


def turn(
    config: EncodingConfig,
    weights: Weights,
    dims: HeadDims,
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T K N"],
    x: Float[Array, "B T D"] | None,
    *,
    positions: Int[Array, "#B T"] | None,
    starts: Bool[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
    carry: Any,
    axis_name: str | None,
) -> tuple[Any, ...]:
    """(q', k'), or (q', k', carry) where a carry was given."""
    _check_one_sequence(q, k, x)
    width = 0 if x is None else x.shape[-1]
    _check_sizes(dims, heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], model_dim=width)
    if axis_name is not None and positions is None and not config.accumulates:
        raise ValueError(
            f"positions are needed over a sharded time axis, got axis_name {axis_name!r} without"
        )
    segmentation, after = _segmentation(config, dims, q.shape[:2], positions, starts, valid, carry)
    state = carry if config.accumulates else None
    given = AttentionInput(q, k, x, x, segmentation, state, axis_name)
    rotated = config.rotate(weights, dims, given)
    if carry is None:
        return rotated.q, rotated.k
    return rotated.q, rotated.k, rotated.state if config.accumulates else after


def locate(
    config: EncodingConfig,
    weights: Weights,
    dims: HeadDims,
    x: Float[Array, "B T D"],
    *,
    positions: Int[Array, "#B T"] | None,
    starts: Bool[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
    carry: Any,
) -> Any:
    """The coordinate [B, T, H], or (coordinate, carry) where a carry was given."""
    _check_sizes(dims, model_dim=x.shape[-1])
    shape = x.shape[:2]
    segmentation, after = _segmentation(config, dims, shape, positions, starts, valid, carry)
    nothing = jnp.zeros((*shape, dims.heads, 0))
    state = carry if config.accumulates else None
    rotated = config.rotate(
        weights, dims, AttentionInput(nothing, nothing, x, x, segmentation, state)
    )
    if carry is None:
        return rotated.coordinate
    return rotated.coordinate, rotated.state if config.accumulates else after


def add(
    config: EncodingConfig,
    weights: Weights,
    dims: HeadDims,
    embedding: Float[Array, "B T D"],
    *,
    positions: Int[Array, "#B T"] | None,
    starts: Bool[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
    carry: Any,
) -> Any:
    """The embeddings with positions added, or (embeddings, carry) where a carry was given."""
    _check_sizes(dims, model_dim=embedding.shape[-1])
    shape = embedding.shape[:2]
    segmentation, after = _segmentation(config, dims, shape, positions, starts, valid, carry)
    added = config.add_to_embedding(weights, dims, embedding, segmentation)
    return added if carry is None else (added, after)


def initial_carry(config: EncodingConfig, dims: HeadDims, batch: int) -> Any:
    """The carry before a row's first token."""
    if config.accumulates:
        return config.initial_state(dims, batch)
    return jnp.zeros(batch, jnp.int32)


def _segmentation(
    config: EncodingConfig,
    dims: HeadDims,
    shape: tuple[int, ...],
    positions: Array | None,
    starts: Array | None,
    valid: Array | None,
    carry: Any,
) -> tuple[Segmentation, Array | None]:
    """Where the tokens are, and the count of them that is a positional encoding's carry."""
    _check_tokens(shape, positions, starts, valid)
    if carry is not None:
        _check_carry(config, dims, shape[0], carry)
    if positions is not None:
        if config.accumulates:
            raise ValueError(
                "positions have no meaning where tokens accumulate: "
                "use starts, valid and carry to say where a sequence begins and goes on"
            )
        if carry is not None:
            raise ValueError("give positions or a carry, not both: a carry is what counts them")
        # Flags say that a row may be more than one sequence: its length then proves nothing.
        counts = jnp.ones(shape, bool) if valid is None else valid
        return Segmentation(positions, starts, counts), None
    if config.accumulates:
        return Segmentation(jnp.zeros((1, shape[1]), jnp.int32), starts, valid), None
    if starts is None and valid is None and carry is None:
        return Segmentation(jnp.arange(shape[1], dtype=jnp.int32)[None]), None
    counted, after = token_positions(shape, starts, valid, carry)
    return Segmentation(counted, starts, valid), after


def _check_one_sequence(q: Array, k: Array, x: Array | None) -> None:
    for name, array, rank in (("q", q, 4), ("k", k, 4), ("x", x, 3)):
        if array is not None and array.ndim != rank:
            wanted = "[B, T, heads, head_dim]" if rank == 4 else "[B, T, model_dim]"
            raise ValueError(f"{name} must be {wanted}, got shape {array.shape}")
    lengths = {"q": q.shape[:2], "k": k.shape[:2]} | ({} if x is None else {"x": x.shape[:2]})
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"q, k and x must be of one sequence, [batch, time] {lengths}: "
            "cross-attention has no phases that both sides share"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must be of one head_dim, got {q.shape[3]} and {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key/value heads do not divide {q.shape[2]} heads")


def _check_sizes(dims: HeadDims, **given: int) -> None:
    """Raises a ValueError where arrays are of other sizes than the encoding was made for."""
    for name, size in given.items():
        wanted = getattr(dims, name)
        # 0: the encoding doesn't ask, or there is no such array.
        if wanted and size and size != wanted:
            raise ValueError(f"the encoding is for {name} {wanted}, got {size}")


def _check_tokens(
    shape: tuple[int, ...], positions: Array | None, starts: Array | None, valid: Array | None
) -> None:
    check_flags(shape, starts=starts, valid=valid)
    if positions is not None and (
        positions.shape not in (shape, (1, shape[1]))
        or not jnp.issubdtype(positions.dtype, jnp.integer)
    ):
        raise ValueError(
            f"positions must be integers of shape {shape} or {(1, shape[1])}, "
            f"got {positions.dtype} of shape {positions.shape}"
        )


def _check_carry(config: EncodingConfig, dims: HeadDims, batch: int, carry: Any) -> None:
    wanted = _described(jax.eval_shape(lambda: initial_carry(config, dims, batch)))
    if _described(carry) != wanted:
        raise ValueError(
            f"carry must be {wanted}, got {_described(carry)}: "
            "this one is another encoding's or another batch's"
        )


def _described(carry: Any) -> str:
    """The arrays of a carry by dtype and shape."""

    def described(leaf: Any) -> str:
        return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"

    return str(jax.tree.map(described, carry))
