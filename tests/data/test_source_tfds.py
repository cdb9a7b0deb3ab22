"""Reading prepared TensorFlow Datasets. They are built here, by TFDS, without TensorFlow."""

import json
import pickle
import shutil
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from carope_jax.data._source import Row, SourceError
from carope_jax.data._sources import find_sources

SPLITS = {"train": [f"tale {i} é" for i in range(9)], "test": ["one", " \n", "three"]}


class Tales(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    name = "tales"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"text": tfds.features.Text(), "number": tfds.features.Scalar(np.int32)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, downloads):
        return {split: self._generate_examples(texts) for split, texts in SPLITS.items()}

    def _generate_examples(self, texts):
        for number, text in enumerate(texts):
            yield number, {"text": text, "number": number}


class NewTales(Tales, skip_registration=True):
    name = "tales"
    VERSION = tfds.core.Version("1.10.0")


class OldTales(Tales, skip_registration=True):
    name = "tales"
    VERSION = tfds.core.Version("1.9.0")


class ConfiguredTales(Tales, skip_registration=True):
    name = "configured"
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="short")]  # noqa: RUF012


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    for builder in (Tales, NewTales, OldTales, ConfiguredTales):
        builder(data_dir=root, file_format="array_record").download_and_prepare()
    return root


@pytest.fixture(autouse=True)
def data_dir(root, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(root))


def rows(spec, column="text"):
    (source,) = find_sources([spec])
    return list(source.rows(column))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("tfds:tales", SPLITS["train"]),
        ("tfds:tales:train", SPLITS["train"]),
        ("tfds:tales:train[:2]", SPLITS["train"][:2]),
        ("tfds:tales:1.9.0:train[7:]", SPLITS["train"][7:]),
        ("tfds:configured/short:1.0.0", SPLITS["train"]),
        ("tfds:configured/short", SPLITS["train"]),
    ],
)
def test_a_split_gives_its_texts_in_order(spec, expected):
    assert rows(spec) == [Row(number, text) for number, text in enumerate(expected, start=1)]


def test_the_newest_version_is_read_and_no_tensorflow():
    (newest,) = find_sources(["tfds:tales"])
    (same,) = find_sources(["tfds:tales:1.10.0"])
    (older,) = find_sources(["tfds:tales:1.9.0"])
    (other,) = find_sources(["tfds:tales:train[:5]"])
    assert newest.fingerprint() == same.fingerprint()
    assert len({source.fingerprint() for source in (newest, older, other)}) == 3
    assert newest.size > 0
    assert "tensorflow" not in sys.modules
    again = pickle.loads(pickle.dumps(newest))
    assert list(again.rows("text")) == list(newest.rows("text"))


def test_a_blank_document_and_a_missing_feature():
    first, blank, third = rows("tfds:tales:test")
    assert (first, third) == (Row(1, "one"), Row(3, "three"))
    assert str(blank) == "tfds:tales:test, row 2: is empty, or only whitespace"
    (error,) = rows("tfds:tales:test", "body")
    assert str(error) == "tfds:tales:test: has no feature 'body'; its features are 'number', 'text'"
    (error,) = rows("tfds:tales:test", "number")
    assert str(error).startswith("tfds:tales:test: has a feature 'number' of Scalar")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("tfds:mnist", FileNotFoundError, "which does not exist; nothing is downloaded"),
        ("tfds:configured", FileNotFoundError, "which has short: name one of them"),
        ("tfds:tales:2.0.0", FileNotFoundError, r"which has the versions 1\.0\.0, 1\.10\.0, 1\.9"),
        ("tfds:tales:valid", ValueError, "'tfds:tales:valid' can't be opened: Unknown split"),
        ("tfds:tales:train[:0]", ValueError, r"'tfds:tales:train\[:0\]' can't be opened"),
        ("tfds:", ValueError, "'tfds:' must be 'tfds:NAME"),
        ("tfds:huggingface:tales/x", FileNotFoundError, "which does not exist; nothing"),
        ("tfds:../tales", ValueError, "must be 'tfds:NAME"),
    ],
)
def test_what_is_not_prepared_is_refused_and_not_downloaded(monkeypatch, spec, error, message):
    def download(*_, **__):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", download)
    monkeypatch.setattr("socket.socket", download)
    with pytest.raises(error, match=message):
        find_sources([spec])


@pytest.fixture
def copied(root, tmp_path, monkeypatch):
    shutil.copytree(root / "tales" / "1.0.0", tmp_path / "tales" / "1.0.0")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    return tmp_path / "tales" / "1.0.0"


@pytest.mark.parametrize("keep", [0, 65_536, 70_000, -1, None])
def test_a_shard_cut_short_or_missing_is_a_file_error(copied, keep):
    (shard,) = copied.glob("*-train*")
    whole = shard.read_bytes()
    shard.unlink()
    if keep is not None:
        shard.write_bytes(whole[:keep])
    *given, error = rows("tfds:tales")
    assert isinstance(error, SourceError)
    assert error.row is None
    assert str(error).startswith("tfds:tales: ")
    assert given == [Row(i, text) for i, text in enumerate(SPLITS["train"][: len(given)], 1)]


def test_a_record_that_is_no_example_is_a_row_error(copied):
    (shard,) = copied.glob("*-train*")
    writer = array_record_module.ArrayRecordWriter(str(shard), "group_size:1")
    example = {"text": "good", "number": 0}
    features = tfds.features.FeaturesDict(
        {"text": tfds.features.Text(), "number": tfds.features.Scalar(np.int32)}
    )
    good = features.serialize_example(example)
    without = tfds.features.FeaturesDict({"number": tfds.features.Scalar(np.int32)})
    for record in (good, b"\xff\xff", without.serialize_example({"number": 1}), *[good] * 6):
        writer.write(record)
    writer.close()
    first, bad, other, *others = rows("tfds:tales")
    assert first == Row(1, "good")
    assert str(bad).startswith("tfds:tales, row 2: is not an example")
    assert str(other) == "tfds:tales, row 3: has no 'text'"
    assert others == [Row(number, "good") for number in range(4, 10)]


def test_a_format_without_random_access_is_refused(copied):
    info = json.loads((copied / "dataset_info.json").read_text())
    (copied / "dataset_info.json").write_text(json.dumps({**info, "fileFormat": "tfrecord"}))
    with pytest.raises(ValueError, match=r"format without random access.*array_record"):
        find_sources(["tfds:tales"])


def test_damaged_metadata_is_named(copied):
    (copied / "features.json").write_text("{")
    with pytest.raises(ValueError, match="source 'tfds:tales' can't be opened"):
        find_sources(["tfds:tales"])
