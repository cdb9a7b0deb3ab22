"""The three ways a model of one's own calls an encoding, once for NNX and Linen alike.

A rotary encoding replaces the rotary call, a bias encoding gives what is added to the scores, an
additive one is added to the embeddings. Each takes and returns a carry for decoding.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from carope_jax.layers._encoding import EncodingConfig, HeadDims, Segmentation, Weights
from carope_jax.positions import token_positions

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
    segmentation, after = _segmentation(config, q.shape[:2], positions, starts, valid, carry)
    rotated = config.rotate(
        weights,
        dims,
        q,
        k,
        hidden=x,
        embedding=x,
        segmentation=segmentation,
        state=carry if config.accumulates else None,
        axis_name=axis_name,
    )
    if carry is None:
        return rotated.q, rotated.k
    return rotated.q, rotated.k, rotated.state if config.accumulates else after


def locate(
    config: EncodingConfig,
    weights: Weights,
    dims: HeadDims,
    shape: tuple[int, int],
    x: Float[Array, "B T D"] | None,
    *,
    positions: Int[Array, "#B T"] | None,
    starts: Bool[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
    carry: Any,
) -> Any:
    """The coordinate [B, T, H], or (coordinate, carry) where a carry was given."""
    segmentation, after = _segmentation(config, shape, positions, starts, valid, carry)
    nothing = jnp.zeros((*shape, dims.heads, 0))
    rotated = config.rotate(
        weights,
        dims,
        nothing,
        nothing,
        hidden=x,
        embedding=x,
        segmentation=segmentation,
        state=carry if config.accumulates else None,
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
    shape = embedding.shape[:2]
    segmentation, after = _segmentation(config, shape, positions, starts, valid, carry)
    added = config.add_to_embedding(weights, dims, embedding, segmentation)
    return added if carry is None else (added, after)


def initial_carry(config: EncodingConfig, dims: HeadDims, batch: int) -> Any:
    """The carry before a row's first token."""
    if config.accumulates:
        return config.initial_state(dims, batch)
    return jnp.zeros(batch, jnp.int32)


def _segmentation(
    config: EncodingConfig,
    shape: tuple[int, int],
    positions: Array | None,
    starts: Array | None,
    valid: Array | None,
    carry: Any,
) -> tuple[Segmentation, Array | None]:
    """Where the tokens are, and the count of them that is a positional encoding's carry."""
    if positions is not None:
        if config.accumulates:
            raise ValueError(
                "positions have no meaning where tokens accumulate: "
                "use starts, valid and carry to say where a sequence begins and goes on"
            )
        if carry is not None:
            raise ValueError("give positions or a carry, not both: a carry is what counts them")
        return Segmentation(positions, starts, valid), None
    if config.accumulates:
        return Segmentation(jnp.zeros((1, shape[1]), jnp.int32), starts, valid), None
    if carry is not None and getattr(carry, "shape", None) != (shape[0],):
        raise ValueError(
            f"the carry of a positional encoding is an int32 count a row, [{shape[0]}]: "
            "this one is another encoding's or another batch's"
        )
    if starts is None and valid is None and carry is None:
        return Segmentation(jnp.arange(shape[1], dtype=jnp.int32)[None]), None
    counted, after = token_positions(shape, starts, valid, carry)
    return Segmentation(counted, starts, valid), after


def _check_one_sequence(q: Array, k: Array, x: Array | None) -> None:
    lengths = {"q": q.shape[:2], "k": k.shape[:2]} | ({} if x is None else {"x": x.shape[:2]})
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"q, k and x must be of one sequence, [batch, time] {lengths}: "
            "cross-attention has no phases that both sides share"
        )
