"""A run's folder: the resolved experiment, the tokenizer, the checkpoints; and reading it back."""

import dataclasses
import difflib
import json
from typing import Any, NamedTuple

import dacite
import jax
import jax.numpy as jnp
from etils import epath

from carope_jax._cli import write_whole
from carope_jax.data import Tokenizer, load_tokenizer
from carope_jax.training._checkpoint import Checkpoints
from carope_jax.training._config import RESUMABLE, Experiment
from carope_jax.training._manifest import check_same
from carope_jax.training._mesh import MeshConfig, make_mesh
from carope_jax.training._state import Model, TrainState, abstract_model


class RunFolder:
    """Where a run keeps what it needs to go on and to be evaluated.

    Args:
      workdir: a local path or gs://.
    """

    def __init__(self, workdir: str | epath.Path) -> None:
        self.path = epath.Path(workdir).expanduser()
        self._experiment = self.path / "experiment.json"
        self._tokenizer = self.path / "tokenizer"
        self.checkpoints = self.path / "checkpoints"

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return self._experiment.exists()

    def begin(self, experiment: Experiment, tokenizer: Tokenizer) -> None:
        """Writes the tokenizer, then the resolved experiment: with it, the run exists."""
        self.path.mkdir(parents=True, exist_ok=True)
        tokenizer.save(self._tokenizer)
        write_whole(self._experiment, json.dumps(to_json(experiment), indent=2) + "\n")

    def experiment(self) -> Experiment:
        """The resolved experiment.

        Raises:
          FileNotFoundError: no run has begun here.
          ValueError: the file is not an experiment; the field is named.
        """
        if not self.exists():
            raise FileNotFoundError(f"no run in {self.path}: it has no {self._experiment.name}")
        try:
            fields = json.loads(self._experiment.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._experiment} is not JSON: {error}") from error
        return from_json(fields, str(self._experiment))

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer; its hash is checked."""
        return load_tokenizer(self._tokenizer)


def to_json(experiment: Experiment) -> dict[str, Any]:
    """The experiment as nested dicts that JSON can hold."""
    return dataclasses.asdict(experiment)


def from_json(fields: dict[str, Any], where: str) -> Experiment:
    """The inverse of `to_json`.

    Raises:
      ValueError: an unknown field (the nearest is named) or a value of the wrong type.
    """
    try:
        return dacite.from_dict(Experiment, fields, dacite.Config(cast=[tuple], strict=True))
    except dacite.UnexpectedDataError as error:
        raise ValueError(f"{where}: {unknown_field(sorted(error.keys)[0])}") from error
    except dacite.DaciteError as error:
        raise ValueError(f"{where}: {error}") from error


def unknown_field(name: str) -> str:
    """The message that says so, with the nearest field of an experiment."""
    known = [f.name for part in _parts(Experiment) for f in dataclasses.fields(part)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _parts(kind: type) -> list[type]:
    inner = [f.type for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.type)]
    return [kind, *(part for i in inner if isinstance(i, type) for part in _parts(i))]


def check_resumable(saved: Experiment, wanted: Experiment) -> None:
    """Raises a ValueError that names every difference which would change what a run computes."""
    ours, theirs = (
        {n: v for n, v in flat_fields(e).items() if not is_resumable(n)} for e in (wanted, saved)
    )
    check_same(ours, theirs, "the run's experiment")


def flat_fields(experiment: Experiment) -> dict[str, Any]:
    """Every field of an experiment by its dotted path."""

    def flat(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in fields.items():
            inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) else None
            out |= {prefix + name: value} if inner is None else inner
        return out

    return flat(to_json(experiment), "")


def is_resumable(field: str) -> bool:
    """Whether the field at a dotted path may differ when a run goes on."""
    return any(field == name or field.startswith(name + ".") for name in RESUMABLE)


class LoadedRun(NamedTuple):
    """A trained model, ready to be evaluated."""

    experiment: Experiment
    tokenizer: Tokenizer
    model: Model
    state: TrainState
    """Without the optimizer's, which is not read."""
    info: dict[str, Any]
    """What the checkpoint says of the data and the tokenizer."""


def load_run(
    workdir: str | epath.Path,
    *,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    devices: list[jax.Device] | None = None,
) -> LoadedRun:
    """The model of a run's newest (or given) checkpoint.

    Args:
      workdir: the run's folder.
      step: which checkpoint; None: the newest.
      mesh: how the devices are laid out; None: all of them replicas.
      devices: which; None: all.

    Raises:
      FileNotFoundError: there is no run, or no (such) checkpoint.
      CheckpointMismatch, CheckpointCorrupt: the checkpoint is not what the run's experiment says.
      ValueError: the tokenizer is not the one the checkpoint was trained with.
    """
    folder = RunFolder(workdir)
    experiment = folder.experiment()
    tokenizer = folder.tokenizer()
    model = abstract_model(
        experiment.model, make_mesh(MeshConfig() if mesh is None else mesh, devices)
    )
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=model.sharding.named(()))
    wanted = {"step": count, "params": model.params, "constants": model.constants}
    with Checkpoints(folder.checkpoints, experiment.checkpoint) as checkpoints:
        restored = checkpoints.restore_parameters(wanted, step=step)
    check_same(
        {"tokenizer": tokenizer.hash},
        {"tokenizer": restored.info["tokenizer"]},
        f"the checkpoint {restored.step} of {folder.path}",
    )
    state = TrainState(**restored.state, optimizer=())
    return LoadedRun(experiment, tokenizer, model, state, restored.info)
