"""What a prepared dataset holds, in numbers: lengths, duplicates, leaks, windows as trained on.

Axes: D documents, T tokens.
"""

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from carope_jax.data._config import DataConfig
from carope_jax.data._index import VERSION
from carope_jax.data._inspection_results import (
    Duplicates,
    Histogram,
    Inspection,
    Leak,
    LengthSummary,
    LongShare,
    Packing,
    Reading,
    Repeated,
    Sample,
    SplitInspection,
)
from carope_jax.data._packed import packing_report
from carope_jax.data._pipeline import StreamWindows
from carope_jax.data._prepared import PreparedDataset, PreparedSplit

LONG = (1024, 2048, 4096, 8192)
"""Lengths from which on a document counts as long: what longer training windows can use."""
_MOST_REPEATED = 5
# Enough for a beginning of so many characters in any tokenizer: a token has a byte at the least.
_BEGINNING = 100
_DOCUMENTS_A_REPORT = 256


def inspect_dataset(
    dataset: PreparedDataset,
    *,
    length: int,
    samples: int,
    seed: int,
    duplicates: bool = True,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Inspection:
    """Looks at every length of a prepared dataset, a few windows, and, for duplicates, every token.

    Args:
        dataset: what to look at.
        length: tokens of a training window.
        samples: how many windows of train to decode.
        seed: of their choice.
        duplicates: read everything and look for identical documents: some 80 bytes of memory each.
        advance: told now and then how many more tokens were read.

    Raises:
        ValueError: `length` or `samples` is not possible, or a record that is read is bad.
        FileNotFoundError: a shard is missing.
    """
    splits = {name: dataset.split(name) for name in dataset.index.splits}
    drawn = _draw_samples(dataset, length, samples, seed)
    digests: dict[str, UInt64[np.ndarray, " D"]] = {}
    reading = None
    if duplicates:
        begun = time.perf_counter()
        digests = {name: document_digests(split, advance) for name, split in splits.items()}
        seconds = time.perf_counter() - begun
        tokens = sum(split.tokens for split in splits.values())
        reading = Reading(tokens, seconds, tokens / seconds)
    return Inspection(
        dataset=str(dataset.folder),
        version=VERSION,
        tokenizer=dataset.tokenizer.kind,
        tokenizer_hash=dataset.index.tokenizer_hash,
        vocab_size=dataset.index.vocab_size,
        eot_id=dataset.index.eot_id,
        text_column=dataset.index.text_column,
        source_fingerprint=dataset.index.source_fingerprint,
        validation=dataset.index.validation,
        skipped=dataset.index.skipped,
        length=length,
        seed=seed,
        splits={
            name: _inspect_split(dataset, split, length, digests.get(name))
            for name, split in splits.items()
        },
        packing=_pack(splits, length, seed),
        leak=_find_leak(dataset, splits, digests),
        reading=reading,
        samples=drawn,
    )


def summarise_lengths(lengths_D: Int32[np.ndarray, " D"]) -> LengthSummary:
    """Quantiles and mean of the lengths of at least one document."""
    return LengthSummary(
        shortest=int(lengths_D.min()),
        median=float(np.median(lengths_D)),
        mean=float(lengths_D.mean(dtype=np.float64)),
        p90=int(np.percentile(lengths_D, 90, method="inverted_cdf")),
        longest=int(lengths_D.max()),
    )


def long_shares(lengths_D: Int32[np.ndarray, " D"]) -> tuple[LongShare, ...]:
    """Shares of at least one document, and their tokens, for each length of `LONG`."""
    tokens = int(lengths_D.sum(dtype=np.int64))
    shares = []
    for at_least in LONG:
        long = lengths_D[lengths_D >= at_least]
        share = int(long.sum(dtype=np.int64)) / tokens
        shares.append(LongShare(at_least, len(long) / len(lengths_D), share))
    return tuple(shares)


def log_edges(shortest: int, longest: int, per_octave: int = 1) -> Int64[np.ndarray, " E"]:
    """Whole numbers, evenly spaced in their logarithm, from at most `shortest` to over `longest`.

    Octaves begin at powers of two. Where there are fewer numbers than bins, bins are left out.
    """
    first, last = shortest.bit_length() - 1, longest.bit_length()
    steps = np.arange(first * per_octave, last * per_octave + 1)
    return np.unique(np.round(np.exp2(steps / per_octave)).astype(np.int64))


def count_lengths(
    lengths_D: Int32[np.ndarray, " D"], edges: Int64[np.ndarray, " E"]
) -> tuple[Int64[np.ndarray, " E-1"], Int64[np.ndarray, " E-1"]]:
    """Documents, and their tokens, by bin: lengths in `[edges[i], edges[i + 1])`."""
    documents, _ = np.histogram(lengths_D, edges)
    tokens, _ = np.histogram(lengths_D, edges, weights=lengths_D.astype(np.int64))
    return documents, tokens


def document_digests(
    split: PreparedSplit, advance: Callable[[int], None]
) -> UInt64[np.ndarray, " D"]:
    """64 bits of BLAKE2 over the ids of each document, read in their order.

    Among ten million documents the chance that any two differ and have equal bits is 3e-6.
    """
    digests_D = np.empty(split.documents, np.uint64)
    tokens = 0
    for number in range(split.documents):
        ids_T = split.document(number)
        digest = hashlib.blake2b(ids_T.tobytes(), digest_size=8).digest()
        digests_D[number] = int.from_bytes(digest, "little")
        tokens += len(ids_T)
        if number % _DOCUMENTS_A_REPORT == _DOCUMENTS_A_REPORT - 1:
            advance(tokens)
            tokens = 0
    advance(tokens)
    return digests_D


def _inspect_split(
    dataset: PreparedDataset,
    split: PreparedSplit,
    length: int,
    digests_D: UInt64[np.ndarray, " D"] | None,
) -> SplitInspection:
    totals = dataset.index.totals(split.name)
    histogram = lengths = duplicates = None
    if split.documents:
        lengths = summarise_lengths(split.lengths)
        edges = log_edges(lengths.shortest, lengths.longest)
        documents, tokens = count_lengths(split.lengths, edges)
        histogram = Histogram(*(tuple(row.tolist()) for row in (edges, documents, tokens)))
    if digests_D is not None:
        values, firsts, counts = np.unique(digests_D, return_index=True, return_counts=True)
        copies = len(digests_D) - len(values)
        repeated = counts > 1
        duplicates = Duplicates(
            copies=copies,
            share=copies / max(1, split.documents),
            most=_most(dataset, split, counts[repeated], firsts[repeated]),
        )
    return SplitInspection(
        **totals,
        shards=len(dataset.index.splits[split.name]),
        windows=max(0, (len(split) - 1) // length),
        lengths=lengths,
        long=long_shares(split.lengths) if split.documents else (),
        histogram=histogram,
        duplicates=duplicates,
    )


def _pack(splits: dict[str, PreparedSplit], length: int, seed: int) -> Packing | None:
    train = splits.get("train")
    if train is None or not train.documents:
        return None
    report = packing_report(train.lengths, DataConfig(length=length, shuffle_seed=seed))
    return Packing(**report._asdict())


def _find_leak(
    dataset: PreparedDataset,
    splits: dict[str, PreparedSplit],
    digests: dict[str, UInt64[np.ndarray, " D"]],
) -> Leak | None:
    if not {"train", "validation"} <= digests.keys():
        return None
    values, firsts, counts = np.unique(digests["train"], return_index=True, return_counts=True)
    leaked = np.isin(values, digests["validation"])
    found = int(np.isin(digests["validation"], values[leaked]).sum())
    return Leak(
        train=int(counts[leaked].sum()),
        validation=found,
        validation_share=found / max(1, splits["validation"].documents),
        most=_most(dataset, splits["train"], counts[leaked], firsts[leaked]),
    )


def _most(
    dataset: PreparedDataset, split: PreparedSplit, counts: np.ndarray, firsts: np.ndarray
) -> tuple[Repeated, ...]:
    """The most frequent; of equals, those that come first in the split."""
    order = np.lexsort((firsts, -counts))[:_MOST_REPEATED]
    return tuple(
        Repeated(
            documents=int(counts[one]),
            first=int(firsts[one]),
            beginning=dataset.tokenizer.decode(split.document(int(firsts[one]))[:_BEGINNING]),
        )
        for one in order
    )


def _draw_samples(
    dataset: PreparedDataset, length: int, samples: int, seed: int
) -> tuple[Sample, ...]:
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    if samples < 0:
        raise ValueError(f"samples={samples} must be at least 0")
    if not samples:
        return ()
    windows = StreamWindows(dataset.split("train"), length)
    if samples > len(windows):
        raise ValueError(
            f"samples={samples} is more than the {len(windows)} windows of length={length} in train"
        )
    numbers = np.random.default_rng(seed).choice(len(windows), samples, replace=False)
    return tuple(
        _sample(dataset, int(number), windows[int(number)]["inputs"]) for number in numbers
    )


def _sample(dataset: PreparedDataset, number: int, ids_T: Int32[np.ndarray, " T"]) -> Sample:
    borders = np.flatnonzero(ids_T == dataset.tokenizer.eot_id)
    parts: Sequence[np.ndarray] = np.split(ids_T, borders)
    # Each part but the first begins with its EOT, which decodes to nothing.
    return Sample(number, len(ids_T), tuple(dataset.tokenizer.decode(part) for part in parts))
