"""The work of one run: training it, and evaluating what was trained."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from etils import epath
from rich.console import Console

from carope_jax.data import load_dataset
from carope_jax.evaluation import (
    Check,
    Documents,
    EvaluatedModel,
    Evaluation,
    EvaluationConfig,
    evaluate,
)
from carope_jax.study._config import Arm, Measurement, Variant, at_length
from carope_jax.study._frequencies import FrequencySums, measure_frequencies
from carope_jax.study._overrides import with_overrides
from carope_jax.training import (
    Experiment,
    InterruptFlag,
    LoadedRun,
    MeshConfig,
    abstract_model,
    flops_per_token,
    load_run,
    make_mesh,
    make_nll_function,
    read_inputs,
    read_metrics,
    train,
)

TRAINED = "trained"
"""The name under which the trained model itself is evaluated."""

Say = Callable[[str], None]
"""Takes a line about what is going on."""


class Worker(Protocol):
    """Who trains and evaluates. The study's order, resuming and results don't depend on how."""

    def resolve(self, experiment: Experiment) -> Experiment:
        """The experiment with nothing left to derive from its data."""
        ...

    def train(self, experiment: Experiment, folder: Path, say: Say) -> dict[str, Any]:
        """Trains, or goes on; returns what a result says of training.

        Raises:
          FloatingPointError: the loss is not finite.
          Interrupted: a signal came; what is new is saved.
        """
        ...

    def evaluate(
        self, folder: Path, arm: Arm, measurement: Measurement, say: Say
    ) -> dict[str, Any]:
        """Evaluates a trained run and its variants; returns what a result says of that."""
        ...


class TrainingWorker:
    """Trains and evaluates with this package's own functions."""

    def __init__(self) -> None:
        self._vocabulary: dict[Any, int] = {}

    def resolve(self, experiment: Experiment) -> Experiment:
        # All arms of a study share their text: its tokenizer is made once.
        if experiment.model.vocab_size is None:
            key = (experiment.data.corpus, experiment.data.tokenizer, experiment.data.validation)
            if key not in self._vocabulary:
                self._vocabulary[key] = load_dataset(experiment.data).tokenizer.vocab_size
            return experiment.resolved(self._vocabulary[key])
        return experiment.resolved(experiment.model.vocab_size)

    def train(self, experiment: Experiment, folder: Path, say: Say) -> dict[str, Any]:
        jax.clear_caches()
        inputs = read_inputs(experiment, folder)
        with _Log(folder / "log.txt", say) as log:
            train(inputs, console=Console(file=log, width=120, force_terminal=False))
        with InterruptFlag() as flag:
            say("validation")
            run = load_run(folder)
            model = _Loaded(run)
            length = run.experiment.data.length
            config = EvaluationConfig(lengths=(length,), bootstrap_samples=1)
            found = model.evaluate(config, inputs.dataset.validation, flag.check)
            frequencies = measure_frequencies(run, model.training_windows(8, flag.check))
        return {
            "training": _training_facts(folder, run),
            "validation": {
                "nll": float(f"{found.results[0].nll:.7g}"),
                "tokens": found.results[0].tokens,
            },
            "frequencies": None if frequencies is None else frequencies.to_json(),
            "data": inputs.dataset.fingerprint,
        }

    def evaluate(
        self, folder: Path, arm: Arm, measurement: Measurement, say: Say
    ) -> dict[str, Any]:
        jax.clear_caches()
        run = load_run(folder)
        documents = load_dataset(run.experiment.data, run.tokenizer).validation
        with InterruptFlag() as flag:
            model = _Loaded(run)
            windows = model.training_windows(measurement.frequency_batches, flag.check)
            frequencies = measure_frequencies(run, windows)
            evaluations: dict[str, Any] = {}
            lengths = tuple(run.experiment.data.length * m for m in measurement.multiples)
            trained = Variant(TRAINED, {}, measurement.protocols)
            for variant in (trained, *arm.variants):
                model.become(variant, frequencies)
                found = {}
                for protocol in measurement.protocols:
                    if protocol not in variant.protocols:
                        continue
                    say(f"{variant.name}, {protocol}")
                    config = EvaluationConfig(
                        lengths=lengths,
                        protocol=protocol,
                        batch_size=measurement.batch_size,
                        max_anchors=(
                            measurement.max_anchors if protocol == "same_targets" else 4096
                        ),
                        bootstrap_samples=1,
                        per_unit=protocol != "paper",
                    )
                    found[protocol] = small(model.evaluate(config, documents, flag.check))
                evaluations[variant.name] = found
        return evaluations


class _Loaded:
    """A trained run as the evaluation wants it, under a variant's options."""

    def __init__(self, run: LoadedRun) -> None:
        self._run = run
        self.become(Variant(TRAINED, {}), None)

    def become(self, variant: Variant, frequencies: FrequencySums | None) -> None:
        """From here on evaluated under these options."""
        self._variant, self._frequencies = variant, frequencies
        self._by_length: dict[int, Any] = {}
        self._before: np.ndarray | None = None

    def _nll(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        length = inputs.shape[1]
        if self._variant.overrides.get("model.carope.control") == "shuffled":
            inputs = self._filled(inputs)
        if length not in self._by_length:
            # One program at a time: at long lengths each holds much memory.
            self._by_length = {length: self._function(length)}
        return self._by_length[length](inputs, targets)

    def _filled(self, inputs_BT: np.ndarray) -> np.ndarray:
        """The batch with other rows than its first where it is filled up with that: under the
        shuffled control the first would get its own f."""
        filled = inputs_BT.copy()
        same = (inputs_BT == inputs_BT[0]).all(axis=1)
        if same[-1] and self._before is not None and self._before.shape == inputs_BT.shape:
            filled[1:][same[1:]] = self._before[1:][same[1:]]
        self._before = inputs_BT
        return filled

    def _function(self, length: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        run, overrides = self._run, self._variant.overrides
        state, model, constants = run.state, run.model, run.state.constants
        if overrides:
            factor = length / run.experiment.data.length
            changed = with_overrides(
                run.experiment, at_length(overrides, factor), f"variant {self._variant.name!r}"
            )
            model = abstract_model(changed.model, make_mesh(MeshConfig()))
            constants = self._constants(model.constants)
        nll = make_nll_function(model)
        return lambda inputs, targets: nll(state.params, constants, inputs, targets)

    def _constants(self, wanted: Any) -> Any:
        """The trained model's constants, and the mean increments where they are asked for."""

        def find(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Any:
            names = [entry.key for entry in path]
            if names[-1] == "mean_increments":
                if self._frequencies is None:
                    raise ValueError("mean increments are CARoPE's alone")
                means = self._frequencies.mean_increments.astype(np.float32)
                return jax.device_put(means.reshape(shape.shape), shape.sharding)
            found: Any = self._run.state.constants
            for name in names:
                found = found[name]
            return found

        return jax.tree_util.tree_map_with_path(find, wanted)

    def evaluate(self, config: EvaluationConfig, documents: Documents, check: Check) -> Evaluation:
        """One protocol."""
        experiment = self._run.experiment
        model = EvaluatedModel(
            nll=self._nll,
            position=experiment.model.position,
            train_length=experiment.data.length,
            params=self._run.model.parameters,
            max_length=experiment.model.longest,
        )
        return evaluate(config, model, documents, self._run.tokenizer.eot_id, check=check)

    def training_windows(self, batches: int, check: Check) -> Iterator[np.ndarray]:
        """The first training batches' tokens."""
        data = load_dataset(self._run.experiment.data, self._run.tokenizer)
        iterator = data.batches(self._run.experiment.data)
        try:
            for _ in range(batches):
                check()
                yield next(iterator)["inputs"]
        finally:
            iterator.close()


def small(evaluation: Evaluation) -> dict[str, Any]:
    """What the report needs of an evaluation: sums and counts, rounded to 1e-3 nats."""
    data: dict[str, Any] = {
        "results": [
            [r.length, None if r.nll is None else float(f"{r.nll:.7g}"), r.tokens]
            for r in evaluation.results
        ]
    }
    if evaluation.targets_hash is not None:
        data["targets_hash"] = evaluation.targets_hash
    entries = evaluation.unit_sums
    if entries:
        data["units"] = list(entries[0].units)
        data["ends"] = [entry.end for entry in entries]
        data["starts"] = [entry.start for entry in entries]
        data["counts"] = [list(entry.counts) for entry in entries]
        data["sums"] = [[round(s, 3) for s in entry.sums] for entry in entries]
    return data


class _Facts(NamedTuple):
    seconds: float
    rate: float


def _speed(rows: list[dict[str, Any]], tokens_per_update: int) -> _Facts:
    seconds, before = 0.0, 0
    for row in rows:
        seconds += (row["step"] - before) * tokens_per_update / row["tokens_per_second"]
        before = row["step"]
    return _Facts(seconds, float(np.median([row["tokens_per_second"] for row in rows])))


def _training_facts(folder: Path, run: LoadedRun) -> dict[str, Any]:
    rows = read_metrics(epath.Path(folder))
    experiment = run.experiment
    speed = _speed(rows, experiment.tokens_per_update)
    tail = [row["loss"] for row in rows[-max(1, len(rows) // 10) :]]
    return {
        "loss": float(f"{math.fsum(tail) / len(tail):.6g}"),
        "losses": [
            [row["step"], round(row["loss"], 4)] for row in rows[:: max(1, len(rows) // 20)]
        ],
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["step"] * experiment.tokens_per_update,
        "parameters": run.model.parameters,
        "flops_per_token": flops_per_token(experiment.model, experiment.data.length),
        "tokens_per_second": round(speed.rate),
        "seconds": round(speed.seconds, 1),
    }


class _Log:
    """A text file that also says its last line."""

    def __init__(self, path: Path, say: Say) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._say = path.open("a"), say

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, text: str) -> int:
        """Writes on, and says each line."""
        for line in text.splitlines():
            if line.strip():
                self._say(line.strip())
        return self._file.write(text)

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()
