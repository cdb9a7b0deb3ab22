"""Preparing a dataset: sources of any size in, a folder of ArrayRecord shards out, once.

The sources are read twice: through, which finds what is wrong with them before hours are spent and
decides what is held out, and to be encoded. Nothing depends on the number of processes.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from carope_jax._cli import write_whole
from carope_jax.data._index import INDEX_FILE, TRAIN, VALIDATION, DatasetIndex, read_index
from carope_jax.data._preparation_config import PreparationConfig
from carope_jax.data._preparing import (
    Calls,
    SampleTask,
    Scan,
    ShardTask,
    Written,
    sample_texts,
    scan_source,
    write_shards,
)
from carope_jax.data._processes import Workers
from carope_jax.data._selection import held_out_up_to, sample_up_to
from carope_jax.data._shard_tasks import PROGRESS, ShardNotes, digest, shard_tasks
from carope_jax.data._shards import SUFFIX, lengths_path
from carope_jax.data._source import Source, SourceError
from carope_jax.data._sources import find_sources
from carope_jax.data._tokenizer import Tokenizer, make_tokenizer

SKIPPED_FILE = "skipped.jsonl"
_LISTED = 20


class Observer(NamedTuple):
    """What is told of the progress, and may end it.

    Attributes:
        calls: called every second or so.
        stage: called as a stage begins: (what it does, bytes of text to come or None).
        note: called with a line for the user.
    """

    calls: Calls
    stage: Callable[[str, int | None], None]
    note: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What preparing ended with.

    Attributes:
        index: of the dataset.
        written: tokens encoded now; those of shards that were there already don't count.
        skipped: what was left out.
    """

    index: DatasetIndex
    written: int
    skipped: tuple[SourceError, ...]


def prepare(config: PreparationConfig, observer: Observer) -> Prepared:
    """Prepares a dataset, or goes on where that was interrupted.

    Finished shards of the same documents and tokenizer are kept. `dataset.json` is written last.

    Raises:
        FileNotFoundError: a source or the tokenizer is missing.
        ValueError: a source has something wrong (with `on_error="stop"`), no document is left, the
            split is impossible, the tokenizer can't be made, or the output holds something else.
        OSError: something can't be written.
    """
    folder = epath.Path(config.output).expanduser()
    _check_output(folder)
    sources = find_sources(config.input)
    with Workers(config.workers, observer.calls) as workers:
        return _prepare(folder, sources, config, observer, workers)


def _prepare(
    folder: epath.Path,
    sources: Sequence[Source],
    config: PreparationConfig,
    observer: Observer,
    workers: Workers,
) -> Prepared:
    observer.stage("reading", None)
    scanned = dict(workers.run(scan_source, [(source, config.text_column) for source in sources]))
    scans = [scanned[number] for number in range(len(sources))]
    errors = [error for scan in scans for error in scan.errors]
    if errors and config.on_error == "stop":
        raise ValueError(_listing(errors, sum(s.bad_rows + s.is_broken for s in scans)))
    hashes = np.unique(np.concatenate([scan.hashes for scan in scans]))
    held_out = held_out_up_to(hashes, config)
    tokenizer = _make_tokenizer(sources, scans, held_out, config, observer, workers)
    index = DatasetIndex(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        source_fingerprint=digest([scan.fingerprint for scan in scans]),
        text_column=config.text_column,
        validation=config.validation,
        skipped=sum(scan.bad_rows + scan.is_broken for scan in scans),
        splits={},
    )
    if (folder / INDEX_FILE).exists():
        return Prepared(_check_same(index, read_index(folder), folder), 0, ())
    # The first thing there: by it, what was begun is known.
    (folder / PROGRESS).mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    tasks = shard_tasks(folder, sources, scans, held_out, tokenizer.hash, config)
    results, tokens = _write(tasks, observer, workers)
    late = [error for result in results for error in result.errors]
    splits = {
        split: tuple(one.shards[split] for one in results if split in one.shards)
        for split in (TRAIN, VALIDATION)
    }
    index = dataclasses.replace(
        index, splits={s: i for s, i in splits.items() if i}, skipped=index.skipped + len(late)
    )
    if TRAIN not in index.splits:
        raise ValueError("no document is left to train on")
    skipped = (*errors, *late)
    (folder / SKIPPED_FILE).unlink(missing_ok=True)
    if skipped:
        lines = (json.dumps({"file": e.file, "row": e.row, "reason": e.reason}) for e in skipped)
        write_whole(folder / SKIPPED_FILE, "".join(line + "\n" for line in lines))
    index.write(folder)
    _remove_rest(folder, index)
    return Prepared(index, tokens, skipped)


def _check_output(folder: epath.Path) -> None:
    """Raises where there is something that preparing did not leave there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"output {str(folder)!r} is a file")
    names = {path.name for path in folder.iterdir()}
    if names and not names & {INDEX_FILE, PROGRESS}:
        raise ValueError(
            f"output {str(folder)!r} is neither empty nor a dataset begun before: it holds "
            f"{min(names)!r}"
        )


def _make_tokenizer(
    sources: Sequence[Source],
    scans: Sequence[Scan],
    held_out: int,
    config: PreparationConfig,
    observer: Observer,
    workers: Workers,
) -> Tokenizer:
    if not config.tokenizer.startswith("train:"):
        return make_tokenizer(config.tokenizer, ())
    readable = [source for source, scan in zip(sources, scans, strict=True) if not scan.is_broken]
    up_to, size = sample_up_to(
        np.concatenate([scan.hashes for scan in scans]),
        np.concatenate([scan.sizes for scan in scans]),
        held_out,
    )
    observer.stage("sampling", None)
    tasks = [SampleTask(source, config.text_column, held_out, up_to) for source in readable]
    done = dict(workers.run(sample_texts, tasks))
    observer.note(f"training the tokenizer on {size / 1e6:,.1f} MB of text")
    return make_tokenizer(config.tokenizer, (text for i in range(len(tasks)) for text in done[i]))


def _write(
    tasks: Sequence[ShardTask], observer: Observer, workers: Workers
) -> tuple[list[Written], int]:
    """What is written by each task, now or before, and the tokens that were encoded now."""
    notes = ShardNotes(tasks[0].folder)
    found = {number: notes.find(task) for number, task in enumerate(tasks)}
    results = {number: result for number, result in found.items() if result is not None}
    todo = [number for number in found if number not in results]
    if results:
        observer.note(f"{len(results)} of {len(tasks)} shards are there already")
    observer.stage("encoding", sum(tasks[number].size for number in todo))
    tokens = 0
    for i, result in workers.run(write_shards, [tasks[number] for number in todo]):
        results[todo[i]] = result
        notes.add(tasks[todo[i]], result)
        tokens += sum(info.tokens for info in result.shards.values())
    return [results[number] for number in range(len(tasks))], tokens


def _check_same(wanted: DatasetIndex, found: DatasetIndex, folder: epath.Path) -> DatasetIndex:
    """The dataset that is there, if it is the one that was asked for."""
    fields = ("tokenizer_hash", "source_fingerprint", "text_column", "validation")
    differences = [
        f"{field}={getattr(found, field)!r}, not {getattr(wanted, field)!r}"
        for field in fields
        if getattr(found, field) != getattr(wanted, field)
    ]
    if differences:
        raise ValueError(
            f"output {str(folder)!r} holds a dataset with {'; '.join(differences)}: give another "
            "output, or remove it"
        )
    return found


def _remove_rest(folder: epath.Path, index: DatasetIndex) -> None:
    """Removes the notes, and shards of an attempt with other inputs."""
    shards = [folder / info.name for infos in index.splits.values() for info in infos]
    kept = {path.name for shard in shards for path in (shard, lengths_path(shard))}
    (folder / PROGRESS).rmtree(missing_ok=True)
    for path in folder.iterdir():
        ours = path.name.endswith((SUFFIX, lengths_path(path).suffix, ".partial"))
        if ours and path.name not in kept:
            path.unlink()


def _listing(errors: Sequence[SourceError], count: int) -> str:
    lines = (f"  {error}" for error in errors[:_LISTED])
    more = f"\n  and {count - _LISTED} more" if count > _LISTED else ""
    return (
        f"{count} row(s) or file(s) can't be read:\n" + "\n".join(lines) + more + "\nnothing was "
        "written; on_error=skip leaves them out"
    )
