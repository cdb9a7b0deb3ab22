"""Finding sources: what `--input` names."""

import os
from collections.abc import Iterable, Iterator, Sequence

from etils import epath

from carope_jax.data._corpora import fingerprint, load_corpus
from carope_jax.data._source import Row, Source, SourceError
from carope_jax.data._source_files import SUFFIXES, FileSource, can_read
from carope_jax.data._source_tfds import PREFIX, TfdsSource

__all__ = ["Row", "Source", "SourceError", "find_sources"]

_BUILT_IN = ("kjv", "synthetic")
_GLOB_CHARACTERS = frozenset("*?[")


class BuiltInSource(Source):
    """A corpus that needs no file: `kjv`, `synthetic`.

    Raises:
        FileNotFoundError: the package that holds it is not installed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._documents = load_corpus(name)

    @property
    def size(self) -> int:
        return sum(len(document.text.encode()) for document in self._documents)

    def _identity(self) -> Iterator[bytes]:
        yield fingerprint(self._documents).encode()

    def _read(self, text_column: str) -> Iterator[Row | SourceError]:
        for number, document in enumerate(self._documents, start=1):
            yield self.check(number, document.text)


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The sources that inputs name, in the order of their names, each once.

    Args:
        inputs: each one of

            * a file, local or of a bucket (`gs://…`), of a kind that `FileSource` reads;
            * a pattern of files with `*`, `?` or `[…]`: all of them must be of such a kind;
            * a folder: the files of such a kind in it (others, and folders in it, are not read);
            * `tfds:NAME[/CONFIG][:VERSION][:SPLIT]`, as `TfdsSource` has it;
            * `kjv` or `synthetic`, as `load_corpus` has them.

    Raises:
        FileNotFoundError: an input names nothing that exists.
        ValueError: there is no input, a file is of an unknown kind, or a folder has none to read.
    """
    if not inputs:
        raise ValueError("input names no source")
    sources: dict[str, Source] = {}
    for name in inputs:
        for source, key in _find(name):
            sources.setdefault(key, source)
    return sorted(sources.values(), key=lambda source: source.name)


def _find(name: str) -> Iterable[tuple[Source, str]]:
    if name in _BUILT_IN:
        return [(BuiltInSource(name), name)]
    if name.startswith(PREFIX):
        return [(TfdsSource(name), name)]
    return [(FileSource(path), _key(path)) for path in _find_files(name)]


def _key(path: epath.Path) -> str:
    text = os.fspath(path)
    return text if "://" in text else os.path.realpath(text)


def _find_files(name: str) -> list[epath.Path]:
    path = epath.Path(name).expanduser()
    if name and path.is_dir():
        files = [file for file in path.iterdir() if can_read(file.name) and not file.is_dir()]
        if not files:
            raise ValueError(f"input {name!r} is a folder without a file in {', '.join(SUFFIXES)}")
        return files
    if name and path.exists():
        return [path]
    if not _GLOB_CHARACTERS.intersection(name):
        raise FileNotFoundError(
            f"input {name!r} does not exist: it must be a file, a folder, a pattern, "
            f"'{PREFIX}NAME', {' or '.join(map(repr, _BUILT_IN))}"
        )
    if "**" in name:
        raise ValueError(
            f"input {name!r} has '**', which is not known: write a '*' for each folder"
        )
    first = next(i for i, part in enumerate(path.parts) if _GLOB_CHARACTERS.intersection(part))
    matches = list(epath.Path(*path.parts[:first]).glob(os.path.join(*path.parts[first:])))
    if not matches:
        raise FileNotFoundError(f"input {name!r} matches no file")
    return sorted(matches)  # so that of several errors it is always the same
