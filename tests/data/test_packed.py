"""Packed rows: every target once an epoch, none across a document, whatever interrupts them."""

import json
import os
import subprocess
import sys
from collections import Counter

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.data import ArrayDocuments, DataConfig, packed_batches, packing_report
from carope_jax.data import _packed as packed_module
from carope_jax.data._batches import shuffled
from carope_jax.data._packed import DocumentPieces

EOT = 9_999


@pytest.fixture(autouse=True)
def few_bins(monkeypatch):
    monkeypatch.setattr(packed_module, "_MOST_BINS", 6)
    monkeypatch.setattr(packed_module, "_FEWEST_BINS", 1)


def documents_of(lengths):
    """Documents whose tokens tell their document and place: 100 d + place."""
    return ArrayDocuments(
        [np.arange(100 * d, 100 * d + n, dtype=np.int32) for d, n in enumerate(lengths)], EOT
    )


def config(**changes):
    fields = {"length": 8, "batch_size": 4, "shuffle_seed": 3, "prefetch": 2}
    return DataConfig(**(fields | changes))


def targets_by_document(lengths):
    """Counted densely: every (input, target) of every document."""
    pairs = Counter()
    for d, n in enumerate(lengths):
        for place in range(n):
            after = 100 * d + place + 1 if place + 1 < n else EOT
            pairs[100 * d + place, after] += 1
    return pairs


def segments(batch):
    """The segments of a batch, as lists of (input, target)."""
    for inputs_L, targets_L, ids_L in zip(
        batch["inputs"], batch["targets"], batch["segment_ids"], strict=True
    ):
        for segment in range(1, ids_L.max() + 1):
            places = np.flatnonzero(ids_L == segment)
            # Consecutive, and the ids ascend without a gap.
            assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
            yield list(zip(inputs_L[places].tolist(), targets_L[places].tolist(), strict=True))
        padding = ids_L == 0
        assert not inputs_L[padding].any()
        assert not targets_L[padding].any()
        # All padding stands at the end.
        assert not padding.any() or padding[np.argmax(padding) :].all()


lists_of_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@settings(max_examples=12, deadline=None)
@given(lengths=lists_of_lengths, length=st.integers(1, 12), count=st.sampled_from([1, 2]))
def test_every_target_once_an_epoch_and_none_across_documents(lengths, length, count):
    documents = documents_of(lengths)
    pieces = DocumentPieces(documents, length)
    if len(pieces) < count:
        return
    union = Counter()
    for process in range(count):
        # As many rows a batch as rows are open: then each batch is all that was packed till then.
        settings_ = config(length=length, batch_size=6 * count)
        stream = packed_batches(documents, settings_, process_index=process, process_count=count)
        packed = []
        while len(packed) < 3 * len(pieces):
            packed += segments(next(stream))
        stream.close()
        order = shuffled(pieces, settings_.shuffle_seed)[process::count]
        expected = [order[i]["pairs"].tolist() for i in range(len(packed))]
        assert sorted(packed) == sorted([tuple(pair) for pair in piece] for piece in expected)
        union.update(pair for piece in packed for pair in piece)
    assert union.keys() == targets_by_document(lengths).keys()


def test_the_pieces_of_an_epoch_are_the_documents():
    lengths = [1, 8, 9, 16, 17, 30]
    pieces = DocumentPieces(documents_of(lengths), 8)
    pairs = Counter(tuple(pair) for i in range(len(pieces)) for pair in pieces[i]["pairs"].tolist())
    assert pairs == targets_by_document(lengths)
    assert len(pieces) == sum(-(-n // 8) for n in lengths)
    with pytest.raises(IndexError, match="index=13"):
        pieces[13]


def test_each_epoch_has_another_order_and_so_has_each_seed():
    lengths = [8] * 40  # a piece a row
    firsts = []
    for seed in (0, 1):
        stream = packed_batches(documents_of(lengths), config(shuffle_seed=seed))
        rows = [int(row[0]) for _ in range(20) for row in next(stream)["inputs"]]
        firsts += [rows[:40], rows[40:]]
        stream.close()
    assert len({tuple(order) for order in firsts}) == 4


class Endless(grain.IterDataset):
    def __iter__(self):
        lengths = [1, 30, 8, 3, 3, 12, 7, 2, 25, 5, 5, 1]
        return packed_batches(documents_of(lengths), config())


def test_every_state_goes_on_exactly():
    """Over epoch edges and in mid-group: an epoch of these is 2 to 3 groups of rows."""
    limited = grain.experimental.LimitIterDataset(Endless(), 15)
    grain.experimental.assert_equal_output_after_checkpoint(limited)


def test_a_fresh_process_goes_on_exactly(tmp_path):
    code = """
import json, sys
import numpy as np
from carope_jax.data import ArrayDocuments, DataConfig, packed_batches
from carope_jax.data import _packed

def main(path, first, count):
    _packed._MOST_BINS, _packed._FEWEST_BINS = 6, 1
    documents = ArrayDocuments([np.arange(n, dtype=np.int32) + 50 * n for n in (3, 30, 8, 9)], 7)
    config = DataConfig(length=8, batch_size=4, workers=2, prefetch=1)
    batches = packed_batches(documents, config)
    if first:
        batches.set_state(json.load(open(path)))
    rows = [{k: v.tolist() for k, v in next(batches).items()} for _ in range(count)]
    json.dump(batches.get_state(), open(path, "w"))
    batches.close()
    print(json.dumps(rows))

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
    script = tmp_path / "part.py"
    script.write_text(code)

    def part(name, first, count):
        arguments = [sys.executable, str(script), str(tmp_path / name), str(first), str(count)]
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert part("a", 0, 9) == part("b", 0, 4) + part("b", 4, 5)


def test_a_state_of_something_else_is_refused():
    documents = documents_of([3, 30, 8, 9, 10])
    state = packed_batches(documents, config()).get_state()
    others = [
        (documents_of([3, 30, 8, 9, 11]), config(), {}, "documents="),
        (documents, config(length=9), {}, "length=8, but here length=9"),
        (documents, config(batch_size=2), {}, "batch_size=4, but here batch_size=2"),
        (documents, config(shuffle_seed=4), {}, "shuffle_seed="),
        (documents, config(workers=2), {}, "workers=0, but here workers=2"),
        (documents, config(), {"process_count": 2}, "process_count=1, but here.*windows of the"),
        (documents, config(), {"process_count": 2, "process_index": 1}, "process_count="),
    ]
    for other, settings_, processes, message in others:
        with pytest.raises(ValueError, match=message):
            packed_batches(other, settings_, **processes).set_state(state)


@pytest.mark.parametrize(
    ("lengths", "changes", "processes", "message"),
    [
        ([], {}, {}, "documents is empty"),
        ([3, 4], {}, {"process_count": 4}, "2 pieces of documents are too few for 4"),
        ([3, 4], {"workers": 3}, {}, "too few for 1 process.* with 3 worker"),
        ([3, 4], {}, {"process_count": 3}, "batch_size=4 can't be divided among process_count=3"),
        ([3, 4], {}, {"process_index": 1}, "process_index=1 must be in"),
    ],
)
def test_bad_input(lengths, changes, processes, message):
    with pytest.raises(ValueError, match=message):
        packed_batches(documents_of(lengths), config(**changes), **processes)


def test_bad_documents():
    with pytest.raises(ValueError, match=r"documents\[1\] has no tokens"):
        ArrayDocuments([np.ones(2, np.int32), np.empty(0, np.int32)], EOT)
    with pytest.raises(ValueError, match=r"documents\[0\] must be int32 \[T\], got int64"):
        ArrayDocuments([np.ones(2, np.int64)], EOT)
    with pytest.raises(ValueError, match="has an empty one, number 1"):
        packing_report(np.array([3, 0], np.int32), config())


def test_the_report_is_what_the_packing_does():
    lengths = np.array([1, 30, 8, 3, 3, 12, 7, 2, 25, 5, 5, 1] * 40, np.int32)
    report = packing_report(lengths, config())
    stream = packed_batches(documents_of(lengths), config())
    epoch = round(lengths.sum() / 8 / (1 - report.padding))
    rows = [row for _ in range(epoch // 4) for row in next(stream)["segment_ids"]]
    stream.close()
    # All but the last group of six rows are the same ones.
    assert report.padding == pytest.approx(np.mean(np.array(rows) == 0), abs=0.005)
    assert report.segments == pytest.approx(np.mean([row.max() for row in rows]), rel=0.02)
    assert report.cut == 3 / 12
    assert packing_report(np.array([8, 16], np.int32), config()).padding == 0
    # A row may be longer than all there is.
    assert packing_report(lengths, config(length=100_000)).cut == 0
