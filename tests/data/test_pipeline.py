import itertools
import json

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.data import DataConfig, StreamWindows, train_batches

LENGTH = 4
# 11 windows, and 3 tokens too few for a twelfth. The window of a row is its first token / LENGTH.
STREAM = np.arange(11 * LENGTH + 4, dtype=np.int32)


def config(**changes):
    fields = {"length": LENGTH, "batch_size": 6, "shuffle_seed": 3, "prefetch": 3}
    return DataConfig(**(fields | changes))


def window_numbers(batches, count):
    rows = [batch["inputs"][:, 0] // LENGTH for batch in itertools.islice(batches, count)]
    return np.concatenate(rows).tolist()


@given(st.lists(st.integers(0, 99), min_size=2, max_size=60), st.integers(1, 20))
def test_windows_are_the_stream_cut_in_a_row(tokens, length):
    stream = np.asarray(tokens, np.int32)
    if len(tokens) < length + 1:
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens is too short.*={length} "):
            StreamWindows(stream, length)
        return
    windows = StreamWindows(stream, length)
    expected = []
    at = 0
    while at + length < len(tokens):
        expected.append((tokens[at : at + length], tokens[at + 1 : at + length + 1]))
        at += length
    assert [(w["inputs"].tolist(), w["targets"].tolist()) for w in windows] == expected
    for outside in (-1, len(windows)):
        with pytest.raises(IndexError, match=f"index={outside} "):
            windows[outside]


@pytest.mark.parametrize(
    "stream", [np.zeros(9, np.int64), np.zeros((3, 3), np.int32), np.zeros(9, np.float32)]
)
def test_other_arrays_are_no_stream(stream):
    with pytest.raises(ValueError, match="must be int32"):
        StreamWindows(stream, 4)


def test_batches_are_rows_of_the_stream():
    with_targets = train_batches(STREAM, config())
    for batch in itertools.islice(with_targets, 5):
        assert set(batch) == {"inputs", "targets"}
        for rows in batch.values():
            assert rows.dtype == np.int32
            assert rows.shape == (6, LENGTH)
        np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
        assert not np.any(batch["inputs"][:, 0] % LENGTH)
    with_targets.close()


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 25), st.integers(1, 9), st.integers(0, 2**32))
def test_each_window_once_an_epoch(windows, batch_size, seed):
    stream = np.arange(windows * LENGTH + 1, dtype=np.int32)
    batches = train_batches(stream, config(batch_size=batch_size, shuffle_seed=seed))
    epochs = 3
    numbers = window_numbers(batches, -(-epochs * windows // batch_size))
    for epoch in range(epochs):
        assert sorted(numbers[epoch * windows : (epoch + 1) * windows]) == list(range(windows))
    batches.close()


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    stream = np.arange(40 * LENGTH + 1, dtype=np.int32)
    orders = [
        tuple(numbers[start : start + 40])
        for seed in range(4)
        for numbers in [window_numbers(train_batches(stream, config(shuffle_seed=seed)), 20)]
        for start in (0, 40, 80)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(40)) not in orders


@pytest.mark.parametrize("process_count", [2, 3, 6])
def test_processes_share_out_each_batch(process_count):
    alone = train_batches(STREAM, config())
    parts = [
        train_batches(STREAM, config(), process_index=index, process_count=process_count)
        for index in range(process_count)
    ]
    for _ in range(7):
        whole = next(alone)
        for index, part in enumerate(parts):
            batch = next(part)
            for name, rows in whole.items():
                np.testing.assert_array_equal(batch[name], rows[index::process_count])


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ({"process_count": 4}, "batch_size=6 can't be divided among process_count=4"),
        ({"process_index": 2, "process_count": 2}, "process_index=2"),
        ({"process_index": -1}, "process_index=-1"),
        ({"process_count": 0}, "process_count=0"),
    ],
)
def test_impossible_processes_are_named(processes, message):
    with pytest.raises(ValueError, match=message):
        train_batches(STREAM, config(), **processes)


def test_a_short_stream_is_refused():
    with pytest.raises(ValueError, match="stream of 4 tokens is too short"):
        train_batches(STREAM[:4], config())


class Endless(grain.IterDataset):
    def __iter__(self):
        return train_batches(STREAM, config())


def test_grain_finds_every_state_restorable():
    limited = grain.experimental.LimitIterDataset(Endless(), 7)
    grain.experimental.assert_equal_output_after_checkpoint(limited)


def test_the_state_is_the_next_batch_not_the_next_prefetched():
    batches = train_batches(STREAM, config())
    for done in range(5):
        state = batches.get_state()
        assert state["next_batch"] == done
        assert json.loads(json.dumps(state)) == state
        next(batches)
    batches.close()


def test_a_running_iterator_goes_back():
    batches = train_batches(STREAM, config())
    start = batches.get_state()
    first = window_numbers(batches, 4)
    batches.set_state(start)
    assert window_numbers(batches, 4) == first
    batches.close()


@pytest.mark.parametrize(
    ("stream", "changes", "field"),
    [
        (STREAM[:-1], {}, "stream"),
        (STREAM, {"length": 5}, "length"),
        (STREAM, {"batch_size": 3}, "batch_size"),
        (STREAM, {"shuffle_seed": 4}, "shuffle_seed"),
    ],
)
def test_a_state_of_other_data_is_refused(stream, changes, field):
    state = train_batches(STREAM, config()).get_state()
    other = train_batches(stream, config(**changes))
    with pytest.raises(ValueError, match=f"saved with {field}=.* but here {field}="):
        other.set_state(state)
    assert other.get_state()["next_batch"] == 0


def test_a_closed_iterator_says_so():
    batches = train_batches(STREAM, config())
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        next(batches)
