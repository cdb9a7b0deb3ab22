"""Stopping and going on, in processes of their own: exact, and nothing lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from experiments import ROOT

from carope_jax.training import CheckpointConfig, Checkpoints

WALL_CLOCK = {"tokens_per_second", "mfu"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts train.py on the smoke experiment, one device; its programs are compiled once."""
    cache = tmp_path_factory.mktemp("cache")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def popen(workdir, *arguments):
        command = [sys.executable, str(ROOT / "train.py"), "--workdir", str(workdir)]
        return subprocess.Popen(
            [*command, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return popen


def finish(process, code=0):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code, out
    return out


def rows_of(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in WALL_CLOCK} for row in rows]


def leaves_of(workdir, step):
    """The fingerprints of every array of a checkpoint, and the position in the data."""
    checkpoints = Checkpoints(workdir / "checkpoints", CheckpointConfig())
    return checkpoints._manifest(step)["leaves"]


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    """Twenty updates without a stop."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(workdir, "--config", ROOT / "configs/smoke.py"))
    return workdir


def test_stop_and_go_on_equals_no_stop(start, uninterrupted, tmp_path):
    workdir = tmp_path / "parts"
    finish(start(workdir, "--config", ROOT / "configs/smoke.py", "--stop-at", 7))
    assert rows_of(workdir)[-1]["step"] == 7
    out = finish(start(workdir))
    assert "resumed at step 7" in out
    # Step 7 is logged because the run stopped there; every other row is the same, bit for bit.
    rows = [row for row in rows_of(workdir) if row["step"] != 7]
    assert rows == rows_of(uninterrupted)
    assert leaves_of(workdir, 20) == leaves_of(uninterrupted, 20)


@pytest.mark.parametrize("moment", ["step 2/20", "step 10/20"])
def test_sigterm_saves_and_exits_75(start, uninterrupted, tmp_path, moment):
    workdir = tmp_path / "run"
    process = start(workdir, "--config", ROOT / "configs/smoke.py")
    for line in process.stdout:
        if line.startswith(moment):
            break
    process.send_signal(signal.SIGTERM)
    out = finish(process, 75)
    assert "SIGTERM" in out
    assert "Traceback" not in out
    finish(start(workdir))
    assert rows_of(workdir) == rows_of(uninterrupted)
    assert leaves_of(workdir, 20) == leaves_of(uninterrupted, 20)


def test_sigterm_while_compiling(start, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    process = start(workdir, "--config", ROOT / "configs/smoke.py")
    # The handler stands once the inputs are read; before it, SIGTERM is the shell's own.
    deadline = time.monotonic() + 120
    caught = 1 << (signal.SIGTERM - 1)
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) & caught:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    finish(start(workdir, "--config", ROOT / "configs/smoke.py"))
    assert rows_of(workdir) == rows_of(uninterrupted)


def test_a_killed_run_goes_on_from_its_newest_checkpoint(start, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    process = start(workdir, "--config", ROOT / "configs/smoke.py")
    for line in process.stdout:
        if line.startswith("step 14/20"):
            break
    process.kill()
    process.communicate()
    finish(start(workdir))
    assert rows_of(workdir) == rows_of(uninterrupted)
    assert leaves_of(workdir, 20) == leaves_of(uninterrupted, 20)


def test_a_nan_loss_stops_with_exit_code_3_and_names_the_good_checkpoint(start, tmp_path):
    """A learning rate that no model survives; nothing that is not finite is ever saved."""
    workdir = tmp_path / "run"
    rate = ["--optimizer.learning-rate", "1e38", "--optimizer.warmup-steps", "0"]
    rate += ["--checkpoint.every", "1", "--training.eval-every", "0"]
    out = finish(start(workdir, "--config", ROOT / "configs/smoke.py", *rate), 3)
    assert "Traceback" not in out
    assert "at step 2" in out or "at step 3" in out
    saved = Checkpoints(workdir / "checkpoints", CheckpointConfig()).steps()
    assert saved
    assert f"checkpoint {saved[-1]} is good" in out
    rows = rows_of(workdir)
    assert all(np.isfinite(row["loss"]) for row in rows)
