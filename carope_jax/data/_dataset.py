"""From a config to token ids: text read into memory, or prepared datasets read where they lie."""

import abc
import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

import grain
import numpy as np
from etils import epath
from jaxtyping import Int32

from carope_jax.data._batches import Batch
from carope_jax.data._config import DataConfig
from carope_jax.data._corpora import Document, fingerprint, load_corpus, split_documents
from carope_jax.data._index import INDEX_FILE, TRAIN, VALIDATION
from carope_jax.data._packed import packed_batches
from carope_jax.data._pipeline import mixture_batches, train_batches
from carope_jax.data._prepared import PreparedDataset, PreparedSplit, SplitDocuments
from carope_jax.data._streams import ArrayDocuments
from carope_jax.data._tokenizer import Ids, Tokenizer, make_tokenizer

TEXT_TOKENIZER = "train:2048"
"""What makes a text's tokens unless told otherwise."""


class Dataset(abc.ABC):
    """What a model is trained on, and what is held out.

    Attributes:
        tokenizer: what made the ids.
        validation: held-out documents, int32 ids without EOT; maybe none.
        fingerprint: SHA-256 (hex), equal where the documents, the split and the tokenizer are.
    """

    tokenizer: Tokenizer
    validation: Sequence[Ids]
    fingerprint: str

    @property
    @abc.abstractmethod
    def training_tokens(self) -> int:
        """Tokens of the training documents, the EOT of each counted."""

    @abc.abstractmethod
    def batches(
        self,
        config: DataConfig,
        *,
        process_index: int = 0,
        process_count: int = 1,
        rows: Sequence[int] | None = None,
    ) -> grain.DatasetIterator[Batch]:
        """Training batches, as `train_batches`, `mixture_batches` or `packed_batches` makes them.

        Args:
            config: rows, length, batch size, seed, workers.
            process_index: which part of each batch to give.
            process_count: parts a batch is cut into.
            rows: which rows of each batch they are. Packed rows have no numbers: each part packs
                documents of its own.

        Raises:
            ValueError: as they do.
        """


@dataclasses.dataclass(frozen=True)
class TextDataset(Dataset):
    """The documents of a corpus as token ids (int32, without EOT), in memory."""

    tokenizer: Tokenizer
    train: list[Ids]
    """Training documents."""
    train_names: list[str]
    """Their names."""
    validation: list[Ids]
    """Held-out documents."""
    validation_names: list[str]
    """Their names."""
    fingerprint: str

    @functools.cached_property
    def train_stream(self) -> Int32[np.ndarray, " T"]:
        """The training documents in a row, one EOT after each."""
        return join_documents(self.train, self.tokenizer.eot_id)

    @property
    def training_tokens(self) -> int:
        return len(self.train_stream)

    def batches(
        self,
        config: DataConfig,
        *,
        process_index: int = 0,
        process_count: int = 1,
        rows: Sequence[int] | None = None,
    ) -> grain.DatasetIterator[Batch]:
        if config.rows == "packed":
            documents = ArrayDocuments(self.train, self.tokenizer.eot_id)
            return packed_batches(
                documents, config, process_index=process_index, process_count=process_count
            )
        return train_batches(
            self.train_stream,
            config,
            process_index=process_index,
            process_count=process_count,
            rows=rows,
        )


@dataclasses.dataclass(frozen=True)
class PreparedMixture(Dataset):
    """One prepared dataset, or several by weight: tokens are read as they are needed."""

    tokenizer: Tokenizer
    train: list[tuple[PreparedSplit, float]]
    """The training split of each, and its weight."""
    validation: Sequence[Ids]
    fingerprint: str

    @property
    def training_tokens(self) -> int:
        return sum(len(split) for split, _ in self.train)

    def batches(
        self,
        config: DataConfig,
        *,
        process_index: int = 0,
        process_count: int = 1,
        rows: Sequence[int] | None = None,
    ) -> grain.DatasetIterator[Batch]:
        part = {"process_index": process_index, "process_count": process_count}
        if len(self.train) > 1:
            return mixture_batches(self.train, config, **part, rows=rows)
        (split, _), *_ = self.train
        if config.rows == "packed":
            return packed_batches(split, config, **part)
        return train_batches(split, config, **part, rows=rows)


def load_dataset(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Reads what a config names. Nothing is written.

    Args:
        config: what to read.
        tokenizer: that of a run that is gone on with: used for text; a prepared dataset's must be
            the same.

    Raises:
        FileNotFoundError: a file or package that the config names is missing.
        ValueError: the corpus, the split or the tokenizer is not possible, or a prepared dataset is
            of another tokenizer than the config's, the run's, or the mixture's first.
    """
    if config.mixture or is_prepared(config.corpus):
        return _load_prepared(config, tokenizer)
    return _load_text(config, tokenizer)


def is_prepared(corpus: str) -> bool:
    """Whether a corpus is a prepared dataset."""
    return bool(corpus) and (epath.Path(corpus).expanduser() / INDEX_FILE).exists()


def load_documents(corpus: str, tokenizer: Tokenizer) -> Sequence[Ids]:
    """Documents to evaluate on: all of a text corpus, what a prepared dataset holds out.

    Raises:
        FileNotFoundError: there is no such corpus.
        ValueError: it has no documents, or is prepared with another tokenizer.
    """
    if not is_prepared(corpus):
        return tokenizer.encode_batch([document.text for document in load_corpus(corpus)])
    dataset = PreparedDataset.open(epath.Path(corpus).expanduser())
    _check_tokenizer(corpus, dataset.tokenizer, tokenizer, "the run's")
    if VALIDATION not in dataset.index.splits:
        raise ValueError(f"prepared dataset {corpus!r} holds nothing out to evaluate on")
    return SplitDocuments([dataset.split(VALIDATION)])


def join_documents(documents: Sequence[Ids], eot_id: int) -> Int32[np.ndarray, " T"]:
    """The documents in a row, one EOT after each: int32, as many tokens as they have, and EOTs."""
    eot = np.asarray([eot_id], np.int32)
    parts = [part for document in documents for part in (document, eot)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _load_text(config: DataConfig, tokenizer: Tokenizer | None) -> TextDataset:
    train, validation = split_documents(load_corpus(config.corpus), config.validation)
    if tokenizer is None:
        spec = config.tokenizer or TEXT_TOKENIZER
        tokenizer = make_tokenizer(spec, (document.text for document in train))
    return TextDataset(
        tokenizer=tokenizer,
        train=tokenizer.encode_batch([document.text for document in train]),
        train_names=[document.name for document in train],
        validation=tokenizer.encode_batch([document.text for document in validation]),
        validation_names=[document.name for document in validation],
        fingerprint=_text_fingerprint(train, validation, tokenizer),
    )


def _load_prepared(config: DataConfig, tokenizer: Tokenizer | None) -> PreparedMixture:
    if config.holds_out:
        raise ValueError(
            "validation_documents and validation_fraction are for text: what a prepared dataset "
            "holds out was decided when it was prepared"
        )
    parts = config.mixture or ((config.corpus, 1.0),)
    datasets = [PreparedDataset.open(epath.Path(path).expanduser()) for path, _ in parts]
    first = datasets[0].tokenizer
    if tokenizer is not None:
        wanted = [("the run's", tokenizer)]
    elif config.tokenizer is None or config.tokenizer.startswith("train:"):
        wanted = []
    else:
        wanted = [(f"tokenizer {config.tokenizer!r}", make_tokenizer(config.tokenizer, ()))]
    for (path, _), dataset in zip(parts, datasets, strict=True):
        for whose, other in [*wanted, (f"that of {parts[0][0]!r}", first)]:
            _check_tokenizer(path, dataset.tokenizer, other, whose)
    held_out = [d.split(VALIDATION) for d in datasets if VALIDATION in d.index.splits]
    splits = [dataset.split(TRAIN) for dataset in datasets]
    weights = [weight for _, weight in parts]
    identity = (weights, [split.fingerprint for split in [*splits, *held_out]])
    return PreparedMixture(
        tokenizer=first,
        train=list(zip(splits, weights, strict=True)),
        validation=SplitDocuments(held_out),
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
    )


def _check_tokenizer(path: str, found: Tokenizer, wanted: Tokenizer, whose: str) -> None:
    if found.hash != wanted.hash:
        raise ValueError(
            f"prepared dataset {path!r} is of the tokenizer {found.hash}, not of {whose}, "
            f"{wanted.hash}"
        )


def _text_fingerprint(
    train: Sequence[Document], validation: Sequence[Document], tokenizer: Tokenizer
) -> str:
    parts = (fingerprint(train), fingerprint(validation), tokenizer.hash)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
