"""Injected faults: each run goes on exactly from its last complete step, or says one line."""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from experiments import ROOT, small_experiment
from rich.console import Console

from carope_jax import command
from carope_jax._lock import FolderInUse, FolderLock
from carope_jax.training import (
    CheckpointConfig,
    CheckpointCorrupt,
    Checkpoints,
    TrainingConfig,
    compare_runs,
    read_inputs,
    train,
)

SMOKE = ("--config", ROOT / "configs/smoke.py", "--checkpoint.every", 1)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(*arguments, before=()):
        return subprocess.Popen(
            [*before, sys.executable, *map(str, [ROOT / "train.py", *arguments])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def finish(process, code=0):
    out, _ = process.communicate(timeout=200)
    assert process.returncode == code, out
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    trained(folder)
    return folder


def trained(folder, stop_at=None):
    small = small_experiment(vocab_size=512, num_layers=1)
    chosen = dataclasses.replace(
        small, training=TrainingConfig(steps=6, log_every=1, eval_every=0, tensorboard=False)
    )
    train(read_inputs(chosen, folder), console=Console(quiet=True), stop_at=stop_at)


def test_one_run_at_a_time(run_command, tmp_path):
    with FolderLock(tmp_path):
        ran = run_command("train.py", [*SMOKE, "--workdir", tmp_path])
        assert ran.code == command.BAD_INPUT
        assert f"in use by another run (process {os.getpid()} on " in ran.err
        assert len(ran.err.splitlines()) == 1
        with pytest.raises(FolderInUse), FolderLock(tmp_path):
            pass
    with FolderLock(tmp_path):
        pass


@pytest.mark.parametrize("fault", ["truncated", "flipped", "half deleted"])
def test_a_damaged_newest_step_is_named_and_never_passed_over(whole, tmp_path, fault):
    """Removing what the message names is all it takes to go on, to the same end."""
    folder = shutil.copytree(whole, tmp_path / "run")
    newest = folder / "checkpoints" / "6"
    largest = max(newest.glob("state/**/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    if fault == "truncated":
        largest.write_bytes(content[: len(content) // 2])
    elif fault == "flipped":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    else:
        shutil.rmtree(newest / "state")
    with pytest.raises(CheckpointCorrupt, match=r"checkpoint 6 in .*try step 5"):
        trained(folder)
    shutil.rmtree(newest)
    trained(folder)
    assert compare_runs(folder, whole).equal


@pytest.mark.slow
def test_no_room_for_a_checkpoint_is_said_and_gone_on_from(launch, tmp_path):
    # No file may have more than 100 KiB.
    limited = ("bash", "-c", 'ulimit -f 100; exec "$@"', "limited")
    arguments = (*SMOKE, "--workdir", tmp_path / "run", "--training.steps", 6)
    out = finish(launch(*arguments, before=limited), command.NOT_SAVED)
    # Orbax's event loop may add lines of its own around this one, when it hears of it too late.
    said = "error: a checkpoint can't be written to"
    assert [line for line in out.splitlines() if line.startswith(said)], out
    finish(launch(*arguments))
    steps = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig()).steps()
    assert steps[-1] == 6


@pytest.mark.slow
def test_twenty_kills_at_random_moments(launch, tmp_path):
    """A checkpoint a step: most moments are in a save. No complete step is ever lost."""
    finish(launch(*SMOKE, "--workdir", tmp_path / "whole"))
    folder, rng, newest = tmp_path / "killed", random.Random(0), 0
    for _ in range(20):
        process = launch(*SMOKE, "--workdir", folder, "--data.workers", rng.choice((0, 1)))
        time.sleep(rng.uniform(1, 8))
        process.send_signal(signal.SIGKILL)
        # Not `communicate`: a data worker that outlives its parent keeps the pipe open.
        process.wait()
        process.stdout.close()
        assert process.returncode in (0, -signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        steps = Checkpoints(folder / "checkpoints", CheckpointConfig()).steps()
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
    finish(launch(*SMOKE, "--workdir", folder))
    assert compare_runs(folder, tmp_path / "whole").equal
