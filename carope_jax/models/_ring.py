"""Queries meet the keys before them, over devices that each hold a part of the sequence.

The keys go round a ring (arXiv 2310.01889). Of 2n chunks of the sequence device r of n works on r
and 2n-1-r, so that the causal mask leaves every device the same work.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Tree = Any
"""Arrays whose axis 1 is time."""


def over_ring(
    visit: Callable[..., tuple[Tree, Tree]],
    axis: str | None,
    ways: int,
    queries: Tree,
    begin_queries: Callable[[Tree], Tree],
    keys: Tree,
    begin_keys: Callable[[Tree], Tree],
) -> tuple[Tree, Tree]:
    """Brings every query together with every key before it.

    `visit(queries, found, keys, given, causal)` returns (found, given): what was found for the
    queries and given to the keys so far. Of 2n chunks device r holds r and 2n-1-r, so each has
    two pairs of chunks to visit at every step of the ring but the first, which has three.
    """
    if axis is None or ways == 1:
        return visit(queries, begin_queries(queries), keys, begin_keys(keys), True)
    here = lax.axis_index(axis)
    q_low, q_high = _to_zigzag(queries, axis, ways)
    k_low, k_high = _to_zigzag(keys, axis, ways)
    low, given_low = visit(q_low, begin_queries(q_low), k_low, begin_keys(k_low), True)
    high, given_low = visit(q_high, begin_queries(q_high), k_low, given_low, False)
    high, given_high = visit(q_high, high, k_high, begin_keys(k_high), True)
    to_next = [(r, (r + 1) % ways) for r in range(ways)]

    def step(number: Array, carried: tuple) -> tuple:
        low, high, turning = carried
        k_low, k_high, given_low, given_high = _permute(turning, axis, to_next)
        high, given_low = visit(q_high, high, k_low, given_low, False)
        # Keys from an earlier device: their late chunk is of nobody's past here. From a later
        # one: the early queries see nothing of it.
        earlier = (here - number) % ways < here
        found, given = visit(
            _choose(earlier, q_low, q_high),
            _choose(earlier, low, high),
            _choose(earlier, k_low, k_high),
            _choose(earlier, given_low, given_high),
            False,
        )
        low, high = _choose(earlier, found, low), _choose(earlier, high, found)
        given_low = _choose(earlier, given, given_low)
        given_high = _choose(earlier, given_high, given)
        return low, high, (k_low, k_high, given_low, given_high)

    turning = (k_low, k_high, given_low, given_high)
    low, high, turning = lax.fori_loop(1, ways, step, (low, high, turning))
    given_low, given_high = _permute(turning[2:], axis, to_next)
    return _from_zigzag(low, high, axis, ways), _from_zigzag(given_low, given_high, axis, ways)


def _choose(condition: Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _permute(tree: Tree, axis: str, pairs: list[tuple[int, int]]) -> Tree:
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def owners(ways: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """To whom each device's first and second chunk go: chunk c to c, from the middle on to 2n-1-c.

    The even chunks all go to different devices, and so do the odd ones.
    """

    def owner(chunk: int) -> int:
        return min(chunk, 2 * ways - 1 - chunk)

    return [(r, owner(2 * r)) for r in range(ways)], [(r, owner(2 * r + 1)) for r in range(ways)]


def _to_zigzag(tree: Tree, axis: str, ways: int) -> tuple[Tree, Tree]:
    """This device's early and late chunk, from shards in order."""
    to_even, to_odd = owners(ways)
    even = jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)
    odd = jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)
    even, odd = _permute(even, axis, to_even), _permute(odd, axis, to_odd)
    is_even = lax.axis_index(axis) % 2 == 0
    return _choose(is_even, even, odd), _choose(is_even, odd, even)


def _from_zigzag(low: Tree, high: Tree, axis: str, ways: int) -> Tree:
    is_even = lax.axis_index(axis) % 2 == 0
    even, odd = _choose(is_even, low, high), _choose(is_even, high, low)
    from_even, from_odd = ([(b, a) for a, b in pairs] for pairs in owners(ways))
    even, odd = _permute(even, axis, from_even), _permute(odd, axis, from_odd)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), even, odd)
