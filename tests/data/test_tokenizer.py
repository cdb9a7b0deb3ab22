import io
import json
import re

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carope_jax.data import _text_parts, load_corpus, load_tokenizer, make_tokenizer

TEXTS = [document.text for document in load_corpus("synthetic")[:6]]

awkward = st.lists(
    st.sampled_from(
        [
            *("\n", " ", "\t", "\r\n", "\x00", "\u200b", "\u3000", "\ufeff", "e\u0301"),
            *("▁", "é", "ﬁ", "😀", "Ⅷ", " ⁇ ", "tale"),
            *("<|endoftext|>", "</s>", "<unk>", "<0x0A>"),
        ]
    )
).map("".join)


def byte_pair_file(path, **changes):
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS, trainer)
    content = json.loads(trained.to_str())
    content.update(changes)
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture(scope="module", params=["sentencepiece", "byte_level_bpe"])
def tokenizer(request, tmp_path_factory):
    if request.param == "sentencepiece":
        return make_tokenizer("train:500", TEXTS)
    return make_tokenizer(byte_pair_file(tmp_path_factory.mktemp("bpe") / "tokenizer.json"), [])


@settings(max_examples=300)
@given(text=st.text() | awkward)
@example(text="▁")
@example(text=" a  b ▁▁ c▁\n\n\n d \r\n")
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_a_batch_is_the_texts_one_by_one(tokenizer):
    texts = [*TEXTS, "", "▁\n"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def _sentencepiece_file(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[0].split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return str(path)


@settings(max_examples=100)
@given(
    words=st.lists(st.sampled_from(["tale", "once", "é,", "1900"]), min_size=4)
    | st.lists(st.sampled_from(["tale", " ", "\n", "  once", "a" * 30, "é"]))
)
def test_a_long_text_in_parts_is_the_text_whole(tokenizer, words):
    text = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_text_parts, "_LONGEST_PART", 20)
        in_parts = tokenizer.encode(text)
    assert tokenizer.decode(in_parts) == text
    if re.fullmatch(r"(\S{1,9} )*\S{0,9}", text):
        np.testing.assert_array_equal(in_parts, tokenizer.encode(text))


@pytest.mark.parametrize(
    "options",
    [{}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": False}],
    ids=["puts a space before", "drops spaces at a start", "keeps spaces"],
)
def test_a_long_text_in_parts_has_no_space_more_or_less(tmp_path, monkeypatch, options):
    tokenizer = make_tokenizer(_sentencepiece_file(tmp_path / "a.model", **options), [])
    texts = [" ".join(TEXTS[0].split()[:60]), "x" * 50, "once upon " + "x" * 50 + " a time"]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(_text_parts, "_LONGEST_PART", 20)
    for ids, expected in zip(tokenizer.encode_batch(texts), whole, strict=True):
        assert tokenizer.decode(ids) == tokenizer.decode(expected)


def test_decode_skips_eot_and_refuses_other_numbers(tokenizer):
    ids = tokenizer.encode("one tale")
    assert tokenizer.decode([tokenizer.eot_id, *ids, tokenizer.eot_id]) == "one tale"
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"ids holds {bad}, outside"):
            tokenizer.decode([0, bad])


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "run" / "tokenizer")
    loaded = load_tokenizer(tmp_path / "run" / "tokenizer")
    assert (loaded.hash, loaded.vocab_size, loaded.eot_id) == (
        tokenizer.hash,
        tokenizer.vocab_size,
        tokenizer.eot_id,
    )
    np.testing.assert_array_equal(loaded.encode(TEXTS[0]), tokenizer.encode(TEXTS[0]))


def test_a_changed_model_file_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (model,) = (file for file in tmp_path.iterdir() if "meta" not in file.name)
    model.write_bytes(model.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=f"has the hash [0-9a-f]{{64}}, but {tokenizer.hash}"):
        load_tokenizer(tmp_path)
    model.unlink()
    with pytest.raises(FileNotFoundError, match=model.name):
        load_tokenizer(tmp_path)


def test_loading_what_was_not_saved(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_meta.json").write_text('{"kind": "words", "hash": "0"}')
    with pytest.raises(ValueError, match="kind 'words'"):
        load_tokenizer(tmp_path)


def test_training_repeats_to_the_bit_and_in_silence(capfd):
    first, second = make_tokenizer("train:500", TEXTS), make_tokenizer("train:500", iter(TEXTS))
    assert first.hash == second.hash
    assert first.vocab_size == 500
    assert first.hash != make_tokenizer("train:501", TEXTS).hash
    assert first.hash != make_tokenizer("train:500", TEXTS[1:]).hash
    assert capfd.readouterr() == ("", "")


def test_long_lines_are_trained_on():
    long_line = "unmistakable " * 2_000
    tokenizer = make_tokenizer("train:400", [long_line, TEXTS[0]])
    assert len(tokenizer.encode(" unmistakable")) == 1


def test_a_newline_is_one_token():
    tokenizer = make_tokenizer("train:500", TEXTS)
    assert len(tokenizer.encode("\n")) == 1
    assert len(tokenizer.encode("\n\n\n")) == 3


def test_a_sentencepiece_file_is_read(tmp_path):
    trained = make_tokenizer("train:500", TEXTS)
    trained.save(tmp_path)
    assert make_tokenizer(str(tmp_path / "tokenizer.model"), []).hash == trained.hash


def test_truncation_and_padding_stored_in_a_file_do_not_apply(tmp_path):
    truncation = {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    padding = {
        "strategy": {"Fixed": 100_000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    spec = byte_pair_file(tmp_path / "tokenizer.json", truncation=truncation, padding=padding)
    tokenizer = make_tokenizer(spec, [])
    ids = tokenizer.encode(TEXTS[0])
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == TEXTS[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train:", "'train:' must be 'train:N'"),
        ("train:0", "'train:0' must be"),
        ("train:-5", "'train:-5' must be"),
        ("train:2k", "'train:2k' must be"),
        ("gpt3", "'gpt3' must be"),
        ("train:20", r"'train:20' can't be trained on \d+ lines.*smaller than required"),
        ("train:99999", r"'train:99999' can't be trained on \d+ lines.*too high.*<= \d+"),
    ],
)
def test_bad_specs_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        make_tokenizer(spec, TEXTS)


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_no_text_to_train_on(texts):
    with pytest.raises(ValueError, match="'train:300' has no text"):
        make_tokenizer("train:300", texts)


@pytest.mark.parametrize("suffix", ["model", "json"])
def test_files_that_are_missing_or_something_else(tmp_path, suffix):
    path = tmp_path / f"tokenizer.{suffix}"
    with pytest.raises(FileNotFoundError, match=rf"tokenizer\.{suffix}' does not exist"):
        make_tokenizer(str(path), [])
    path.write_bytes(b"{}nonsense")
    with pytest.raises(ValueError, match=rf"tokenizer\.{suffix}' is not a "):
        make_tokenizer(str(path), [])


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1}, "merges": []}},
    ],
    ids=["changes text", "lacks bytes"],
)
def test_a_file_that_loses_text_is_refused(tmp_path, changes):
    spec = byte_pair_file(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(ValueError, match=r"tokenizer\.json' does not give '.*' back"):
        make_tokenizer(spec, [])


def test_a_file_without_end_of_text_is_refused(tmp_path):
    spec = byte_pair_file(tmp_path / "tokenizer.json", added_tokens=[])
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"]["vocab"]["<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has no token '<\|endoftext\|>'"):
        make_tokenizer(spec, [])
