"""Preparing a dataset: the same bytes whatever happens on the way, and nothing lost in silence."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carope_jax._cli import InputError
from carope_jax._interrupt import Interrupted
from carope_jax.data import PreparedDataset, load_corpus, make_tokenizer
from carope_jax.data import _preparing as preparing
from carope_jax.data import _processes as processes
from carope_jax.data import _shard_tasks as shard_tasks
from carope_jax.data._preparation import Observer, prepare
from carope_jax.data._preparation_config import PreparationConfig
from carope_jax.data._preparing import Calls
from carope_jax.data.prepare import main

TALES = [document.text for document in load_corpus("synthetic")]
TEXTS = [f"{number}: {TALES[number % 40][: 40 + 97 * number % 900]}" for number in range(90)]
# Twice in one file, and in two files: equal texts must not part.
TEXTS[7] = TEXTS[3] = TEXTS[50]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer("train:400", TALES).save(folder)
    return str(folder / "tokenizer.model")


@pytest.fixture
def sources(tmp_path):
    """Four files of all kinds, each a shard of its own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    pq.write_table(pa.table({"text": TEXTS[:40]}), folder / "a.parquet", row_group_size=16)
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS[40:70])
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.jsonl.gz").write_bytes(
        gzip.compress("\n".join(json.dumps({"text": t}) for t in TEXTS[70:89]).encode())
    )
    (folder / "d.txt").write_text(TEXTS[89])
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shard_tasks, "_SHARD_BYTES", 1)
    monkeypatch.setattr(preparing, "_BATCH_CHARACTERS", 2_000)


def config(sources, output, tokenizer, **changes):
    fields = {"val_docs": 9, "workers": 1, "tokenizer": tokenizer}
    return PreparationConfig(input=(str(sources),), output=str(output), **(fields | changes))


def nothing(*_):
    return None


def observer(check=nothing):
    return Observer(Calls(check, nothing), nothing, nothing)


def run(sources, output, tokenizer, **changes):
    return prepare(config(sources, output, tokenizer, **changes), observer())


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def texts_of(folder, split):
    dataset = PreparedDataset.open(folder)
    documents = dataset.split(split)
    return [dataset.tokenizer.decode(documents.document(i)) for i in range(documents.documents)]


def test_every_document_is_there_once_in_its_order(sources, tmp_path, tokenizer):
    prepared = run(sources, tmp_path / "out", tokenizer)
    train, validation = (texts_of(tmp_path / "out", split) for split in ("train", "validation"))
    held_out = set(validation)
    assert train == [text for text in TEXTS if text not in held_out]
    assert validation == [text for text in TEXTS if text in held_out]
    assert len(held_out) == 9
    assert prepared.index.totals("train")["documents"] == len(train)
    assert prepared.written == sum(
        prepared.index.totals(s)["tokens"] for s in prepared.index.splits
    )
    names = [shard.name for shard in prepared.index.splits["train"]]
    assert names[0] == "train-00000-of-00004.array_record"
    assert not [name for name in content(tmp_path / "out") if "partial" in name]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == []


def test_which_documents_are_held_out_depends_on_nothing_but_texts(tmp_path, tokenizer):
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    for name, texts in (("one", TEXTS), ("two", shuffled)):
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        run(tmp_path / f"{name}.jsonl", tmp_path / name, tokenizer)
    one, two = (Counter(texts_of(tmp_path / name, "validation")) for name in ("one", "two"))
    assert one == two


def test_more_workers_write_the_same_bytes(sources, tmp_path):
    # Also the tokenizer, trained on what the workers read.
    for workers in (1, 2):
        run(sources, tmp_path / str(workers), "train:400", workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert len(content(tmp_path / "1")) > 8


def test_small_sources_share_a_shard(sources, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shard_tasks, "_SHARD_BYTES", 1 << 20)
    run(sources, tmp_path / "out", tokenizer)
    (shard,) = PreparedDataset.open(tmp_path / "out").index.splits["train"]
    assert shard.sources == tuple(
        str(sources / name) for name in ("a.parquet", "b.jsonl", "c.jsonl.gz", "d.txt")
    )
    held_out = set(texts_of(tmp_path / "out", "validation"))
    assert texts_of(tmp_path / "out", "train") == [t for t in TEXTS if t not in held_out]


@pytest.mark.parametrize("at", [2, 12, 21, 24, 27, 30])
def test_stopped_anywhere_and_run_again(sources, tmp_path, tokenizer, at):
    run(sources, tmp_path / "whole", tokenizer)
    calls = 0

    def check():
        nonlocal calls
        calls += 1
        if calls == at:
            raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted):
        prepare(config(sources, tmp_path / "out", tokenizer), observer(check))
    assert not (tmp_path / "out" / "dataset.json").exists()
    left = content(tmp_path / "out") if (tmp_path / "out").exists() else {}
    finished = {name: data for name, data in left.items() if name.endswith("array_record")}
    assert not [name for name in left if "partial" in name]
    stamps = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished}
    prepared = run(sources, tmp_path / "out", tokenizer)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    # Finished shards were kept, not written again.
    assert all((tmp_path / "out" / n).stat().st_mtime_ns == stamp for n, stamp in stamps.items())
    total = sum(prepared.index.totals(split)["tokens"] for split in prepared.index.splits)
    assert (prepared.written < total) == bool(finished)


def test_the_stops_tested_are_before_between_and_in_shards(sources, tmp_path, tokenizer):
    """What the test above rests on: some of its stops find finished shards, some none."""
    counts = []

    def check():
        folder = tmp_path / "out"
        counts.append(len(list(folder.glob("*.array_record"))) if folder.exists() else -1)

    prepare(config(sources, tmp_path / "out", tokenizer), observer(check))
    assert {counts[at - 1] > 0 for at in (2, 12, 21, 24, 27, 30)} == {True, False}
    assert counts[2 - 1] == -1


def test_killed_and_run_again(sources, tmp_path, tokenizer):
    run(sources, tmp_path / "whole", tokenizer)
    arguments = ["--input", str(sources), "--output", str(tmp_path / "out"), "--workers", "2"]
    command = [sys.executable, "-m", "carope_jax.data.prepare", *arguments, "--val-docs", "9"]
    process = subprocess.Popen(
        [*command, "--tokenizer", tokenizer], start_new_session=True, stdout=subprocess.DEVNULL
    )
    # As soon as there is something half done, if it is seen in time.
    while process.poll() is None and not list((tmp_path / "out").glob("*.partial")):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(sources, tmp_path / "out", tokenizer)
    got, expected = content(tmp_path / "out"), content(tmp_path / "whole")
    # The killed one, in a process of its own, put all files into one shard.
    assert {n: d for n, d in got.items() if "array" in n or "json" in n} == {
        n: d for n, d in expected.items() if "array" in n or "json" in n
    }
    assert got.keys() == expected.keys()


def test_a_second_run_has_nothing_to_do_and_another_is_refused(
    sources, tmp_path, tokenizer, capsys
):
    run(sources, tmp_path / "out", tokenizer)
    before = content(tmp_path / "out")
    assert run(sources, tmp_path / "out", tokenizer).written == 0
    with pytest.raises(ValueError, match="validation='val_docs=9', not 'val_docs=8'"):
        run(sources, tmp_path / "out", tokenizer, val_docs=8)
    with (sources / "b.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"text": "one more"}))
    with pytest.raises(ValueError, match="source_fingerprint="):
        run(sources, tmp_path / "out", tokenizer)
    assert content(tmp_path / "out") == before


def test_a_change_before_it_is_run_again_is_taken_in(sources, tmp_path, tokenizer):
    def stop_late(calls=[0]):  # noqa: B006 - a counter
        calls[0] += 1
        if calls[0] == 27:
            raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted):
        prepare(config(sources, tmp_path / "out", tokenizer), observer(stop_late))
    assert list((tmp_path / "out").glob("*.array_record"))
    (sources / "a.parquet").unlink()
    run(sources, tmp_path / "out", tokenizer)
    run(sources, tmp_path / "fresh", tokenizer)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_a_source_that_changes_meanwhile(sources, tmp_path, tokenizer, monkeypatch):
    scan = preparing.scan_source

    def change(task, calls):
        found = scan(task, calls)
        if task[0].name.endswith("d.txt"):
            (sources / "d.txt").write_text("another")
        return found

    monkeypatch.setattr("carope_jax.data._preparation.scan_source", change)
    with pytest.raises(ValueError, match=r"d\.txt: has changed since it was first read"):
        run(sources, tmp_path / "out", tokenizer)
    assert not (tmp_path / "out" / "dataset.json").exists()


def bad_files(folder):
    """A file of each kind of damage, by name; what the message says, and whether rows are left."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": TEXTS[:40]}), folder / "whole.parquet", row_group_size=16)
    cut = (folder / "whole.parquet").read_bytes()[:-300]
    (folder / "whole.parquet").unlink()
    (folder / "cut.parquet").write_bytes(cut)
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS[:20]).encode()
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-400])
    (folder / "bytes.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff\xfe"}\n')
    (folder / "column.jsonl").write_text('{"text": "good"}\n{"body": "x"}\nnot json\n')
    (folder / "empty.txt").write_text("")
    return {
        "cut.parquet": "cut.parquet: can't be read: ",
        "cut.jsonl.gz": "cut.jsonl.gz: can't be read: ",
        "bytes.jsonl": "bytes.jsonl, row 2: is not valid Unicode",
        "column.jsonl": "column.jsonl, row 2: has no key 'text'",
        "empty.txt": "empty.txt: is empty",
    }


def test_what_is_wrong_is_named_before_anything_is_written(sources, tmp_path, tokenizer):
    messages = bad_files(sources)
    with pytest.raises(ValueError, match="6 row") as caught:
        run(sources, tmp_path / "out", tokenizer)
    for message in messages.values():
        assert message in str(caught.value)
    assert "column.jsonl, row 3: is not JSON" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_skipping_leaves_out_and_lists(sources, tmp_path, tokenizer, capsys):
    bad_files(sources)
    arguments = ["--input", str(sources), "--output", str(tmp_path / "out"), "--workers", "1"]
    main(
        [*arguments, "--tokenizer", tokenizer, "--on-error", "skip", "--json", str(tmp_path / "j")]
    )
    # Of files that end too early nothing is taken; of the others the good rows.
    found = Counter(texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "validation"))
    assert found == Counter([*TEXTS, "fine", "good"])
    listed = [json.loads(s) for s in (tmp_path / "out/skipped.jsonl").read_text().splitlines()]
    places = {(Path(one["file"]).name, one["row"]) for one in listed}
    assert places == {
        ("cut.parquet", None),
        ("cut.jsonl.gz", None),
        ("bytes.jsonl", 2),
        ("column.jsonl", 2),
        ("column.jsonl", 3),
        ("empty.txt", None),
    }
    assert json.loads((tmp_path / "j").read_text())["skipped"] == 6
    assert PreparedDataset.open(tmp_path / "out").index.skipped == 6
    assert "skipped: 6, listed in skipped.jsonl" in capsys.readouterr().out


def test_documents_without_a_token(sources, tmp_path, tokenizer, monkeypatch):
    encode = preparing.Tokenizer.encode_batch

    def encode_batch(self, texts):
        return [
            ids[: len(ids) * (not t.startswith("5:"))]
            for t, ids in zip(texts, encode(self, texts), strict=True)
        ]

    monkeypatch.setattr(preparing.Tokenizer, "encode_batch", encode_batch)
    with pytest.raises(ValueError, match=r"a\.parquet, row 6: has no token"):
        run(sources, tmp_path / "out", tokenizer)
    prepared = run(sources, tmp_path / "out", tokenizer, on_error="skip")
    assert prepared.index.skipped == 1
    found = texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "validation")
    assert Counter(found) == Counter(text for text in TEXTS if not text.startswith("5:"))


def test_a_full_disk(sources, tmp_path, tokenizer):
    """The shards' files may not pass 10 kB: a writer then sees what it sees on a full disk."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); "
        "from carope_jax._cli import run; from carope_jax.data.prepare import main; run(main)"
    )
    arguments = ["--input", str(sources), "--output", str(tmp_path / "out"), "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--tokenizer", tokenizer],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "can't be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert not list((tmp_path / "out").glob("*.partial"))


def die(task, calls):
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(task, calls):
    while True:
        calls.check()
        time.sleep(0.01)


def run_tasks(function, calls):
    with processes.Workers(2, calls) as workers:
        return list(workers.run(function, [0, 1]))


def test_a_worker_that_dies_ends_all():
    with pytest.raises(ChildProcessError, match="a worker process has died"):
        run_tasks(die, Calls(nothing, nothing))


def test_a_signal_ends_the_workers_too():
    began = time.monotonic()

    def check():
        if time.monotonic() - began > 1:
            raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted):
        run_tasks(sleep, Calls(check, nothing))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere/*.parquet"], "input 'nowhere/.*' matches no file"),
        (["--input", "synthetic", "--tokenizer", "gpt9"], "tokenizer 'gpt9' must be"),
        (["--input", "synthetic", "--val-docs", "40"], "leaves none of 40 distinct"),
        (["--input", "synthetic", "--val-fraction", "1.5"], r"val_fraction=1\.5 must be in"),
        (["--input", "synthetic", "--val-docs", "-1"], "val_docs=-1"),
        (["--input", "synthetic", "--val-docs", "1", "--val-fraction", "0.1"], "give one"),
        (["--input", "synthetic", "--workers", "0"], "workers=0"),
        (["--input", "tfds:nothing_there"], "tfds:nothing_there' is not prepared"),
    ],
)
def test_bad_arguments(tmp_path, tokenizer, arguments, message):
    output = ["--output", str(tmp_path / "out"), "--tokenizer", tokenizer]
    with pytest.raises(InputError, match=message):
        main([*output, *arguments])
    assert not (tmp_path / "out").exists()


def test_an_output_of_someone_else(sources, tmp_path, tokenizer):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"it holds 'thesis\.tex'"):
        run(sources, tmp_path / "out", tokenizer)


def test_one_document_can_only_be_trained_on(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXTS[0])
    with pytest.raises(ValueError, match="val_docs=0 none is held out"):
        run(tmp_path / "a.txt", tmp_path / "out", tokenizer, val_docs=None)
    prepared = run(tmp_path / "a.txt", tmp_path / "out", tokenizer, val_docs=0)
    assert list(prepared.index.splits) == ["train"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(["a.parquet", "b.jsonl", "c.jsonl.gz", "d.txt"]),
    cut=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_mangled_files(sources, tmp_path, tokenizer, name, cut, changes, seed):
    """Whatever bytes a file has: a dataset with all that stands in the others, or one message."""
    path = sources / name
    original = path.read_bytes()
    data = bytearray(original)
    for place, byte in changes:
        data[int(place * (len(data) - 1))] = byte
    if seed % 2:
        data = data[: int(cut * len(data))]
    path.write_bytes(bytes(data))
    output = tmp_path / f"out-{seed}-{name}-{time.monotonic_ns()}"
    try:
        if data != original:
            run(sources, output, tokenizer, on_error="skip")
            found = Counter(texts_of(output, "train") + texts_of(output, "validation"))
            first, last = {
                "a.parquet": (0, 40),
                "b.jsonl": (40, 70),
                "c.jsonl.gz": (70, 89),
                "d.txt": (89, 90),
            }[name]
            others = Counter(TEXTS[:first] + TEXTS[last:])
            assert not others - found
            PreparedDataset.open(output).verify()
    finally:
        path.write_bytes(original)


def test_the_stream_of_a_prepared_dataset(sources, tmp_path, tokenizer):
    run(sources, tmp_path / "out", tokenizer)
    dataset = PreparedDataset.open(tmp_path / "out")
    split = dataset.split("train")
    expected = [
        np.append(dataset.tokenizer.encode(text), dataset.tokenizer.eot_id)
        for text in texts_of(tmp_path / "out", "train")
    ]
    np.testing.assert_array_equal(split.slice(0, len(split)), np.concatenate(expected))
