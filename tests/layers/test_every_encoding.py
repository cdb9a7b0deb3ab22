import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoding_cases import (
    CASES,
    KEYS,
    B,
    H,
    K,
    Q,
    T,
    X,
    call,
    quick_jit,
    run,
    stirred,
)

from carope_jax.layers import ENCODINGS

# Two documents, row 0 of the inputs and row 1, packed and padded (a dot) in every way.
LAYOUTS = ("aaaaabbb", "..aaaaa.", "aa..a.aa", "b.bb.aaa")
LETTERS = np.array([list(row) for row in LAYOUTS])
VALID = LETTERS != "."
PLACE = (np.array(["a", "b"])[:, None, None] == LETTERS).cumsum(-1) - 1
PLACE = np.where(LETTERS == "a", PLACE[0], PLACE[1])
STARTS = VALID & (PLACE == 0)
FLAGS = {"starts": STARTS, "valid": VALID}
SOURCE = np.where(LETTERS == "a", 0, 1), np.maximum(PLACE, 0)
FEEL_THE_PAST = {
    **dict.fromkeys(("carope", "carope exclusive", "selective", "selective gated", "fox"), True),
    **dict.fromkeys(("rope", "darope", "alibi", "sinusoidal", "learned"), False),
}
"""Encodings that differ in what they sum, and whether a token's output feels those before it."""
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
            turned = (mine - other).view(np.int32) * (2 * np.pi / 2**32)
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
    # Each size of chunk is compiled: one encoding of each kind of state has more than one.
    uneven = name in ("rope", "carope", "selective", "fox")
    for sizes in ((1,) * T, (3, 1, 1, 3), (1, 3, 3, 1))[: 3 if uneven else 1]:
        carry, chunks = layer.initial_carry(B), []
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            part = np.s_[:, end - size : end]
            flags = {key: flag[part] for key, flag in FLAGS.items()}
            out, carry = run(layer, *[x[part] for x in INPUTS], carry=carry, **flags)
            chunks.append(out)
        joined = [np.concatenate(x, axis=1) for x in zip(*chunks, strict=True)]
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


# A query's projection is a group's own, so with other groups it is another encoding.
@pytest.mark.parametrize(
    "name", ["rope partial", "carope", "carope exclusive", "selective hidden", "darope"]
)
def test_a_query_group_shares_its_phase(name):
    grouped, single = stirred(name), stirred(name, kv_heads=H)
    for weight in grouped.names:
        variable = getattr(grouped, weight)
        values = np.asarray(variable[...])
        if "kv_heads" in variable.axes:
            values = np.repeat(values, H // K, axis=variable.axes.index("kv_heads"))
        getattr(single, weight)[...] = jnp.asarray(values)
    keys = np.repeat(KEYS, H // K, axis=2)
    (q, k), _ = run(grouped, Q, KEYS, X)
    assert_same((q, np.repeat(k, H // K, axis=2)), run(single, Q, keys, X)[0])


@quick_jit
def felt(layer, q, k, x):
    """[B, T, B, T]: how strongly each token's outputs feel each token."""

    def one_number_a_token(q, k, x):
        out, _ = call(layer, q, k, x, **FLAGS)
        # Of another direction than any token's, so that a turn moves the number.
        return sum(jnp.tanh(y + 1).reshape(B, T, -1).sum(-1) for y in out)

    jacobians = jax.jacrev(one_number_a_token, argnums=(0, 1, 2))(q, k, x)
    return sum(jnp.abs(j).reshape(B, T, B, T, -1).sum(-1) for j in jacobians)


@pytest.mark.parametrize("name", FEEL_THE_PAST)
def test_no_token_feels_a_later_one_or_another_document(name):
    felt_BTBT = np.asarray(felt(stirred(name), Q, KEYS, X))
    assert np.isfinite(felt_BTBT).all()
    depends = felt_BTBT != 0
    own = np.eye(B * T, dtype=bool).reshape(depends.shape)
    row = np.eye(B, dtype=bool)[:, None, :, None]
    same = row & (LETTERS[:, :, None, None] == LETTERS) & np.tril(np.ones((T, T), bool))[:, None]
    past = same & VALID[:, :, None, None] & ~own
    # A padded token's own output may look back; what matters is that none looks at padding.
    valid = VALID[:, :, None, None] & np.ones_like(depends)
    assert not (depends & valid & ~past & ~own).any()
    if FEEL_THE_PAST[name]:
        nearest = past & (np.arange(B * T)[:, None] == np.arange(B * T) + 1).reshape(past.shape)
        assert depends[nearest].all()
    else:
        assert not (depends & past).any()


@pytest.mark.parametrize(
    "name",
    ["rope", "carope", "selective", "selective hidden", "darope", "fox", "alibi", "sinusoidal"],
)
def test_bfloat16_inputs_have_float32_phases(name):
    layer = stirred(name)
    inputs = [x.astype(jnp.bfloat16) for x in (Q, KEYS, X)]
    out, _ = run(layer, *inputs)
    exact, _ = run(layer, *[x.astype(np.float32) for x in inputs])
    for ours, theirs in zip(out, exact, strict=True):
        if CASES[name].biases:
            assert ours.dtype == jnp.float32
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        else:
            assert ours.dtype == jnp.bfloat16
            # Half a unit of bfloat16's 8 bits, twice where rounded before the sum too.
            np.testing.assert_allclose(ours.astype(np.float32), theirs, rtol=2**-7, atol=2**-8)
