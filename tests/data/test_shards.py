import os
import resource
from pathlib import Path

import numpy as np
import pytest
from array_record.python import array_record_module
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.data._shards import (
    ShardInfo,
    ShardReader,
    ShardWriter,
    lengths_path,
    read_lengths,
    token_dtype,
)

DOCUMENTS = [[5, 6, 7], [0], [299, 298], list(range(200))]


def write(path, documents=DOCUMENTS, vocab_size=300, **changes):
    with ShardWriter(path, vocab_size, **changes) as writer:
        for ids in documents:
            writer.add(np.asarray(ids, np.int32))
        return writer.finish()


def records(path):
    # An independent reading: all in a row, none of our options.
    reader = array_record_module.ArrayRecordReader(str(path))
    found = reader.read_all()
    reader.close()
    return found


@settings(max_examples=25, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 300, 65_536, 65_537, 2**31]),
    lengths=st.lists(st.integers(1, 40), max_size=12),
    seed=st.integers(0, 2**32 - 1),
)
def test_documents_are_little_endian_records(tmp_path_factory, vocab_size, lengths, seed):
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocab_size, length) for length in lengths]
    info = write(folder / "a.array_record", documents, vocab_size, sources=["a.parquet"])
    width = 2 if vocab_size <= 65_536 else 4
    assert records(folder / "a.array_record") == [
        b"".join(int(i).to_bytes(width, "little") for i in ids) for ids in documents
    ]
    assert (info.name, info.sources) == ("a.array_record", ("a.parquet",))
    assert (info.documents, info.tokens) == (len(lengths), sum(lengths))
    assert info.bytes == os.path.getsize(folder / "a.array_record")
    stored = np.load(folder / "a.lengths.npy")
    assert stored.dtype == np.int32
    assert stored.tolist() == lengths
    reader = ShardReader(folder / "a.array_record", vocab_size, stored)
    for record, ids in enumerate(documents):
        assert reader.read(record).tolist() == ids.tolist()


def test_the_same_documents_give_the_same_files(tmp_path):
    first, second = write(tmp_path / "a.array_record"), write(tmp_path / "b.array_record")
    assert (first.tokens_sha256, first.lengths_sha256) == (
        second.tokens_sha256,
        second.lengths_sha256,
    )
    for end in (".array_record", ".lengths.npy"):
        assert (tmp_path / f"a{end}").read_bytes() == (tmp_path / f"b{end}").read_bytes()
    # The borders of documents count, and so do the tokens.
    other_borders = write(tmp_path / "c.array_record", [[5, 6], [7, 0], *DOCUMENTS[2:]])
    assert other_borders.tokens_sha256 == first.tokens_sha256
    assert other_borders.lengths_sha256 != first.lengths_sha256
    other_tokens = write(tmp_path / "d.array_record", [[5, 6, 8], *DOCUMENTS[1:]])
    assert other_tokens.tokens_sha256 != first.tokens_sha256


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.empty(0, np.int32), "document 1: ids is empty"),
        (np.asarray([1, 300]), r"document 1: id 300 is outside the vocabulary \[0, 300\)"),
        (np.asarray([1, -1]), "document 1: id -1 is outside"),
        (np.asarray([1.0]), r"document 1: ids must be a row of integers, got float64 \(1,\)"),
        (np.zeros((2, 2), int), r"document 1: ids must be .* got int64 \(2, 2\)"),
    ],
)
def test_what_is_no_document_is_refused_and_nothing_stays(tmp_path, ids, message):
    path = tmp_path / "a.array_record"
    with pytest.raises(ValueError, match=message), ShardWriter(path, 300) as writer:  # noqa: PT012
        writer.add(np.asarray([1]))
        writer.add(ids)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_visible_before_the_end(tmp_path):
    path = tmp_path / "a.array_record"
    old = write(path)
    old_files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt), ShardWriter(path, 300) as writer:  # noqa: PT012
        writer.add(np.asarray([1]))
        assert {file.name for file in tmp_path.iterdir()} > set(old_files)
        raise KeyboardInterrupt
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == old_files

    with ShardWriter(path, 300) as writer:
        writer.add(np.asarray([1]))  # and no finish
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == old_files

    # What a killed process left is no hindrance.
    (tmp_path / "a.array_record.partial").write_bytes(b"half" * 1_000_000)
    assert write(path, DOCUMENTS[:1]) != old
    assert {file.name for file in tmp_path.iterdir()} == set(old_files)


def test_the_shard_is_renamed_after_its_lengths(tmp_path, monkeypatch):
    names = []
    replace = Path.replace
    monkeypatch.setattr(
        type(ShardWriter(tmp_path / "a.array_record", 300)._path),
        "replace",
        lambda self, target: (names.append(target.name), replace(Path(self), target)),
    )
    write(tmp_path / "a.array_record")
    assert names == ["a.lengths.npy", "a.array_record"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's always full disk")
@pytest.mark.parametrize("full", ["a.array_record", "a.lengths.npy"])
def test_a_full_disk_is_named_and_nothing_stays(tmp_path, full):
    (tmp_path / f"{full}.partial").symlink_to("/dev/full")
    path = tmp_path / "a.array_record"
    with pytest.raises(OSError, match=r"a\.array_record' can't be written: .*No space left"):
        write(path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_midway(tmp_path):
    rng = np.random.default_rng(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError, match=r"a\.array_record' can't be written: .*too large"):
            write(tmp_path / "a.array_record", rng.integers(0, 65_536, (60, 50_000)), 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_is_open_between_enter_and_finish(tmp_path):
    writer = ShardWriter(tmp_path / "a.array_record", 300)
    for use in (writer.finish, lambda: writer.add(np.asarray([1]))):
        with pytest.raises(ValueError, match="is not open"):
            use()
    with writer:
        writer.finish()
        for use in (writer.finish, lambda: writer.add(np.asarray([1]))):
            with pytest.raises(ValueError, match="is not open"):
                use()


def test_bad_paths_and_vocabularies(tmp_path):
    with pytest.raises(ValueError, match=r"a\.bin' of a shard must end in"):
        ShardWriter(tmp_path / "a.bin", 300)
    with pytest.raises(OSError, match=r"none/a\.array_record' can't be written: .*No such file"):
        write(tmp_path / "none" / "a.array_record")
    for vocab_size in (0, 2**31 + 1):
        with pytest.raises(ValueError, match=f"vocab_size={vocab_size} must be in"):
            token_dtype(vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../a.array_record"}, r"name='\.\./a"),
        ({"name": "a.bin"}, "name='a.bin'"),
        ({"documents": -1}, "documents=-1"),
    ],
)
def test_infos_that_can_not_be(changes, message):
    fields = {"name": "a.array_record", "sources": (), "documents": 0, "tokens": 0, "bytes": 0}
    with pytest.raises(ValueError, match=message):
        ShardInfo(**(fields | {"tokens_sha256": "", "lengths_sha256": ""} | changes))


def test_a_flipped_bit_is_found_in_its_record_only(tmp_path):
    path = tmp_path / "a.array_record"
    rng = np.random.default_rng(1)
    documents = rng.integers(0, 65_536, (9, 2_000))
    info = write(path, documents, 65_536)
    content = bytearray(path.read_bytes())
    needle = documents[4].astype("<u2").tobytes()[1_000:1_032]
    at = content.find(needle)  # random tokens don't compress
    assert at > 0
    content[at] ^= 4
    path.write_bytes(content)
    reader = ShardReader(path, 65_536, read_lengths(tmp_path, info))
    for record in (0, 3, 5, 8):
        assert reader.read(record).tolist() == documents[record].tolist()
    with pytest.raises(ValueError, match=r"a\.array_record', record 4 is corrupt: .*hash mismatch"):
        reader.read(4)


@pytest.mark.parametrize("size", [0, 1_000, 65_536, 100_000])
@pytest.mark.parametrize("documents", [DOCUMENTS, []])
def test_a_shard_cut_short_is_corrupt(tmp_path, documents, size):
    path = tmp_path / "a.array_record"
    info = write(path, documents)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"a\.array_record' is corrupt: \w"):
        ShardReader(path, 300, read_lengths(tmp_path, info))


def test_records_that_disagree_are_named(tmp_path):
    path = tmp_path / "a.array_record"
    write(path)
    lengths = np.asarray([3, 1, 2, 200], np.int32)
    with pytest.raises(ValueError, match="holds 4 documents, but its lengths are those of 3"):
        ShardReader(path, 300, lengths[:3])
    with pytest.raises(ValueError, match="record 1 has 2 bytes, but its noted length of 2 tokens"):
        ShardReader(path, 300, lengths + 1).read(1)
    with pytest.raises(ValueError, match=r"record 2 has the id 299, outside .*\[0, 299\)"):
        ShardReader(path, 299, lengths).read(2)
    with pytest.raises(FileNotFoundError, match=r"b\.array_record' does not exist"):
        ShardReader(tmp_path / "b.array_record", 300, lengths)


def test_lengths_that_are_not_those_written(tmp_path):
    info = write(tmp_path / "a.array_record")
    file = lengths_path(tmp_path / "a.array_record")
    lengths = read_lengths(tmp_path, info)
    for other in (lengths[::-1], lengths[:-1], lengths.astype(np.int64), lengths[None]):
        np.save(file, other)
        with pytest.raises(ValueError, match=r"a\.lengths\.npy' are not those noted"):
            read_lengths(tmp_path, info)
    for junk in (b"", b"junk", np.load.__doc__.encode()):
        file.write_bytes(junk)
        with pytest.raises(ValueError, match=r"a\.lengths\.npy' are not an \.npy file"):
            read_lengths(tmp_path, info)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.lengths\.npy'.* do not exist"):
        read_lengths(tmp_path, info)


def test_in_a_bucket_whole_files_are_copied_the_shard_last(tmp_path):
    write(tmp_path / "a.array_record")
    copied = []

    def copy(backend, path, dst, *, overwrite):
        assert overwrite
        copied.append((os.fspath(dst), Path(path).read_bytes()))

    with epath.testing.mock_epath(copy=copy):
        write("gs://bucket/folder/a.array_record")
    assert copied == [
        ("gs://bucket/folder/a.lengths.npy", (tmp_path / "a.lengths.npy").read_bytes()),
        ("gs://bucket/folder/a.array_record", (tmp_path / "a.array_record").read_bytes()),
    ]
