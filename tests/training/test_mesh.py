"""Any mesh, same numbers; what does not divide is named."""

import jax
import numpy as np
import pytest
from experiments import ragged_batch, small_experiment

from carope_jax.layers import ENCODINGS
from carope_jax.training import (
    CheckpointConfig,
    Checkpoints,
    MeshConfig,
    abstract_model,
    abstract_state,
    batch_loss,
    batch_shapes,
    initial_state,
    make_mesh,
    make_optimizer,
)

SHAPES = [(8, 1, 1), (1, 8, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (1, 4, 2), (2, 2, 2)]


def loss_and_gradient(experiment, mesh, state):
    model = abstract_model(experiment.model, mesh)
    params = jax.tree.map(lambda p, s: jax.device_put(p, s.sharding), state.params, model.params)
    batch = ragged_batch()
    where = model.sharding.named(("batch", "time"))
    batch = {name: jax.device_put(x, where) for name, x in batch.items()}

    def loss(params):
        total, (count, _) = batch_loss(model, params, state.constants, batch)
        return total / count

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), jax.tree.map(np.asarray, gradient)


@pytest.fixture(scope="module")
def alone():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return {}, mesh


def close_by_norm(found, wanted, tolerance=1e-5):
    for path, a in jax.tree_util.tree_leaves_with_path(found):
        b = wanted
        for entry in path:
            b = b[entry.key]
        error, norm = np.linalg.norm(a - b), np.linalg.norm(b)
        # Rope's key bias has no gradient but rounding; an absolute floor speaks for it.
        assert error <= tolerance * norm + 1e-8, (jax.tree_util.keystr(path), error, norm)


# Every shape for one encoding; on one shape rope and every encoding with weights to be placed.
WITHOUT_WEIGHTS = {"hope", "alibi", "sinusoidal", "nope"}
CASES = [(shape, "carope") for shape in SHAPES]
CASES += [((2, 2, 2), name) for name in ENCODINGS if name not in WITHOUT_WEIGHTS | {"carope"}]


@pytest.mark.parametrize(("shape", "position"), CASES)
def test_every_mesh_gives_one_devices_numbers(shape, position, alone):
    experiment = small_experiment(position=position)
    known, single = alone
    if position not in known:
        model = abstract_model(experiment.model, single)
        optimizer = make_optimizer(experiment.optimizer, 3)
        state = initial_state(experiment.model, model, optimizer, 0)
        known[position] = state, *loss_and_gradient(experiment, single, state)
    state, wanted_loss, wanted = known[position]
    loss, gradient = loss_and_gradient(experiment, make_mesh(MeshConfig(*shape)), state)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    close_by_norm(gradient, wanted)


def test_parameters_and_optimizer_are_sharded():
    experiment = small_experiment()
    model = abstract_model(experiment.model, make_mesh(MeshConfig(data=1, fsdp=4, tensor=2)))
    state = abstract_state(model, make_optimizer(experiment.optimizer, 3))
    for tree in (state.params, state.optimizer[1].mu, state.optimizer[1].nu):
        kernel = tree["blocks"]["mlp"]["up"]["linear"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (2, 32 // 4, 128 // 2)
        embedding = tree["token_embedding"]["embedding"]
        assert embedding.sharding.shard_shape(embedding.shape) == (64 // 2, 32 // 4)


def test_a_checkpoint_of_one_mesh_restores_on_another(tmp_path):
    experiment = small_experiment()
    optimizer = make_optimizer(experiment.optimizer, 3)
    first, second = (
        abstract_model(experiment.model, make_mesh(MeshConfig(*shape)))
        for shape in ((2, 2, 2), (1, 4, 2))
    )
    state = initial_state(experiment.model, first, optimizer, 0)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, data=None, info={})
        restored = checkpoints.restore(abstract_state(second, optimizer)).state
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    kernel = restored.params["blocks"]["mlp"]["up"]["linear"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 32 // 4, 128 // 2)


def test_what_does_not_divide_is_named():
    experiment = small_experiment()
    with pytest.raises(ValueError, match=r"8 devices"):
        make_mesh(MeshConfig(data=3))
    with pytest.raises(ValueError, match=r"attention/.*kv_heads.* size 2 .* 4 devices"):
        abstract_model(experiment.model, make_mesh(MeshConfig(data=2, tensor=4)))
    model = abstract_model(experiment.model, make_mesh(MeshConfig(data=8)))
    with pytest.raises(ValueError, match=r"batch_size 6 .* 8 devices"):
        batch_shapes(model, 6, 16)
    with pytest.raises(ValueError, match="at most one"):
        MeshConfig(data=-1, fsdp=-1)
