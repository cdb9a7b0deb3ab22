"""The results of looking at a prepared dataset: what `--json` writes."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class LengthSummary:
    """Tokens a document, EOT not counted."""

    shortest: int
    median: float
    mean: float
    p90: int
    """The least length that nine in ten documents don't exceed."""
    longest: int


@dataclasses.dataclass(frozen=True)
class LongShare:
    """How much is in documents of at least so many tokens."""

    at_least: int
    documents: float
    """Share of the documents."""
    tokens: float
    """Share of the tokens."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Documents and tokens by the length of their document, in bins of whole octaves."""

    edges: tuple[int, ...]
    """Bin `i` holds lengths in `[edges[i], edges[i + 1])`."""
    documents: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Repeated:
    """Token ids that several documents have."""

    documents: int
    """How many have them."""
    first: int
    """The number of the first of these in its split."""
    beginning: str
    """How their text begins."""


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """Documents of a split with identical token ids."""

    copies: int
    """Documents whose ids an earlier one of the split has."""
    share: float
    """Of all documents of the split."""
    most: tuple[Repeated, ...]
    """The most repeated ones, five at most."""


@dataclasses.dataclass(frozen=True)
class Leak:
    """Documents that stand in both train and validation."""

    train: int
    """Documents of train whose ids a document of validation has."""
    validation: int
    """Documents of validation whose ids a document of train has."""
    validation_share: float
    """Of all documents of validation."""
    most: tuple[Repeated, ...]
    """The most frequent in train, five at most; numbered there."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """What packing does to the documents of train, as `PackingReport` says of a sample of rows."""

    padding: float
    """Share of the rows' places."""
    cut: float
    """Share of the documents: those longer than a row."""
    segments: float
    """Pieces of documents a row, on average."""


@dataclasses.dataclass(frozen=True)
class SplitInspection:
    """One split; `None` for what an empty one does not have, or what was not asked for."""

    documents: int
    tokens: int
    """EOTs not counted."""
    bytes: int
    shards: int
    windows: int
    """Training windows of the length asked for."""
    lengths: LengthSummary | None
    long: tuple[LongShare, ...]
    histogram: Histogram | None
    duplicates: Duplicates | None


@dataclasses.dataclass(frozen=True)
class Sample:
    """A window of the training stream, as text."""

    window: int
    """Its number in the stream."""
    tokens: int
    texts: tuple[str, ...]
    """What stands before, between and after its EOTs: one more than the window has."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What it took to read all tokens once."""

    tokens: int
    seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A prepared dataset, looked at for windows of a length."""

    dataset: str
    version: int
    tokenizer: str
    """Its kind."""
    tokenizer_hash: str
    vocab_size: int
    eot_id: int
    text_column: str
    source_fingerprint: str
    validation: str
    """How its documents were chosen."""
    skipped: int
    """Rows and files of the source that could not be read."""
    length: int
    seed: int
    splits: dict[str, SplitInspection]
    packing: Packing | None
    """For rows of the length; None without a document in train."""
    leak: Leak | None
    """None if not asked for, or without a split to leak into."""
    reading: Reading | None
    samples: tuple[Sample, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return dataclasses.asdict(self)
