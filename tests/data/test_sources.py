import gzip
import json
import pickle
import random
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.data import load_corpus
from carope_jax.data._source import Row, SourceError
from carope_jax.data._source_files import SUFFIXES
from carope_jax.data._sources import find_sources

TEXTS = [f"Tale {i} of é, 😀 and\r\n\u2028\x85 more " * (i % 5 + 1) for i in range(60)]
ONE_TEXT = (".txt", ".txt.gz", ".txt.zst")


def compress(data, suffix):
    if suffix.endswith(".gz"):
        return gzip.compress(data, compresslevel=1)
    if suffix.endswith(".zst"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()
    return data


def write_texts(path, texts, **options):
    """Writes a file of the kind that its name says; `.txt` has the texts in a row."""
    if path.name.endswith(".parquet"):
        column = pa.array(texts, pa.string())
        table = pa.table({"id": list(range(len(texts))), "text": column})
        pq.write_table(table, path, **{"row_group_size": 25, **options})
    elif ".jsonl" in path.name:
        lines = [json.dumps({"id": 0, "text": text}, ensure_ascii=False) for text in texts]
        path.write_bytes(compress("\n".join(lines).encode(), path.name))
    else:
        path.write_bytes(compress("".join(texts).encode(), path.name))
    return path


def read(path, column="text"):
    (source,) = find_sources([str(path)])
    return list(source.rows(column))


def reasons(path, column="text"):
    """Errors as (row, message), after checking that they name the file and row."""
    errors = [row for row in read(path, column) if isinstance(row, SourceError)]
    for error in errors:
        row = "" if error.row is None else f", row {error.row}"
        assert str(error) == f"{path}{row}: {error.reason}"
        assert "\n" not in str(error)
    return [(error.row, error.reason) for error in errors]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_gives_its_texts(tmp_path, suffix):
    path = write_texts(tmp_path / f"a{suffix}", TEXTS)
    expected = ["".join(TEXTS)] if suffix in ONE_TEXT else TEXTS
    assert read(path) == [Row(number, text) for number, text in enumerate(expected, start=1)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_file_is_an_error(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"")
    ((row, reason),) = reasons(path)
    assert row is None
    assert "empty" in reason or "size is 0 bytes" in reason
    write_texts(path, [])
    assert reasons(path) == [(None, "is empty: it has no rows")]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_document_without_text_is_a_row_error(tmp_path, suffix):
    blank = " \n\t\u3000"
    texts = [blank] if suffix in ONE_TEXT else [blank, "one", "", "two"]
    path = write_texts(tmp_path / f"a{suffix}", texts)
    rows = [1] if suffix in ONE_TEXT else [1, 3]
    assert reasons(path) == [(row, "is empty, or only whitespace") for row in rows]
    assert len(read(path)) == len(texts)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_file_is_a_file_error_once_it_is_read(tmp_path, suffix):
    path = write_texts(tmp_path / f"a{suffix}", TEXTS)
    (source,) = find_sources([str(path)])
    path.unlink()
    (error,) = source.rows("text")
    assert str(error) == f"{path}: can't be read: No such file or directory"
    with pytest.raises(SourceError, match="No such file"):
        source.fingerprint()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "is not JSON: Unterminated string"),
        (b"[" * 100_000, "is not JSON: maximum recursion"),
        (b"1" * 5_000, "is not JSON: Exceeds the limit"),
        (b'"text"', "is not a JSON object, but a string"),
        (b"[1]", "is not a JSON object, but an array"),
        (b"null", "is not a JSON object, but null"),
        (b'{"body": "x", "id": 1}', "has no key 'text'; its keys are 'body', 'id'"),
        (b"{}", "has no key 'text'; its keys are none"),
        (b'{"\\ud800' + b"x" * 500 + b'": 1}', "has no key 'text'; its keys are '\\ud800x"),
        (b'{"text": null}', "has under 'text' no string, but null"),
        (b'{"text": 1.5}', "has under 'text' no string, but a number"),
        (b'{"text": true}', "has under 'text' no string, but true or false"),
        (b'{"text": ["a"]}', "has under 'text' no string, but an array"),
        (b'{"text": "\xff"}', "is not valid Unicode: 'utf-8' codec can't decode byte 0xff"),
        (b'{"text": "\\ud83d"}', "is not valid Unicode: 'utf-8' codec can't encode"),
    ],
)
def test_a_bad_line_is_named_and_the_next_is_read(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n  \n' + line + b'\n{"text": "two"}\n')
    rows = read(path)
    assert [rows[0], rows[2]] == [Row(1, "one"), Row(5, "two")]
    assert len(rows) == 3
    ((number, found),) = reasons(path)
    assert number == 4
    assert reason in found
    assert len(found) < 400
    found.encode()


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_parquet_text_of_any_type(tmp_path, kind):
    path = tmp_path / "a.parquet"
    texts = ["one é", None, "two", "two"]
    array = pa.array(texts, pa.binary() if kind == pa.binary() else pa.string()).cast(kind)
    pq.write_table(pa.table({"text": array}), path)
    rows = read(path)
    assert [rows[0], *rows[2:]] == [Row(1, "one é"), Row(3, "two"), Row(4, "two")]
    assert reasons(path) == [(2, "has no 'text': it is null")]


def test_parquet_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    raw = pa.array([b"one", b"\xff\xfe", b"two"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": text}), path)
    ((row, reason),) = reasons(path)
    assert row == 2
    assert "is not valid Unicode" in reason
    assert len(read(path)) == 3


def test_parquet_columns_that_are_not_the_text(tmp_path):
    path = write_texts(tmp_path / "a.parquet", TEXTS)
    assert reasons(path, "body") == [
        (None, "has no column 'body'; its columns are 'id', 'text'"),
    ]
    assert reasons(path, "id") == [(None, "has a column 'id' of int64, which is not text")]
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, path)
    assert reasons(path) == [(None, "has 2 column 'text'; its columns are 'text', 'text'")]
    nested = pa.table({"text": pa.array([{"body": "a"}])})
    pq.write_table(nested, path)
    ((_, reason),) = reasons(path)
    assert "which is not text" in reason


@pytest.mark.parametrize("suffix", [s for s in SUFFIXES if s not in (".txt", ".jsonl")])
def test_a_file_cut_short_is_an_error_wherever_it_is_cut(tmp_path, suffix):
    path = write_texts(tmp_path / f"a{suffix}", TEXTS)
    whole = path.read_bytes()
    for end in (1, 4, len(whole) // 3, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:end])
        *rows, error = read(path)
        assert isinstance(error, SourceError), end
        assert error.row is None
        assert "can't be read" in error.reason
        assert rows == [Row(number, text) for number, text in enumerate(TEXTS[: len(rows)], 1)]


def test_what_was_read_before_a_cut_is_given_and_counted(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    # Incompressible, so that a good part comes before the cut.
    texts = [random.Random(i).randbytes(9_000).hex() for i in range(400)]
    path.write_bytes(gzip.compress("".join(f'{{"text": "{t}"}}\n' for t in texts).encode()))
    path.write_bytes(path.read_bytes()[:-20])
    *rows, error = read(path)
    assert rows
    assert [row.text for row in rows] == texts[: len(rows)]
    assert error.reason.startswith(f"after row {len(rows)}: can't be read: Truncated")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_a_document_of_50_mb(tmp_path, suffix):
    text = "fifty characters of text, and they come again. \n é" * 1_000_000
    path = write_texts(tmp_path / f"a{suffix}", [text])
    (row,) = read(path)
    assert len(text.encode()) > 50e6
    assert row.text == text


def test_parquet_is_read_a_part_at_a_time(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"{i} " + "x" * 20_000 for i in range(2_000)]
    write_texts(
        path,
        texts,
        row_group_size=2_000,
        write_batch_size=16,  # pages are not cut within such a batch
        compression="none",
        use_dictionary=False,
    )
    (source,) = find_sources([str(path)])
    before, peak = pa.total_allocated_bytes(), 0
    tracemalloc.start()  # what Arrow reads from a Python file is Python's memory first
    try:
        for row, text in zip(source.rows("text"), texts, strict=True):
            assert row.text == text
            peak = max(peak, pa.total_allocated_bytes() - before)
        peak += tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12e6 < path.stat().st_size


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_lines_are_read_one_at_a_time(tmp_path, suffix):
    path = write_texts(tmp_path / f"a{suffix}", ["x" * 1_000_000] * 30)
    tracemalloc.start()
    try:
        (source,) = find_sources([str(path)])
        assert sum(len(row.text) for row in source.rows("text")) == 30_000_000
        assert tracemalloc.get_traced_memory()[1] < 12e6
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    files = {suffix: write_texts(folder / f"a{suffix}", TEXTS) for suffix in SUFFIXES}
    checked = folder / "checked.parquet"
    files["checked.parquet"] = write_texts(checked, TEXTS, write_page_checksum=True)
    return {kind: path.read_bytes() for kind, path in files.items()}


def test_a_wrong_bit_in_the_footer_of_a_parquet_is_an_error_or_harmless(tmp_path):
    path = tmp_path / "a.parquet"
    write_texts(path, TEXTS[:4], row_group_size=4, write_page_checksum=True)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    good = [Row(number, text) for number, text in enumerate(TEXTS[:4], start=1)]
    found = set()
    for at in range(footer, len(content)):
        for bit in (1, 7):
            path.write_bytes(
                content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :],
            )
            rows = read(path)
            if rows != good:
                assert isinstance(rows[-1], SourceError), (at, bit)
                found.add(rows[-1].reason)
    assert any("rows, but its footer says" in reason for reason in found)


def test_a_wrong_bit_in_a_page_with_a_checksum_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"page {i} and some more text" for i in range(50)]
    write_texts(path, texts, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"page 40 and", b"page 41 and"))
    *rows, error = read(path)
    assert [row.text for row in rows] == texts[:25]
    assert error.reason.startswith("after row 25: can't be read: could not verify page integrity")


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_a_mangled_file_gives_rows_and_errors_and_nothing_else(tmp_path_factory, whole_files, data):
    kind = data.draw(st.sampled_from(sorted(whole_files)))
    content = bytearray(whole_files[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, max(len(content) - 1, 0)))
        # The end of a Parquet file describes the rest.
        start = data.draw(st.sampled_from([start, max(len(content) - 1 - start % 700, 0)]))
        stop = start + data.draw(st.integers(0, 40) | st.just(len(content)))
        content[start:stop] = data.draw(st.binary(max_size=8) | st.just(content[start:stop][::-1]))
    path = tmp_path_factory.getbasetemp() / f"mangled{kind}"
    path.write_bytes(content)

    rows = read(path)
    assert rows
    assert all(isinstance(row, Row | SourceError) for row in rows)
    for row in rows:
        str(row).encode()
    files = [row for row in rows if isinstance(row, SourceError) and row.row is None]
    assert files in ([], rows[-1:])
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Row):
            assert row.text.strip()
            row.text.encode()
            assert row.number >= number
    if kind.endswith((".gz", "checked.parquet")) and not any(
        isinstance(row, SourceError) for row in rows
    ):
        expected = ["".join(TEXTS)] if kind in ONE_TEXT else TEXTS
        # Cut where a compressed part ends, a file is whole again.
        assert [row.text for row in rows] == expected


def test_errors_can_be_pickled():
    for error in (SourceError("a.jsonl", 3, "is bad"), SourceError("a.jsonl", None, "is bad")):
        again = pickle.loads(pickle.dumps(error))
        assert (again.file, again.row, again.reason) == (error.file, error.row, error.reason)
        assert str(again) == str(error)
    assert (
        str(SourceError("shards/a.parquet", 17, "is null")) == "shards/a.parquet, row 17: is null"
    )


def test_sources_can_be_pickled_and_say_their_size(tmp_path):
    path = write_texts(tmp_path / "a.jsonl.gz", TEXTS)
    (source,) = find_sources([str(path)])
    again = pickle.loads(pickle.dumps(source))
    assert list(again.rows("text")) == list(source.rows("text"))
    assert again.fingerprint() == source.fingerprint()
    assert again.size == path.stat().st_size


def test_a_fingerprint_is_of_the_bytes(tmp_path):
    first, same = (write_texts(tmp_path / name, TEXTS) for name in ("a.jsonl", "b.jsonl"))
    other = write_texts(tmp_path / "c.jsonl", [*TEXTS[:-1], TEXTS[-1] + "!"])
    prints = [source.fingerprint() for source in find_sources([str(tmp_path)])]
    assert [str(path) for path in (first, same, other)] == [
        source.name for source in find_sources([str(tmp_path)])
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_built_in_corpus():
    (source,) = find_sources(["synthetic"])
    texts = [document.text for document in load_corpus("synthetic")]
    assert list(source.rows("anything")) == [Row(i, text) for i, text in enumerate(texts, start=1)]
    assert source.fingerprint() == find_sources(["synthetic"])[0].fingerprint()
    assert source.name == "synthetic"
    assert source.size == sum(len(text.encode()) for text in texts)


def test_a_built_in_corpus_whose_package_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="quickstart"):
        find_sources(["kjv"])


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.jsonl", "b/1.PARQUET", "a/1.txt", "a/notes.md", "a/[1].txt", "a/c/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (["b/*"], ["b/1.PARQUET", "b/2.jsonl"]),
        (["b/2.jsonl", "b", "./b/*.jsonl", "{}/b/2.jsonl"], ["b/1.PARQUET", "b/2.jsonl"]),
        (["*/?.txt"], ["a/1.txt"]),
        (["*/[12].*"], ["a/1.txt", "b/1.PARQUET", "b/2.jsonl"]),
        (["a/[1].txt"], ["a/[1].txt"]),
        (["a"], ["a/1.txt", "a/[1].txt"]),
        (["synthetic", "b/2.jsonl"], ["b/2.jsonl", "synthetic"]),
        (["{}/a/1.*"], ["{}/a/1.txt"]),
    ],
)
def test_what_inputs_find(shards, inputs, names):
    found = find_sources([one.format(shards) for one in inputs])
    assert [source.name for source in found] == [one.format(shards) for one in names]


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([], ValueError, "input names no source"),
        ([""], FileNotFoundError, "input '' does not exist"),
        (["nowhere"], FileNotFoundError, "input 'nowhere' does not exist"),
        (["b", "b/*.txt"], FileNotFoundError, r"input 'b/\*\.txt' matches no file"),
        (["a/*"], ValueError, r"source 'a/c' is of a kind that can't be read.*\.jsonl\.zst"),
        (["a/*.md"], ValueError, r"source 'a/notes\.md' is of a kind"),
        (["a/notes.md"], ValueError, r"source 'a/notes\.md' is of a kind"),
        (["."], ValueError, r"input '\.' is a folder without a file in \.parquet"),
        (["**/*.txt"], ValueError, r"input '\*\*/\*\.txt' has '\*\*'"),
    ],
)
@pytest.mark.usefixtures("shards")
def test_inputs_that_find_nothing_to_read(inputs, error, message):
    with pytest.raises(error, match=message):
        find_sources(inputs)
