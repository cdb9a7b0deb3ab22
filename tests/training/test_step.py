"""One update: its loss, its gradient over micro-batches, what it leaves alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import ragged_batch, small_experiment
from flax import nnx

from carope_jax.training import (
    abstract_model,
    batch_loss,
    initial_state,
    make_nll_function,
    make_optimizer,
    make_schedule,
    make_train_step,
)


@functools.cache
def prepared(experiment, mesh, micro_batches=1):
    """A model, its first state and its compiled update: most tests share one."""
    model = abstract_model(experiment.model, mesh)
    optimizer = make_optimizer(experiment.optimizer, experiment.training.steps)
    schedule = make_schedule(experiment.optimizer, experiment.training.steps)
    state = initial_state(experiment.model, model, optimizer, 0)
    return model, state, jax.jit(make_train_step(model, optimizer, schedule, micro_batches))


def test_loss_is_the_mean_over_counted_targets(one_device):
    experiment = small_experiment()
    model, state, step = prepared(experiment, one_device)
    batch = ragged_batch()
    _, metrics = step(state, batch)
    logits = model.merge(state.params, state.constants)(batch["inputs"]).logits
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    assert int(metrics["tokens"]) == batch["mask"].sum()
    assert float(metrics["loss"]) == pytest.approx(nll[batch["mask"]].mean(), rel=1e-6)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_micro_batches_equal_one_batch(one_device, micro_batches):
    """Sum of losses over sum of tokens, though every part has another number of targets."""
    experiment = small_experiment()
    _, state, whole = prepared(experiment, one_device)
    parts = prepared(experiment, one_device, micro_batches)[2]
    batch = ragged_batch()
    after, metrics = whole(state, batch)
    after_parts, metrics_parts = parts(state, batch)
    assert float(metrics_parts["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert float(metrics_parts["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    # Adam's first moment after one update is the clipped gradient, unnormalised.
    for a, b in zip(
        jax.tree.leaves(after.optimizer[1].mu),
        jax.tree.leaves(after_parts.optimizer[1].mu),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8)


def test_padding_by_segment_ids_does_not_count(one_device):
    experiment = small_experiment()
    model, state, _ = prepared(experiment, one_device)
    batch = {k: v for k, v in ragged_batch().items() if k != "mask"}
    segment_ids = np.ones((8, 16), np.int32)
    segment_ids[:, 12:] = 0
    total, (count, _) = batch_loss(
        model, state.params, state.constants, batch | {"segment_ids": segment_ids}
    )
    short, (short_count, _) = batch_loss(
        model, state.params, state.constants, {k: v[:, :12] for k, v in batch.items()}
    )
    assert int(count) == int(short_count) == 8 * 12
    assert float(total) == pytest.approx(float(short), rel=1e-6)


def test_a_batch_without_targets_changes_nothing_but_decay(one_device):
    _, state, step = prepared(small_experiment(), one_device)
    batch = ragged_batch()
    batch["mask"] = np.zeros_like(batch["mask"])
    after, metrics = step(state, batch)
    assert float(metrics["loss"]) == 0
    assert float(metrics["grad_norm"]) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))


def test_frozen_control_is_not_trained(one_device):
    experiment = small_experiment()
    carope = dataclasses.replace(experiment.model.carope, control="frozen", kernel_std=0.5)
    model = dataclasses.replace(experiment.model, carope=carope)
    experiment = dataclasses.replace(experiment, model=model)
    _, state, step = prepared(experiment, one_device)
    after, _ = step(state, ragged_batch())
    encoding = state.constants["blocks"]["attention"]["encoding"]
    assert set(encoding) == {"kernel", "bias"}
    assert np.std(encoding["kernel"]) > 0.3
    jax.tree.map(np.testing.assert_array_equal, after.constants, state.constants)
    assert "encoding" not in after.params["blocks"]["attention"]


def test_encoding_factor_zero_leaves_w_alone_and_trains_the_bias(one_device):
    experiment = small_experiment()
    optimizer = dataclasses.replace(experiment.optimizer, encoding_factor=0.0)
    _, state, step = prepared(dataclasses.replace(experiment, optimizer=optimizer), one_device)
    after, _ = step(state, ragged_batch())
    before, now = (s.params["blocks"]["attention"]["encoding"] for s in (state, after))
    np.testing.assert_array_equal(now["kernel"], before["kernel"])
    assert not np.array_equal(now["bias"], before["bias"])


def test_initialisation_is_gpt2s_and_does_not_depend_on_the_mesh(one_device):
    from carope_jax.training import MeshConfig, make_mesh

    experiment = small_experiment(model_dim=64)
    alone = prepared(experiment, one_device)[1].params
    many = prepared(experiment, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))[1].params
    jax.tree.map(np.testing.assert_array_equal, alone, many)
    blocks = alone["blocks"]
    assert np.std(blocks["mlp"]["up"]["linear"]["kernel"]) == pytest.approx(0.02, rel=0.05)
    residual = blocks["mlp"]["down"]["linear"]["kernel"]
    assert np.std(residual) == pytest.approx(0.02 / 2, rel=0.05)  # sqrt(2 x 2 layers)
    assert not np.array_equal(residual[0], residual[1])


def test_shared_parameters_start_alike_whatever_the_encoding(one_device):
    starts = {
        position: prepared(small_experiment(position=position), one_device)[1].params
        for position in ("rope", "carope", "learned")
    }
    for position in ("carope", "learned"):
        flat = dict(nnx.traversals.flatten_mapping(starts[position]))
        for path, value in nnx.traversals.flatten_mapping(starts["rope"]).items():
            np.testing.assert_array_equal(flat[path], value, err_msg="/".join(path))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_nll_function_takes_any_number_of_rows(rows):
    from carope_jax.training import MeshConfig, make_mesh

    experiment = small_experiment()
    model, state, _ = prepared(experiment, make_mesh(MeshConfig(data=4, tensor=2)))
    batch = ragged_batch(rows)
    nll = make_nll_function(model)
    found = nll(state.params, state.constants, batch["inputs"], batch["targets"])
    assert found.shape == (rows, 16)
    assert found.dtype == np.float32
    alone = nll(state.params, state.constants, batch["inputs"][:1], batch["targets"][:1])
    np.testing.assert_allclose(found[:1], alone, rtol=1e-5, atol=1e-6)


def test_the_step_is_pure(one_device):
    _, state, step = prepared(small_experiment(), one_device)
    batch = ragged_batch()
    first, again = step(state, batch), step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert int(first[0].step) == int(state.step) + 1
    assert first[0].step.dtype == jnp.int32
