"""Evaluating runs: their newest checkpoints on their held-out documents, or on another corpus."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from carope_jax.data import load_corpus, load_dataset
from carope_jax.evaluation import Check, EvaluatedModel, Evaluation, EvaluationConfig, evaluate
from carope_jax.training._config import Experiment
from carope_jax.training._manifest import check_same
from carope_jax.training._mesh import MeshConfig
from carope_jax.training._run import LoadedRun, load_run
from carope_jax.training._state import Model
from carope_jax.training._step import NllOfArrays, make_nll_function


def evaluated_model(
    experiment: Experiment, model: Model, nll: NllOfArrays, params: Any, constants: Any
) -> EvaluatedModel:
    """A model with these arrays, as the protocols want it."""
    return EvaluatedModel(
        nll=lambda inputs, targets: nll(params, constants, inputs, targets),
        position=experiment.model.position,
        train_length=experiment.data.length,
        params=model.parameters,
        max_length=experiment.model.longest,
    )


def evaluate_runs(
    workdirs: Sequence[str | epath.Path],
    config: EvaluationConfig,
    *,
    corpus: str | None = None,
    tokens: int | None = None,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    check: Check | None = None,
    console: Console | None = None,
) -> list[Evaluation]:
    """Evaluates each run's model.

    Args:
      workdirs: the runs' folders.
      config: protocol, lengths, seed.
      corpus: evaluate on all documents of this corpus; None: on each run's held-out ones.
      tokens: evaluate on about so many, taken evenly from the documents' beginnings; None: all.
      step: which checkpoint; None: the newest.
      mesh: how the devices are laid out; None: all of them replicas.
      check: called before each batch; what it raises stops the evaluation.
      console: shows the progress.

    Raises:
      FileNotFoundError: a run, a checkpoint or the corpus is missing.
      ValueError: a run's data is not what it was trained beside, or too short for the lengths.
      FloatingPointError: a model's loss is not finite.
    """
    documents: dict[Any, list[np.ndarray]] = {}
    evaluations = []
    for workdir in workdirs:
        run = load_run(workdir, step=step, mesh=mesh)
        # Runs of one comparison mostly share their data: it is read once.
        key = (run.info["data"], run.tokenizer.hash)
        if key not in documents:
            found = _documents(run, corpus)
            documents[key] = found if tokens is None else beginnings(found, tokens)
        nll = make_nll_function(run.model)
        model = evaluated_model(
            run.experiment, run.model, nll, run.state.params, run.state.constants
        )
        with Progress(
            TextColumn(f"{epath.Path(workdir).name}: {{task.description}}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} windows"),
            TimeRemainingColumn(),
            console=console,
            disable=console is None or not console.is_terminal,
            transient=True,
        ) as bar:
            task = bar.add_task("", total=None)

            def progress(
                length: int, done: int, total: int, bar: Progress = bar, task: Any = task
            ) -> None:
                bar.update(task, completed=done, total=total, description=f"length {length}")

            eot_id = run.tokenizer.eot_id
            evaluations.append(
                evaluate(config, model, documents[key], eot_id, check=check, progress=progress)
            )
    return evaluations


def beginnings(documents: list[np.ndarray], tokens: int) -> list[np.ndarray]:
    """Each document's beginning, about `tokens` in all.

    Raises:
      ValueError: that is less than a token of each.
    """
    if tokens < len(documents):
        raise ValueError(f"tokens {tokens} is below one of each of {len(documents)} documents")
    return [document[: tokens // len(documents)] for document in documents]


def _documents(run: LoadedRun, corpus: str | None) -> list[np.ndarray]:
    if corpus is not None:
        return run.tokenizer.encode_batch([document.text for document in load_corpus(corpus)])
    dataset = load_dataset(run.experiment.data, run.tokenizer)
    check_same({"data": dataset.fingerprint}, {"data": run.info["data"]}, "the run's data")
    return dataset.validation
