"""What a run is made of, read and checked before anything is compiled."""

import dataclasses
import hashlib
from typing import Any

from etils import epath

from carope_jax.data import Dataset, load_dataset
from carope_jax.training._config import Experiment
from carope_jax.training._distributed import check_agreement, failing_together
from carope_jax.training._feeding import open_batches
from carope_jax.training._plan import lay_out
from carope_jax.training._run import RunFolder, check_resumable


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run is made of, read and checked before anything is compiled."""

    folder: RunFolder
    experiment: Experiment
    """Resolved."""
    dataset: Dataset

    @property
    def info(self) -> dict[str, Any]:
        """What a checkpoint says of the data and the tokenizer."""
        return {"tokenizer": self.dataset.tokenizer.hash, "data": self.dataset.fingerprint}


def read_inputs(experiment: Experiment, workdir: str | epath.Path) -> Inputs:
    """Reads the data, resolves the experiment, and compares it with the run that is there, if any.

    Raises:
      FileNotFoundError: the corpus or the tokenizer is missing.
      ValueError: the text is too short, the tokenizer does not fit, the batch or the model does not
        divide over the mesh, or the folder holds a run that differs in what an update computes;
        every difference is named. Or another process can't read its inputs, or reads others.
    """
    with failing_together():
        inputs = _read(experiment, workdir)
    check_agreement(
        {
            "experiments": hashlib.sha256(repr(inputs.experiment).encode()).hexdigest(),
            **inputs.info,
        }
    )
    return inputs


def _read(experiment: Experiment, workdir: str | epath.Path) -> Inputs:
    folder = RunFolder(workdir)
    tokenizer = folder.tokenizer() if folder.exists() else None
    dataset = load_dataset(experiment.data, tokenizer)
    experiment = experiment.resolved(dataset.tokenizer.vocab_size)
    if folder.exists():
        check_resumable(folder.experiment(), experiment)
    if experiment.training.eval_every and not len(dataset.validation):
        raise ValueError(
            f"eval_every {experiment.training.eval_every} needs held-out documents, and the data "
            "has none: set it to 0"
        )
    batches, _ = open_batches(dataset, experiment.data, lay_out(experiment).batch)
    batches.close()
    return Inputs(folder, experiment, dataset)


def resolve(experiment: Experiment) -> Experiment:
    """The experiment with nothing left to derive; reads its data only if the vocabulary needs it.

    Raises:
      FileNotFoundError, ValueError: as `read_inputs` does.
    """
    if experiment.model.vocab_size is not None:
        return experiment.resolved(experiment.model.vocab_size)
    return experiment.resolved(load_dataset(experiment.data).tokenizer.vocab_size)
