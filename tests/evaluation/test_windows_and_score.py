from collections import Counter

import numpy as np
import pytest
from evaluation_toy import EOT, corpus, document_sizes, rough_nll, toy_nll
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.evaluation import WindowSet, score
from carope_jax.evaluation._windows import (
    anchored_windows,
    choose_anchors,
    chunk_windows,
    sliding_windows,
    stream_windows,
)


def walk(window_set: WindowSet) -> list:
    windows = list(window_set.windows)
    assert len(windows) == window_set.total
    for window in windows:
        assert len(window.inputs) == len(window.targets) == len(window.mask) == window_set.length
        assert window.inputs.dtype == window.targets.dtype == np.int32
        assert window.mask.dtype == bool
    return windows


def scored_targets(windows: list) -> Counter:
    """(unit, offset, token id), each with its number of context tokens."""
    return Counter(
        (window.unit, window.offset + int(at), int(window.targets[at]))
        for window in windows
        for at in np.flatnonzero(window.mask)
    )


@settings(deadline=None, max_examples=60)
@given(document_sizes, st.integers(2, 20))
def test_stream_windows_tile_the_stream(sizes, length):
    documents = corpus(sizes)
    stream = [token for document in documents for token in [*document.tolist(), EOT]]
    windows = walk(stream_windows(documents, EOT, length))
    assert len(windows) == (len(stream) - 1) // length
    for index, window in enumerate(windows):
        assert window.inputs.tolist() == stream[index * length : (index + 1) * length]
        assert window.targets.tolist() == stream[index * length + 1 : (index + 1) * length + 1]
        assert window.mask.all()
        assert (window.unit, window.offset) == (index, index * length + 1)


@settings(deadline=None, max_examples=60)
@given(document_sizes, st.integers(2, 20), st.data())
def test_sliding_scores_each_token_once_with_enough_context(sizes, length, data):
    stride = data.draw(st.integers(1, length))
    documents = corpus(sizes)
    windows = walk(sliding_windows(documents, EOT, length, stride))
    assert scored_targets(windows) == Counter(
        (index, offset, int(document[offset]))
        for index, document in enumerate(documents)
        for offset in range(1, len(document))
    )
    for window in windows:
        document = documents[window.unit]
        for at in np.flatnonzero(window.mask):
            offset = window.offset + at
            context = at + 1
            assert context == offset or context > length - stride
            assert window.inputs[:context].tolist() == document[offset - context : offset].tolist()


@settings(deadline=None, max_examples=60)
@given(document_sizes, st.lists(st.integers(2, 24), min_size=1, max_size=3, unique=True), st.data())
def test_anchored_windows_score_the_same_targets_with_more_context(sizes, lengths, data):
    lengths = sorted(lengths)
    scored = data.draw(st.integers(1, lengths[0] // 2))
    cap = data.draw(st.none() | st.integers(1, 5))
    documents = corpus(sizes)
    anchors = choose_anchors(documents, lengths[-1], scored, cap, seed=3)
    by_length = {}
    for length in lengths:
        windows = walk(anchored_windows(documents, anchors, EOT, length, scored))
        by_length[length] = scored_targets(windows)
        for window in windows:
            at = np.flatnonzero(window.mask)
            # A target at place j of a window is predicted from inputs 0 ... j.
            assert (at + 1).tolist() == list(range(length - scored, length))
            document = documents[window.unit]
            end = window.offset - 1 + length
            assert window.inputs.tolist() == document[end - length : end].tolist()
            assert window.targets[at].tolist() == document[end - scored : end].tolist()
    first = by_length[lengths[0]]
    assert all(targets == first for targets in by_length.values())
    assert all(times == 1 for times in first.values())
    every = [
        (index, end)
        for index, document in enumerate(documents)
        for end in range(lengths[-1], len(document) + 1, scored)
    ]
    chosen = list(zip(anchors.documents.tolist(), anchors.ends.tolist(), strict=True))
    if cap is None or cap >= len(every):
        assert chosen == every
    else:
        assert len(chosen) == cap
        assert chosen == sorted(set(chosen) & set(every))


def test_capped_anchors_are_drawn_evenly_over_all_anchors():
    documents = corpus([10, 50, 7])
    times = Counter(
        (int(document), int(end))
        for seed in range(1500)
        for anchors in [choose_anchors(documents, 8, 4, 3, seed)]
        for document, end in zip(anchors.documents, anchors.ends, strict=True)
    )
    # 1 + 11 + 0 anchors; each is expected 1500 * 3 / 12 = 375 times, with a deviation of 17.
    assert len(times) == 12
    assert all(300 < count < 450 for count in times.values())


@settings(deadline=None, max_examples=60)
@given(document_sizes, st.integers(2, 20), st.data())
def test_chunks_are_disjoint_and_whole(sizes, chunk, data):
    reach = data.draw(st.integers(1, chunk))
    documents = corpus(sizes)
    windows = walk(chunk_windows(documents, EOT, chunk, reach))
    targets = scored_targets(windows)
    assert targets == Counter(
        (index, start + place, int(document[start + place]))
        for index, document in enumerate(documents)
        for start in range(0, len(document) // chunk * chunk, chunk)
        for place in range(1, min(reach + 1, chunk))
    )


@settings(deadline=None, max_examples=30)
@given(document_sizes, st.integers(2, 12), st.integers(1, 9))
def test_rows_are_bitwise_the_same_at_every_batch_size(sizes, length, batch_size):
    documents = corpus(sizes)

    def rows(size: int) -> list[np.ndarray]:
        windows = sliding_windows(documents, EOT, length, 1)
        return [nll_T for _, nll_T in score(rough_nll, windows, size)]

    one, many = rows(1), rows(batch_size)
    assert len(one) == len(many)
    assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))


def test_every_batch_has_the_same_shape_and_real_tokens():
    shapes = []

    def nll(inputs_BT, targets_BT):
        shapes.append(inputs_BT.shape)
        assert (inputs_BT < EOT + 1).all()
        return toy_nll(inputs_BT, targets_BT)

    seen = []
    progress = []
    checks = []
    windows = stream_windows(corpus([50]), EOT, 7)
    for window, nll_T in score(
        nll,
        windows,
        3,
        check=lambda: checks.append(len(shapes)),
        progress=lambda *done: progress.append(done),
    ):
        assert nll_T.dtype == np.float64
        np.testing.assert_array_equal(nll_T, toy_nll(window.inputs[None], window.targets[None])[0])
        seen.append(window.unit)
    assert shapes == [(3, 7)] * 3
    assert seen == list(range(7))
    assert progress == [(7, 3, 7), (7, 6, 7), (7, 7, 7)]
    assert checks == [0, 1, 2]


def test_check_stops_before_the_next_batch():
    batches = []

    def nll(inputs_BT, targets_BT):
        batches.append(1)
        return toy_nll(inputs_BT, targets_BT)

    def check():
        if len(batches) == 2:
            raise InterruptedError("stop asked")

    with pytest.raises(InterruptedError, match="stop asked"):
        list(score(nll, stream_windows(corpus([50]), EOT, 7), 2, check=check))
    assert len(batches) == 2


def test_windows_are_taken_only_as_batches_need_them():
    taken = []

    def counted(windows):
        for window in windows:
            taken.append(window)
            yield window

    whole = stream_windows(corpus([100]), EOT, 5)
    lazy = WindowSet(whole.length, whole.total, counted(whole.windows))
    rows = score(toy_nll, lazy, 2)
    next(rows)
    assert len(taken) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nll_that_is_not_finite_is_named(value):
    def nll(inputs_BT, targets_BT):
        nll_BT = toy_nll(inputs_BT, targets_BT)
        nll_BT[inputs_BT[:, 0] == 5, 2] = value
        return nll_BT

    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 0], np.int32)
    windows = stream_windows([tokens], EOT, 4)
    with pytest.raises(
        FloatingPointError, match=r"some protocol, length 4.* position 2 of window 1"
    ):
        list(score(nll, windows, 1, label="some protocol"))


def test_a_nll_that_is_not_finite_off_the_mask_does_not_matter():
    def nll(inputs_BT, targets_BT):
        return np.where(targets_BT == EOT, np.nan, toy_nll(inputs_BT, targets_BT))

    rows = list(score(nll, sliding_windows(corpus([5]), EOT, 8, 2), 2))
    assert [np.count_nonzero(window.mask) for window, _ in rows] == [4]
    assert np.isfinite(rows[0][1]).all()


def test_bad_batches_are_refused():
    with pytest.raises(ValueError, match=r"batch_size=0"):
        list(score(toy_nll, stream_windows(corpus([9]), EOT, 3), 0))
    with pytest.raises(ValueError, match=r"shape \(2,\) for inputs of shape \(2, 3\)"):
        list(score(lambda i, t: np.zeros(2), stream_windows(corpus([9]), EOT, 3), 2))
