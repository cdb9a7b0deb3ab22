"""Exact causal attention tile by tile, over a sequence on one device or sharded over several.

No array of scores is longer than a tile: the forward pass keeps a running softmax (arXiv
2112.05682, 2205.14135) and, for the backward pass, the logarithm of its sum; that pass computes
the tiles again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from carope_jax.models._ring import Tree, over_ring
from carope_jax.models._sharding import Sharding

# B batch, T time, H query heads, K key/value heads, G = H/K, N head dim, X = B x K,
# Q queries of a tile, C keys of a tile.

_TILE = 512
_MASKED = -1e30


class _Queries(NamedTuple):
    """A stretch of queries; time is axis 1 of every array, None what is not given."""

    q: Array  # XTGN
    ids: Array | None  # XT
    coordinate: Array | None  # XTG
    cotangent: Array | None = None  # XTGN
    log_sum: Array | None = None  # XTG
    delta: Array | None = None  # XTG


class _Keys(NamedTuple):
    """A stretch of keys and values, the same way."""

    k: Array  # XTN
    v: Array  # XTN
    ids: Array | None
    coordinate: Array | None


def blockwise_attention(
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T K N"],
    v: Float[Array, "B T K N"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    coordinate: Float[Array, "B T H"] | None = None,
    sharding: Sharding | None = None,
) -> Float[Array, "B T H N"]:
    """Causal attention, as `jax.nn.dot_product_attention` has it, in memory linear in T.

    Args:
      q: queries; each group of H/K shares a key/value head.
      k: keys.
      v: values.
      segment_ids: a query sees the keys of its own id only.
      coordinate: float32; the score of query i and key j is biased by c_i - c_j.
      sharding: the mesh, over which time may be sharded in order.

    Returns:
      The attention's output in q's dtype. Differentiable once, in reverse mode.
    """
    sharding = Sharding() if sharding is None else sharding
    return _attention(sharding, q, k, v, coordinate, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    sharding: Sharding, q: Array, k: Array, v: Array, coordinate: Array | None, ids: Array | None
) -> Array:
    return _forward(sharding, q, k, v, coordinate, ids)[0]


def _forward(
    sharding: Sharding, q: Array, k: Array, v: Array, coordinate: Array | None, ids: Array | None
) -> tuple[Array, tuple]:
    specs = _specs(sharding)
    out, log_sum = sharding.on_each_device(
        functools.partial(_local_forward, *_ring_of(sharding)),
        in_specs=specs,
        out_specs=(specs[0], specs[3]),
    )(q, k, v, coordinate, ids)
    return out, (q, k, v, coordinate, ids, out, log_sum)


def _backward(sharding: Sharding, kept: tuple, cotangent: Array) -> tuple:
    specs = _specs(sharding)
    gradients = sharding.on_each_device(
        functools.partial(_local_backward, *_ring_of(sharding)),
        in_specs=(*specs, specs[0], specs[3], specs[0]),
        out_specs=specs[:4],
    )(*kept, cotangent)
    return *gradients, None


_attention.defvjp(_forward, _backward)


def _specs(sharding: Sharding) -> tuple[jax.sharding.PartitionSpec, ...]:
    """Of q, k, v, the coordinate and the ids."""
    axes: tuple[tuple[str | None, ...], ...] = (
        ("batch", "time", "heads", None),
        ("batch", "time", "kv_heads", None),
        ("batch", "time", "kv_heads", None),
        ("batch", "time", "heads"),
        ("batch", "time"),
    )
    return tuple(sharding.spec(a) for a in axes)


def _ring_of(sharding: Sharding) -> tuple[str | None, int]:
    return sharding.time_axis, sharding.ways("time")


def _local_forward(
    axis: str | None, ways: int, q: Array, k: Array, v: Array, c: Array | None, ids: Array | None
) -> tuple[Array, Array]:
    queries, keys = _stretches(q, k, v, c, ids)

    def begin(part: _Queries) -> tuple[Array, Array, Array]:
        flat = jnp.zeros(part.q.shape[:-1], jnp.float32)
        return jnp.zeros(part.q.shape, jnp.float32), flat + _MASKED, flat

    visit = functools.partial(_pair_forward, q.shape[-1] ** -0.5)
    (sum_XTGN, top_XTG, total_XTG), _ = over_ring(
        visit, axis, ways, queries, begin, keys, lambda part: ()
    )
    out_XTGN = (sum_XTGN / total_XTG[..., None]).astype(q.dtype)
    log_sum = top_XTG + jnp.log(total_XTG)
    return _back(out_XTGN, q.shape), _back(log_sum, q.shape[:3])


def _local_backward(
    axis: str | None,
    ways: int,
    q: Array,
    k: Array,
    v: Array,
    c: Array | None,
    ids: Array | None,
    out: Array,
    log_sum: Array,
    cotangent: Array,
) -> tuple[Array, Array, Array, Array | None]:
    queries, keys = _stretches(q, k, v, c, ids)
    delta_BTH = (cotangent.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    kv_heads = k.shape[2]
    queries = queries._replace(
        cotangent=_grouped(cotangent, kv_heads),
        log_sum=_grouped(log_sum, kv_heads),
        delta=_grouped(delta_BTH, kv_heads),
    )

    def zeros(*arrays: Array | None) -> tuple:
        return tuple(None if x is None else jnp.zeros(x.shape, jnp.float32) for x in arrays)

    visit = functools.partial(_pair_backward, q.shape[-1] ** -0.5)
    (q_bar, c_bar), (k_bar, v_bar, keys_c_bar) = over_ring(
        visit,
        axis,
        ways,
        queries,
        lambda part: zeros(part.q, part.coordinate),
        keys,
        lambda part: zeros(part.k, part.v, part.coordinate),
    )
    return (
        _back(q_bar, q.shape).astype(q.dtype),
        _back(k_bar, k.shape).astype(k.dtype),
        _back(v_bar, v.shape).astype(v.dtype),
        None if c is None else _back(c_bar + keys_c_bar, c.shape),
    )


def _stretches(
    q: Array, k: Array, v: Array, c: Array | None, ids: Array | None
) -> tuple[_Queries, _Keys]:
    kv_heads = k.shape[2]
    ids_XT = None if ids is None else jnp.repeat(ids, kv_heads, axis=0)
    c_XTG = None if c is None else _grouped(c, kv_heads)
    k_XTN, v_XTN = (_grouped(x, kv_heads)[:, :, 0] for x in (k, v))
    return _Queries(_grouped(q, kv_heads), ids_XT, c_XTG), _Keys(k_XTN, v_XTN, ids_XT, c_XTG)


def _grouped(x: Array, kv_heads: int) -> Array:
    """[B, T, H, ...] as [X, T, G, ...]."""
    batch, time, heads, *rest = x.shape
    x = x.reshape(batch, time, kv_heads, heads // kv_heads, *rest)
    return jnp.moveaxis(x, 2, 1).reshape(-1, time, heads // kv_heads, *rest)


def _back(x: Array, shape: tuple[int, ...]) -> Array:
    """[X, T, G, ...] or [X, T, ...] as [B, T, H, ...]."""
    batch, time = shape[:2]
    x = x.reshape(batch, x.shape[0] // batch, time, *x.shape[2:])
    return jnp.moveaxis(x, 1, 2).reshape(shape)


def _pair_forward(
    scale: float, queries: _Queries, found: tuple, keys: _Keys, given: tuple, causal: bool
) -> tuple[tuple, tuple]:
    """The running softmax of the queries after these keys."""

    def visit(tile_q: _Queries, found: tuple, tile_k: _Keys, given: tuple, mask: Any) -> tuple:
        sum_XQGN, top_XQG, total_XQG = found
        scores_XQGC = _scores(scale, tile_q, tile_k, mask)
        new_top_XQG = jnp.maximum(top_XQG, scores_XQGC.max(-1))
        weights_XQGC = jnp.exp(scores_XQGC - new_top_XQG[..., None])
        fade_XQG = jnp.exp(top_XQG - new_top_XQG)
        seen_XQGN = _einsum("xqgc,xcn->xqgn", weights_XQGC.astype(tile_k.v.dtype), tile_k.v)
        return (
            sum_XQGN * fade_XQG[..., None] + seen_XQGN,
            new_top_XQG,
            total_XQG * fade_XQG + weights_XQGC.sum(-1),
        ), given

    return _over_tiles(visit, queries, found, keys, given, causal)


def _pair_backward(
    scale: float, queries: _Queries, found: tuple, keys: _Keys, given: tuple, causal: bool
) -> tuple[tuple, tuple]:
    """Adds the gradients of these queries and these keys."""

    def visit(tile_q: _Queries, found: tuple, tile_k: _Keys, given: tuple, mask: Any) -> tuple:
        (q_bar, c_bar), (k_bar, v_bar, keys_c_bar) = found, given
        assert tile_q.cotangent is not None
        assert tile_q.log_sum is not None
        assert tile_q.delta is not None
        scores_XQGC = _scores(scale, tile_q, tile_k, mask)
        weights_XQGC = jnp.exp(scores_XQGC - tile_q.log_sum[..., None])
        weights_bar = _einsum("xqgn,xcn->xqgc", tile_q.cotangent, tile_k.v)
        scores_bar = weights_XQGC * (weights_bar - tile_q.delta[..., None])
        v_bar += _einsum("xqgc,xqgn->xcn", weights_XQGC.astype(tile_k.v.dtype), tile_q.cotangent)
        if c_bar is not None:
            c_bar += scores_bar.sum(-1)
            keys_c_bar -= jnp.swapaxes(scores_bar.sum(1), 1, 2)
        scores_bar = (scale * scores_bar).astype(tile_q.q.dtype)
        q_bar += _einsum("xqgc,xcn->xqgn", scores_bar, tile_k.k)
        k_bar += _einsum("xqgc,xqgn->xcn", scores_bar, tile_q.q)
        return (q_bar, c_bar), (k_bar, v_bar, keys_c_bar)

    return _over_tiles(visit, queries, found, keys, given, causal)


def _scores(scale: float, queries: _Queries, keys: _Keys, mask_QC: Array | None) -> Array:
    scores_XQGC = _einsum("xqgn,xcn->xqgc", queries.q, keys.k) * scale
    if queries.coordinate is not None and keys.coordinate is not None:
        keys_XGC = jnp.swapaxes(keys.coordinate, 1, 2)
        scores_XQGC += queries.coordinate[..., None] - keys_XGC[:, None]
    if mask_QC is not None:
        scores_XQGC = jnp.where(mask_QC[:, None], scores_XQGC, _MASKED)
    if queries.ids is not None and keys.ids is not None:
        same_XQC = queries.ids[:, :, None] == keys.ids[:, None]
        scores_XQGC = jnp.where(same_XQC[:, :, None], scores_XQGC, _MASKED)
    return scores_XQGC


def _over_tiles(
    visit: Callable[..., tuple[Tree, Tree]],
    queries: _Queries,
    found: Tree,
    keys: _Keys,
    given: Tree,
    causal: bool,
) -> tuple[Tree, Tree]:
    """Visits every pair of tiles that the causal mask leaves."""
    length = queries.q.shape[1]
    tile = next(d for d in range(min(_TILE, length), 0, -1) if length % d == 0)
    tiles = length // tile
    token_Q = jnp.arange(tile)

    def of_query_tile(i: Array, carried: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        tile_q = _slice(queries, i, tile)

        def of_key_tile(j: Array, carried: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            found, given = carried
            mask = (i - j) * tile + token_Q[:, None] >= token_Q if causal else None
            found, part = visit(tile_q, found, _slice(keys, j, tile), _slice(given, j, tile), mask)
            return found, _put(given, part, j, tile)

        found, given = carried
        # A bound that depends on i also keeps the masks inside the loops.
        last = i + 1 if causal else jnp.int32(tiles)
        part, given = lax.fori_loop(0, last, of_key_tile, (_slice(found, i, tile), given))
        return _put(found, part, i, tile), given

    return lax.fori_loop(jnp.int32(0), jnp.int32(tiles), of_query_tile, (found, given))


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _slice(tree: Tree, number: Array, size: int) -> Tree:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, number * size, size, axis=1), tree)


def _put(tree: Tree, part: Tree, number: Array, size: int) -> Tree:
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, number * size, axis=1), tree, part
    )
