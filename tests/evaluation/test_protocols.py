import hashlib
import json
import math

import numpy as np
import pytest
from evaluation_toy import EOT, corpus, document_sizes, rough_nll, token_nll, toy_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from carope_jax.evaluation import (
    PROTOCOLS,
    EvaluatedModel,
    Evaluation,
    EvaluationConfig,
    evaluate,
)

SAMPLES = 50


def run(protocol: str, lengths, documents, model: EvaluatedModel | None = None, **options):
    config = EvaluationConfig(
        lengths=tuple(lengths), protocol=protocol, bootstrap_samples=SAMPLES, **options
    )
    return evaluate(config, model or toy_model(lengths[0]), documents, EOT)


def assert_result(result, nlls: list[float], documents: int) -> None:
    assert result.tokens == len(nlls)
    assert result.documents == documents
    assert result.nll == math.fsum(nlls) / len(nlls)
    assert result.ppl == math.exp(result.nll)


ascending = st.lists(st.integers(2, 24), min_size=1, max_size=3, unique=True).map(sorted)
asked = settings(deadline=None, max_examples=40)


@asked
@given(document_sizes, ascending)
def test_paper_is_the_mean_over_the_stream(sizes, lengths):
    documents = corpus(sizes)
    owners = [i for i, document in enumerate(documents) for _ in range(len(document) + 1)]
    stream = [token for document in documents for token in [*document.tolist(), EOT]]
    assume(len(stream) > lengths[-1])
    evaluation = run("paper", lengths, documents)
    assert evaluation.bootstrap_unit == "window"
    for length, result in zip(lengths, evaluation.results, strict=True):
        nlls, touched = [], set()
        for start in range(0, len(stream) - length, length):
            for end in range(start + 1, start + length + 1):
                nlls.append(token_nll(stream[start:end], stream[end]))
                touched.add(owners[end])
        assert_result(result, nlls, len(touched))


@asked
@given(document_sizes, ascending, st.data())
def test_sliding_is_the_mean_over_all_but_first_tokens(sizes, lengths, data):
    documents = corpus(sizes)
    assume(max(sizes) > 1)
    stride = data.draw(st.none() | st.integers(1, lengths[0]))
    evaluation = run("sliding", lengths, documents, stride=stride)
    for length, result in zip(lengths, evaluation.results, strict=True):
        step = stride or max(1, length // 4)
        assert result.stride == step
        nlls = []
        for tokens in (document.tolist() for document in documents):
            start = 0
            for end in range(1, len(tokens)):
                if end - start > length:
                    start += step
                nlls.append(token_nll(tokens[start:end], tokens[end]))
        assert_result(result, nlls, sum(size > 1 for size in sizes))


@asked
@given(document_sizes, ascending, st.data())
def test_same_targets_is_the_mean_over_the_last_tokens_before_anchors(sizes, lengths, data):
    documents = corpus(sizes)
    assume(max(sizes) >= lengths[-1])
    train_length = data.draw(st.sampled_from(lengths))
    evaluation = run("same_targets", lengths, documents, toy_model(train_length))
    scored = min(train_length, lengths[0]) // 2
    targets = [
        (index, at, int(document[at]))
        for index, document in enumerate(documents)
        for end in range(lengths[-1], len(document) + 1, scored)
        for at in range(end - scored, end)
    ]
    rows = np.array(targets, "<i8")
    assert evaluation.targets_hash == hashlib.sha256(rows.tobytes()).hexdigest()
    for length, result in zip(lengths, evaluation.results, strict=True):
        nlls = []
        for tokens in (document.tolist() for document in documents):
            for end in range(lengths[-1], len(tokens) + 1, scored):
                for at in range(end - scored, end):
                    nlls.append(token_nll(tokens[end - length : at], tokens[at]))
        assert_result(result, nlls, sum(size >= lengths[-1] for size in sizes))
    by_length = {result.length: result.nll for result in evaluation.results}
    assert [d.length for d in evaluation.differences] == [n for n in lengths if n != train_length]
    for difference in evaluation.differences:
        assert difference.reference == train_length
        expected = by_length[difference.length] - by_length[train_length]
        assert difference.nll == pytest.approx(expected, abs=1e-12)


@asked
@given(document_sizes, ascending, st.integers(1, 20))
def test_per_position_is_the_mean_at_each_place_of_a_chunk(sizes, lengths, train_length):
    documents = corpus(sizes)
    chunk = lengths[-1]
    assume(max(sizes) >= chunk)
    evaluation = run("per_position", lengths, documents, toy_model(train_length))
    by_place: list[list[float]] = [[] for _ in range(chunk - 1)]
    for tokens in (document.tolist() for document in documents):
        for start in range(0, len(tokens) - chunk + 1, chunk):
            for place in range(chunk - 1):
                at = start + place + 1
                by_place[place].append(token_nll(tokens[start:at], tokens[at]))
    long_enough = sum(size >= chunk for size in sizes)
    for length, result in zip(lengths, evaluation.results, strict=True):
        assert_result(result, [n for place in by_place[:length] for n in place], long_enough)
    for bins in (evaluation.bins, evaluation.curve):
        assert bins[0].start == 0
        assert bins[-1].end == chunk - 1
        assert [b.end for b in bins[:-1]] == [b.start for b in bins[1:]]
        for piece in bins:
            nlls = [n for place in by_place[piece.start : piece.end] for n in place]
            assert piece.tokens == len(nlls)
            assert piece.nll == math.fsum(nlls) / len(nlls)
    starts = [0] + [train_length * 2**k for k in range(9) if train_length * 2**k < chunk - 1]
    assert [b.start for b in evaluation.bins] == starts


def test_the_curve_has_finer_bins_that_widen_with_the_octave():
    evaluation = run("per_position", (64, 256), corpus([600]), toy_model(64))
    assert [b.start for b in evaluation.bins] == [0, 64, 128]
    starts = [*range(0, 128, 16), *range(128, 255, 32)]
    assert [b.start for b in evaluation.curve] == starts


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_depends_on_the_batch_size(protocol):
    documents = corpus([61, 33, 5, 80, 47])
    model = toy_model(8, nll=rough_nll)
    one = run(protocol, (8, 16, 32), documents, model, batch_size=1)
    assert run(protocol, (8, 16, 32), documents, model, batch_size=7) == one
    assert all(None not in result.ci95 for result in one.results)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_intervals_repeat_at_a_seed(protocol):
    documents = corpus([61, 33, 5, 80, 47])
    one = run(protocol, (8, 16), documents, seed=1)
    assert run(protocol, (8, 16), documents, seed=1) == one
    other = run(protocol, (8, 16), documents, seed=2)
    assert [r.nll for r in other.results] == [r.nll for r in one.results]
    assert [r.ci95 for r in other.results] != [r.ci95 for r in one.results]
    for result in one.results:
        assert result.ci95[0] < result.nll < result.ci95[1]


def test_capped_anchors_depend_on_the_seed_alone():
    documents = corpus([200, 150])
    hashes = [
        run("same_targets", (8, 16), documents, seed=seed, max_anchors=5).targets_hash
        for seed in (0, 0, 1)
    ]
    assert hashes[0] == hashes[1] != hashes[2]
    capped = run("same_targets", (8, 16), documents, max_anchors=5)
    assert [result.tokens for result in capped.results] == [20, 20]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_unit_has_no_interval(protocol):
    evaluation = run(protocol, (8, 16), corpus([17]))
    last = evaluation.results[-1]
    assert last.ci95 == (None, None)
    assert last.nll is not None
    assert all(d.ci95 == (None, None) and d.does_not_rise is None for d in evaluation.differences)
    assert evaluation.to_json()["results"][-1]["ci95"] == [None, None]


@pytest.mark.parametrize(
    ("slope", "verdict"), [(-0.1, True), (0.0, True), (0.004, True), (0.1, False)]
)
def test_does_not_rise_is_read_off_the_upper_bound(slope, verdict):
    def nll(inputs_BT, targets_BT):
        rises = slope if inputs_BT.shape[1] == 16 else 0.0
        return (2.0 + rises + 0.1 * targets_BT).astype(np.float32)

    evaluation = run("same_targets", (8, 16), corpus([90] * 8), toy_model(8, nll=nll))
    (difference,) = evaluation.differences
    assert difference.nll == pytest.approx(slope, abs=1e-6)
    assert difference.does_not_rise is verdict


def test_a_mean_that_falls_with_a_wide_interval_is_not_cleared():
    def nll(inputs_BT, targets_BT):
        rises = np.where(targets_BT % 2 == 0, 1.0, -1.2) if inputs_BT.shape[1] == 16 else 0.0
        return np.full(targets_BT.shape, 2.0, np.float32) + rises

    # A document of one token, again and again: half of them rise, half of them fall by more.
    documents = [np.full(40, token, np.int32) for token in range(6)]
    evaluation = run("same_targets", (8, 16), documents, toy_model(8, nll=nll))
    (difference,) = evaluation.differences
    assert difference.nll == pytest.approx(-0.1)
    assert difference.ci95[0] < -0.5 < 0.3 < difference.ci95[1]
    assert difference.does_not_rise is False


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_length_out_of_reach_is_null_and_moves_no_other_number(protocol):
    documents = corpus([61, 33, 5, 80, 47])
    lengths = (8, 16, 32)

    def nll(inputs_BT, targets_BT):
        assert inputs_BT.shape[1] <= 16
        return rough_nll(inputs_BT, targets_BT)

    short = run(protocol, lengths, documents, toy_model(8, nll=nll, max_length=16))
    free = run(protocol, lengths, documents, toy_model(8, nll=rough_nll))
    assert short.results[:2] == free.results[:2]
    last = short.to_json()["results"][-1]
    assert (last["length"], last["nll"], last["ppl"], last["tokens"]) == (32, None, None, 0)
    assert last["ci95"] == [None, None]
    assert short.targets_hash == free.targets_hash
    assert [d.length for d in short.differences] == [d.length for d in free.differences][:-1]
    if protocol == "per_position":
        assert short.bins[-1].end == short.curve[-1].end == 16
        assert short.bins[:2] == free.bins[:2]


@pytest.mark.parametrize("protocol", ["paper", "per_position", "sliding"])
def test_a_model_that_reaches_no_length_has_no_number(protocol):
    def nll(inputs_BT, targets_BT):
        raise AssertionError("the model was called past its table")

    evaluation = run(protocol, (16, 32), corpus([40]), toy_model(8, nll=nll, max_length=8))
    assert [result.nll for result in evaluation.results] == [None, None]
    assert evaluation.curve == ()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_json_has_the_agreed_keys_and_reads_back(protocol):
    evaluation = run(protocol, (8, 16), corpus([61, 33, 5, 80]))
    text = json.dumps(evaluation.to_json(), allow_nan=False)
    data = json.loads(text)
    assert data == evaluation.to_json()
    required = {"protocol", "train_length", "params", "position", "results", "bootstrap_unit"}
    assert required <= data.keys()
    assert (data["protocol"], data["train_length"]) == (protocol, 8)
    assert (data["params"], data["position"]) == (1234, "toy")
    assert ("targets_hash" in data) == ("differences" in data) == (protocol == "same_targets")
    assert ("bins" in data) == ("curve" in data) == (protocol == "per_position")
    for result in data["results"]:
        assert result.keys() == {"length", "nll", "ppl", "tokens", "documents", "stride", "ci95"}
        assert isinstance(result["tokens"], int)
        assert result["ppl"] == math.exp(result["nll"])
        assert result["ci95"][0] <= result["nll"] <= result["ci95"][1]
    assert Evaluation.from_json(data) == evaluation


def test_a_perplexity_that_overflows_is_null_in_json():
    def nll(inputs_BT, targets_BT):
        return np.full(inputs_BT.shape, 1000.0, np.float32)

    evaluation = run("paper", (8,), corpus([40]), toy_model(8, nll=nll))
    assert evaluation.results[0].ppl == math.inf
    (result,) = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))["results"]
    assert (result["nll"], result["ppl"]) == (1000.0, None)


@pytest.mark.parametrize("missing", ["protocol", "results"])
def test_json_without_a_key_is_refused(missing):
    data = run("paper", (8,), corpus([40])).to_json()
    del data[missing]
    with pytest.raises(ValueError, match=missing):
        Evaluation.from_json(data)


def test_json_of_a_result_without_a_key_is_refused():
    data = run("paper", (8,), corpus([40])).to_json()
    del data["results"][0]["tokens"]
    with pytest.raises(ValueError, match=r"LengthResult.*tokens"):
        Evaluation.from_json(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": "same_target"}, "protocol='same_target' is unknown.*'same_targets'"),
        ({"protocol": ""}, "protocol='' is unknown"),
        ({"lengths": ()}, r"lengths=\(\) is empty"),
        ({"lengths": (0, 8)}, r"lengths=\(0, 8\) must each be at least 2"),
        ({"lengths": (8, -4)}, r"lengths=\(8, -4\) must each be at least 2"),
        ({"lengths": (16, 8)}, r"lengths=\(16, 8\) must ascend"),
        ({"lengths": (8, 8)}, r"lengths=\(8, 8\) must ascend without duplicates"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"bootstrap_samples": 0}, "bootstrap_samples=0"),
        ({"seed": -1}, "seed=-1"),
        ({"max_anchors": 0}, "max_anchors=0"),
        ({"stride": 2}, "stride=2 has no meaning under protocol='paper'"),
        ({"stride": 0, "protocol": "sliding"}, "stride=0 must be between 1 and .* 8"),
        ({"stride": 9, "protocol": "sliding"}, "stride=9 must be between 1 and .* 8"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**{"lengths": (8, 16), **fields})


def test_bad_models_are_refused():
    with pytest.raises(ValueError, match="train_length=0"):
        toy_model(0)
    with pytest.raises(ValueError, match="max_length=4 is below train_length=8"):
        toy_model(8, max_length=4)


@pytest.mark.parametrize(
    ("protocol", "lengths", "documents", "message"),
    [
        ("paper", (8,), [], "documents is empty"),
        ("paper", (8, 64), corpus([20, 9]), "length 64 needs a stream of at least 65.* give 31"),
        ("paper", (8, 31), corpus([20, 9]), "length 31 needs a stream of at least 32.* give 31"),
        ("same_targets", (8, 64), corpus([20, 9]), "at least 64 tokens; the longest of 2 has 20"),
        ("per_position", (8, 64), corpus([20, 9]), "at least 64 tokens; the longest of 2 has 20"),
        ("sliding", (8,), corpus([1, 1]), "at least 2 tokens; the longest of 2 has 1"),
        ("same_targets", (16, 32), corpus([80]), r"training length 8.*lengths=\(16, 32\)"),
        ("paper", (8,), [np.zeros((3, 4), np.int32)], r"documents\[0\] .* not int32\[3, 4\]"),
        ("paper", (8,), [np.zeros(30)], r"documents\[0\] .* not float64\[30\]"),
        ("paper", (8,), [*corpus([30]), np.zeros(0, np.int32)], r"documents\[1\] is empty"),
    ],
)
def test_unfit_documents_are_refused(protocol, lengths, documents, message):
    with pytest.raises(ValueError, match=message):
        run(protocol, lengths, documents, toy_model(8))


def test_a_nll_that_is_not_finite_names_the_protocol():
    def nll(inputs_BT, targets_BT):
        return np.full(inputs_BT.shape, np.nan, np.float32)

    with pytest.raises(FloatingPointError, match="protocol sliding, toy, length 8: nll is nan"):
        run("sliding", (8,), corpus([40]), toy_model(8, nll=nll))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sums_by_unit_make_the_means(protocol):
    documents = corpus([40, 3, 90, 64])
    assert run(protocol, [8, 16], documents).unit_sums == ()
    evaluation = run(protocol, [8, 16], documents, per_unit=True)
    assert Evaluation.from_json(json.loads(json.dumps(evaluation.to_json()))) == evaluation
    means = {(0, r.length): r for r in evaluation.results}
    if protocol == "per_position":
        means = {(piece.start, piece.end): piece for piece in evaluation.curve}
    assert [(entry.start, entry.end) for entry in evaluation.unit_sums] == list(means)
    for entry in evaluation.unit_sums:
        mean = means[entry.start, entry.end]
        assert math.fsum(entry.sums) / sum(entry.counts) == mean.nll
        assert sum(entry.counts) == mean.tokens
        assert min(entry.counts) > 0
        if evaluation.bootstrap_unit == "document" and protocol != "sliding":
            assert entry.units == (0, 2, 3)  # the document of 3 tokens is too short
