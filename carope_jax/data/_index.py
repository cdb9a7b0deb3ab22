"""`dataset.json`, what a prepared dataset holds: written last, so no folder without it is one."""

import dataclasses
import hashlib
import json
import os
from typing import Any

import dacite
from etils import epath

from carope_jax.data._shards import ShardInfo, lengths_path, token_dtype

INDEX_FILE = "dataset.json"
VERSION = 1
TRAIN, VALIDATION = "train", "validation"
_EOT_POLICY = "after each document, not stored"


@dataclasses.dataclass(frozen=True)
class DatasetIndex:
    """The tokenizer, the source, and the shards of each split in the order of their documents.

    Raises:
        ValueError: a field contradicts another.
    """

    tokenizer_hash: str
    """`Tokenizer.hash` of what made the ids."""
    vocab_size: int
    """Ids are in `[0, vocab_size)`."""
    eot_id: int
    """The id that follows each document in a stream. It is not stored."""
    source_fingerprint: str
    """SHA-256 (hex) over the source files."""
    text_column: str
    """The column, or JSON key, of the sources that held the text."""
    validation: str
    """How documents were chosen for the split `"validation"`."""
    skipped: int
    """Rows and files that could not be read and were left out."""
    splits: dict[str, tuple[ShardInfo, ...]]
    """`"train"`, `"validation"`: their shards."""

    def __post_init__(self) -> None:
        token_dtype(self.vocab_size)
        if not 0 <= self.eot_id < self.vocab_size:
            raise ValueError(
                f"eot_id={self.eot_id} is outside the vocabulary [0, {self.vocab_size})"
            )
        names = [shard.name for shards in self.splits.values() for shard in shards]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"splits name the shard {twice!r} twice")

    def totals(self, split: str) -> dict[str, int]:
        """Documents, tokens and bytes of a split, all shards together."""
        return {
            field: sum(getattr(shard, field) for shard in self.splits[split])
            for field in ("documents", "tokens", "bytes")
        }

    def fingerprint(self, split: str) -> str:
        """SHA-256 (hex), equal where the token stream of the split is cut into equal shards."""
        contents = [
            (shard.documents, shard.tokens_sha256, shard.lengths_sha256)
            for shard in self.splits[split]
        ]
        identity = (self.tokenizer_hash, self.vocab_size, self.eot_id, contents)
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def write(self, folder: epath.PathLike) -> None:
        """Makes the folder a dataset: the last thing written into it, whole or not at all.

        Raises:
            FileNotFoundError: a shard or its lengths are missing.
            ValueError: a shard has another size than the index says.
        """
        folder = epath.Path(folder)
        for shards in self.splits.values():
            for shard in shards:
                check_shard(folder, shard)
        text = json.dumps(self._as_json(), indent=2) + "\n"
        path = folder / INDEX_FILE
        if "://" in os.fspath(path):
            path.write_text(text)  # an object of a bucket appears once it is whole
            return
        partial = folder / (INDEX_FILE + ".partial")
        try:
            partial.write_text(text)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _as_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {
            "version": VERSION,
            "eot": _EOT_POLICY,
            "totals": {split: self.totals(split) for split in self.splits},
            **fields,
        }


def read_index(folder: epath.PathLike) -> DatasetIndex:
    """Reads the `dataset.json` of a folder.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: it is of another version, has unknown, missing or ill-typed fields, or its
            totals are not the sums over its shards.
    """
    path = epath.Path(folder) / INDEX_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{str(folder)!r} is no prepared dataset: {INDEX_FILE} is missing (preparing writes it "
            "last: run it to its end)"
        )
    place = f"index {str(path)!r}"
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place} is not a JSON object")
    version = fields.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{place} is of version {version!r}; this package reads {VERSION}")
    eot = fields.pop("eot", None)
    if eot != _EOT_POLICY:
        raise ValueError(f"{place} has eot={eot!r}, not {_EOT_POLICY!r}")
    totals = fields.pop("totals", None)
    try:
        index = dacite.from_dict(DatasetIndex, fields, dacite.Config(cast=[tuple], strict=True))
    except (dacite.DaciteError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from None
    expected = {split: index.totals(split) for split in index.splits}
    if totals != expected:
        raise ValueError(f"{place} has totals={totals}, but its shards make {expected}")
    return index


def check_shard(folder: epath.PathLike, shard: ShardInfo) -> None:
    """Checks that a shard and its lengths are there, and the shard is of its size.

    Raises:
        FileNotFoundError: one of the two is missing.
        ValueError: the shard has another size.
    """
    path = epath.Path(folder) / shard.name
    for file in (path, lengths_path(path)):
        if not file.exists():
            raise FileNotFoundError(f"{str(file)!r} is missing from the prepared dataset")
    found = path.stat().length
    if found != shard.bytes:
        raise ValueError(f"shard {str(path)!r} has {found} bytes, but {shard.bytes} were written")
