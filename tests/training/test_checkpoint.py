"""Checkpoints: what comes back, what is refused, and what a crash or a flipped bit can do."""

import dataclasses
import logging
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from carope_jax.training._checkpoint import CheckpointConfig, Checkpoints
from carope_jax.training._manifest import (
    CheckpointCorrupt,
    CheckpointMismatch,
    check_same,
    plain_json,
)

CONFIG = CheckpointConfig(keep=10)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    params: Any
    optimizer: Any
    step: jax.Array


class Odds(NamedTuple):
    nothing: None
    flags: jax.Array
    bytes_: jax.Array
    halves: jax.Array
    words: jax.Array
    empty: jax.Array


def mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def random_params(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    kernel = rng.standard_normal((64, 32), dtype=np.float32)
    kernel[0, 0] = np.array(0x7FC12345, np.uint32).view(np.float32)
    scale = rng.standard_normal(8, dtype=np.float32)
    return {
        "blocks": {"attention": {"query": {"kernel": jnp.asarray(kernel)}}},
        "scale": jnp.asarray(scale, jnp.bfloat16),
    }


def train_state(seed: int = 0) -> TrainState:
    params = random_params(seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    odds = Odds(
        nothing=None,
        flags=jnp.array([True, False, True]),
        bytes_=jnp.array([[-128, 127]], jnp.int8),
        halves=jnp.array([6e-8, -0.0], jnp.float16),
        words=jnp.array([0, 2**32 - 1], jnp.uint32),
        empty=jnp.zeros((0, 4), jnp.float32),
    )
    opt_state = optimizer.init(params)
    return TrainState(params, (opt_state, odds, random_params(seed + 1)), jnp.int32(seed))


def abstract(state: Any, sharding: Any = None) -> Any:
    sharding = sharding or (lambda x: jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), state
    )


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def batches() -> grain.DatasetIterator:
    return iter(grain.MapDataset.range(1000).shuffle(seed=1).batch(4).to_iter_dataset())


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Steps 3 and 7, the second with data; tests that change files work on a copy."""
    folder = tmp_path_factory.mktemp("saved")
    data = batches()
    next(data)
    with Checkpoints(str(folder), CONFIG) as checkpoints:
        checkpoints.save(3, train_state(3), data=None, info={"tokenizer": "abc"})
        checkpoints.save(7, train_state(7), data=data, info={"tokenizer": "abc", "n": [1, 2.5]})
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_round_trip_is_bitwise(tmp_path, asynchronous):
    state = train_state(5)
    config = CheckpointConfig(asynchronous=asynchronous)
    with Checkpoints(tmp_path / "new" / "run", config) as checkpoints:
        checkpoints.save(5, state, data=None, info={"a": [1, None, {"b": 0.1}]})
        restored = checkpoints.restore(abstract(state))
        assert checkpoints.info(5) == restored.info == {"a": [1, None, {"b": 0.1}]}
    assert restored.step == 5
    assert_same_bits(restored.state, state)


def test_restores_on_another_mesh(tmp_path):
    state = {"w": jnp.arange(256.0).reshape(16, 16), "b": jnp.arange(8, dtype=jnp.bfloat16)}
    before = {"w": NamedSharding(mesh(4, 2), P("model", "data")), "b": NamedSharding(mesh(8), P())}
    after = {"w": NamedSharding(mesh(2, 4), P("data")), "b": NamedSharding(mesh(8), P("data"))}
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, jax.device_put(state, before), data=None, info={})
        wanted = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            after,
        )
        restored = checkpoints.restore(wanted).state
    assert_same_bits(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == after


@pytest.mark.parametrize("sharded", [False, True])
def test_buffers_may_be_donated_and_deleted_at_once(tmp_path, sharded):
    expected = np.arange(2**20, dtype=np.float32).reshape(8, -1)
    sharding = NamedSharding(mesh(8), P("data")) if sharded else jax.devices()[0]
    donate = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    warm_up = jax.device_put(expected, sharding)
    donate(warm_up)
    assert warm_up.is_deleted()
    state = {"donated": jnp.array(expected), "deleted": jnp.array(expected)}
    state = jax.device_put(state, sharding)
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, state, data=None, info={})
        donate(state["donated"]).block_until_ready()
        state["deleted"].delete()
        jax.device_put(np.full_like(expected, 7), sharding).block_until_ready()
        restored = checkpoints.restore(abstract(state)).state
    for array in restored.values():
        np.testing.assert_array_equal(array, expected)


def test_data_resumes_where_it_was_saved(tmp_path):
    data = batches()
    for _ in range(3):
        next(data)
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(3, {"x": jnp.ones(2)}, data=data, info={})
        expected = [next(data) for _ in range(5)]
    fresh = batches()
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.restore(abstract({"x": jnp.ones(2)}), data=fresh)
    np.testing.assert_array_equal([next(fresh) for _ in range(5)], expected)


def test_info_is_taken_at_the_save():
    """The file is written in the background, where a change by the caller would still show."""
    info = {"seen": [1]}
    copy = plain_json(info)
    info["seen"].append(2)
    assert copy == {"seen": [1]}


def test_retention(tmp_path):
    with Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_period=4)) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(step, {"x": jnp.int32(step)}, data=None, info={})
    assert Checkpoints(tmp_path, CONFIG).steps() == [4, 8, 9, 10]


def test_retention_counts_what_an_earlier_run_left(tmp_path):
    for step in (1, 2, 3):
        with Checkpoints(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
            checkpoints.save(step, {"x": jnp.int32(step)}, data=None, info={})
    assert Checkpoints(tmp_path, CONFIG).steps() == [2, 3]


def test_a_step_is_saved_once(tmp_path):
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, {"x": jnp.int32(1)}, data=None, info={})
        with pytest.raises(ValueError, match="step 1 is already saved"):
            checkpoints.save(1, {"x": jnp.int32(2)}, data=None, info={})
        checkpoints.save(2, {"x": jnp.int32(2)}, data=None, info={})
    with (
        Checkpoints(tmp_path, CONFIG) as checkpoints,
        pytest.raises(ValueError, match="step 2 is already saved"),
    ):
        checkpoints.save(2, {"x": jnp.int32(3)}, data=None, info={})
    restored = Checkpoints(tmp_path, CONFIG).restore(abstract({"x": jnp.int32(0)}), step=1)
    assert restored.state["x"] == 1


def test_what_is_missing_is_named(tmp_path, saved):
    missing = Checkpoints(tmp_path / "gone", CONFIG)
    assert (missing.steps(), missing.latest()) == ([], None)
    with pytest.raises(FileNotFoundError, match=r"no such checkpoint folder: .*gone"):
        missing.restore(abstract(train_state()))
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        Checkpoints(tmp_path, CONFIG).restore(abstract(train_state()))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 5 in .* only \[3, 7\]"):
        Checkpoints(saved, CONFIG).restore(abstract(train_state()), step=5)
    with pytest.raises(FileNotFoundError, match="no checkpoint 5"):
        Checkpoints(saved, CONFIG).info(5)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("state", "info", "step", "message"),
    [
        ({"x": np.ones(2)}, {}, 1, "state must hold jax.Array only, got .*ndarray.* at x"),
        ({"x": jax.random.key(0)}, {}, 1, "x: arrays of type key"),
        (jnp.ones(2), {}, 1, "state must be a tree"),
        ({}, {}, 1, "state must be a tree"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, {}, 1, "paths of their own"),
        ({"x": jnp.ones(2)}, {"a": (1, 2)}, 1, "info must come back from JSON unchanged"),
        ({"x": jnp.ones(2)}, {"a": np.float32(1)}, 1, "info must be JSON"),
        ({"x": jnp.ones(2)}, {}, -1, "step must not be negative, got -1"),
    ],
)
def test_bad_saves_are_refused_before_anything_is_written(tmp_path, state, info, step, message):
    with (
        Checkpoints(tmp_path, CONFIG) as checkpoints,
        pytest.raises(ValueError, match=message),
    ):
        checkpoints.save(step, state, data=None, info=info)
    assert files_of(tmp_path) == []


def changed(**params: Any) -> Any:
    state = abstract(train_state())
    return dataclasses.replace(state, params={**state.params, **params})


def spec(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return abstract(jnp.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (changed(scale=spec((8,))), "params/scale: dtype float32 here, bfloat16 in the checkpoint"),
        (
            changed(scale=spec((4,), jnp.bfloat16)),
            r"params/scale: shape \[4\] here, \[8\] in the checkpoint",
        ),
        (changed(bias=spec((8,))), "params/bias: missing from the checkpoint"),
        (
            changed(blocks={}),
            "params/blocks/attention/query/kernel: in the checkpoint only",
        ),
        (
            changed(**{f"new{i}": spec(()) for i in range(9)}),
            r"(?s)params/new4: missing.*and 4 more$",
        ),
        (
            dataclasses.replace(changed(), optimizer=()),
            "optimizer/0/1/0/mu/blocks/attention/query/kernel: in the checkpoint only",
        ),
    ],
)
def test_a_mismatch_is_named_before_anything_is_read(copied, wanted, message):
    shutil.rmtree(copied / "7" / "state")
    with pytest.raises(CheckpointMismatch, match=message):
        Checkpoints(copied, CONFIG).restore(wanted)


def test_the_empty_array_is_compared_too(saved):
    wanted = abstract(train_state())
    opt_state, odds, more = wanted.optimizer
    odds = odds._replace(empty=spec((0, 5)))
    with pytest.raises(CheckpointMismatch, match=r"empty: shape \[0, 5\] here, \[0, 4\]"):
        Checkpoints(saved, CONFIG).restore(
            dataclasses.replace(wanted, optimizer=(opt_state, odds, more))
        )


def test_a_leaf_without_sharding_is_named(saved):
    wanted = changed(scale=jax.ShapeDtypeStruct((8,), jnp.bfloat16))
    with pytest.raises(ValueError, match="params/scale has none"):
        Checkpoints(saved, CONFIG).restore(wanted)


def test_data_that_was_not_saved_is_refused(saved):
    with pytest.raises(CheckpointMismatch, match="position for no process"):
        Checkpoints(saved, CONFIG).restore(abstract(train_state()), step=3, data=batches())


def test_check_same_names_every_difference():
    check_same({"a": 1, "b": [2]}, {"b": [2], "a": 1}, "tokenizer")
    with pytest.raises(CheckpointMismatch) as caught:
        check_same({"a": 1, "b": 2, "c": None}, {"b": 3, "c": None, "d": "x"}, "tokenizer")
    assert str(caught.value).splitlines() == [
        "tokenizer differs from the checkpoint's:",
        "  a: 1 here, absent in the checkpoint",
        "  b: 2 here, 3 in the checkpoint",
        "  d: absent here, 'x' in the checkpoint",
    ]


@pytest.mark.parametrize("field", ["keep", "keep_period", "every"])
def test_config_is_validated(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1.*got 0"):
        CheckpointConfig(**{field: 0})


def restores_or_says_so(folder: Path, expected: Any, next_batch: np.ndarray) -> bool:
    """Whether damage was reported; what comes back without a report must be what was saved."""
    data = batches()
    try:
        restored = Checkpoints(folder, CONFIG).restore(abstract(expected), step=7, data=data)
    except CheckpointCorrupt:
        return True
    assert_same_bits(restored.state, expected)
    assert restored.info == {"tokenizer": "abc", "n": [1, 2.5]}
    np.testing.assert_array_equal(next(data), next_batch)
    return False


# Orbax's event loop may be gone when TensorStore reports a second failure of the same read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("files", "flips", "at_least"),
    [("state/**/d/*", 24, 18), ("state/**/*", 8, 0), ("info/metadata", 10, 10), ("data/*", 8, 4)],
)
def test_no_flipped_bit_passes_in_silence(copied, files, flips, at_least):
    expected, data = train_state(7), batches()
    next(data)
    next_batch = next(data)
    rng = np.random.default_rng(0)
    found = sorted(path for path in (copied / "7").glob(files) if path.is_file())
    sizes = np.array([path.stat().st_size for path in found], float)
    reported = 0
    for _ in range(flips):
        path = found[rng.choice(len(found), p=sizes / sizes.sum())]
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[rng.integers(len(sound))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        reported += restores_or_says_so(copied, expected, next_batch)
        path.write_bytes(sound)
    assert reported >= at_least
    assert not restores_or_says_so(copied, expected, next_batch)


def test_a_damaged_leaf_is_named(copied):
    """The fingerprint itself, not TensorStore's own checks: one leaf exchanged on disk."""
    state = train_state(7)
    other = jax.tree.map(jnp.array, state)
    other.params["scale"] = state.params["scale"].at[2].add(1)
    with Checkpoints(copied / "other", CONFIG) as checkpoints:
        checkpoints.save(7, other, data=None, info={})
    shutil.rmtree(copied / "7" / "state")
    shutil.copytree(copied / "other" / "7" / "state", copied / "7" / "state")
    with pytest.raises(CheckpointCorrupt, match=r"damaged since it was saved: params/scale; try"):
        Checkpoints(copied, CONFIG).restore(abstract(state), step=7)


@pytest.mark.parametrize("item", ["state", "info", "data"])
def test_a_missing_item_is_reported_and_data_stays_put(copied, item):
    shutil.rmtree(copied / "7" / item)
    data = batches()
    expected = next(batches())
    with pytest.raises(CheckpointCorrupt, match=f"{item} can't be read.*try step 3"):
        Checkpoints(copied, CONFIG).restore(abstract(train_state()), data=data)
    np.testing.assert_array_equal(next(data), expected)


def test_a_renamed_step_is_reported(copied):
    shutil.rmtree(copied / "3")
    (copied / "7").rename(copied / "2")
    with pytest.raises(CheckpointCorrupt, match="saved as step 7; there is no earlier step to try"):
        Checkpoints(copied, CONFIG).restore(abstract(train_state()))


def test_leftovers_are_not_listed_survive_readers_and_go_at_the_next_save(copied):
    leftover = copied / "9.orbax-checkpoint-tmp"
    shutil.copytree(copied / "7", leftover)
    (copied / "eval_12").mkdir()
    before = files_of(copied)
    reader = Checkpoints(copied, CONFIG)
    assert (reader.steps(), reader.latest()) == ([3, 7], 7)
    reader.restore(abstract(train_state()))
    assert files_of(copied) == before
    with Checkpoints(copied, CONFIG) as checkpoints:
        checkpoints.save(11, train_state(11), data=None, info={})
    assert not leftover.exists()
    assert Checkpoints(copied, CONFIG).restore(abstract(train_state())).state.step == 11


def test_a_failed_write_is_raised_and_leaves_no_step(tmp_path, monkeypatch):
    from orbax.checkpoint import JsonCheckpointHandler

    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, {"x": jnp.int32(1)}, data=None, info={})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(JsonCheckpointHandler, "_save_fn", disk_full)
            checkpoints.save(2, {"x": jnp.int32(2)}, data=None, info={})
            with pytest.raises(OSError, match="no space left"):
                checkpoints.wait()
        assert checkpoints.steps() == [1]
        checkpoints.save(3, {"x": jnp.int32(3)}, data=None, info={})
        assert checkpoints.restore(abstract({"x": jnp.int32(0)})).state["x"] == 3
        assert checkpoints.steps() == [1, 3]


async def disk_full(*_: Any) -> None:
    raise OSError("no space left")


CHILD = """
import sys
import jax.numpy as jnp
from carope_jax.training._checkpoint import CheckpointConfig, Checkpoints

with Checkpoints(sys.argv[1], CheckpointConfig(keep=100)) as checkpoints:
    for step in range(1, 100):
        state = {str(i): jnp.full((64, 1024), step, jnp.float32) for i in range(8)}
        checkpoints.save(step, state, data=None, info={"step": step})
        print(step, flush=True)
"""


def test_a_killed_process_leaves_whole_steps_only(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path], stdout=subprocess.PIPE)
    for line in child.stdout:
        if int(line) == 4:
            break
    time.sleep(0.02)  # the fourth step is being written in the background
    child.send_signal(signal.SIGKILL)
    child.communicate()
    checkpoints = Checkpoints(tmp_path, CONFIG)
    steps = checkpoints.steps()
    assert steps[:3] == [1, 2, 3]
    wanted = abstract({str(i): jnp.zeros((64, 1024), jnp.float32) for i in range(8)})
    for step in steps:
        restored = checkpoints.restore(wanted, step=step)
        assert restored.info == {"step": step}
        assert all((leaf == step).all() for leaf in restored.state.values())


def test_orbax_is_quiet_but_for_warnings(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(2)}, data=None, info={})
        checkpoints.restore(abstract({"x": jnp.ones(2)}))
    assert caplog.records == []


def test_a_level_set_on_purpose_stays(tmp_path):
    logger = logging.getLogger("absl")
    before = logger.level
    try:
        for level in (logging.INFO, logging.ERROR):
            logger.setLevel(level)
            Checkpoints(tmp_path, CONFIG)
            assert logger.level == level
    finally:
        logger.setLevel(before)
