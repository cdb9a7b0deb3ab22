"""Runs a study: every arm and seed, resumable at any point."""

import json
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
from rich.console import Console

from carope_jax._cli import write_whole
from carope_jax.study._config import Arm, Study
from carope_jax.study._overrides import Overrides, identity
from carope_jax.study._progress import StudyProgress
from carope_jax.study._results import (
    Result,
    Results,
    RunKey,
    check_unchanged,
    is_done,
    is_evaluated,
)
from carope_jax.study._work import Worker
from carope_jax.training import Experiment

_TIMES = "times.json"


class Step(NamedTuple):
    """An arm's runs of one seed: a sweep, or one at the rate found."""

    arm: Arm
    seed: int
    first: bool
    """Whether it is the arm's first seed, which sweeps the rates if the arm has a sweep."""


class RunCounts(NamedTuple):
    """What a call of `run_study` left."""

    done: int
    failed: tuple[str, ...]
    """Runs whose loss was not finite."""
    waiting: tuple[str, ...]
    """Arms that need another one's result, and why it isn't there."""


def steps(study: Study, arms: tuple[Arm, ...]) -> list[Step]:
    """The order: the core arms' sweeps, their further seeds, then the others alike."""
    found = []
    for group in ("core", "others"):
        members = [arm for arm in arms if arm.group == group]
        for place in range(max((len(arm.seeds) for arm in members), default=0)):
            found += [Step(a, a.seeds[place], place == 0) for a in members if place < len(a.seeds)]
    return found


def run_study(
    study: Study,
    workdir: Path,
    worker: Worker,
    *,
    console: Console,
    command: str,
    only: str | None = None,
    keep: bool = False,
    seeded: Path | None = None,
) -> RunCounts:
    """Trains and evaluates what is not finished yet.

    Args:
      study: what to run.
      workdir: results in `results/`, and the runs that are under way in `runs/`.
      worker: trains and evaluates.
      console: for the progress.
      command: recorded in each result.
      only: a pattern of arms' names.
      keep: leave the finished runs' folders with their checkpoints.
      seeded: a folder of results to start from.

    Raises:
      Interrupted: a signal came; what is new is saved.
      ValueError: the pattern matches nothing, or a result is of another study: arm and field are
        named.
    """
    return _Runner(study, workdir, worker, console, command, keep).run(only, seeded)


class _Waiting(Exception):  # noqa: N818 - named for what happened
    """An arm can't run before another one has."""


class _Runner:
    def __init__(
        self,
        study: Study,
        workdir: Path,
        worker: Worker,
        console: Console,
        command: str,
        keep: bool,
    ) -> None:
        self.study, self.workdir, self.worker = study, workdir, worker
        self.console, self.command, self.keep = console, command, keep
        self.results = Results(workdir / "results")
        self.waiting: dict[str, str] = {}

    def run(self, only: str | None, seeded: Path | None) -> RunCounts:
        arms = self.study.matching(only)
        if seeded is not None:
            if not seeded.is_dir():
                raise FileNotFoundError(f"no folder of results {seeded}")
            self.results.add_from(Results(seeded))
        self._check_results()
        order = steps(self.study, arms)
        total = sum(len(self._rates(step) or (None,)) for step in order)
        with StudyProgress(self.console, self.study.name, total, self._times()) as self.progress:
            for step in order:
                try:
                    self._step(step)
                except _Waiting as reason:
                    self.waiting.setdefault(step.arm.name, str(reason))
                    self.progress.skip(len(self._rates(step) or (None,)))
        failed = tuple(
            f"{key.name}: {result['error']}"
            for key, result in self.results
            if not is_done(result) and any(key.arm == arm.name for arm in arms)
        )
        done = sum(is_done(result) for _, result in self.results)
        return RunCounts(done, failed, tuple(f"{a} {why}" for a, why in self.waiting.items()))

    def _check_results(self) -> None:
        """Refuses results of another study before anything is trained."""
        for key, result in self.results:
            arm = self.study.arm(key.arm)
            try:
                experiment = self._experiment(arm, key)
            except _Waiting:
                continue
            check_unchanged(result, identity(experiment), self._evaluated_as(arm))

    def _step(self, step: Step) -> None:
        keys = [RunKey(step.arm.name, step.seed, rate) for rate in self._known_rates(step)]
        for key in keys:
            if self.results.get(key) is None:
                self._train(step.arm, key)
            else:
                self.progress.skip(1)
        best = self.results.best_rate(self.study, step.arm)
        for key in keys:
            result = self.results.get(key)
            if key.rate == best and result is not None and is_done(result):
                self._evaluate(step.arm, key, result)
        for key in keys:
            if not self.keep:
                shutil.rmtree(self._folder(key), ignore_errors=True)

    def _rates(self, step: Step) -> tuple[float, ...] | None:
        return self.study.rates_of(step.arm) if step.first else None

    def _known_rates(self, step: Step) -> tuple[float, ...]:
        rates = self._rates(step)
        if rates is not None:
            return rates
        best = self.results.best_rate(self.study, step.arm)
        if best is None:
            raise _Waiting(f"has no best rate: the sweep of {step.arm.rate_of or step.arm.name}")
        return (best,)

    def _needed(self, arm: Arm, seed: int) -> Overrides:
        if arm.need is None:
            return {}
        other = self.study.arm(arm.need.arm)
        rate = self.results.best_rate(self.study, other)
        result = None if rate is None else self.results.get(RunKey(other.name, seed, rate))
        if result is None or not is_done(result):
            raise _Waiting(f"needs {other.name} of seed {seed}, which has not ended well")
        return arm.need.overrides(result)

    def _experiment(self, arm: Arm, key: RunKey) -> Experiment:
        needed = self._needed(arm, key.seed)
        return self.worker.resolve(self.study.experiment(arm, key.seed, key.rate, needed))

    def _evaluated_as(self, arm: Arm) -> dict[str, Any]:
        """What decides the evaluations' numbers, as it comes back from JSON."""
        measurement = self.study.measurement
        settings = {
            "multiples": measurement.multiples,
            "protocols": measurement.protocols,
            "max_anchors": measurement.max_anchors,
            "variants": {v.name: [v.overrides, v.protocols] for v in arm.variants},
        }
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain

    def _train(self, arm: Arm, key: RunKey) -> None:
        experiment = self._experiment(arm, key)
        began = time.monotonic()
        self.progress.begin(key.name)
        result: Result = {
            "study": self.study.name,
            "arm": arm.name,
            "seed": key.seed,
            "rate": key.rate,
            "status": "done",
            "experiment": identity(experiment),
            "made_by": {"command": self.command, **made_by()},
        }
        try:
            found = self.worker.train(experiment, self._folder(key), self.progress.say)
        except FloatingPointError as error:
            result |= {"status": "failed", "error": str(error)}
            found = {}
        else:
            self._check_data(key, found)
        self.results.put(key, result | found | {"evaluations": {}})
        self._took(time.monotonic() - began)
        self.progress.end(_in_short(self.results.get(key)))

    def _check_data(self, key: RunKey, found: Result) -> None:
        for other, result in self.results:
            if is_done(result) and result["data"] != found["data"]:
                raise ValueError(
                    f"the data or its tokenizer has changed since {other.name} was run: "
                    f"{key.name} can't be compared with it; use another --workdir"
                )

    def _evaluate(self, arm: Arm, key: RunKey, result: Result) -> None:
        if is_evaluated(result):
            return
        folder = self._folder(key)
        self.progress.begin(f"{key.name}, evaluation")
        if not folder.exists():
            # The result outlived its checkpoint (it came from elsewhere): made once more.
            self.worker.train(self._experiment(arm, key), folder, self.progress.say)
        began = time.monotonic()
        measurement = self.study.measurement
        try:
            evaluations = self.worker.evaluate(folder, arm, measurement, self.progress.say)
        except FloatingPointError as error:
            self.results.put(key, result | {"status": "failed", "error": str(error)})
            return
        seconds = round(time.monotonic() - began, 1)
        evaluated = {"evaluated_as": self._evaluated_as(arm), "evaluation_seconds": seconds}
        self.results.put(key, result | evaluated | {"evaluations": evaluations})
        self.progress.note(f"{key.name} evaluated in {seconds:.0f} s")

    def _folder(self, key: RunKey) -> Path:
        return self.workdir / "runs" / key.name

    def _times(self) -> list[float]:
        path = self.workdir / _TIMES
        return json.loads(path.read_text()) if path.is_file() else []

    def _took(self, seconds: float) -> None:
        write_whole(self.workdir / _TIMES, json.dumps([*self._times(), round(seconds, 1)]))


def made_by() -> dict[str, Any]:
    """The commit and the versions that a result comes from."""
    return {
        "commit": _commit(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
    }


def _commit() -> str | None:
    """The commit of the package's checkout, with + where the package differs from it; or None."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "..")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _in_short(result: Result | None) -> str:
    if result is None or not is_done(result):
        return "failed" if result is None else f"failed: {result['error']}"
    training = result["training"]
    return (
        f"validation {result['validation']['nll']:.4f}, "
        f"{training['tokens_per_second']:,} tok/s, {training['seconds']:.0f} s"
    )
