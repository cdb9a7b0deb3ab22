import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoding_cases import CASES, KEYS, ROTARY, B, D, H, K, N, Q, T, X, call, quick_jit, stirred
from flax import linen as nn
from flax import nnx

from carope_jax import layers, linen
from carope_jax.layers import CaropeConfig, FoxConfig, HeadDims, SelectiveRopeConfig

DIMS = HeadDims(model_dim=D, heads=H, kv_heads=K, head_dim=N)
every = pytest.mark.parametrize("name", CASES)
STARTS = np.tile(np.arange(T) == 3, (B, 1))
VALID = np.tile(np.arange(T) != 4, (B, 1))


def make(name):
    """The Linen module of a case, and what it is called with."""
    config = CASES[name]
    module = getattr(linen, type(config).__name__.removesuffix("Config"))
    if config.biases:
        return module(H, config), (X,)
    return module(config), (Q, KEYS, X) if name in ROTARY else (X,)


def variables(layer):
    """An NNX module's weights as Linen's variables."""
    collections = {}
    for name in layer.names:
        variable = getattr(layer, name)
        collection = "constants" if isinstance(variable, layers.FrozenParam) else "params"
        collections.setdefault(collection, {})[name] = variable[...]
    return collections


def test_linen_has_every_module():
    assert {type(make(name)[0]).__name__ for name in CASES} == set(linen.__all__)


@every
def test_weights_are_nnxs(name):
    module, inputs = make(name)
    made = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    theirs = variables(stirred(name))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), theirs
    )
    assert ("constants" in made) == (name in ("carope shared", "fox fixed"))


@every
def test_numbers_are_nnxs_bit_for_bit(name):
    (module, inputs), layer = make(name), stirred(name)
    flags = {"starts": STARTS, "valid": VALID}

    # In one program: what is the same computation is done once, what is not is seen.
    @quick_jit
    def both(layer, variables):
        ours = module.apply(variables, *inputs, carry=module.initial_carry(DIMS, B), **flags)
        out, carry = call(layer, Q, KEYS, X, carry=layer.initial_carry(B), **flags)
        return ours, (*out, carry)

    ours, theirs = both(layer, variables(layer))
    assert len(ours) == len(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
    whole = jax.eval_shape(module.apply, variables(layer), *inputs)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(whole)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(theirs[:-1])
    ]


@pytest.mark.parametrize(
    ("config", "std"),
    [
        (CaropeConfig(init="paper", kernel_std=0.3, control="frozen"), 0.3),
        (CaropeConfig(exponent="free", control="mean"), 0.0),
        (SelectiveRopeConfig(source="hidden", train_temperature=True, gate="head"), 400**-0.5),
        (FoxConfig(shortest_decay=2.0, longest_decay=7.0), 0.02),
    ],
    ids=["frozen", "mean", "selective", "fox"],
)
def test_weights_start_as_nnxs(config, std):
    x = jnp.zeros((1, 1, 400))
    module = getattr(linen, type(config).__name__.removesuffix("Config"))
    module = module(H, config) if config.biases else module(config)
    inputs = (x,) if config.biases else (Q[:1, :1], KEYS[:1, :1], x)

    @quick_jit
    def both(key):
        dims = HeadDims(400, H, K, N)
        theirs = layers.AttentionEncoding(config, dims, rngs=nnx.Rngs(params=key))
        return module.init(key, *inputs), variables(theirs)

    ours, theirs = both(jax.random.key(0))
    for collection, weights in theirs.items():
        for weight, values in weights.items():
            mine = ours[collection][weight]
            if weight == "kernel":
                for drawn in (mine, values):
                    assert np.std(drawn) == pytest.approx(std, rel=0.1)
                    assert np.mean(drawn) == pytest.approx(0, abs=0.15 * std)
            elif not weight.endswith("kernel"):
                np.testing.assert_array_equal(mine, values)


class Attention(nn.Module):
    """As an importer writes it."""

    @nn.compact
    def __call__(self, x):
        q = nn.DenseGeneral((H, N), name="query")(x)
        k = nn.DenseGeneral((K, N), name="key")(x)
        turned = linen.Carope(CaropeConfig(init="paper", control="frozen"), name="rope")(q, k, x)
        return linen.Rope(name="fixed")(*turned)


def test_in_a_compact_method_frozen_weights_are_not_params():
    variables = quick_jit(Attention().init)(jax.random.key(0), X)
    assert set(variables) == {"params", "constants"}
    assert set(variables["params"]) == {"query", "key"}
    assert set(variables["constants"]["rope"]) == {"kernel"}

    @quick_jit
    def gradient(params):
        def loss(params):
            q, k = Attention().apply({**variables, "params": params}, X)
            return (q[:, :, ::2] * k).sum()

        return jax.grad(loss)(params)

    for leaf in jax.tree.leaves(gradient(variables["params"])):
        assert np.isfinite(leaf).all()
        assert np.any(leaf)


@pytest.mark.parametrize(
    "module",
    [
        linen.Carope(),
        linen.SelectiveRope(SelectiveRopeConfig(source="hidden")),
        linen.SelectiveRope(SelectiveRopeConfig(gate="head")),
        linen.DaRope(layers.DaRopeConfig(length=4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_missing_x_is_named(module):
    with pytest.raises(ValueError, match=f"{type(module).__name__} needs x"):
        module.init(jax.random.key(0), Q, KEYS)
    weights = jax.eval_shape(module.init, jax.random.key(0), Q, KEYS, X)
    with pytest.raises(ValueError, match=f"{type(module).__name__} needs x"):
        jax.eval_shape(module.apply, weights, Q, KEYS)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"head_dim must be even and at least 2 .* 7"):
        linen.Carope().init(jax.random.key(0), Q[..., :7], KEYS[..., :7], X)
    with pytest.raises(ValueError, match="2 key/value heads do not divide 3 heads"):
        linen.Rope().init(jax.random.key(0), Q[:, :, :3], KEYS)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        linen.HoPe(layers.HoPeConfig()).init(jax.random.key(0), Q, KEYS)
