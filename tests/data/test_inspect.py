import collections
import json
import re
import shutil
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carope_jax import _cli
from carope_jax.data import inspect, load_corpus, make_tokenizer
from carope_jax.data._index import DatasetIndex
from carope_jax.data._inspection import LONG, count_lengths, log_edges, long_shares
from carope_jax.data._inspection_report import visible
from carope_jax.data._shards import ShardWriter

SHARD = "train-00002-of-00003.array_record"
NASTY = "red \x1b[31m bell \a tab \t turned \u202e back \x9b2J\r\n<|end|>\nnull \0 joined \u200d."


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("train:400", [load_corpus("synthetic")[0].text])


def write_dataset(folder, tokenizer, splits):
    """A dataset of the documents, lists of ids, of each shard of each split."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    infos = {}
    for split, shards in splits.items():
        infos[split] = []
        for number, documents in enumerate(shards):
            path = folder / f"{split}-{number:05d}-of-{len(shards):05d}.array_record"
            with ShardWriter(path, tokenizer.vocab_size) as writer:
                for ids in documents:
                    writer.add(np.asarray(ids, np.int32))
                infos[split].append(writer.finish())
    DatasetIndex(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        source_fingerprint="cd" * 32,
        text_column="text\x1b[2J",
        validation="by hand\x07",
        skipped=3,
        splits={split: tuple(shards) for split, shards in infos.items()},
    ).write(folder)
    return folder


def random_documents(tokenizer, count, seed):
    """Short ones of few different ids, so that many are repeated, and two long ones."""
    rng = np.random.default_rng(seed)
    ids = tokenizer.encode("Brel was a miller.")[:3]
    documents = [rng.choice(ids, rng.integers(1, 5)).tolist() for _ in range(count)]
    return [*documents, rng.choice(ids, 1500).tolist(), rng.choice(ids, 4096).tolist()]


@pytest.fixture(scope="module")
def documents(tokenizer):
    return {
        "train": random_documents(tokenizer, 80, 0),
        "validation": random_documents(tokenizer, 20, 1),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer, documents):
    train = documents["train"]
    splits = {"train": [train[:50], [], train[50:]], "validation": [documents["validation"]]}
    return write_dataset(tmp_path_factory.mktemp("inspect") / "set", tokenizer, splits)


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        _cli.run(inspect.main, [str(argument) for argument in arguments])
    return stopped.value.code


def results(folder, tmp_path, *arguments):
    file = tmp_path / "out.json"
    assert run(folder, "--json", file, *arguments) == 0
    return json.loads(file.read_text())


def test_figures_are_those_of_counting(folder, documents, tokenizer, tmp_path, capsys):
    found = results(folder, tmp_path, "--length", 100, "--samples", 2)
    assert found["tokenizer"] == "sentencepiece"
    assert (found["tokenizer_hash"], found["vocab_size"]) == (tokenizer.hash, 400)
    assert found["source_fingerprint"] == "cd" * 32
    assert (found["validation"], found["skipped"]) == ("by hand\a", 3)
    for name, all_ids in documents.items():
        split, lengths = found["splits"][name], sorted(map(len, all_ids))
        assert (split["documents"], split["tokens"]) == (len(lengths), sum(lengths))
        assert split["bytes"] == sum(f.stat().st_size for f in folder.glob(f"{name}*.array_record"))
        assert split["shards"] == {"train": 3, "validation": 1}[name]
        assert split["windows"] == (sum(lengths) + len(lengths) - 1) // 100
        summary = split["lengths"]
        assert (summary["shortest"], summary["longest"]) == (1, 4096)
        assert summary["median"] == np.median(lengths)
        assert summary["mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert summary["p90"] == lengths[-(-9 * len(lengths) // 10) - 1]
        for share in split["long"]:
            long = [n for n in lengths if n >= share["at_least"]]
            assert share["documents"] == len(long) / len(lengths)
            assert share["tokens"] == sum(long) / sum(lengths)
        assert sum(split["histogram"]["tokens"]) == sum(lengths)

        counts = collections.Counter(map(tuple, all_ids))
        assert split["duplicates"]["copies"] == len(lengths) - len(counts)
        assert split["duplicates"]["share"] == (len(lengths) - len(counts)) / len(lengths)
        most = split["duplicates"]["most"]
        repeated = sorted((count for count in counts.values() if count > 1), reverse=True)
        assert [one["documents"] for one in most] == repeated[:5]
        for one in most:
            ids = all_ids[one["first"]]
            assert counts[tuple(ids)] == one["documents"]
            assert all_ids.index(ids) == one["first"]
            assert one["beginning"] == tokenizer.decode(ids)

    # Rows of 100 hold the two long documents in pieces, and the short ones whole.
    packing = found["packing"]
    assert 0 <= packing["padding"] < 0.1
    assert packing["cut"] == 2 / len(documents["train"])
    assert 1 <= packing["segments"] < 100

    train, validation = (documents[name] for name in ("train", "validation"))
    leak = found["leak"]
    assert leak["train"] == sum(ids in validation for ids in train) > 0
    assert leak["validation"] == sum(ids in train for ids in validation) > 0
    assert leak["validation_share"] == leak["validation"] / len(validation)
    assert all(train[one["first"]] in validation for one in leak["most"])
    assert found["reading"]["tokens"] == sum(map(len, train + validation))

    said = capsys.readouterr().out
    assert f"train: {found['splits']['train']['duplicates']['copies']} (" in said
    assert f"{100 * packing['padding']:.2f}% padding" in said
    assert f"leakage: {leak['validation']} (" in said
    assert "tokens/s" in said
    assert re.search(r"4,096 - 8,191 +▏ +1 +█+ +1\n", said)


def test_one_other_token_or_its_place_makes_another_document(tokenizer, tmp_path):
    ids = tokenizer.encode("Brel was a miller of Stoon.").tolist()
    other = [*ids[:-1], ids[-1] - 1]
    splits = {"train": [[ids, other, ids[::-1], ids[:-1]]], "validation": [[other[::-1]], [ids]]}
    folder = write_dataset(tmp_path / "set", tokenizer, splits)
    found = results(folder, tmp_path, "--length", 4, "--samples", 0)
    assert found["splits"]["train"]["duplicates"] == {"copies": 0, "share": 0, "most": []}
    assert (found["leak"]["train"], found["leak"]["validation"]) == (1, 1)
    assert [one["first"] for one in found["leak"]["most"]] == [0]


@given(st.lists(st.integers(1, 2**31 - 1) | st.integers(1, 40), min_size=1), st.integers(1, 4))
def test_every_length_is_in_the_one_bin_that_says_so(lengths, per_octave):
    edges = log_edges(min(lengths), max(lengths), per_octave)
    assert edges[0] <= min(lengths)
    assert edges[-1] > max(lengths)
    assert edges[0] > min(lengths) / 2
    assert edges[-1] <= 2 * max(lengths)
    assert np.all(np.diff(edges) > 0)
    documents, tokens = count_lengths(np.asarray(lengths, np.int32), edges)
    for low, high, count, sum_ in zip(edges[:-1], edges[1:], documents, tokens, strict=True):
        inside = [n for n in lengths if low <= n < high]
        assert (count, sum_) == (len(inside), sum(inside))


def test_long_shares_count_the_least_length_in():
    shares = long_shares(np.asarray([1023, 1024, 8192, 8191], np.int32))
    assert [share.at_least for share in shares] == list(LONG)
    assert [share.documents for share in shares] == [0.75, 0.5, 0.5, 0.25]
    assert shares[-1].tokens == 8192 / (1023 + 1024 + 8192 + 8191)


def test_samples_are_windows_of_the_stream(folder, documents, tokenizer, tmp_path, capsys):
    stream = [token for ids in documents["train"] for token in (*ids, tokenizer.eot_id)]
    arguments = ("--length", 10, "--samples", 300, "--no-duplicates")
    found = results(folder, tmp_path, *arguments)
    windows = [sample["window"] for sample in found["samples"]]
    assert len(set(windows)) == 300
    assert max(windows) < (len(stream) - 1) // 10
    for sample in found["samples"]:
        ids = stream[sample["window"] * 10 :][:10]
        pieces = [[]]
        for token in ids:
            if token == tokenizer.eot_id:
                pieces.append([])
            else:
                pieces[-1].append(token)
        assert sample["texts"] == [tokenizer.decode(piece) for piece in pieces]
    borders = sum(len(sample["texts"]) - 1 for sample in found["samples"])
    assert borders > 20
    assert found["reading"] is found["leak"] is found["splits"]["train"]["duplicates"] is None

    assert results(folder, tmp_path, *arguments)["samples"] == found["samples"]
    again = results(folder, tmp_path, *arguments, "--seed", 1)["samples"]
    assert [sample["window"] for sample in again] != windows


def test_a_long_window_is_shown_by_its_ends(folder, tmp_path, capsys):
    assert run(folder, "--length", 5000, "--samples", 1) == 0
    said = capsys.readouterr().out
    assert re.search(r"… \d+ documents …", said) or re.search(r"\[…[\d,]+ characters…\]", said)
    assert len(said) < 8000


def test_nothing_of_a_document_controls_the_terminal(tokenizer, tmp_path, capsys):
    ids = tokenizer.encode(NASTY).tolist()
    splits = {"train": [[ids] * 3], "validation": [[ids]]}
    folder = write_dataset(tmp_path / "set", tokenizer, splits)
    found = results(folder, tmp_path, "--length", 2 * len(ids) + 2, "--samples", 1)
    assert found["samples"][0]["texts"] == [NASTY, NASTY, ""]
    assert found["splits"]["train"]["duplicates"]["most"][0]["beginning"] == NASTY
    said = capsys.readouterr()
    for char in said.out + said.err:
        assert char == "\n" or unicodedata.category(char)[0] != "C", repr(char)
    assert r"red \x1b[31m bell \x07 tab \t turned \u202e back \x9b2J\r" in said.out
    # A border is at the left edge, a text that spells one is behind the bar.
    lines = said.out.splitlines()
    assert (lines.count("<|end|>"), lines.count("│ <|end|>")) == (2, 2)


@given(st.text())
def test_visible_text_is_printable_and_otherwise_unchanged(text):
    shown = visible(text)
    assert all(line.isprintable() for line in shown.split("\n"))
    if "\\" not in text:
        assert shown.encode("latin-1", "backslashreplace").decode("unicode_escape") == text
    if all(char.isprintable() or char == "\n" for char in text):
        assert shown == text


def test_an_empty_split_and_a_picture(tokenizer, tmp_path, capsys):
    splits = {"train": [[[5, 6, 7], [8] * 40]], "validation": [[]]}
    folder = write_dataset(tmp_path / "set", tokenizer, splits)
    plot = tmp_path / "lengths.png"
    found = results(folder, tmp_path, "--length", 45, "--samples", 0, "--plot", plot)
    empty = found["splits"]["validation"]
    assert (empty["documents"], empty["windows"], empty["long"]) == (0, 0, [])
    assert empty["lengths"] is empty["histogram"] is None
    assert (found["leak"]["validation"], found["leak"]["validation_share"]) == (0, 0)
    # 43 tokens and 2 EOTs: a window of 45 would lack its last target.
    assert found["splits"]["train"]["windows"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def flip(shard):
    """Changes a bit of the first record: shard and lengths stay of their size."""
    content = bytearray(shard.read_bytes())
    # The file's signature has 64 bytes, the first record's header 40.
    content[64 + 40 + 8] ^= 1
    shard.write_bytes(content)


BAD = {
    "no dataset": (lambda set: (set / "dataset.json").unlink(), "", r"dataset\.json is missing"),
    "no shard": (lambda set: (set / SHARD).unlink(), "", rf"{SHARD}' is missing"),
    "corrupt": (lambda set: flip(set / SHARD), "--samples 0", rf"{SHARD}', record 0 is corrupt"),
    "verify": (
        lambda set: flip(set / SHARD),
        "--verify --samples 0 --no-duplicates",
        rf"{SHARD}', record 0 is corrupt",
    ),
    "length": (None, "--length 0", "length must be at least 1, got 0"),
    "samples": (None, "--samples -1", "samples must be at least 0, got -1"),
    "seed": (None, "--seed -1", "seed must be at least 0, got -1"),
    "windows": (None, "--samples 9 --length 900", "samples=9 is more than the 6 windows of length"),
    "window": (None, "--samples 1 --length 9999", r"stream of \d+ tokens is too short"),
    "plot": (None, "--plot {tmp}/none/a.png", "there is no folder '.*none'"),
    "picture": (None, "--plot {tmp}/a.txt", r"a\.txt' must end in one of"),
    "json": (None, "--json /dev/null/a.json", "/dev/null"),
}


@pytest.mark.parametrize(("spoil", "arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_message_and_exit_code_2(
    folder, tmp_path, capsys, spoil, arguments, message
):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    if spoil is not None:
        spoil(copy)
    assert run(copy, *arguments.replace("{tmp}", str(tmp_path)).split()) == _cli.BAD_INPUT
    err = capsys.readouterr().err
    said = " ".join(line.strip("│ ") for line in err.splitlines())
    # A flag's error is shown in a box, every other one as a line.
    assert "Error parsing" in said or len(err.splitlines()) == 1, err
    assert "Traceback" not in err
    assert re.search(message, said), err


def test_what_is_not_read_is_not_missed(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    flip(copy / SHARD)
    assert run(copy, "--no-duplicates", "--samples", 0) == 0
    assert run(folder, "--verify", "--samples", 0) == 0
