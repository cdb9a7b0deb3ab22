"""Any mesh, same numbers; what does not divide is named."""

import dataclasses

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
    compile_step,
    initial_state,
    make_mesh,
    make_nll_function,
    make_optimizer,
    make_schedule,
    make_train_step,
    memory_per_device,
)
from carope_jax.training._plan import lay_out

SHAPES = [
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (2, 4, 1, 1),
    (1, 4, 2, 1),
    (2, 2, 2, 1),
    (1, 1, 1, 8),
    (4, 1, 1, 2),
    (1, 1, 2, 4),
    (1, 2, 2, 2),
]


def packed_batch():
    """The same with several documents a row, cut anywhere, and padding after them."""
    batch = ragged_batch()
    rng = np.random.default_rng(1)
    ids = np.cumsum(rng.random(batch["inputs"].shape) < 0.2, axis=1) + 1
    ids[::3, -5:] = 0
    return batch | {"segment_ids": ids.astype(np.int32)}


def loss_and_gradient(experiment, mesh, state, batch):
    model = abstract_model(experiment.model, mesh)
    params = jax.tree.map(lambda p, s: jax.device_put(p, s.sharding), state.params, model.params)
    where = model.sharding.named(("batch", "time"))
    batch = {name: jax.device_put(x, where) for name, x in batch.items()}

    def loss(params):
        total, (count, measured) = batch_loss(model, params, state.constants, batch)
        return total / count, measured

    (value, measured), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return (float(value), *jax.tree.map(np.asarray, (gradient, measured)))


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


# Every shape for one encoding; every encoding, packed, on one that splits all that can be split.
CASES = [(shape, "carope", False) for shape in SHAPES]
CASES += [((1, 2, 2, 2), name, True) for name in ENCODINGS]


@pytest.mark.parametrize(("shape", "position", "packed"), CASES)
def test_every_mesh_gives_one_devices_numbers(shape, position, packed, alone):
    # Chunks of the loss that don't divide a device's tokens.
    experiment = small_experiment(position=position, loss_chunk=5 if packed else None)
    batch = packed_batch() if packed else ragged_batch()
    known, single = alone
    if (position, packed) not in known:
        model = abstract_model(experiment.model, single)
        optimizer = make_optimizer(experiment.optimizer, 3)
        state = initial_state(experiment.model, model, optimizer, 0)
        wanted = loss_and_gradient(experiment, single, state, batch)
        known[position, packed] = state, *wanted
    state, wanted_loss, wanted, wanted_measured = known[position, packed]
    mesh = make_mesh(MeshConfig(*shape))
    loss, gradient, measured = loss_and_gradient(experiment, mesh, state, batch)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    close_by_norm(gradient, wanted)
    # The spread of f starts at nothing but rounding.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        measured,
        wanted_measured,
    )


def test_evaluation_of_lengths_that_do_not_divide(alone):
    experiment = small_experiment()
    single = abstract_model(experiment.model, alone[1])
    state = initial_state(experiment.model, single, make_optimizer(experiment.optimizer, 3), 0)
    sharded = abstract_model(experiment.model, make_mesh(MeshConfig(data=2, context=4)))
    tokens = ragged_batch()["inputs"][:3, :13]
    nll = [
        make_nll_function(model)(
            jax.device_put(state.params, jax.tree.map(lambda s: s.sharding, model.params)),
            state.constants,
            tokens[:, :-1],
            tokens[:, 1:],
        )
        for model in (single, sharded)
    ]
    assert nll[1].shape == (3, 12)
    np.testing.assert_allclose(nll[1], nll[0], rtol=1e-5)


def step_on(devices, length, position="carope"):
    """The compiled update of one packed sequence, sharded over these devices, and what it takes."""
    experiment = small_experiment(position=position, max_length=length)
    mesh = make_mesh(MeshConfig(data=1, context=devices), jax.devices()[:devices])
    model = abstract_model(experiment.model, mesh)
    optimizer = make_optimizer(experiment.optimizer, 3)
    step = make_train_step(model, optimizer, make_schedule(experiment.optimizer, 3))
    state = abstract_state(model, optimizer)
    batch = batch_shapes(model, 1, length, "packed")
    compiled = compile_step(step, model, state, batch)
    return compiled, lambda: initial_state(experiment.model, model, optimizer, 0), batch


def test_a_long_sequence_takes_an_eighth_of_the_memory_on_eight_devices():
    alone, together = (memory_per_device(step_on(n, 131_072)[0]) for n in (1, 8))
    assert together < 1.05 * alone / 8


def test_a_long_sequence_over_eight_devices_is_that_of_one():
    length = 8192
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (1, length + 1)).astype(np.int32)
    ids = np.cumsum(rng.random((1, length)) < 4 / length, axis=1).astype(np.int32) + 1
    given = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids}
    found = []
    for devices in (1, 8):
        compiled, start, shapes = step_on(devices, length)
        batch = {name: jax.device_put(x, shapes[name].sharding) for name, x in given.items()}
        state, metrics = compiled(start(), batch)
        found.append((float(metrics["loss"]), jax.tree.map(np.asarray, state.optimizer[1].mu)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    close_by_norm(found[1][1], found[0][1])


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
        for shape in ((2, 2, 2), (1, 4, 1, 2))
    )
    state = initial_state(experiment.model, first, optimizer, 0)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, data=None, info={})
        restored = checkpoints.restore(abstract_state(second, optimizer)).state
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    kernel = restored.params["blocks"]["mlp"]["up"]["linear"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 32 // 4, 128)


def test_what_does_not_divide_is_named():
    experiment = small_experiment()
    with pytest.raises(ValueError, match=r"8 devices"):
        make_mesh(MeshConfig(data=3))
    with pytest.raises(ValueError, match=r"attention/.*kv_heads.* size 2 .* 4 devices"):
        abstract_model(experiment.model, make_mesh(MeshConfig(data=2, tensor=4)))
    model = abstract_model(experiment.model, make_mesh(MeshConfig(data=8)))
    with pytest.raises(ValueError, match=r"batch_size 6 .* 8 devices"):
        batch_shapes(model, 6, 16)
    with pytest.raises(ValueError, match=r"length 12 is not a multiple of 16: .* context 8"):
        batch_shapes(abstract_model(experiment.model, make_mesh(MeshConfig(1, 1, 1, 8))), 8, 12)
    over_context = dataclasses.replace(
        small_experiment(attention="cudnn"), mesh=MeshConfig(data=4, context=2)
    )
    with pytest.raises(ValueError, match=r"'cudnn' takes whole sequences .* context 2"):
        lay_out(over_context)
    with pytest.raises(ValueError, match="at most one"):
        MeshConfig(data=-1, fsdp=-1)
