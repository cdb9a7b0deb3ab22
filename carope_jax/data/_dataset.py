"""From a config to token ids: corpus, split, tokenizer."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from carope_jax.data._corpora import (
    KJV_VALIDATION,
    Document,
    fingerprint,
    load_corpus,
    split_documents,
)
from carope_jax.data._tokenizer import Ids, Tokenizer, check_tokenizer_spec, make_tokenizer

_DEFAULT_FRACTION = 0.1


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, which tokens, which batches.

    Raises:
        ValueError: a field is out of range, or two of them contradict each other.
    """

    corpus: str = "kjv"
    """'kjv', 'synthetic', or a path: a .txt, a .jsonl (key 'text'), or a folder of such files."""
    validation_documents: tuple[str, ...] = ()
    """Names of the documents held out for validation. With neither these nor the fraction given,
    'kjv' holds out eight books (13% of it), any other corpus a tenth of its documents."""
    validation_fraction: float | None = None
    """Fraction of the documents held out, chosen by a hash of their text. Not beside names."""
    tokenizer: str = "train:2048"
    """'train:N' (SentencePiece of N tokens trained on the training documents), 'gpt2', or the path
    of a SentencePiece .model, of a Hugging Face tokenizer.json, or (with a '/') of a folder with
    vocab.bpe and encoder.json."""
    length: int = 128
    """Tokens a training window."""
    batch_size: int = 32
    """Windows an update, all processes together."""
    shuffle_seed: int = 0
    """Seed of the order of the windows."""
    workers: int = 0
    """Processes that prepare batches ahead; 0: a thread of this process does."""
    prefetch: int = 4
    """Batches prepared ahead, by each worker or by the thread."""

    def __post_init__(self) -> None:
        if not self.corpus:
            raise ValueError("corpus '' must be 'kjv', 'synthetic' or a path")
        if self.validation_documents and self.validation_fraction is not None:
            raise ValueError(
                f"validation_documents={self.validation_documents!r} and validation_fraction="
                f"{self.validation_fraction!r} both say what to hold out: give one"
            )
        if self.validation_fraction is not None and not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction={self.validation_fraction!r} must be in (0, 1)")
        check_tokenizer_spec(self.tokenizer)
        minima = {"length": 1, "batch_size": 1, "shuffle_seed": 0, "workers": 0, "prefetch": 1}
        for field, least in minima.items():
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {least}")

    @property
    def validation(self) -> tuple[str, ...] | float:
        """What to hold out, the defaults filled in: names, or a fraction of the documents."""
        if self.validation_documents:
            return self.validation_documents
        if self.validation_fraction is not None:
            return self.validation_fraction
        return KJV_VALIDATION if self.corpus == "kjv" else _DEFAULT_FRACTION


@dataclasses.dataclass(frozen=True)
class TextDataset:
    """The documents of a corpus as token ids (int32, without EOT), split in two."""

    tokenizer: Tokenizer
    """What made the ids."""
    train: list[Ids]
    """Training documents."""
    train_names: list[str]
    """Their names."""
    validation: list[Ids]
    """Held-out documents."""
    validation_names: list[str]
    """Their names."""
    fingerprint: str
    """SHA-256 (hex) over the text of either part and the tokenizer: equal where the ids are."""

    def train_stream(self) -> Int32[np.ndarray, " T"]:
        """The training documents in a row, one EOT after each."""
        return join_documents(self.train, self.tokenizer.eot_id)

    def validation_stream(self) -> Int32[np.ndarray, " T"]:
        """The held-out documents in a row, one EOT after each."""
        return join_documents(self.validation, self.tokenizer.eot_id)


def load_dataset(config: DataConfig, tokenizer: Tokenizer | None = None) -> TextDataset:
    """Reads the corpus, holds documents out, and encodes all of them.

    Args:
        config: what to read. Nothing is read or written besides the files it names.
        tokenizer: used in place of the one that `config.tokenizer` describes, as on resuming a run.

    Raises:
        FileNotFoundError: a file or package that the config names is missing.
        ValueError: the corpus, the split or the tokenizer is not possible.
    """
    train, validation = split_documents(load_corpus(config.corpus), config.validation)
    if tokenizer is None:
        tokenizer = make_tokenizer(config.tokenizer, (document.text for document in train))
    return TextDataset(
        tokenizer=tokenizer,
        train=tokenizer.encode_batch([document.text for document in train]),
        train_names=[document.name for document in train],
        validation=tokenizer.encode_batch([document.text for document in validation]),
        validation_names=[document.name for document in validation],
        fingerprint=_dataset_fingerprint(train, validation, tokenizer),
    )


def join_documents(documents: Sequence[Ids], eot_id: int) -> Int32[np.ndarray, " T"]:
    """The documents in a row, one EOT after each: int32, as many tokens as they have, and EOTs."""
    eot = np.asarray([eot_id], np.int32)
    parts = [part for document in documents for part in (document, eot)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _dataset_fingerprint(
    train: Sequence[Document], validation: Sequence[Document], tokenizer: Tokenizer
) -> str:
    parts = (fingerprint(train), fingerprint(validation), tokenizer.hash)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
