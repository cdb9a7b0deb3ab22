import subprocess
import sys

import pytest
from evaluation_toy import EOT, corpus, toy_model, toy_nll
from rich.console import Console

from carope_jax.evaluation import (
    EvaluationConfig,
    comparison_markdown,
    comparison_table,
    evaluate,
    plot_by_position,
)


def evaluation(name: str, protocol: str = "paper", rise: float = 0.0, **options):
    sizes = options.pop("sizes", [300, 200, 230])
    lengths = options.pop("lengths", (32, 64, 128))

    def nll(inputs_BT, targets_BT):
        return toy_nll(inputs_BT, targets_BT) + rise

    model = toy_model(
        options.pop("train_length", 32),
        nll=nll,
        position=name,
        params=options.pop("params", 1000),
        **options,
    )
    config = EvaluationConfig(lengths=lengths, protocol=protocol, bootstrap_samples=20)
    return evaluate(config, model, corpus(sizes), EOT)


def rendered(results) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(comparison_table(results))
    return captured.get()


def test_the_table_has_the_papers_shape():
    results = {
        "rope": [evaluation("rope", rise=0.5)],
        "learned": [evaluation("learned", max_length=32, params=1500)],
    }
    rope, learned = (runs[0].results for runs in results.values())
    expected = [
        ["32 (1x)", f"{rope[0].ppl:,.2f}", f"{learned[0].ppl:,.2f}"],
        ["64 (2x)", f"{rope[1].ppl:,.2f}", "-"],
        ["128 (4x)", f"{rope[2].ppl:,.2f}", "-"],
    ]
    lines = comparison_markdown(results).splitlines()
    assert lines[0] == "**Perplexity by evaluation length (paper)**"
    assert lines[2:4] == ["| length | rope | learned |", "| --- | ---: | ---: |"]
    assert [line.strip("| ").split(" | ") for line in lines[4:7]] == expected
    caption = " ".join(lines[7:])
    for fact in (
        "Trained at 32 tokens",
        "non-overlapping windows",
        "Documents: 3.",
        f"Tokens scored at a length: {rope[2].tokens} to {rope[0].tokens}.",
        "Parameters: rope 1,000, learned 1,500.",
    ):
        assert fact in caption
    text = rendered(results)
    for row in expected:
        assert any(line.split() == " ".join(row).split() for line in text.splitlines())
    assert "Parameters: rope 1,000, learned 1,500." in " ".join(text.split())


def test_runs_of_an_encoding_are_averaged():
    one, other = evaluation("a"), evaluation("a", rise=0.1)
    low, high = one.results[0].ppl, other.results[0].ppl
    text = comparison_markdown({"a": [one, other], "b": [one]})
    mean, deviation = (low + high) / 2, (high - low) / 2**0.5
    assert f"| 32 (1x) | {mean:,.2f} ± {deviation:,.2f} | {low:,.2f} |" in text
    assert "over runs (1 to 2 an encoding)" in text


def test_a_mean_leaves_out_no_run_that_has_no_number():
    runs = [evaluation("a"), evaluation("a", max_length=32)]
    lines = comparison_markdown({"a": runs}).splitlines()
    assert lines[4] == f"| 32 (1x) | {runs[0].results[0].ppl:,.2f} ± 0.00 |"
    assert lines[5] == "| 64 (2x) | - |"


def test_a_bar_in_a_name_stays_in_its_column():
    assert "| length | a\\|b |" in comparison_markdown({"a|b": [evaluation("a")]})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"protocol": "sliding"}, "different protocol .*'paper', 'sliding'"),
        ({"train_length": 64}, "different train_length .*32, 64"),
        ({"sizes": [300, 200, 260]}, "length 32 are over different targets"),
        ({"lengths": (32, 64)}, "'b'] lacks length 128 in 1 of 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(other, message):
    with pytest.raises(ValueError, match=message):
        comparison_table({"a": [evaluation("a")], "b": [evaluation("b", **other)]})


def test_targets_are_compared_by_their_hash():
    a = evaluation("a", "same_targets", sizes=[300, 200])
    b = evaluation("b", "same_targets", sizes=[200, 300])
    with pytest.raises(ValueError, match="targets_hash"):
        comparison_table({"a": [a], "b": [b]})


def test_an_empty_comparison_is_refused():
    with pytest.raises(ValueError, match="results is empty"):
        comparison_table({})
    with pytest.raises(ValueError, match=r"results\['a'\] is empty"):
        comparison_markdown({"a": []})


def test_the_picture_shows_each_encoding_to_its_end(tmp_path):
    results = {
        "rope": [evaluation("rope", "per_position"), evaluation("rope", "per_position", rise=1.0)],
        "learned": [evaluation("learned", "per_position", max_length=32)],
    }
    path = tmp_path / "picture.svg"
    plot_by_position(results, path)
    # matplotlib writes every text of an SVG into a comment beside its glyphs.
    text = path.read_text()
    for label in ("rope", "learned", "(ends at 32)", "4x", "1x", "1/8x", "nll (nats a token)"):
        assert f"<!-- {label} -->" in text
    assert text.count("<!-- rope -->") == 1
    plot_by_position(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_one_document_is_drawn_without_a_band(tmp_path):
    alone = evaluation("a", "per_position", sizes=[200])
    assert alone.curve[0].ci95 == (None, None)
    plot_by_position({"a": [alone]}, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").exists()


def test_a_picture_short_of_the_training_length_still_shows_it(tmp_path):
    short = evaluation("a", "per_position", train_length=512, lengths=(16, 32))
    plot_by_position({"a": [short]}, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "<!-- trained at 512 -->" in text
    assert text.count("<!-- 512 -->") == 1


def test_what_cannot_be_drawn_is_refused(tmp_path):
    path = tmp_path / "picture.png"
    good = evaluation("a", "per_position")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_by_position({}, path)
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_by_position({"a": [good], "b": []}, path)
    with pytest.raises(ValueError, match=r"results\['b'\] has no curve: it is of protocol 'paper'"):
        plot_by_position({"a": [good], "b": [evaluation("b")]}, path)
    other = evaluation("b", "per_position", train_length=64)
    with pytest.raises(ValueError, match=r"different train_length .*\[32, 64\]"):
        plot_by_position({"a": [good], "b": [other]}, path)
    with pytest.raises(FileNotFoundError, match=r"no folder .*absent"):
        plot_by_position({"a": [good]}, tmp_path / "absent" / "picture.png")
    assert not path.exists()


def test_importing_does_not_load_matplotlib():
    code = "import sys, carope_jax.evaluation; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
