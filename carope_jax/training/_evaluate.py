"""Evaluating runs: their newest checkpoints on their held-out documents, or on another corpus."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from carope_jax.data import load_dataset, load_documents
from carope_jax.evaluation import (
    Check,
    Documents,
    EvaluatedModel,
    Evaluation,
    EvaluationConfig,
    evaluate,
)
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
      corpus: evaluate on all documents of this corpus (of a prepared dataset, on what it holds
        out); None: on each run's held-out ones.
      tokens: evaluate on about so many, taken evenly from the documents' beginnings (not of all of
        them where there are too many); None: all.
      step: which checkpoint; None: the newest.
      mesh: how the devices are laid out; None: all of them replicas.
      check: called before each batch; what it raises stops the evaluation.
      console: shows the progress.

    Raises:
      FileNotFoundError: a run, a checkpoint or the corpus is missing.
      ValueError: a run's data is not what it was trained beside, or too short for the lengths.
      FloatingPointError: a model's loss is not finite.
    """
    documents: dict[Any, Documents] = {}
    evaluations = []
    for workdir in workdirs:
        run = load_run(workdir, step=step, mesh=mesh)
        # Runs of one comparison mostly share their data: it is read once.
        key = (run.info["data"], run.tokenizer.hash)
        if key not in documents:
            found = _documents(run, corpus)
            longest = config.lengths[-1] + 1
            documents[key] = found if tokens is None else beginnings(found, tokens, longest)
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


def beginnings(documents: Documents, tokens: int, least: int) -> list[np.ndarray]:
    """Documents' beginnings, about `tokens` in all.

    Each document gives as much as any other; where that would be less than `least` of each, some
    documents, always the same, give `least`.
    """
    share = tokens // len(documents) if len(documents) else 0
    if share >= min(tokens, least):
        return [document[:share] for document in documents]
    chosen: dict[int, np.ndarray] = {}
    found = 0
    for number in np.random.default_rng(0).permutation(len(documents)).tolist():
        chosen[number] = documents[number][:least]
        found += len(chosen[number])
        if found >= tokens:
            break
    return [chosen[number] for number in sorted(chosen)]


def _documents(run: LoadedRun, corpus: str | None) -> Documents:
    if corpus is not None:
        return load_documents(corpus, run.tokenizer)
    dataset = load_dataset(run.experiment.data, run.tokenizer)
    check_same({"data": dataset.fingerprint}, {"data": run.info["data"]}, "the run's data")
    return dataset.validation
