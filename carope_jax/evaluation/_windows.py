"""Where each protocol's windows lie, and which of their targets count.

Axes: T time (one length at a time). Windows are made one by one: a corpus costs no second copy.
A window always has T = length inputs; targets past the end of its text are padding, masked off,
which a causal model cannot see from the positions that are scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64

Documents = Sequence[np.ndarray]


@dataclass(frozen=True, eq=False)
class Window:
    """One row of a forward pass.

    Attributes:
        inputs: token ids.
        targets: the ids to predict, `inputs` moved by one.
        mask: which targets are scored.
        unit: the bootstrap unit: index of the document (of the window itself under `paper`).
        offset: place of `targets[0]` in the document (in the stream under `paper`).
    """

    inputs: Int32[np.ndarray, " T"]
    targets: Int32[np.ndarray, " T"]
    mask: Bool[np.ndarray, " T"]
    unit: int
    offset: int


@dataclass(frozen=True)
class WindowSet:
    """Windows of one length, to be walked once.

    Attributes:
        length: inputs a window, in tokens.
        total: how many windows there are.
        windows: the windows, made when asked for.
    """

    length: int
    total: int
    windows: Iterator[Window]


@dataclass(frozen=True, eq=False)
class Anchors:
    """Ends e of the windows of `same_targets`: document index and e, in document order."""

    documents: Int64[np.ndarray, " anchors"]
    ends: Int64[np.ndarray, " anchors"]


def _padded(tokens: np.ndarray, length: int, pad_id: int) -> Int32[np.ndarray, " T"]:
    row_T = np.full(length, pad_id, np.int32)
    row_T[: len(tokens)] = tokens
    return row_T


def _cut(document: np.ndarray, start: int, mask_T: np.ndarray, pad_id: int, unit: int) -> Window:
    length = len(mask_T)
    return Window(
        inputs=_padded(document[start : start + length], length, pad_id),
        targets=_padded(document[start + 1 : start + 1 + length], length, pad_id),
        mask=mask_T,
        unit=unit,
        offset=start + 1,
    )


def stream_size(documents: Documents) -> int:
    """Tokens of the EOT-joined stream: each document, and one EOT after it."""
    return sum(len(document) + 1 for document in documents)


def stream_windows(documents: Documents, eot_id: int, length: int) -> WindowSet:
    """Non-overlapping windows over the EOT-joined stream, the tail dropped (`paper`)."""

    def walk() -> Iterator[Window]:
        mask_T = np.ones(length, bool)
        rest = np.empty(0, np.int32)
        index = 0
        for document in documents:
            rest = np.concatenate([rest, document.astype(np.int32), [np.int32(eot_id)]])
            while len(rest) > length:
                yield Window(
                    inputs=rest[:length],
                    targets=rest[1 : length + 1],
                    mask=mask_T,
                    unit=index,
                    offset=index * length + 1,
                )
                rest = rest[length:]
                index += 1

    return WindowSet(length, (stream_size(documents) - 1) // length, walk())


def choose_anchors(
    documents: Documents, longest: int, spacing: int, max_anchors: int | None, seed: int
) -> Anchors:
    """Every end with `longest` tokens before it, `spacing` apart; at most `max_anchors`, drawn.

    Args:
        documents: token ids, one array a document.
        longest: tokens an anchor must have before it in its document.
        spacing: tokens from one anchor of a document to the next.
        max_anchors: how many to keep, uniformly and without replacement over all of them.
        seed: of the draw.
    """
    sizes = np.array([len(document) for document in documents], np.int64)
    counts = np.where(sizes >= longest, (sizes - longest) // spacing + 1, 0)
    after = np.cumsum(counts)
    chosen = np.arange(int(after[-1]), dtype=np.int64)
    if max_anchors is not None and len(chosen) > max_anchors:
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(chosen, size=max_anchors, replace=False))
    indices = np.searchsorted(after, chosen, side="right")
    ordinals = chosen - (after - counts)[indices]
    return Anchors(documents=indices, ends=longest + spacing * ordinals)


def anchored_windows(
    documents: Documents, anchors: Anchors, eot_id: int, length: int, scored: int
) -> WindowSet:
    """At each anchor e the window x[e-length:e), of which x[e-scored:e) counts (`same_targets`).

    The last input, x[e-1], has its target outside the window, so it is never scored: T stays equal
    to the length, and the targets have length - scored ... length - 1 tokens of context.
    """
    mask_T = np.zeros(length, bool)
    mask_T[length - 1 - scored : length - 1] = True

    def walk() -> Iterator[Window]:
        for index, end in zip(anchors.documents.tolist(), anchors.ends.tolist(), strict=True):
            yield _cut(documents[index], end - length, mask_T, eot_id, index)

    return WindowSet(length, len(anchors.ends), walk())


def chunk_windows(documents: Documents, eot_id: int, chunk: int, reach: int) -> WindowSet:
    """The first `reach` tokens of each disjoint chunk of a document (`per_position`).

    Targets stay inside the chunk: a whole chunk's last input is not scored.
    """
    mask_T = np.arange(reach) < chunk - 1

    def walk() -> Iterator[Window]:
        for index, document in enumerate(documents):
            for start in range(0, len(document) - chunk + 1, chunk):
                yield _cut(document, start, mask_T, eot_id, index)

    total = sum(len(document) // chunk for document in documents)
    return WindowSet(reach, total, walk())


def sliding_windows(documents: Documents, eot_id: int, length: int, stride: int) -> WindowSet:
    """Windows of a document `stride` apart, each scoring what no earlier one did (`sliding`).

    The first window of a document scores all its targets, a later one its last `stride`; the
    document's first token has no context and is nobody's target.
    """
    place_T = np.arange(length)

    def count(document: np.ndarray) -> int:
        targets = len(document) - 1
        return 0 if targets < 1 else 1 + max(0, -((length - targets) // stride))

    def walk() -> Iterator[Window]:
        for index, document in enumerate(documents):
            for ordinal in range(count(document)):
                start = ordinal * stride
                mask_T = start + 1 + place_T < len(document)
                if ordinal > 0:
                    mask_T &= place_T >= length - stride
                yield _cut(document, start, mask_T, eot_id, index)

    return WindowSet(length, sum(count(document) for document in documents), walk())
