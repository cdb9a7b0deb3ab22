"""The training loop: batches in, updates, and on the way rows, validations and checkpoints."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from rich.console import Console

from carope_jax._interrupt import Interrupted, InterruptFlag
from carope_jax._lock import FolderLock
from carope_jax.evaluation import EvaluationConfig, evaluate
from carope_jax.training._checkpoint import Checkpoints
from carope_jax.training._distributed import (
    FailedElsewhere,
    failing_together,
    first_says,
    interrupt_flag,
    is_first,
)
from carope_jax.training._evaluate import beginnings, evaluated_model
from carope_jax.training._feeding import BatchPart, open_batches, place
from carope_jax.training._fingerprint import fingerprints, joint_fingerprint
from carope_jax.training._flops import flops_per_token, peak_flops
from carope_jax.training._inputs import Inputs
from carope_jax.training._manifest import by_path, check_same
from carope_jax.training._plan import Plan, make_plan, print_facts
from carope_jax.training._profile import Profiler
from carope_jax.training._records import (
    VALIDATION,
    NoRecords,
    ProgressLine,
    Records,
    Row,
    to_row,
)
from carope_jax.training._state import TrainState, initial_state
from carope_jax.training._step import Batch, make_nll_function


class NonFiniteLoss(FloatingPointError):  # noqa: N818 - named for what happened
    """The loss or the gradient is not a number any more; the message names the good checkpoint."""


def train(
    inputs: Inputs,
    *,
    console: Console,
    stop_at: int | None = None,
    profile_steps: tuple[int, int] | None = None,
) -> int:
    """Trains until the experiment's last step, from the newest checkpoint if there is one.

    Args:
      inputs: of `read_inputs`.
      console: for the start-up figures and the progress.
      stop_at: stop (and save) after this many updates, as if the run had been interrupted.
      profile_steps: the updates (first, last), counted from 1, whose trace goes to `profile/`.

    Returns:
      Updates done.

    Raises:
      Interrupted: SIGTERM or SIGINT came; what was new is saved.
      NonFiniteLoss: the loss or the gradient is NaN or infinite. Nothing of that step is saved.
      CheckpointMismatch, CheckpointCorrupt: the checkpoint can't be gone on from.
      FolderInUse: another process trains in the run's folder.
      SaveFailed: a checkpoint can't be written.
    """
    experiment, dataset = inputs.experiment, inputs.dataset
    with contextlib.ExitStack() as held, interrupt_flag() as flag:
        with failing_together():
            if is_first():
                held.enter_context(FolderLock(inputs.folder.path))
        began = time.monotonic()
        plan = make_plan(experiment)
        flag.check()
        facts = plan.facts(training_tokens=dataset.training_tokens)
        print_facts(facts, console)
        console.print(f"compiled in {time.monotonic() - began:.1f} s", highlight=False)
        _begin(inputs)
        data, part = open_batches(dataset, experiment.data, plan.layout.batch)
        checkpoints = Checkpoints(inputs.folder.checkpoints, experiment.checkpoint)
        try:
            with checkpoints:
                loop = _Loop(inputs, plan, data, part, checkpoints, flag, console)
                return loop.run(stop_at or experiment.training.steps, profile_steps)
        finally:
            data.close()


def _begin(inputs: Inputs) -> None:
    """Makes the run's folder, in process 0, and looks whether all see it."""
    with failing_together():
        if is_first():
            inputs.folder.begin(inputs.experiment, inputs.dataset.tokenizer)
    with failing_together():
        if not inputs.folder.exists():
            raise FailedElsewhere(
                f"{inputs.folder.path} is another folder here than in process 0: several hosts "
                "need one that they share, a bucket or a network disk"
            )


class _Loop:
    """One process's walk through the steps; what lives on the device is in `state` alone."""

    def __init__(
        self,
        inputs: Inputs,
        plan: Plan,
        data: grain.DatasetIterator[dict[str, np.ndarray]],
        part: BatchPart,
        checkpoints: Checkpoints,
        flag: InterruptFlag,
        console: Console,
    ) -> None:
        self.inputs, self.plan, self.data, self.part = inputs, plan, data, part
        self.checkpoints, self.flag, self.console = checkpoints, flag, console
        self.config = inputs.experiment.training
        self.step, self.state = self._first_state()
        self.saved = checkpoints.latest()
        self._nll = make_nll_function(plan.model)
        longest = 2 * inputs.experiment.data.length + 1
        self._validation = beginnings(inputs.dataset.validation, self.config.eval_tokens, longest)
        # The last update's metrics, not yet looked at: the device works on while the host checks.
        self._unchecked: dict[str, Any] | None = None

    def run(self, last: int, profile_steps: tuple[int, int] | None) -> int:
        """Updates until `last`, saving what is new at the end, whatever ends it but a NaN."""
        folder = self.inputs.folder.path
        records = (
            Records(folder, step=self.step, tensorboard=self.config.tensorboard)
            if is_first()
            else NoRecords()
        )
        unvalidated = None
        if self.step > 0 and self._due(self.config.eval_every, last):
            unvalidated = records.pop_unvalidated(self.step)
            # Process 0 has the row; all of them make its validation.
            if first_says(unvalidated is not None) and unvalidated is None:
                unvalidated = {"step": self.step}
        progress = ProgressLine(self.console, steps=self.config.steps, done=self.step)
        profiler = Profiler(str(folder / "profile"), profile_steps)
        with records, progress, profiler:
            try:
                for row in self._rows(last, unvalidated, profiler, progress.update):
                    records.write(row)
                    if is_first():
                        progress.row(row)
            except Interrupted:
                self._save()
                raise
            self._save()
        return self.step

    def _first_state(self) -> tuple[int, TrainState]:
        if self.checkpoints.latest() is None:
            config, seed = self.inputs.experiment.model, self.config.seed
            return 0, initial_state(config, self.plan.model, self.plan.layout.optimizer, seed)
        restored = self.checkpoints.restore(self.plan.layout.state, data=self.data)
        check_same(self.inputs.info, restored.info, f"the run in {self.inputs.folder.path}")
        self.console.print(f"resumed at step {restored.step}", highlight=False)
        return restored.step, restored.state

    def _rows(
        self,
        last: int,
        unvalidated: Row | None,
        profiler: Profiler,
        moved: Callable[[int], None],
    ) -> Iterator[Row]:
        """Updates until `last`; yields what is to be logged."""
        if unvalidated is not None:
            yield from self._validated(unvalidated)
        clock, counted = time.monotonic(), self.step
        while self.step < last:
            self.flag.check()
            batch = self._next_batch()
            profiler.before(self.step + 1)
            self.state, metrics = self.plan.step(self.state, batch)
            self._check_finite()
            self.step, self._unchecked = self.step + 1, metrics
            profiler.after(self.step, metrics)
            moved(self.step)
            validate = self._due(self.config.eval_every, last)
            save = self.step % self.inputs.experiment.checkpoint.every == 0
            if validate or save or self._due(self.config.log_every, last):
                self._check_finite()
                seconds = time.monotonic() - clock
                row = to_row(self.step, metrics) | self._speed(self.step - counted, seconds)
                if save:
                    row["params_fingerprint"] = self._params_fingerprint()
                yield from self._validated(row) if validate else (row,)
                clock, counted = time.monotonic(), self.step
            if save:
                self._save()

    def _validated(self, row: Row) -> Iterator[Row]:
        """The row with its validation, or without where that is interrupted: resuming makes it."""
        try:
            row = row | self._validate()
        except Interrupted:
            yield row
            raise
        yield row

    def _due(self, every: int, last: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == last)

    def _next_batch(self) -> Batch:
        return place(next(self.data), self.part, self.plan.layout.batch)

    def _check_finite(self) -> None:
        """Looks at the last update's loss and gradient, waiting for them if need be."""
        metrics, self._unchecked = self._unchecked, None
        if metrics is None or all(math.isfinite(metrics[m]) for m in ("loss", "grad_norm")):
            return
        self.checkpoints.wait()
        good = self.checkpoints.latest()
        raise NonFiniteLoss(
            f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])} "
            f"at step {self.step}; "
            + (f"checkpoint {good} is good" if good is not None else "no checkpoint was saved yet")
        )

    def _save(self) -> None:
        """Saves the state unless it is the one saved last; nothing that is not finite."""
        self._check_finite()
        if self.step != self.saved:
            self.checkpoints.save(self.step, self.state, data=self.data, info=self.inputs.info)
            self.saved = self.step

    def _params_fingerprint(self) -> int:
        return joint_fingerprint(fingerprints(by_path(self.state.params)))

    def _speed(self, updates: int, seconds: float) -> Row:
        experiment, mesh = self.inputs.experiment, self.plan.model.sharding.mesh
        rate = updates * experiment.tokens_per_update / seconds
        row: Row = {"tokens_per_second": rate}
        peak = peak_flops(jax.devices()[0])
        if peak is not None and mesh is not None:
            row["mfu"] = (
                rate * flops_per_token(experiment.model, experiment.data.length) / peak / mesh.size
            )
        return row

    def _validate(self) -> Row:
        experiment, length = self.inputs.experiment, self.inputs.experiment.data.length
        model = evaluated_model(
            experiment, self.plan.model, self._nll, self.state.params, self.state.constants
        )
        config = EvaluationConfig(
            lengths=(length, 2 * length), protocol="paper", batch_size=8, bootstrap_samples=1
        )
        eot_id = self.inputs.dataset.tokenizer.eot_id
        result = evaluate(config, model, self._validation, eot_id, check=self.flag.check)
        return {f"{VALIDATION}{r.length}": r.nll for r in result.results}
