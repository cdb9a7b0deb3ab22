"""train.py and eval.py as a user meets them: bad input, a run, an evaluation, in one process."""

import json
import re

import numpy as np
import pytest
from experiments import ROOT

from carope_jax import command
from carope_jax.training import CheckpointCorrupt, CheckpointMismatch

SMOKE = ["--config", ROOT / "configs/smoke.py"]
SHORT = ["--training.steps", 4, "--optimizer.warmup-steps", 1, "--training.eval-every", 2]
SHORT += ["--checkpoint.every", 2, "--training.log-every", 1, "--mesh.data", 8]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four updates, made once."""
    import train

    workdir = tmp_path_factory.mktemp("runs") / "a"
    train.main([str(a) for a in [*SMOKE, *SHORT, "--workdir", workdir]])
    return workdir


def one_message(err):
    """The message: one line of ours, or the one box in which a flag's error is shown."""
    lines = err.strip().splitlines()
    boxed = [line.strip("│ ") for line in lines if line.startswith("│")]
    assert len(lines) == 1 or lines[0].startswith("╭"), err
    return " ".join(boxed) if boxed else lines[0]


BAD_TRAINING = {
    "no config, no run": (["--workdir", "{tmp}/none"], r"no run in .*none"),
    "nothing at all": ([], r"--config FILE"),
    "missing config": (["--config", "{tmp}/x.py"], r"no config file .*x\.py"),
    "odd head_dim": ([*SMOKE, "--model.head-dim", "7"], r"head_dim must be even.*7"),
    "heads": ([*SMOKE, "--model.num-heads", "5"], r"num_heads 5 does not divide model_dim 64"),
    "kv heads": ([*SMOKE, "--model.num-kv-heads", "3"], r"num_kv_heads 3 does not divide"),
    "unknown encoding": ([*SMOKE, "--model.position", "carop"], r"did you mean 'carope'"),
    "past the table": (
        [*SMOKE, "--model.position", "learned", "--model.max-length", "32"],
        r"length 64 is past the learned table's max_length 32",
    ),
    "rope not reachable": ([*SMOKE, "--model.carope.exponent", "shared"], r"init='rope'"),
    "missing corpus": ([*SMOKE, "--data.corpus", "{tmp}/text"], r"{tmp}/text"),
    "text too short": ([*SMOKE, "--data.corpus", "{tmp}/t.jsonl"], r"short|at least|token"),
    "empty corpus": ([*SMOKE, "--data.corpus", "{tmp}/e.txt"], r"e\.txt"),
    "mesh": ([*SMOKE, "--mesh.data", "3"], r"8 devices"),
    "batch over the mesh": ([*SMOKE, "--data.batch-size", "6"], r"batch_size 6"),
    "vocabulary": ([*SMOKE, "--model.vocab-size", "100"], r"vocab_size 100 is below .* 512"),
    "profile": ([*SMOKE, "--profile-steps", "5:2"], r"FIRST:LAST.*'5:2'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_TRAINING.values(), ids=BAD_TRAINING)
def test_bad_input_is_one_line_and_exit_code_2(run_command, tmp_path, arguments, message):
    (tmp_path / "e.txt").write_text("")
    (tmp_path / "t.jsonl").write_text('{"text": "A few words."}\n{"text": "And a few more."}\n')
    arguments = [str(a).replace("{tmp}", str(tmp_path)) for a in arguments]
    if "--workdir" not in arguments:
        arguments += ["--workdir", str(tmp_path / "run")]
    if message == r"--config FILE":
        arguments = []
    ran = run_command("train.py", arguments)
    assert ran.code == command.BAD_INPUT
    assert "Traceback" not in ran.err + ran.out
    said = one_message(ran.err)
    import re

    assert re.search(message.replace("{tmp}", str(tmp_path)), said), said
    assert not (tmp_path / "run" / "experiment.json").exists()


def test_unknown_flag_names_the_nearest(run_command, tmp_path):
    ran = run_command("train.py", [*SMOKE, "--workdir", tmp_path, "--model.num-layer", 3])
    assert ran.code == command.BAD_INPUT
    assert "num-layers" in ran.err + ran.out


def test_unknown_field_in_a_config_file_names_the_nearest(run_command, tmp_path):
    config = tmp_path / "c.py"
    config.write_text(
        "from carope_jax.models import ModelConfig\nModelConfig(num_layer=3)\nexperiment = None\n"
    )
    ran = run_command("train.py", ["--config", config, "--workdir", tmp_path / "r"])
    assert ran.code == command.BAD_INPUT
    assert "did you mean 'num_layers'" in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment = 3", "must define"),
        ("import nothing_here", "nothing_here"),
        ("x =", "invalid"),
    ],
)
def test_config_files_that_build_nothing(run_command, tmp_path, text, message):
    config = tmp_path / "c.py"
    config.write_text(text)
    ran = run_command("train.py", ["--config", config, "--workdir", tmp_path / "r"])
    assert ran.code == command.BAD_INPUT
    assert message in ran.err


def test_help_lists_the_fields(run_command):
    ran = run_command("train.py", ["--help"])
    assert ran.code == 0
    for flag in ("--model.position", "--model.carope.init", "--data.length", "--profile-steps"):
        assert flag in ran.out


def test_metrics_have_a_row_a_logged_step(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert {"loss", "grad_norm", "learning_rate", "tokens_per_second", "tokens"} <= set(row)
        assert row["tokens"] == 8 * 64
        assert len(row["f_mean"]) == len(row["f_std"]) == 2
    assert [r["step"] for r in rows if "validation_nll_64" in r] == [2, 4]
    assert all(np.isfinite(r["validation_nll_128"]) for r in rows if r["step"] % 2 == 0)
    assert list((finished / "tensorboard").glob("events*"))


def test_a_finished_run_has_nothing_left_to_do(run_command, finished):
    before = (finished / "metrics.jsonl").read_text()
    assert run_command("train.py", ["--workdir", finished]).code == 0
    assert (finished / "metrics.jsonl").read_text() == before


def test_a_run_refuses_another_experiment_and_names_the_difference(run_command, finished):
    ran = run_command("train.py", ["--workdir", finished, "--optimizer.learning-rate", 0.5])
    assert ran.code == command.BAD_INPUT
    assert "optimizer.learning_rate" in ran.err
    assert "0.5" in ran.err
    assert "0.003" in ran.err


def test_cadences_may_change(run_command, finished):
    arguments = ["--workdir", finished, "--training.log-every", 7, "--checkpoint.keep", 5]
    assert run_command("train.py", arguments).code == 0


SCHEMA = {"protocol", "train_length", "params", "position", "results"}
RESULT = {"length", "nll", "ppl", "tokens", "documents", "ci95"}


def test_evaluation_json(run_command, finished, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--workdir", finished, "--protocol", "paper", "--lengths", 64, 128, "--json", out]
    ran = run_command("eval.py", arguments)
    assert ran.code == 0, ran.err
    found = json.loads(out.read_text())
    assert set(found) >= SCHEMA
    assert (found["position"], found["train_length"], found["protocol"]) == ("carope", 64, "paper")
    assert [r["length"] for r in found["results"]] == [64, 128]
    for result in found["results"]:
        assert set(result) >= RESULT
        assert result["ppl"] == pytest.approx(np.exp(result["nll"]))
        assert result["ci95"][0] < result["nll"] < result["ci95"][1]


@pytest.mark.parametrize("protocol", ["same_targets", "per_position", "sliding"])
def test_every_protocol_runs(run_command, finished, tmp_path, protocol):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--workdir", finished, "--protocol", protocol, "--lengths", 64, 128, "--json", out]
    arguments += ["--max-anchors", 8] if protocol == "same_targets" else []
    arguments += ["--plot", plot] if protocol == "per_position" else []
    ran = run_command("eval.py", arguments)
    assert ran.code == 0, ran.err
    assert json.loads(out.read_text())["protocol"] == protocol
    assert plot.exists() == (protocol == "per_position")


def test_perplexity_is_a_property_of_the_model(run_command, finished, tmp_path):
    """Batch size, device count and a short last batch move nothing (1e-6 relative)."""
    found = []
    for batch_size, mesh in ((8, 8), (5, 1), (32, 2)):
        out = tmp_path / f"{batch_size}.json"
        arguments = ["--workdir", finished, "--lengths", 64, "--batch-size", batch_size]
        arguments += ["--mesh.data", mesh, "--mesh.tensor", 1, "--mesh.fsdp", 8 // mesh]
        assert run_command("eval.py", [*arguments, "--json", out]).code == 0
        found.append(json.loads(out.read_text())["results"][0])
    assert len({result["tokens"] for result in found}) == 1
    for result in found[1:]:
        assert result["ppl"] == pytest.approx(found[0]["ppl"], rel=1e-6)


BAD_EVALUATION = {
    "no run": (["--workdir", "{tmp}/none", "--lengths", "64"], r"no run in"),
    "no workdir": (["--workdir", "--lengths", "64"], r"at least one run"),
    "no such step": (["--workdir", "{run}", "--lengths", "64", "--step", "3"], r"3"),
    "lengths": (["--workdir", "{run}", "--lengths", "128", "64"], r"lengths=\(128, 64\)"),
    "too long": (
        ["--workdir", "{run}", "--protocol", "same_targets", "--lengths", "64", "65536"],
        r"65536.*longest",
    ),
    "plot": (["--workdir", "{run}", "--lengths", "64", "--plot", "{tmp}/x.png"], r"per_position"),
    "corpus": (["--workdir", "{run}", "--lengths", "64", "--corpus", "{tmp}/t.txt"], r"t\.txt"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_EVALUATION.values(), ids=BAD_EVALUATION)
def test_bad_evaluation(run_command, finished, tmp_path, arguments, message):
    import re

    filled = [a.replace("{tmp}", str(tmp_path)).replace("{run}", str(finished)) for a in arguments]
    ran = run_command("eval.py", filled)
    assert ran.code == command.BAD_INPUT, ran.err
    assert re.search(message, ran.err), ran.err
    assert "Traceback" not in ran.err


def test_evaluation_refuses_another_tokenizer(run_command, finished, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    model = next(path for path in (copy / "tokenizer").iterdir() if path.suffix == ".model")
    model.write_bytes(model.read_bytes() + b"x")
    ran = run_command("eval.py", ["--workdir", copy, "--lengths", 64])
    assert ran.code == command.BAD_INPUT
    assert "hash" in ran.err


def test_comparison_of_several_runs(run_command, finished, tmp_path):
    import shutil

    other = tmp_path / "b"
    shutil.copytree(finished, other)
    out, table = tmp_path / "out.json", tmp_path / "table.md"
    arguments = ["--workdir", finished, other, "--lengths", 64, "--json", out, "--markdown", table]
    ran = run_command("eval.py", arguments)
    assert ran.code == 0, ran.err
    first, second = json.loads(out.read_text())
    assert first["results"] == second["results"]
    assert "| length | a | b |" in table.read_text()


def test_dry_run_prints_the_paper_s_sizes(run_command, tmp_path):
    out = tmp_path / "facts.json"
    arguments = ["--config", ROOT / "configs/gpt2_tiny.py", "--dry-run", "--json", out]
    ran = run_command("train.py", arguments)
    assert ran.code == 0, ran.err
    facts = json.loads(out.read_text())
    assert facts["parameters"] // 10**6 == 44
    assert facts["tokens_per_update"] == 524_288
    assert facts["steps"] == 19_000
    assert facts["memory_per_device"] > facts["parameters"] * 3 * 4 / 8
    assert "44M" in ran.out


@pytest.mark.parametrize("kind", [CheckpointMismatch, CheckpointCorrupt])
def test_a_checkpoint_that_cannot_be_used_is_one_line_too(capfd, kind):
    """Found while resuming, after the inputs were read: still no traceback."""

    def resume(arguments):
        raise kind("data differs")

    with pytest.raises(SystemExit) as stopped:
        command.run(resume, [])
    assert stopped.value.code == command.BAD_INPUT
    assert capfd.readouterr().err == "error: data differs\n"


def test_generating_from_a_run(run_command, finished, tmp_path):
    out = tmp_path / "out.json"
    options = ["--workdir", finished, "--max-tokens", 5, "--temperature", 0, "--json", out]
    alone = run_command("carope_jax.generate", [*options, "--prompt", "the king"])
    assert alone.code == 0
    [row] = json.loads(out.read_text())
    assert alone.out == f"the king{row['text']}\n"
    assert row["prompt_tokens"] > 0
    assert 0 < row["tokens"] <= 5
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(
        "the king\n\nsome of the longer words that are in no one bucket of sixteen\n"
    )
    several = run_command("carope_jax.generate", [*options, "--file", prompts])
    assert several.code == 0
    rows = json.loads(out.read_text())
    assert rows[0] == row
    assert [line[:3] for line in several.out.splitlines()] == ["[0]", "[1]", "[2]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--workdir", "{tmp}/none"], r"no run in .*none"),
        ([], "give --prompt TEXT or --file FILE"),
        (["--prompt", "a", "--file", "b"], "give --prompt TEXT or --file FILE"),
        (["--file", "{tmp}/none.txt"], r"none\.txt"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be 0 or above, got -1.0"),
        (["--prompt", "a", "--step", "3"], r"no checkpoint 3"),
    ],
)
def test_bad_generation_input(run_command, finished, tmp_path, arguments, message):
    flags = [a.format(tmp=tmp_path) for a in arguments]
    workdir = [] if "--workdir" in flags else ["--workdir", finished]
    ran = run_command("carope_jax.generate", [*workdir, *flags])
    assert ran.code == command.BAD_INPUT
    assert re.search(message, one_message(ran.err)), ran.err
