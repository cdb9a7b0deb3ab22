"""One checkpoint on other devices, on other meshes, and without its optimizer."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import small_experiment

from carope_jax.training import (
    CheckpointConfig,
    CheckpointCorrupt,
    CheckpointMismatch,
    Checkpoints,
    MeshConfig,
    abstract_model,
    abstract_state,
    initial_state,
    make_mesh,
    make_optimizer,
)
from carope_jax.training._fingerprint import fingerprints
from carope_jax.training._manifest import by_path

EXPERIMENT = small_experiment()
OPTIMIZER = make_optimizer(EXPERIMENT.optimizer, EXPERIMENT.training.steps)


def model_on(devices=8, **mesh):
    return abstract_model(EXPERIMENT.model, make_mesh(MeshConfig(**mesh), jax.devices()[:devices]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state of eight devices, and its fingerprints."""
    folder = tmp_path_factory.mktemp("saved")
    model = model_on(data=2, fsdp=2, tensor=2)
    state = initial_state(EXPERIMENT.model, model, OPTIMIZER, 0)
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.save(0, state, data=None, info={})
    return folder, fingerprints(by_path(state))


MESHES = [
    {"devices": 1},
    {"devices": 2},
    {"devices": 2, "data": 1, "tensor": 2},
    {"devices": 4, "fsdp": 2},
    {"devices": 8, "data": 1, "fsdp": 8},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_restores_on_other_devices(saved, mesh):
    folder, sums = saved
    wanted = abstract_state(model_on(**mesh), OPTIMIZER)
    found = Checkpoints(folder, CheckpointConfig()).restore(wanted).state
    assert fingerprints(by_path(found)) == sums
    for leaf, like in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == like.sharding


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parameters_alone(saved, mesh):
    folder, sums = saved
    params = model_on(**mesh).params
    found = Checkpoints(folder, CheckpointConfig()).restore_parameters({"params": params})
    assert set(found.state) == {"params"}
    expected = {path: value for path, value in sums.items() if path.startswith("params/")}
    assert expected
    assert fingerprints(by_path(found.state)) == expected


# Orbax's event loop may be gone when TensorStore reports a second failure of the same read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_optimizer_is_not_read(tmp_path):
    """A state whose optimizer is far larger than the parameters, damaged all over."""
    rng = np.random.default_rng(0)
    noise = jnp.asarray(rng.standard_normal((1 << 20,), np.float32))
    state = {"params": {"w": jnp.arange(8.0)}, "optimizer": noise}
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, data=None, info={})
    largest = max(tmp_path.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for at in range(len(content) // 4, 3 * len(content) // 4, 4096):
        content[at] ^= 1
    largest.write_bytes(content)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with pytest.raises(CheckpointCorrupt):
        checkpoints.restore(wanted)
    found = checkpoints.restore_parameters({"params": wanted["params"]})
    np.testing.assert_array_equal(found.state["params"]["w"], np.arange(8.0))


CHANGES = {
    "shape": ({"model_dim": 48}, r"params/\S+: shape \[.*\] here, \[.*\] in the checkpoint"),
    "tree": ({"position": "nope"}, r"params/\S*encoding\S*: in the checkpoint only"),
}


@pytest.mark.parametrize(("model", "message"), CHANGES.values(), ids=CHANGES)
def test_another_model_is_named_by_the_parameters_path(saved, model, message):
    other = dataclasses.replace(EXPERIMENT.model, **model)
    wanted = abstract_model(other, make_mesh(MeshConfig())).params
    checkpoints = Checkpoints(saved[0], CheckpointConfig())
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoints.restore_parameters({"params": wanted})
    assert re.search(message, str(caught.value)), caught.value
    assert "optimizer/" not in str(caught.value)


def test_another_type_is_named_by_the_parameters_path(saved):
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding),
        model_on().params,
    )
    with pytest.raises(CheckpointMismatch, match=r"params/\S+: dtype bfloat16 here, float32 in"):
        Checkpoints(saved[0], CheckpointConfig()).restore_parameters({"params": params})
