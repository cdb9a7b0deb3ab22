"""Several processes as one run: how they find one another, agree, and stop together."""

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

import dacite
import jax
import numpy as np
from jax.experimental import multihost_utils

from carope_jax._interrupt import Interrupted, InterruptFlag

# An error's message, as bytes: every process sends as many.
_MESSAGE_BYTES = 2048
# A process that ends on its own must not hold the others for JAX's five minutes.
_SHUTDOWN_SECONDS = 60


class FailedElsewhere(ValueError):  # noqa: N818 - named for what happened
    """Another process of the run has failed; the message says which, and how."""


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """How the processes of one run find one another; by default there is one."""

    coordinator: str | None = None
    """HOST:PORT of process 0, given to each process, with `processes` and `process`."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which one this is, from 0."""
    auto: bool = False
    """Ask the cluster for all three: Cloud TPU, GKE, Slurm, Open MPI, Kubernetes."""

    def __post_init__(self) -> None:
        """Raises a ValueError where the fields don't fit one another."""
        given = [self.coordinator, self.processes, self.process]
        if self.auto and given != [None] * 3:
            raise ValueError("distributed.auto finds the other three itself: leave them out")
        if None in given and given != [None] * 3:
            raise ValueError(
                "distributed.coordinator, distributed.processes and distributed.process go together"
            )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(
                    f"distributed.coordinator must be HOST:PORT, got {self.coordinator!r}"
                )
        if self.processes is not None and self.process is not None:
            if self.processes < 1:
                raise ValueError(f"distributed.processes must be at least 1, got {self.processes}")
            if not 0 <= self.process < self.processes:
                raise ValueError(
                    f"distributed.process must be from 0 to {self.processes - 1}, "
                    f"got {self.process}"
                )


def start_processes(config: DistributedConfig) -> None:
    """Connects this process with the others, before anything else asks for devices.

    Without any field, it does so only where the environment lists several TPU hosts
    (`TPU_WORKER_HOSTNAMES`, `MEGASCALE_COORDINATOR_ADDRESS`), as on GKE: nothing is asked over
    the network, so that a laptop never waits.

    Raises:
      ValueError: the others can't be found or reached, or there are some that this one was not
        told of.
    """
    detect = config.auto or (config.coordinator is None and _environment_has_hosts(os.environ))
    if detect or config.coordinator is not None:
        try:
            jax.distributed.initialize(
                config.coordinator,
                config.processes,
                config.process,
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            )
        except (RuntimeError, ValueError, OSError) as error:
            what = "no cluster was found" if detect else f"{config.coordinator} can't be reached"
            reason = str(error).partition("\n")[0][:200]
            raise ValueError(
                f"the processes of this run: {what} ({reason}); give --distributed.coordinator "
                "HOST:PORT --distributed.processes N --distributed.process I"
            ) from error
    elif jax.process_count() > 1:
        raise ValueError(
            f"these devices belong to {jax.process_count()} hosts: add --distributed.auto, and "
            "start the same command on each"
        )


def _environment_has_hosts(environment: Mapping[str, str]) -> bool:
    return (
        "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    )


def is_first() -> bool:
    """Whether this is the process that writes what all have computed."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns once every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def first_says(flag: bool) -> bool:
    """What process 0 says, in every process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """What is raised about inputs or files in one process ends all: none is left waiting.

    Every process enters it at the same point; inside, none may wait for another.

    Raises:
      FailedElsewhere: it went well here, and not in another process.
    """
    failure: Exception | None = None
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, dacite.DaciteError) as error:
        failure = error
    said = gather("" if failure is None else (str(failure) or repr(failure)))
    if failure is not None:
        raise failure
    for process, text in enumerate(said):
        if text:
            raise FailedElsewhere(f"process {process} has failed: {text}")


def check_agreement(facts: Mapping[str, Any]) -> None:
    """Raises a ValueError where the processes were not given the same; what differs is named."""
    for name, value in facts.items():
        digests = gather(json.dumps(value, sort_keys=True))
        if len(set(digests)) > 1:
            other = next(i for i, digest in enumerate(digests) if digest != digests[0])
            raise ValueError(
                f"the processes of this run were started with different {name}: process 0 has "
                f"{digests[0][:100]}, process {other} {digests[other][:100]}"
            )


def gather(text: str) -> list[str]:
    """Every process's text, cut to 2,048 bytes."""
    if jax.process_count() == 1:
        return [text]
    sent = np.zeros(_MESSAGE_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:_MESSAGE_BYTES], np.uint8)
    sent[: len(encoded)] = encoded
    received = np.asarray(multihost_utils.process_allgather(sent)).astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in received]


def interrupt_flag() -> InterruptFlag:
    """The flag to check while computing, of this process or of all."""
    return InterruptFlag() if jax.process_count() == 1 else SharedInterruptFlag()


class SharedInterruptFlag(InterruptFlag):
    """Set in every process once one of them is told to stop, at the same `check` in each.

    JAX itself listens for SIGTERM where there are several processes, and settles with the others
    on a point that none has passed. So each must call `check` equally often.
    """

    _checks = 0  # of this process's life: the settled point is a number of them

    def __enter__(self) -> Self:
        # A handler of Python's would take SIGTERM away from JAX; a Ctrl-C is passed on as one.
        self._previous = {signal.SIGINT: signal.signal(signal.SIGINT, self._pass_on)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
        os.kill(os.getpid(), signal.SIGTERM)

    def check(self) -> None:
        """Raises Interrupted, in all processes at once."""
        SharedInterruptFlag._checks += 1
        if multihost_utils.reached_preemption_sync_point(SharedInterruptFlag._checks):
            self._name = "SIGTERM"
        if self._name is not None:
            raise Interrupted(self._name)
