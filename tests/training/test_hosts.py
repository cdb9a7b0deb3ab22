"""Two processes of four devices as one run: what one process of eight does."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from experiments import ROOT, small_experiment
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from carope_jax import command
from carope_jax.data import load_dataset
from carope_jax.training import (
    DistributedConfig,
    MeshConfig,
    compare_runs,
    make_mesh,
    read_metrics,
    start_processes,
)
from carope_jax.training import _distributed as distributed
from carope_jax.training._feeding import BatchPart, batch_part, open_batches, place

SMOKE = ("--config", ROOT / "configs/smoke.py")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Starts a script as `processes` processes that share eight devices."""
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    started = []

    def start(script: str, *arguments: Any, processes: int = 2) -> list[subprocess.Popen]:
        with socket.socket() as one:
            one.bind(("localhost", 0))
            address = f"localhost:{one.getsockname()[1]}"
        group = []
        for process in range(processes):
            run = ["--distributed.coordinator", address, "--distributed.processes", processes]
            run = [*run, "--distributed.process", process] if processes > 1 else []
            group.append(
                subprocess.Popen(
                    [sys.executable, *map(str, [ROOT / script, *arguments, *run])],
                    env=environment | {"JAX_NUM_CPU_DEVICES": str(8 // processes)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        started.extend(group)
        return group

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()  # SIGTERM is a process's own affair


def finish(group, code=0, seconds=240):
    said = [process.communicate(timeout=seconds) for process in group]
    assert [process.returncode for process in group] == [code] * len(group), said
    return said


@pytest.fixture(scope="module")
def pair(launch, tmp_path_factory):
    """Twenty updates of two processes."""
    workdir = tmp_path_factory.mktemp("runs") / "pair"
    said = finish(launch("train.py", *SMOKE, "--workdir", workdir))
    assert "step 20/20" in said[0][0]
    lines = said[1][0].splitlines()
    assert [line for line in lines if line and not line.startswith("[Gloo]")] == []
    return workdir


@pytest.fixture(scope="module")
def single(launch, tmp_path_factory):
    """The same of one process."""
    workdir = tmp_path_factory.mktemp("runs") / "single"
    finish(launch("train.py", *SMOKE, "--workdir", workdir, processes=1))
    return workdir


def assert_same_run(one: Path, other: Path) -> None:
    """The same batches to the bit; losses to the order in which processes' parts are added."""
    ours, theirs = read_metrics(one), read_metrics(other)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, its in zip(ours, theirs, strict=True):
        assert row["batch_fingerprint"] == its["batch_fingerprint"]
        # Where a run was stopped, it was validated.
        for name in row.keys() & its.keys():
            if name == "loss" or name.startswith("validation"):
                assert row[name] == pytest.approx(its[name], rel=2e-5)


def test_two_processes_are_one_run(pair, single):
    assert_same_run(pair, single)
    steps = [row["step"] for row in read_metrics(pair)]
    assert steps == sorted(set(steps))
    assert len(list((pair / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_two_processes_stop_together_and_go_on_exactly(launch, pair, single, tmp_path):
    """SIGTERM to one stops both, saved; resumed, evaluated: equal to never stopped, bit for bit."""
    workdir = tmp_path / "pair"
    group = launch("train.py", *SMOKE, "--workdir", workdir)
    for line in group[0].stdout:
        if line.startswith("step 8/20"):
            break
    group[1].send_signal(signal.SIGTERM)
    said = finish(group, command.STOPPED)
    assert all("stopped by SIGTERM" in err for _, err in said)
    stopped = read_metrics(workdir)[-1]["step"]
    assert 8 <= stopped < 20
    finish(launch("train.py", "--workdir", workdir))
    assert compare_runs(workdir, pair).equal

    # One process goes on with what two have saved, and the other way round.
    for first, then in ((2, 1), (1, 2)):
        mixed = tmp_path / f"mixed{first}"
        arguments = ("train.py", *SMOKE, "--workdir", mixed)
        finish(launch(*arguments, "--stop-at", 10, processes=first))
        finish(launch(*arguments, processes=then))
        assert_same_run(mixed, single)

    results = []
    for name, run, processes in (("a", pair, 2), ("b", workdir, 2), ("c", pair, 1)):
        out = tmp_path / f"{name}.json"
        lengths = ("--protocol", "paper", "--lengths", 64, 128, "--tokens", 2048, "--json", out)
        finish(launch("eval.py", "--workdir", run, *lengths, processes=processes))
        results.append(json.loads(out.read_text())["results"])
    assert results[0] == results[1]
    for one, other in zip(results[0], results[2], strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["nll"] == pytest.approx(other["nll"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rows"),
    [({"data": 1, "fsdp": 8}, "stream"), ({"data": 1, "tensor": 8}, "packed")],
    ids=["fsdp", "tensor"],
)
def test_parameters_lie_across_processes(launch, tmp_path, mesh, rows):
    """With `tensor` across them, both processes read all rows of a batch, packed ones too."""
    sizes = [x for axis, size in mesh.items() for x in (f"--mesh.{axis}", size)]
    sizes += ["--model.num-heads", 8, "--data.rows", rows, "--training.steps", 10]
    for processes in (2, 1):
        arguments = ("train.py", *SMOKE, *sizes, "--workdir", tmp_path / str(processes))
        if processes == 2:
            finish(launch(*arguments, "--stop-at", 6))
        finish(launch(*arguments, processes=processes))
    assert_same_run(tmp_path / "2", tmp_path / "1")


@pytest.mark.slow
def test_what_fails_in_one_process_ends_all_with_one_line(launch, tmp_path):
    group = launch("train.py", *SMOKE, "--workdir", tmp_path / "a", "--data.corpus", tmp_path / "x")
    for _, err in finish(group, command.BAD_INPUT, seconds=90):
        assert len([line for line in err.splitlines() if "error:" in line]) == 1
        assert "Traceback" not in err


PARTIAL_BATCH = {
    # Rows of 8 by device, devices by process: as a mesh may follow the wiring of the chips.
    "in a row": ([0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 1, 1, 1, 1], (0, 1, 2, 3), 2),
    "in turns": ([0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1, 1], (0, 1, 4, 5), 2),
    "the same": ([0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1], (0, 1, 2, 3), 1),
    "overlapping": ([0, 1, 2, 3, 2, 3, 0, 1], [0, 0, 0, 1, 1, 1, 1, 1], (0, 1, 2), None),
}


@pytest.mark.parametrize(
    ("rows", "processes", "expected", "count"), PARTIAL_BATCH.values(), ids=PARTIAL_BATCH
)
def test_a_process_reads_the_rows_of_its_devices(rows, processes, expected, count):
    size = max(rows) + 1
    places = {
        _Device(process, i): (slice(row, row + 1), slice(None))
        for i, (row, process) in enumerate(zip(rows, processes, strict=True))
    }
    sharding: Any = SimpleNamespace(devices_indices_map=lambda shape: places)
    part = batch_part(sharding, (size, 16), 0)
    assert part.rows == expected
    assert part.count == count


@dataclasses.dataclass(frozen=True)
class _Device:
    process_index: int
    id: int


def test_rows_read_apart_are_the_batch_of_one():
    config = small_experiment().data
    dataset = load_dataset(config)
    whole = dataset.batches(config)
    parts = [(0, 1, 6), (7,), (2, 3, 4, 5)]
    readers = [dataset.batches(config, rows=rows) for rows in parts]
    for _ in range(40):  # past an epoch
        batch = next(whole)
        for rows, reader in zip(parts, readers, strict=True):
            np.testing.assert_array_equal(next(reader)["targets"], batch["targets"][list(rows)])
    state = whole.get_state()
    assert all(reader.get_state() == state for reader in readers)
    for reader in (whole, *readers):
        reader.close()


@pytest.mark.parametrize("spec", [P("data"), P(("data", "fsdp"), "tensor"), P(None, "data")])
def test_a_batch_is_placed_whatever_the_order_of_the_devices(spec):
    config = small_experiment().data
    dataset = load_dataset(config)
    order = np.random.default_rng(0).permutation(8).tolist()
    devices = [jax.devices()[i] for i in order]
    mesh = jax.sharding.Mesh(np.reshape(devices, (2, 2, 2)), ("data", "fsdp", "tensor"))
    leaf = jax.ShapeDtypeStruct((8, 16), np.int32, sharding=NamedSharding(mesh, spec))
    layout = {"inputs": leaf, "targets": leaf}
    batches, part = open_batches(dataset, config, layout)
    batch = next(batches)
    placed = place(batch, part, layout)
    for name in layout:
        assert placed[name].sharding == leaf.sharding
        np.testing.assert_array_equal(placed[name], batch[name])
    batches.close()


BAD_FLAGS = {
    "some": ({"coordinator": "a:1"}, "go together"),
    "port": ({"coordinator": "a", "processes": 2, "process": 0}, "must be HOST:PORT, got 'a'"),
    "which": ({"coordinator": "a:1", "processes": 2, "process": 2}, "from 0 to 1, got 2"),
    "none": ({"coordinator": "a:1", "processes": 0, "process": 0}, "at least 1, got 0"),
    "both": ({"auto": True, "process": 0}, "leave them out"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_flags_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DistributedConfig(**fields)


def test_no_cluster_is_said_at_once(monkeypatch):
    def initialize(*_: Any, **__: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match="no cluster was found"):
        start_processes(DistributedConfig(auto=True))
    start_processes(DistributedConfig())  # alone: nothing is asked


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, False),
    ],
)
def test_which_environments_are_asked_without_a_flag(environment, expected):
    assert distributed._environment_has_hosts(environment) is expected


def test_processes_that_disagree_or_fail_are_named(monkeypatch):
    """The answers of the others are put in: what is made of them is tested."""
    monkeypatch.setattr(distributed, "gather", lambda text: [text, '"other"'])
    with pytest.raises(ValueError, match='different data: process 0 has "d", process 1 "other"'):
        distributed.check_agreement({"data": "d"})
    monkeypatch.setattr(distributed, "gather", lambda text: [text, "no text"])
    elsewhere = pytest.raises(distributed.FailedElsewhere, match="process 1 has failed: no text")
    with elsewhere, distributed.failing_together():
        pass
    with pytest.raises(FileNotFoundError, match="mine"), distributed.failing_together():
        raise FileNotFoundError("mine")


def test_packed_rows_refuse_a_mesh_that_cuts_them(monkeypatch):
    config = dataclasses.replace(small_experiment().data, rows="packed")
    mesh = make_mesh(MeshConfig())
    sharding = NamedSharding(mesh, P("data"))
    leaf = jax.ShapeDtypeStruct((8, 16), np.int32, sharding=sharding)
    monkeypatch.setattr(
        "carope_jax.training._feeding.batch_part",
        lambda *_: BatchPart((0, 1, 2), 0, None),
    )
    with pytest.raises(ValueError, match="overlap in part"):
        open_batches(load_dataset(config), config, {"inputs": leaf})
