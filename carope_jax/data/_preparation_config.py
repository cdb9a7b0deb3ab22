"""What to prepare, and where."""

import dataclasses
import os
from typing import Literal

from carope_jax.data._tokenizer import check_tokenizer_spec

_DEFAULT_FRACTION = 0.01


@dataclasses.dataclass(frozen=True)
class PreparationConfig:
    """What to prepare, and where.

    Raises:
        ValueError: a field is out of range, or two contradict each other.
    """

    input: tuple[str, ...]
    """Files (.parquet, .jsonl, .txt, the latter two also .gz or .zst), patterns of them in quotes,
    folders, `tfds:NAME[/CONFIG][:VERSION][:SPLIT]`, `kjv`, `synthetic`; local or gs://."""
    output: str
    """Folder of the prepared dataset, local or gs://: new, empty, or one to go on with."""
    text_column: str = "text"
    """Column, key or feature that holds the text."""
    tokenizer: str = "gpt2"
    """'gpt2', 'train:N' (SentencePiece of N tokens, trained on the training documents), the path of
    a SentencePiece .model, of a tokenizer.json, or (with a '/') of a folder with vocab.bpe and
    encoder.json."""
    val_fraction: float | None = None
    """Fraction of the documents held out, chosen by a hash of their text; 0.01 by default."""
    val_docs: int | None = None
    """Number of documents held out, in place of a fraction; 0: none."""
    workers: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    """Processes, each at a file of its own; by default as many as there are cores. What is written
    does not depend on it."""
    on_error: Literal["stop", "skip"] = "stop"
    """At what can't be read: stop before anything is written, or leave it out and list it in
    skipped.jsonl (a row alone, or the whole of a file that can't be read to its end)."""

    def __post_init__(self) -> None:
        for field in ("output", "text_column"):
            if not getattr(self, field):
                raise ValueError(f"{field} is empty")
        check_tokenizer_spec(self.tokenizer)
        if self.val_fraction is not None and self.val_docs is not None:
            raise ValueError(
                f"val_fraction={self.val_fraction} and val_docs={self.val_docs} both say what to "
                "hold out: give one"
            )
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction} must be in (0, 1)")
        if self.val_docs is not None and self.val_docs < 0:
            raise ValueError(f"val_docs={self.val_docs} must be at least 0")
        if self.workers < 1:
            raise ValueError(f"workers={self.workers} must be at least 1")

    @property
    def validation(self) -> str:
        """What is held out, as the dataset's index says it."""
        if self.val_docs is not None:
            return f"val_docs={self.val_docs}"
        return f"val_fraction={self.fraction}"

    @property
    def fraction(self) -> float:
        """The fraction held out where no number is given."""
        return _DEFAULT_FRACTION if self.val_fraction is None else self.val_fraction
