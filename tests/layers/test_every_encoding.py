import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoding_cases import (
    CASES,
    HIDDEN,
    KEYS,
    ROTARY,
    B,
    D,
    H,
    K,
    N,
    Q,
    T,
    X,
    call,
    make,
    quick_jit,
    run,
    stirred,
)
from flax import nnx

from carope_jax.layers import ENCODINGS, Encoding

# Two documents, row 0 of the inputs and row 1, packed and padded (a dot) in every way.
LAYOUTS = ("aaaaabbb", "..aaaaa.", "aa..a.aa", "b.bb.aaa")
LETTERS = np.array([list(row) for row in LAYOUTS])
VALID = LETTERS != "."
PLACE = np.stack([(LETTERS == letter) for letter in "ab"]).cumsum(-1) - 1
PLACE = np.where(LETTERS == "a", PLACE[0], PLACE[1])
STARTS = VALID & (PLACE == 0)
FLAGS = {"starts": STARTS, "valid": VALID}
SOURCE = np.where(LETTERS == "a", 0, 1), np.maximum(PLACE, 0)
every = pytest.mark.parametrize("name", CASES)


def laid_out(x):
    """Documents where the layouts have them, NaN at padding."""
    return np.where(VALID.reshape(B, T, *[1] * (x.ndim - 2)), x[SOURCE], np.nan)


INPUTS = [laid_out(x) for x in (Q, KEYS, X)]


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


def assert_same_carry(ours, theirs):
    """Counts exactly; turns and sums to what a projection's last bit makes of them."""
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        if mine.dtype == jnp.uint32:
            turned = np.asarray(mine - other).view(np.int32) * (2 * np.pi / 2**32)
            np.testing.assert_allclose(turned, 0, atol=1e-5)
        else:
            np.testing.assert_allclose(mine, other, atol=0 if mine.dtype == jnp.int32 else 1e-5)


def test_the_cases_are_every_encoding():
    names = {type(config).__name__.removesuffix("Config").lower() for config in CASES.values()}
    assert names == {name.replace("_", "") for name in ENCODINGS}


@every
def test_the_whole_equals_its_chunks(name):
    layer = stirred(name)
    whole, after = run(layer, *INPUTS, carry=layer.initial_carry(B), **FLAGS)
    for sizes in ((1,) * T, (3, 1, 1, 3), (1, 3, 3, 1)):
        carry, chunks = layer.initial_carry(B), []
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            part = np.s_[:, end - size : end]
            flags = {key: flag[part] for key, flag in FLAGS.items()}
            out, carry = run(layer, *[x[part] for x in INPUTS], carry=carry, **flags)
            chunks.append(out)
        joined = [jnp.concatenate(x, axis=1) for x in zip(*chunks, strict=True)]
        assert_same([x[VALID] for x in joined], [x[VALID] for x in whole])
        assert_same_carry(carry, after)


@every
def test_packed_and_padded_equals_alone(name):
    layer = stirred(name)
    # Row 0 begins with the document a, row 1 with b, and what comes later can't matter.
    alone, none = run(layer, Q, KEYS, X)
    assert none is None
    together, _ = run(layer, *INPUTS, carry=layer.initial_carry(B), **FLAGS)
    assert_same([x[VALID] for x in together], [x[SOURCE][VALID] for x in alone])
    # Neither flags nor a carry says the same as flags that say nothing and a first carry.
    nothing = {"starts": np.zeros((B, T), bool), "valid": np.ones((B, T), bool)}
    assert_same(run(layer, Q, KEYS, X, carry=layer.initial_carry(B), **nothing)[0], alone)


@pytest.mark.parametrize("name", [x for x in ROTARY if CASES[x] not in (CASES["selective"],)])
def test_a_query_group_shares_its_phase(name):
    pass


def tokens_felt(layer, q, k, x):
    """[B, T, B, T], how strongly each token's outputs feel each token; and weights' gradients."""
    rng = np.random.default_rng(3)

    def one_number_a_token(layer, q, k, x):
        out, _ = call(layer, q, k, x, **FLAGS)
        # A q or k times its own directions, so that a phase alone moves the number.
        return sum(
            (y.reshape(B, T, -1) * rng.normal(size=(y[0, 0].size,))).sum(-1) for y in out
        )

    felt = jax.jacrev(one_number_a_token, argnums=(1, 2, 3))(layer, q, k, x)
    felt = sum(jnp.abs(jacobian).reshape(B, T, B, T, -1).max(-1) for jacobian in felt)
    return felt
