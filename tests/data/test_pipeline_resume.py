"""Resuming through Orbax, in a new process, and with workers."""

import itertools
import json
import os
import subprocess
import sys

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from carope_jax.data import DataConfig, train_batches

LENGTH = 4
STREAM = np.arange(11 * LENGTH + 1, dtype=np.int32)
# 11 windows in batches of 4: the third batch begins in one epoch and ends in the next.
STEPS = (0, 1, 2, 3, 7)
AFTER = 4


def make_batches(workers=0):
    return train_batches(
        STREAM, DataConfig(length=LENGTH, batch_size=4, shuffle_seed=1, workers=workers)
    )


def take(batches, count):
    return [batch["inputs"].tolist() for batch in itertools.islice(batches, count)]


def restored_rows(folder, step):
    with ocp.CheckpointManager(folder) as manager:
        restore = ocp.args.Composite(batches=grain.checkpoint.CheckpointRestore(make_batches()))
        batches = manager.restore(step, args=restore)["batches"]
        rows = take(batches, AFTER)
        batches.close()
    return rows


@pytest.fixture(scope="module")
def expected():
    batches = make_batches()
    rows = take(batches, max(STEPS) + AFTER)
    batches.close()
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    batches = make_batches()
    with ocp.CheckpointManager(folder) as manager:
        for step in range(max(STEPS) + 1):
            if step in STEPS:
                save = ocp.args.Composite(batches=grain.checkpoint.CheckpointSave(batches))
                manager.save(step, args=save)
            next(batches)
    batches.close()
    return folder


@pytest.mark.parametrize("step", STEPS)
def test_orbax_restores_the_next_batch(folder, expected, step):
    assert restored_rows(folder, step) == expected[step : step + AFTER]


def test_a_new_process_restores_the_next_batch(folder, expected):
    code = (
        "import json, runpy, sys\n"
        "restored_rows = runpy.run_path(sys.argv[1])['restored_rows']\n"
        "rows = {step: restored_rows(sys.argv[2], int(step)) for step in sys.argv[3:]}\n"
        "print(json.dumps(rows))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, __file__, str(folder), *map(str, STEPS)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows == {str(step): expected[step : step + AFTER] for step in STEPS}


def test_workers_change_neither_the_batches_nor_the_state(expected):
    alone = make_batches()
    next(alone)
    batches = make_batches(workers=2)
    try:
        batches.set_state(alone.get_state())
        assert take(batches, 3) == expected[1:4]
        state = batches.get_state()
    finally:
        batches.close()

    alone.set_state(state)
    assert take(alone, 2) == expected[4:6]
    alone.close()
