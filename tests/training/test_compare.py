"""Telling two runs apart: what is logged to do so, and what is said of it."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest
from experiments import small_experiment
from rich.console import Console

from carope_jax import command
from carope_jax.training import (
    CheckpointConfig,
    Checkpoints,
    MeshConfig,
    TrainingConfig,
    compare_runs,
    read_inputs,
    read_metrics,
    train,
)
from carope_jax.training._fingerprint import batch_fingerprint, fingerprints, joint_fingerprint

COMPARE = "carope_jax.training.compare"


def experiment(mesh=None, **data):
    small = small_experiment(vocab_size=512, num_layers=1)
    return dataclasses.replace(
        small,
        data=dataclasses.replace(small.data, **data),
        training=TrainingConfig(steps=6, log_every=2, eval_every=0, tensorboard=False),
        checkpoint=CheckpointConfig(every=3),
        mesh=mesh or MeshConfig(),
    )


def trained(folder, chosen):
    train(read_inputs(chosen, folder), console=Console(quiet=True))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "a", experiment())


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "b")


def change_row(folder, step, **values):
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | values if row["step"] == step else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_carry_the_fingerprints_of_batches_and_parameters(run):
    chosen = experiment()
    rows = {row["step"]: row for row in read_metrics(run)}
    assert sorted(rows) == [2, 3, 4, 6]
    batches = read_inputs(chosen, run).dataset.batches(chosen.data)
    for step in range(1, 7):
        batch = {name: jnp.asarray(rows_BT) for name, rows_BT in next(batches).items()}
        if step in rows:
            assert rows[step]["batch_fingerprint"] == joint_fingerprint(fingerprints(batch))
            assert rows[step]["batch_fingerprint"] == int(batch_fingerprint(batch))
    batches.close()
    assert [step for step, row in rows.items() if "params_fingerprint" in row] == [3, 6]
    for step in (3, 6):
        leaves = Checkpoints(run / "checkpoints", CheckpointConfig()).fingerprints(step)
        params = {
            path.removeprefix("params/"): value
            for path, value in leaves.items()
            if path.startswith("params/")
        }
        assert rows[step]["params_fingerprint"] == joint_fingerprint(params)


def test_exchanged_arrays_have_another_joint_fingerprint():
    assert joint_fingerprint({"a": 3, "b": 4}) == joint_fingerprint({"b": 4, "a": 3})
    assert joint_fingerprint({"a": 3, "b": 4}) != joint_fingerprint({"a": 4, "b": 3})


def test_equal_runs(run_command, run, copied, tmp_path):
    change_row(copied, 4, tokens_per_second=1.0)
    out = tmp_path / "out.json"
    ran = run_command(COMPARE, [run, copied, "--json", out])
    assert ran.code == 0, ran.err
    assert ran.out == "no step differs: 4 rows and 2 checkpoints in both\n"
    found = json.loads(out.read_text())
    assert found["equal"] is True
    assert (found["first_step"], found["rows"], found["checkpoints"]) == (None, 4, [3, 6])


@pytest.mark.parametrize(
    ("step", "name"), [(4, "loss"), (6, "grad_norm"), (2, "batch_fingerprint"), (4, "f_mean")]
)
def test_the_first_differing_step_is_named(run_command, run, copied, step, name):
    change_row(copied, 6, tokens=0)
    value = [0.5] if name == "f_mean" else 0.5
    change_row(copied, step, **{name: value})
    ran = run_command(COMPARE, [run, copied])
    assert ran.code == 1
    assert f"first difference at step {step}" in ran.out
    assert f"  {name}: " in ran.out
    assert ("tokens" in ran.out) == (step == 6)


def test_the_last_bit_of_a_loss_counts(run, copied):
    loss = read_metrics(run)[0]["loss"]
    change_row(copied, 2, loss=float(jnp.nextafter(jnp.float32(loss), jnp.float32(9))))
    assert [d.what for d in compare_runs(run, copied).differences] == ["loss"]


def test_other_batches_come_first_and_the_configuration_says_why(run_command, run, tmp_path):
    other = trained(tmp_path / "other", experiment(shuffle_seed=1))
    ran = run_command(COMPARE, [run, other])
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert lines[0] == "differs: data.shuffle_seed: 0 | 1"
    assert lines[1].startswith("first difference at step 2, of 4 rows")
    assert lines[2].startswith("  batch_fingerprint: ")


def test_another_mesh_has_the_same_batches_and_stands_aside(run, tmp_path):
    other = trained(tmp_path / "other", experiment(MeshConfig(data=2, tensor=2, fsdp=2)))
    found = compare_runs(run, other)
    assert found.inputs == ()
    assert {d.what for d in found.aside} == {"mesh.data", "mesh.fsdp", "mesh.tensor"}
    assert "batch_fingerprint" not in {d.what for d in found.differences}
    ours, theirs = ([r["batch_fingerprint"] for r in read_metrics(f)] for f in (run, other))
    assert ours == theirs
    assert len(set(ours)) == len(ours)


def test_a_checkpoint_that_differs_is_named_by_its_arrays(run, copied):
    """Rows say nothing at this step: the arrays do."""
    config = CheckpointConfig()
    leaves = Checkpoints(run / "checkpoints", config).fingerprints(3)
    shutil.rmtree(copied / "checkpoints" / "3")
    with Checkpoints(copied / "checkpoints", config) as checkpoints:
        state = {"step": jnp.int32(3)}
        checkpoints.save(3, state, data=None, info={})
    (copied / "metrics.jsonl").unlink()
    found = compare_runs(run, copied)
    assert (found.first_step, found.rows) == (3, 0)
    assert {d.what for d in found.differences} == set(leaves) - {"step"}


def test_bad_input(run_command, run, copied, tmp_path):
    ran = run_command(COMPARE, [run, tmp_path / "none"])
    assert ran.code == command.BAD_INPUT
    assert ran.err.startswith("error: no run in")
    (copied / "metrics.jsonl").unlink()
    shutil.rmtree(copied / "checkpoints")
    ran = run_command(COMPARE, [run, copied])
    assert ran.code == command.BAD_INPUT
    assert "no step in common" in ran.err
