"""Checkpoints that appear whole or not at all, and that are checked before and after reading."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import grain
import jax
import orbax.checkpoint as ocp
from etils import epath
from grain.checkpoint import CheckpointRestore, CheckpointSave
from orbax.checkpoint import checkpoint_managers

from carope_jax.training._distributed import failing_together
from carope_jax.training._fingerprint import fingerprints
from carope_jax.training._manifest import (
    CheckpointCorrupt,
    CheckpointMismatch,
    by_path,
    check_leaves,
    first_few,
    plain_json,
    seal,
    shape_and_dtype,
    unseal,
)

_STATE, _DATA, _INFO = "state", "data", "info"
# Of the data, in the manifest: what any number of processes can go on from, or how many it needs.
_POSITION, _PROCESSES = "position", "processes"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and which of them stay."""

    keep: int = 3
    """How many of the newest checkpoints to keep."""

    keep_period: int | None = None
    """Checkpoints whose step is a multiple of this are never deleted (none: no such steps)."""

    every: int = 1000
    """Steps between two checkpoints."""

    asynchronous: bool = True
    """Write files in the background while training goes on."""

    def __post_init__(self) -> None:
        for name in ("keep", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.keep_period is not None and self.keep_period < 1:
            raise ValueError(f"keep_period must be at least 1 or None, got {self.keep_period}")


class SaveFailed(OSError):  # noqa: N818 - named for what happened
    """A checkpoint could not be written, for want of room perhaps; earlier ones are whole."""


class Restored(NamedTuple):
    """What `Checkpoints.restore` gives back."""

    step: int
    """Updates done when the checkpoint was made."""

    state: Any
    """The state: the abstract state's structure, holding arrays with its shardings."""

    info: dict[str, Any]
    """The facts saved beside the state."""


class Checkpoints:
    """The checkpoints of one run, in one folder, a sub-folder a step.

    A step holds the state, the position of the data and facts about the run. They are written to a
    temporary place and become visible together, once all of it is complete. One run writes to a
    folder at a time; any number may read, and reading changes nothing on disk.

    With several processes, all of them call the same methods in the same order.

    Args:
        folder: Where the checkpoints are: a local path or a `gs://` one. The first `save` makes it
            and clears away what an interrupted one left there.
        config: When checkpoints are written, and which of them stay.
    """

    def __init__(self, folder: str | epath.Path, config: CheckpointConfig) -> None:
        # Orbax takes absolute paths only.
        self._folder = epath.Path(folder).expanduser().resolve()
        self._config = config
        self._names = ocp.path.step.standard_name_format()
        self._writer: ocp.CheckpointManager | None = None
        _quiet_orbax()

    def save(
        self, step: int, state: Any, *, data: grain.DatasetIterator | None, info: Mapping[str, Any]
    ) -> None:
        """Saves one step; returns once the arrays may be donated or deleted.

        Waits for the previous save, copies the arrays to the host and, when asynchronous, writes
        them in the background: a failure there is raised by the next `save`, `wait` or `close`.

        Args:
            step: Updates done, which is also the index of the next batch.
            state: A pytree of `jax.Array`, of any sharding; no PRNG keys, no complex numbers.
            data: The data iterator, whose position is taken now.
            info: A small dictionary that JSON can hold, given back by `restore` and `info`.

        Raises:
            ValueError: The step is negative or exists already, the state holds something other
                than arrays of plain numbers, or JSON can't hold the info unchanged.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        info = plain_json(info)
        arrays = by_path(state)
        for path, leaf in arrays.items():
            if not isinstance(leaf, jax.Array):
                raise ValueError(f"state must hold jax.Array only, got {type(leaf)} at {path}")
        self.wait()
        if step in self.steps():
            raise ValueError(f"step {step} is already saved in {self._folder}")
        sums = fingerprints(arrays)
        where_data = _where(data)
        manifest = {
            "step": step,
            "leaves": {path: [*shape_and_dtype(leaf), sums[path]] for path, leaf in arrays.items()},
            "data": where_data,
            "info": info,
        }
        items: dict[str, Any] = {
            _INFO: ocp.args.JsonSave(seal(manifest)),
            # Orbax refuses arrays without elements; the manifest's shape and type say it all.
            _STATE: ocp.args.StandardSave({path: x for path, x in arrays.items() if x.size}),
        }
        if data is not None and _POSITION not in where_data:
            items[_DATA] = CheckpointSave(_SealedPosition(data.get_state()))
        if self._writer is None:
            self._writer = self._new_writer()
        # Forced, because when to save is the caller's decision and not Orbax's.
        with self._saving():
            self._writer.save(step, args=ocp.args.Composite(**items), force=True)

    def steps(self) -> list[int]:
        """The complete checkpoints on disk, oldest first; one still being written is not listed."""
        return sorted(found.step for found in self._names.find_all(self._folder))

    def latest(self) -> int | None:
        """The newest complete checkpoint, or None where there is none."""
        return max(self.steps(), default=None)

    def info(self, step: int) -> dict[str, Any]:
        """The facts saved with a step.

        Raises:
            FileNotFoundError: There is no such step.
            CheckpointCorrupt: They can't be read, or were damaged.
        """
        return self._manifest(self._existing(step))["info"]

    def fingerprints(self, step: int) -> dict[str, int]:
        """The fingerprint saved with each array of a step, by its path; no array is read.

        Raises:
            FileNotFoundError: There is no such step.
            CheckpointCorrupt: They can't be read, or were damaged.
        """
        leaves = self._manifest(self._existing(step))["leaves"]
        return {path: leaf[2] for path, leaf in leaves.items()}

    def restore(
        self,
        abstract_state: Any,
        *,
        step: int | None = None,
        data: grain.DatasetIterator | None = None,
    ) -> Restored:
        """Restores a step, with the shardings asked for, whatever those it was saved with.

        Paths, shapes and types are compared before any array is read, every array's fingerprint
        after it. The data iterator is moved last, so a failed restore leaves it where it was unless
        the position itself can't be restored.

        Args:
            abstract_state: A pytree of `jax.ShapeDtypeStruct` with shardings.
            step: Which step; None means the newest.
            data: The iterator to move to the saved position; None leaves the data aside.

        Raises:
            FileNotFoundError: The folder or the step is missing, or no step is complete.
            CheckpointMismatch: The checkpoint has other leaves, shapes or types, or no position for
                the data (of as many processes as there are now).
            CheckpointCorrupt: It can't be read, or what was read is not what was saved.
            ValueError: A leaf of `abstract_state` has no sharding.
        """
        wanted = _with_shardings(abstract_state)
        self.wait()
        with failing_together():
            step = self._existing(step)
            manifest = self._manifest(step)
            where = f"checkpoint {step} in {self._folder}"
            check_leaves(wanted, manifest["leaves"], where)
            position = None if data is None else self._position(step, manifest["data"], where)
        state = self._read_state(step, wanted, manifest["leaves"])
        if data is not None:
            try:
                data.set_state(position)
            except ValueError as error:
                raise CheckpointMismatch(f"{where}: {error}") from error
        structure = jax.tree.structure(abstract_state)
        return Restored(step, jax.tree.unflatten(structure, state.values()), manifest["info"])

    def restore_parameters(
        self, abstract_branches: Mapping[str, Any], *, step: int | None = None
    ) -> Restored:
        """Restores some branches of a state, such as its parameters, and reads no other array.

        For evaluation, and for importers: neither the optimizer's arrays nor its structure are
        needed. The branches that are asked for are compared and checked as `restore` does.

        Args:
            abstract_branches: By the name of the branch (`params`, `constants`, `step`), trees of
                `jax.ShapeDtypeStruct` with shardings.
            step: Which step; None means the newest.

        Raises:
            FileNotFoundError, CheckpointMismatch, CheckpointCorrupt, ValueError: As `restore` does.
        """
        wanted = _with_shardings(dict(abstract_branches))
        self.wait()
        with failing_together():
            step = self._existing(step)
            manifest = self._manifest(step)
            leaves = {
                path: leaf
                for path, leaf in manifest["leaves"].items()
                if path.partition("/")[0] in abstract_branches
            }
            check_leaves(wanted, leaves, f"checkpoint {step} in {self._folder}")
        state = self._read_state(step, wanted, leaves)
        structure = jax.tree.structure(dict(abstract_branches))
        return Restored(step, jax.tree.unflatten(structure, state.values()), manifest["info"])

    def wait(self) -> None:
        """Waits until the last `save` is complete, and raises what went wrong with it."""
        if self._writer is not None:
            with self._saving():
                self._writer.wait_until_finished()

    def close(self) -> None:
        """Waits for the last `save` and frees the background threads."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._saving():
                writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the devices' or the machine's trouble, not the disk's
        except Exception as error:
            # As when reading, errors are of many kinds.
            reason = str(error).partition("\n")[0][:200]
            newest = self.latest()
            raise SaveFailed(
                f"a checkpoint can't be written to {self._folder} ({type(error).__name__}: "
                f"{reason}); "
                + (f"checkpoint {newest} is good" if newest is not None else "there is none yet")
            ) from error

    def _new_writer(self) -> ocp.CheckpointManager:
        keep: list[checkpoint_managers.PreservationPolicy] = [
            checkpoint_managers.LatestN(self._config.keep)
        ]
        if self._config.keep_period is not None:
            keep.append(checkpoint_managers.EveryNSteps(self._config.keep_period))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            enable_async_checkpointing=self._config.asynchronous,
            cleanup_tmp_directories=True,
            # A step that a crash left half deleted must not stop the run that would finish it.
            lightweight_initialize=True,
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def _existing(self, step: int | None) -> int:
        if not self._folder.exists():
            raise FileNotFoundError(f"no such checkpoint folder: {self._folder}")
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(f"no complete checkpoint in {self._folder}")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise FileNotFoundError(f"no checkpoint {step} in {self._folder}, only {steps}")
        return step

    def _manifest(self, step: int) -> dict[str, Any]:
        sealed = self._read(step, _INFO, ocp.args.JsonRestore())
        try:
            manifest = unseal(sealed)
        except ValueError as error:
            raise self._corrupt(step, str(error)) from error
        if manifest["step"] != step:
            raise self._corrupt(step, f"it was saved as step {manifest['step']}")
        return manifest

    def _position(self, step: int, data: dict[str, Any], where: str) -> Any:
        """The data's position, of every process or of this one."""
        if _POSITION in data:
            return data[_POSITION]
        if data[_PROCESSES] != jax.process_count():
            raise CheckpointMismatch(
                f"{where} holds the data's position for {data[_PROCESSES] or 'no'} "
                f"process(es), this run has {jax.process_count()}"
            )
        sealed = _SealedPosition(None)
        self._read(step, _DATA, CheckpointRestore(sealed))
        return sealed.position

    def _read_state(
        self, step: int, wanted: dict[str, Any], saved_leaves: dict[str, Any]
    ) -> dict[str, jax.Array]:
        on_disk = {path: leaf for path, leaf in wanted.items() if 0 not in leaf.shape}
        with failing_together():
            restore_args = ocp.checkpoint_utils.construct_restore_args(on_disk)
            args = ocp.args.PyTreeRestore(on_disk, restore_args, partial_restore=True)
            read = self._read(step, _STATE, args)
        state = {
            path: read[path]
            if path in read
            else jax.numpy.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for path, leaf in wanted.items()
        }
        sums = fingerprints(state)
        damaged = [path for path, value in sums.items() if value != saved_leaves[path][2]]
        if damaged:
            raise self._corrupt(step, f"damaged since it was saved: {first_few(damaged)}")
        return state

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        path = self._names.find_step(self._folder, step).path
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
                return reader.restore(path, args=ocp.args.Composite(**{item: args}))[item]
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the devices' or the machine's trouble, not the files'
        except Exception as error:
            # Orbax and TensorStore report damage as errors of many kinds, some of them pages long.
            reason = str(error).partition("\n")[0][:200]
            cause = f"{item} can't be read ({type(error).__name__}: {reason})"
            raise self._corrupt(step, cause) from error

    def _corrupt(self, step: int, cause: str) -> CheckpointCorrupt:
        earlier = [other for other in self.steps() if other < step]
        advice = f"try step {earlier[-1]}" if earlier else "there is no earlier step to try"
        return CheckpointCorrupt(f"checkpoint {step} in {self._folder}: {cause}; {advice}")


def _with_shardings(abstract_state: Any) -> dict[str, Any]:
    wanted = by_path(abstract_state)
    for path, leaf in wanted.items():
        if getattr(leaf, "sharding", None) is None:
            raise ValueError(f"abstract_state needs a sharding for every leaf; {path} has none")
    return wanted


def _where(data: grain.DatasetIterator | None) -> dict[str, Any]:
    """What the manifest says of the data: its position, if that is every process's."""
    if data is None:
        return {_PROCESSES: 0}
    if getattr(data, "is_shared", False):
        return {_POSITION: data.get_state()}
    return {_PROCESSES: jax.process_count()}


class _SealedPosition:
    """A data iterator's position as Grain's checkpoint arguments take it, under a checksum.

    Grain's handler writes one file a process, from what `get_state` gives. Taking the position here
    rather than in the handler fixes it at the moment of the save.
    """

    def __init__(self, position: Any) -> None:
        self.position = position
        self._saved = json.dumps(seal(position)).encode() if position is not None else b""

    def get_state(self) -> bytes:
        return self._saved

    def set_state(self, saved: bytes) -> None:
        self.position = unseal(json.loads(saved))

    def start_prefetch(self) -> None:
        """What Grain calls after `set_state`; there is nothing to fetch yet."""


def _quiet_orbax() -> None:
    """Holds back the lines that Orbax logs at level INFO, about sixty a save.

    They go to absl's logger, which passes them on wherever the root logger shows INFO. Warnings
    stay, and so does a level that someone has set on purpose.
    """
    logger = logging.getLogger("absl")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
