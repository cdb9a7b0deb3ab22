"""Sources dealt out to shards, and notes of the shards that are finished."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from carope_jax._cli import write_whole
from carope_jax.data._index import VERSION, check_shard
from carope_jax.data._preparation_config import PreparationConfig
from carope_jax.data._preparing import Scan, ShardTask, Written
from carope_jax.data._shards import ShardInfo
from carope_jax.data._source import Source, SourceError

PROGRESS = "progress"

# Sources in a row share a shard up to this many stored bytes: ten thousand small files don't make
# ten thousand shards.
_SHARD_BYTES = 8 << 20


def shard_tasks(
    folder: epath.Path,
    sources: Sequence[Source],
    scans: Sequence[Scan],
    held_out: int,
    tokenizer_hash: str,
    config: PreparationConfig,
) -> list[ShardTask]:
    """The work that is left once the sources are read through: small sources share a shard."""
    groups: list[list[int]] = []
    size = 0
    for number, (source, scan) in enumerate(zip(sources, scans, strict=True)):
        if scan.is_broken or not len(scan.hashes):
            continue
        if not groups or size + source.size > _SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += source.size
    return [
        ShardTask(
            folder=folder,
            stem=f"{i:05d}-of-{len(groups):05d}",
            sources=tuple(sources[number] for number in group),
            identities=tuple(scans[number].identity for number in group),
            fingerprints=tuple(scans[number].fingerprint for number in group),
            size=int(sum(scans[number].sizes.sum() for number in group)),
            tokenizer_hash=tokenizer_hash,
            text_column=config.text_column,
            held_out_up_to=held_out,
            stop_on_error=config.on_error == "stop",
        )
        for i, group in enumerate(groups)
    ]


class ShardNotes:
    """Notes of finished shards, in a folder beside them, by which a second attempt knows them."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder

    def add(self, task: ShardTask, result: Written) -> None:
        """Notes that a task is done."""
        fields = {
            "key": self._key(task),
            "shards": {split: dataclasses.asdict(info) for split, info in result.shards.items()},
            "errors": [error.args for error in result.errors],
        }
        write_whole(self._path(task), json.dumps(fields))

    def find(self, task: ShardTask) -> Written | None:
        """The shards of a task, if they are there, whole, and those that it would write."""
        path = self._path(task)
        if not path.exists():
            return None
        fields = json.loads(path.read_text())
        if fields["key"] != self._key(task) or (fields["errors"] and task.stop_on_error):
            return None
        shards = {
            split: ShardInfo(**{**info, "sources": tuple(info["sources"])})
            for split, info in fields["shards"].items()
        }
        try:
            for info in shards.values():
                check_shard(self._folder, info)
        except (FileNotFoundError, ValueError):
            return None
        return Written(shards, tuple(SourceError(*args) for args in fields["errors"]))

    def _path(self, task: ShardTask) -> epath.Path:
        return self._folder / PROGRESS / f"{task.stem}.json"

    def _key(self, task: ShardTask) -> str:
        """Equal where the shards would be."""
        names = [source.name for source in task.sources]
        parts = (task.tokenizer_hash, task.text_column, task.held_out_up_to)
        return digest([VERSION, *parts, names, task.fingerprints])


def digest(parts: Sequence[Any]) -> str:
    """SHA-256 (hex) of what JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
