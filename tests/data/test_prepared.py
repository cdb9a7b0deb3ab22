import concurrent.futures
import itertools
import json
import pickle

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.data import (
    DataConfig,
    PreparedDataset,
    PreparedSplit,
    StreamWindows,
    join_documents,
    load_corpus,
    make_tokenizer,
    mixture_batches,
    train_batches,
)
from carope_jax.data import _prepared as prepared_module
from carope_jax.data._index import DatasetIndex
from carope_jax.data._interleaving import Interleaving, whole_shares
from carope_jax.data._shards import ShardWriter

EOT = 299
# Lengths of the documents of each shard; one shard is empty, as where all went to validation.
SHARDS = [[3, 1, 7], [], [40], [2, 2, 5, 1, 9]]


def random_shards(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, EOT, n, np.int32) for n in shard] for shard in lengths]


def write_shards(folder, split, shards):
    infos = []
    for number, documents in enumerate(shards):
        path = folder / f"{split}-{number:05d}-of-{len(shards):05d}.array_record"
        with ShardWriter(path, 300, sources=[f"{number}.txt"]) as writer:
            for ids in documents:
                writer.add(ids)
            infos.append(writer.finish())
    return tuple(infos)


def make_index(**changes):
    fields = {
        "tokenizer_hash": "ab" * 32,
        "vocab_size": 300,
        "eot_id": EOT,
        "source_fingerprint": "cd" * 32,
        "text_column": "text",
        "validation": "val_docs=1",
        "skipped": 0,
        "splits": {},
    }
    return DatasetIndex(**(fields | changes))


def make_split(folder, shards, **changes):
    return PreparedSplit(
        folder,
        make_index(splits={"train": write_shards(folder, "train", shards)}, **changes),
        "train",
    )


def flat(shards):
    return [ids for shard in shards for ids in shard]


def config(**changes):
    fields = {"length": 4, "batch_size": 6, "shuffle_seed": 3, "prefetch": 3}
    return DataConfig(**(fields | changes))


def take(batches, count):
    rows = [
        {name: rows.tolist() for name, rows in batch.items()}
        for batch in itertools.islice(batches, count)
    ]
    batches.close()
    return rows


@pytest.fixture(scope="module")
def documents():
    return flat(random_shards(SHARDS))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("prepared"), random_shards(SHARDS))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("train:400", [load_corpus("synthetic")[0].text])


@pytest.fixture
def dataset_folder(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    index = make_index(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        splits={
            "train": write_shards(tmp_path, "train", random_shards(SHARDS)),
            "validation": write_shards(tmp_path, "validation", random_shards([[6]])),
        },
    )
    index.write(tmp_path)
    return tmp_path


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), max_size=5), max_size=4),
    length=st.integers(1, 12),
    data=st.data(),
)
def test_any_part_of_any_stream_is_that_of_memory(tmp_path_factory, lengths, length, data):
    shards = random_shards(lengths)
    split = make_split(tmp_path_factory.mktemp("any"), shards)
    stream = join_documents(flat(shards), EOT)
    assert len(split) == len(stream)
    assert split.documents == len(flat(shards))
    assert split.tokens == len(stream) - split.documents
    assert split.lengths.tolist() == [len(ids) for ids in flat(shards)]
    for number, ids in enumerate(flat(shards)):
        assert split.document(number).dtype == np.int32
        assert split.document(number).tolist() == ids.tolist()
    start = data.draw(st.integers(0, len(stream)))
    stop = data.draw(st.integers(start, len(stream)))
    part = split.slice(start, stop)
    assert part.dtype == np.int32
    assert part.tolist() == stream[start:stop].tolist()
    if len(stream) > length:
        for here, there in zip(
            StreamWindows(split, length), StreamWindows(stream, length), strict=True
        ):
            assert {k: v.tolist() for k, v in here.items()} == {
                k: v.tolist() for k, v in there.items()
            }


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 80), (80, 80)])
def test_parts_outside_the_stream_are_refused(split, start, stop):
    assert len(split) == 79
    with pytest.raises(ValueError, match=rf"slice \[{start}, {stop}\) is not inside .*\[0, 79\)"):
        split.slice(start, stop)
    for number in (-1, 9):
        with pytest.raises(IndexError, match=f"number={number} is outside the 9 documents"):
            split.document(number)


def test_only_the_documents_of_a_part_are_read(split, monkeypatch):
    read = []
    whole = PreparedSplit._read
    monkeypatch.setattr(
        PreparedSplit, "_read", lambda self, number: (read.append(number), whole(self, number))[1]
    )
    ends = np.cumsum(split.lengths + 1)
    split.slice(int(ends[1]), int(ends[3]) - 1)
    assert read == [2, 3]
    read.clear()
    split.slice(int(ends[3]) - 1, int(ends[3]))  # an EOT only
    assert read == []


@pytest.mark.parametrize("process_count", [1, 2, 3])
def test_batches_are_those_of_memory(split, documents, process_count):
    stream = join_documents(documents, EOT)
    for process_index in range(process_count):
        processes = {"process_index": process_index, "process_count": process_count}
        prepared = train_batches(split, config(), **processes)
        in_memory = train_batches(stream, config(), **processes)
        assert take(prepared, 8) == take(in_memory, 8)


def test_resuming_on_another_number_of_hosts(split):
    alone = train_batches(split, config())
    for _ in range(3):
        next(alone)
    state = json.loads(json.dumps(alone.get_state()))
    assert state["next_batch"] == 3
    parts = [
        train_batches(split, config(), process_index=index, process_count=2) for index in (0, 1)
    ]
    for part in parts:
        part.set_state(state)
    whole, halves = take(alone, 4), [take(part, 4) for part in parts]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert batch["inputs"][0::2] == first["inputs"]
        assert batch["inputs"][1::2] == second["inputs"]


def test_a_worker_reads_the_same(split):
    assert take(train_batches(split, config(workers=1)), 3) == take(
        train_batches(split, config()), 3
    )


def test_a_state_of_another_dataset_is_refused(split, tmp_path):
    state = train_batches(split, config()).get_state()
    shards = random_shards(SHARDS)
    same = train_batches(make_split(tmp_path, shards), config())
    same.set_state(state)
    shards[2][0][17] += 1
    for other in (
        make_split(tmp_path, shards),
        make_split(tmp_path, random_shards(SHARDS), tokenizer_hash="ef" * 32),
        make_split(tmp_path, random_shards(SHARDS), eot_id=0),
    ):
        with pytest.raises(ValueError, match="saved with stream="):
            train_batches(other, config()).set_state(state)


def test_a_split_is_pickled_without_its_tokens_or_readers(split):
    split.document(0)
    pickled = pickle.dumps(split)
    assert split.document(3).astype("<u2").tobytes() not in pickled
    copy = pickle.loads(pickled)
    assert repr(copy) == repr(split)
    assert copy.fingerprint == split.fingerprint
    assert copy.slice(0, len(copy)).tolist() == split.slice(0, len(split)).tolist()


def test_threads_and_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_module, "_MAX_READERS", 2)
    shards = random_shards([[30, 20]] * 6)
    split = make_split(tmp_path, shards)
    numbers = np.random.default_rng(0).integers(0, 12, 300).tolist()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(split.document, numbers))
    for number, ids in zip(numbers, found, strict=True):
        assert ids.tolist() == flat(shards)[number].tolist()
    assert len(split._readers) == 2


def test_a_whole_dataset_opens_and_verifies(dataset_folder, documents, tokenizer):
    dataset = PreparedDataset.open(str(dataset_folder))
    dataset.verify()
    assert dataset.tokenizer.hash == tokenizer.hash
    train = dataset.split("train")
    assert [train.document(n).tolist() for n in range(9)] == [ids.tolist() for ids in documents]
    assert dataset.split("validation").documents == 1
    with pytest.raises(ValueError, match=r"split 'test' is none of .*\['train', 'validation'\]"):
        dataset.split("test")
    index = json.loads((dataset_folder / "dataset.json").read_text())
    assert index["totals"]["train"]["documents"] == 9
    assert index["totals"]["train"]["tokens"] == sum(map(len, documents))
    assert [shard["sources"] for shard in index["splits"]["train"]][2] == ["2.txt"]
    assert not list(dataset_folder.glob("*.partial"))


@pytest.mark.parametrize(
    "file",
    [
        "dataset.json",
        "tokenizer.model",
        "train-00001-of-00004.array_record",
        "train-00003-of-00004.lengths.npy",
    ],
)
def test_a_missing_file_is_named(dataset_folder, file):
    (dataset_folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        PreparedDataset.open(dataset_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "is of version 2; this package reads 1"),
        ({"version": None}, "is of version None"),
        ({"eot": "none"}, "has eot='none'"),
        ({"colour": 1}, "colour"),
        ({"vocab_size": "400"}, 'vocab_size"'),
        ({"vocab_size": 0}, "vocab_size=0 must be"),
        ({"eot_id": 400}, "eot_id=400 is outside"),
        ({"eot_id": 0}, "has eot_id=0, but its tokenizer"),
        ({"tokenizer_hash": "00"}, "has tokenizer_hash='00', but its tokenizer"),
        ({"totals": {}}, r"has totals=\{\}, but its shards make"),
        ({"splits": {"train": [{"name": "a.array_record"}]}}, "source"),
    ],
)
def test_an_index_that_does_not_fit_is_named(dataset_folder, changes, message):
    path = dataset_folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        PreparedDataset.open(dataset_folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1'])
def test_an_index_that_is_no_object(dataset_folder, text):
    (dataset_folder / "dataset.json").write_text(text)
    with pytest.raises(ValueError, match=r"dataset\.json' is not (a )?JSON"):
        PreparedDataset.open(dataset_folder)


def test_an_index_is_written_only_over_whole_shards(tmp_path):
    infos = write_shards(tmp_path, "train", random_shards([[3], [4]]))
    with pytest.raises(ValueError, match="splits name the shard 'train-00000-of-00002"):
        make_index(splits={"train": infos, "validation": infos[:1]})
    (tmp_path / infos[1].name).unlink()
    with pytest.raises(FileNotFoundError, match=infos[1].name):
        make_index(splits={"train": infos}).write(tmp_path)
    assert not (tmp_path / "dataset.json").exists()


def test_a_shard_of_another_size_is_named(dataset_folder):
    shard = dataset_folder / "train-00003-of-00004.array_record"
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"train-00003-of-00004\.array_record' has \d+ bytes, but"):
        PreparedDataset.open(dataset_folder)


def test_other_tokens_of_the_same_size_are_found_by_verify(dataset_folder):
    dataset = PreparedDataset.open(dataset_folder)
    shards = random_shards(SHARDS)
    shards[3][1][0] = (shards[3][1][0] + 1) % 300
    write_shards(dataset_folder, "train", shards)
    PreparedDataset.open(dataset_folder)
    with pytest.raises(ValueError, match=r"train-00003-of-00004\.array_record' holds other tokens"):
        dataset.verify()


def test_bad_records_end_the_reading_with_their_names(tmp_path):
    shards = random_shards([[5, 6], [7, 8]])
    infos = write_shards(tmp_path, "train", shards)
    # The second shard is rewritten: first with another length, then with an id past the vocabulary.
    last = tmp_path / infos[1].name
    lengths_file = tmp_path / infos[1].name.replace(".array_record", ".lengths.npy")
    lengths = lengths_file.read_bytes()
    with ShardWriter(last, 300) as writer:
        writer.add(shards[1][0])
        writer.add(shards[1][1][:-1])
        writer.finish()
    lengths_file.write_bytes(lengths)
    split = PreparedSplit(tmp_path, make_index(splits={"train": infos}), "train")
    windows = StreamWindows(split, 4)
    assert windows[4]["inputs"].tolist() == split.slice(16, 20).tolist()
    with pytest.raises(ValueError, match=r"00001-of-00002\.array_record', record 1 has 14 bytes"):
        windows[len(windows) - 1]

    with ShardWriter(last, 400) as writer:
        writer.add(shards[1][0])
        writer.add(np.full(8, 300))
        writer.finish()
    split = pickle.loads(pickle.dumps(split))
    with pytest.raises(ValueError, match=r"00001-of-00002\.array_record', record 1 has the id 300"):
        split.document(3)
    with pytest.raises(ValueError, match="record 1 has the id 300"):
        take(train_batches(split, config()), 5)

    last.unlink()
    split = pickle.loads(pickle.dumps(split))
    with pytest.raises(FileNotFoundError, match=infos[1].name):
        split.document(3)


def test_counts_that_the_lengths_do_not_make(tmp_path):
    (info,) = write_shards(tmp_path, "train", random_shards([[5, 6]]))
    for changes in ({"documents": 3}, {"tokens": 12}):
        wrong = type(info)(**(vars(info) | changes))
        with pytest.raises(ValueError, match=r"but its lengths are 2 and make 11"):
            PreparedSplit(tmp_path, make_index(splits={"train": (wrong,)}), "train")


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([0.7, 0.3], [7, 3]), ([2, 4, 6], [1, 2, 3]), ([5], [1]), ([1e-3, 1.0], [1, 1000])],
)
def test_whole_shares(weights, shares):
    assert whole_shares(weights) == shares


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 0], "above 0 and finite, not 0"),
        ([1, -2.0], "not -2.0"),
        ([float("nan"), 1], "not nan"),
        ([float("inf"), 1], "not inf"),
        ([1, 2**0.5], "whole-number ratios"),
    ],
)
def test_weights_that_give_no_shares(weights, message):
    with pytest.raises(ValueError, match=message):
        whole_shares(weights)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 1000))
def test_interleaving_is_exact_and_leaves_nothing_out(shares, cycle):
    total = sum(shares)
    interleaving = Interleaving(shares)
    seen = [interleaving[index] for index in range(cycle * total, (cycle + 1) * total)]
    for part, share in enumerate(shares):
        ranks = [rank for one, rank in seen if one == part]
        assert ranks == list(range(cycle * share, (cycle + 1) * share))
        # Evenly: at every point within the parts' number of its exact proportion.
        done = 0
        for at, (one, _) in enumerate(seen, start=1):
            done += one == part
            assert abs(done - at * share / total) < len(shares)


def test_a_mixture_has_its_proportions_and_each_window_once(tmp_path):
    splits = []
    for name, tokens, base in (("a", 41, 0), ("b", 81, 100)):
        folder = tmp_path / name
        folder.mkdir()
        splits.append(make_split(folder, [[np.arange(base, base + tokens, dtype=np.int32)]]))
    sources = list(zip(splits, (0.75, 0.25), strict=True))
    alone = mixture_batches(sources, config(batch_size=4))
    state = alone.get_state()
    assert json.loads(json.dumps(state)) == state
    rows = [batch["inputs"] for batch in take(alone, 80)]
    windows = {0: [], 1: []}
    for batch in rows:
        assert [row[0] >= 100 for row in batch].count(True) == 1
        for row in batch:
            assert row == list(range(row[0], row[0] + 4))
            windows[int(row[0] >= 100)].append(row[0] % 100 // 4)
    for part, count in ((0, 10), (1, 20)):
        for epoch in range(4):
            numbers = windows[part][epoch * count : (epoch + 1) * count]
            assert sorted(numbers) == list(range(count))
    assert windows[0][:10] != windows[0][10:20]

    halves = [
        mixture_batches(sources, config(batch_size=4), process_index=index, process_count=2)
        for index in (0, 1)
    ]
    for index, half in enumerate(halves):
        half.set_state({**state, "next_batch": 5})
        assert [batch["inputs"] for batch in take(half, 3)] == [
            batch[index::2] for batch in rows[5:8]
        ]
    other = mixture_batches([(splits[0], 1), (splits[1], 1)], config(batch_size=4))
    with pytest.raises(ValueError, match=r"saved with shares=\[3, 1\], but here shares=\[1, 1\]"):
        other.set_state(state)


def test_impossible_mixtures_are_named(split, tmp_path):
    with pytest.raises(ValueError, match="names nothing to mix"):
        mixture_batches([], config())
    other = make_split(tmp_path, random_shards(SHARDS), tokenizer_hash="ef" * 32)
    with pytest.raises(ValueError, match=f"of the tokenizer {'ef' * 32}"):
        mixture_batches([(split, 1), (other, 1)], config())
    with pytest.raises(ValueError, match="stream of 79 tokens is too short"):
        mixture_batches([(split, 1)], config(length=79))


class Endless(grain.IterDataset):
    def __init__(self, make):
        super().__init__()
        self._make = make

    def __iter__(self):
        return self._make()


def test_grain_finds_every_state_restorable(split):
    for make in (
        lambda: train_batches(split, config()),
        lambda: mixture_batches([(split, 1), (split, 2)], config()),
    ):
        limited = grain.experimental.LimitIterDataset(Endless(make), 5)
        grain.experimental.assert_equal_output_after_checkpoint(limited)


def test_a_split_given_twice_has_two_orders(tmp_path):
    split = make_split(tmp_path, [[np.arange(81, dtype=np.int32)]])
    (batch,) = take(mixture_batches([(split, 1), (split, 1)], config(batch_size=40)), 1)
    first, second = batch["inputs"][0::2], batch["inputs"][1::2]
    assert sorted(first) == sorted(second)
    assert first != second
