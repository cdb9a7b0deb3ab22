import dataclasses

import numpy as np
import pytest

from carope_jax.data import (
    KJV_VALIDATION,
    DataConfig,
    join_documents,
    load_corpus,
    load_dataset,
    make_tokenizer,
)

SYNTHETIC = DataConfig(corpus="synthetic", tokenizer="train:512")


@pytest.fixture(scope="module")
def dataset():
    return load_dataset(SYNTHETIC)


def test_every_document_is_on_one_side_and_comes_back(dataset):
    texts = {document.name: document.text for document in load_corpus("synthetic")}
    assert len(dataset.validation) == 4
    for names, documents in (
        (dataset.train_names, dataset.train),
        (dataset.validation_names, dataset.validation),
    ):
        for name, ids in zip(names, documents, strict=True):
            assert ids.dtype == np.int32
            assert dataset.tokenizer.decode(ids) == texts.pop(name)
    assert not texts


def test_streams_end_each_document_with_one_eot(dataset):
    for stream, documents in (
        (dataset.train_stream, dataset.train),
        (join_documents(dataset.validation, dataset.tokenizer.eot_id), dataset.validation),
    ):
        assert stream.dtype == np.int32
        ends = np.flatnonzero(stream == dataset.tokenizer.eot_id)
        assert ends[-1] == len(stream) - 1
        for ids, part in zip(documents, np.split(stream, ends + 1), strict=False):
            np.testing.assert_array_equal(part[:-1], ids)
        assert len(ends) == len(documents)


def test_joining_nothing_gives_an_empty_stream():
    assert join_documents([], 1).shape == (0,)
    np.testing.assert_array_equal(join_documents([np.empty(0, np.int32)], 1), [1])


def test_the_tokenizer_is_trained_on_the_training_documents_only(tmp_path):
    config = DataConfig(
        corpus=str(tmp_path), validation_documents=("held.txt",), tokenizer="train:300"
    )
    (tmp_path / "a.txt").write_text(load_corpus("synthetic")[0].text)
    (tmp_path / "held.txt").write_text("xyz")
    first = load_dataset(config)
    (tmp_path / "held.txt").write_text("zyx" * 500)
    second = load_dataset(config)
    assert first.tokenizer.hash == second.tokenizer.hash
    assert first.fingerprint != second.fingerprint


def test_a_given_tokenizer_is_used(dataset):
    given = make_tokenizer("train:400", [document.text for document in load_corpus("synthetic")])
    other = load_dataset(SYNTHETIC, given)
    assert other.tokenizer is given
    assert given.decode(other.train[0]) == dataset.tokenizer.decode(dataset.train[0])
    assert other.fingerprint != dataset.fingerprint


def test_the_fingerprint_is_of_text_split_and_tokenizer_alone(dataset):
    def fingerprint(**changes):
        return load_dataset(
            dataclasses.replace(SYNTHETIC, **changes), dataset.tokenizer
        ).fingerprint

    assert fingerprint() == dataset.fingerprint
    assert fingerprint(length=64, batch_size=2, shuffle_seed=5, workers=1) == dataset.fingerprint
    # The documents in a row are the same here, only the border between the parts is not.
    last_two = ("tale-38", "tale-39")
    assert fingerprint(validation_documents=last_two) != fingerprint(
        validation_documents=last_two[1:]
    )


def test_what_is_held_out_by_default():
    assert DataConfig().validation == KJV_VALIDATION
    assert DataConfig(corpus="synthetic").validation == 0.1
    assert DataConfig(validation_fraction=0.3).validation == 0.3
    assert DataConfig(validation_documents=("Ruth",)).validation == ("Ruth",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"corpus": ""}, "corpus ''"),
        ({"validation_documents": ("Job",), "validation_fraction": 0.1}, r"\('Job',\).*0\.1 both"),
        ({"validation_fraction": 0.0}, r"validation_fraction=0\.0"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0"),
        ({"tokenizer": "gpt3"}, "tokenizer 'gpt3'"),
        ({"length": 0}, "length=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"shuffle_seed": -1}, "shuffle_seed=-1"),
        ({"workers": -1}, "workers=-1"),
        ({"prefetch": 0}, "prefetch=0"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)
