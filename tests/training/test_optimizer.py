"""The recipe: who is decayed, who has another rate, and AdamW's arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from carope_jax.layers import ENCODINGS
from carope_jax.models import Decoder, ModelConfig
from carope_jax.training import OptimizerConfig, make_optimizer, make_schedule
from carope_jax.training._optimizer import is_decayed


def params_of(**model):
    config = ModelConfig(
        num_layers=2, model_dim=16, num_heads=2, vocab_size=32, max_length=8, **model
    )
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


def paths(tree, keep):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(entry.key for entry in path) for path, _ in leaves if keep(path)}


DENSE = {
    *(f"blocks/attention/{layer}/linear/kernel" for layer in ("query", "key", "value", "out")),
    *(f"blocks/mlp/{layer}/linear/kernel" for layer in ("up", "down")),
}


@pytest.mark.parametrize("position", ENCODINGS)
def test_decayed_leaves(position):
    kernel = {"blocks/attention/encoding/kernel"}
    own = dict.fromkeys(("carope", "darope", "fox"), kernel)
    own["selective_rope"] = kernel | {"blocks/attention/encoding/conv_kernel"}
    own["learned"] = {"encoding/table"}
    wanted = DENSE | {"token_embedding/embedding"} | own.get(position, set())
    assert paths(params_of(position=position), is_decayed) == wanted


def test_decayed_leaves_of_swiglu_untied():
    params = params_of(activation="swiglu", norm="rmsnorm", tie_embeddings=False)
    wanted = DENSE | {"token_embedding/embedding", "output/linear/kernel"}
    wanted |= {"blocks/mlp/gate/linear/kernel"}
    assert paths(params, is_decayed) == wanted


def test_updates_are_adamws():
    """Three updates against the paper's formulas in float64 numpy, clipping and groups included."""
    config = OptimizerConfig(
        learning_rate=1e-2,
        final_learning_rate=1e-3,
        warmup_steps=2,
        weight_decay=0.3,
        clip_norm=0.5,
        encoding_factor=0.25,
    )
    optimizer, schedule = make_optimizer(config, 10), make_schedule(config, 10)
    rng = np.random.default_rng(0)
    params = {
        "blocks": {"encoding": {"kernel": rng.normal(size=(2, 3)), "bias": rng.normal(size=3)}},
        "dense": {"kernel": rng.normal(size=(3, 3))},
    }
    state = optimizer.init(jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params))
    ours = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    flat, tree = jax.tree.flatten(params)
    decay, factor = [0.0, 0.3, 0.3], [1.0, 0.25, 1.0]  # bias, encoding kernel, dense kernel
    mean, square = [np.zeros_like(p) for p in flat], [np.zeros_like(p) for p in flat]
    for step in range(3):
        gradient = [rng.normal(size=p.shape) for p in flat]
        norm = np.sqrt(sum((g**2).sum() for g in gradient))
        updates, state = optimizer.update(
            jax.tree.unflatten(tree, [jnp.asarray(g, jnp.float32) for g in gradient]), state, ours
        )
        ours = jax.tree.map(jnp.add, ours, updates)
        rate = float(schedule(step))
        for i, g in enumerate(gradient):
            g = g * min(1.0, 0.5 / norm)
            mean[i] = 0.9 * mean[i] + 0.1 * g
            square[i] = 0.95 * square[i] + 0.05 * g**2
            adam = mean[i] / (1 - 0.9 ** (step + 1))
            adam = adam / (np.sqrt(square[i] / (1 - 0.95 ** (step + 1))) + 1e-8)
            flat[i] = flat[i] - rate * factor[i] * (adam + decay[i] * flat[i])
    for mine, reference in zip(jax.tree.leaves(ours), flat, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=2e-5, atol=1e-6)


def test_schedule_is_the_papers():
    schedule = make_schedule(OptimizerConfig(), 19_000)
    assert 0 < float(schedule(0)) < 1e-6
    assert float(schedule(750)) == pytest.approx(6e-4)
    assert float(schedule(19_000)) == pytest.approx(6e-5)
    assert float(schedule((750 + 19_000) // 2)) == pytest.approx(3.3e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.0), ("beta2", 1.0), ("warmup_steps", -1), ("clip_norm", float("nan"))],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        OptimizerConfig(**{field: value})
