"""Splits of prepared TensorFlow Datasets, read without TensorFlow and never downloaded."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath
from google.protobuf import message

from carope_jax.data._source import Row, Source, SourceError, listed

PREFIX = "tfds:"

_SPEC = re.compile(
    r"tfds:(?P<name>\w+)(/(?P<config>[^:/]+))?(:(?P<version>\d+\.\d+\.\d+))?(:(?P<split>.+))?"
)
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_METADATA_FILES = ("dataset_info.json", "features.json")


class TfdsSource(Source):
    """A split of a dataset that TFDS prepared in a format of random access (ArrayRecord).

    It is looked for in the folder `$TFDS_DATA_DIR`, or `~/tensorflow_datasets`.

    Args:
        spec: `tfds:NAME[/CONFIG][:VERSION][:SPLIT]`; the newest version and the split `train` if
            not given. A split may be a part, `train[:1%]`.

    Raises:
        FileNotFoundError: there is no such prepared dataset.
        ValueError: the form of `spec` is another one, or the dataset has no such split or is of
            another format.
    """

    # Those of ArrayRecord are bare RuntimeErrors.
    _file_errors = (OSError, RuntimeError, ValueError)

    def __init__(self, spec: str) -> None:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ValueError(f"source {spec!r} must be 'tfds:NAME[/CONFIG][:VERSION][:SPLIT]'")
        self.name = spec
        self._split = match["split"] or "train"
        self._folder = _find(spec, match["name"], match["config"], match["version"])
        self._records()

    @property
    def size(self) -> int:
        split = self._builder().info.splits[self._split]
        return sum(epath.Path(path).stat().length for path in split.filepaths)

    def _identity(self) -> Iterator[bytes]:
        for name in _METADATA_FILES:
            yield (self._folder / name).read_bytes()
        yield json.dumps((self._split, len(self._records()), self.size)).encode()

    def _read(self, text_column: str) -> Iterator[Row | SourceError]:
        parse = self._parser(text_column)
        for number, record in enumerate(self._records(), start=1):
            if not record:  # what is read of a file cut short
                raise SourceError(self.name, None, f"has an empty record {number}: it is cut short")
            try:
                text = parse(record)
            except message.DecodeError as error:
                yield SourceError(self.name, number, f"is not an example: {error}")
                continue
            if text is None:
                yield SourceError(self.name, number, f"has no {text_column!r}")
            else:
                yield self.check(number, text)

    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        # It reads a folder and nothing else; by a name, TFDS would offer to download.
        return tfds.builder_from_directory(self._folder)

    def _records(self) -> Sequence[bytes]:
        import tensorflow_datasets as tfds

        try:
            return self._builder().as_data_source(
                self._split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
            )
        except NotImplementedError:
            raise ValueError(
                f"source {self.name!r} is prepared in {str(self._folder)!r}, but in a format "
                "without random access: prepare it with file_format='array_record'"
            ) from None
        except ValueError as error:
            raise ValueError(f"source {self.name!r} can't be opened: {error}") from None

    def _parser(self, text_column: str) -> Callable[[bytes], bytes | None]:
        import tensorflow_datasets as tfds

        features = self._builder().info.features
        names = sorted(features) if isinstance(features, tfds.features.FeaturesDict) else []
        if text_column not in names:
            raise SourceError(
                self.name,
                None,
                f"has no feature {text_column!r}; its features are {listed(names)}",
            )
        feature = features[text_column]
        if not isinstance(feature, tfds.features.Text):
            raise SourceError(
                self.name, None, f"has a feature {text_column!r} of {feature}, which is not text"
            )
        # Alone: the others, images maybe, are not decoded.
        alone = tfds.features.FeaturesDict({text_column: feature})
        return lambda record: alone.deserialize_example_np(record)[text_column]


def _find(spec: str, name: str, config: str | None, version: str | None) -> epath.Path:
    root = epath.Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    folder = root / name / config if config else root / name
    found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = sorted(one for one in found if not one.startswith("."))
    versions = [one for one in found if _VERSION.fullmatch(one) and _is_prepared(folder / one)]
    if version in versions:
        return folder / version
    if version is None and versions:
        return folder / max(versions, key=lambda one: [int(part) for part in one.split(".")])
    if versions:
        there = f"which has the versions {', '.join(versions)}"
    elif found:
        there = f"which has {', '.join(found)}: name one of them as its configuration"
    else:
        there = "which does not exist; nothing is downloaded here: prepare it with TFDS first"
    raise FileNotFoundError(f"source {spec!r} is not prepared in {str(folder)!r}, {there}")


def _is_prepared(folder: epath.Path) -> bool:
    return all((folder / name).exists() for name in _METADATA_FILES)
