"""Tasks in processes of their own, or in this one: with progress, and stopped cleanly."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self, TypeVar

from carope_jax.data._preparing import Calls

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_Function = Callable[[_Task, Calls], _Result]

_calls: Calls | None = None


class Stopped(Exception):  # noqa: N818 - named for what happened
    """The parent has ended, or wants to."""


class Workers:
    """Processes that do tasks, made when they are first needed and ended on leaving.

    Args:
        count: how many; with 1, all is done in this process.
        calls: what this process calls, for the tasks of the others too.
    """

    def __init__(self, count: int, calls: Calls) -> None:
        self._count = count
        self._calls = calls
        self._stack = contextlib.ExitStack()
        self._pool: futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self, function: _Function[_Task, _Result], tasks: Sequence[_Task]
    ) -> Iterator[tuple[int, _Result]]:
        """Gives (number of the task, result) as each is done.

        Args:
            function: of a module, as other processes must find it.
            tasks: what can be pickled, like the results.

        Raises:
            ChildProcessError: a process has died.
            Exception: what the function or `calls.check` raises. Leave the workers then.
        """
        if self._count == 1 or len(tasks) < 2:
            for number, task in enumerate(tasks):
                yield number, function(task, self._calls)
            return
        try:
            pool = self._start()
            numbers = {pool.submit(_call, function, task): i for i, task in enumerate(tasks)}
            waiting = set(numbers)
            while waiting:
                self._calls.check()
                done, waiting = futures.wait(waiting, 0.2, futures.FIRST_COMPLETED)
                for future in done:
                    yield numbers[future], future.result()
        except BrokenProcessPool:
            self._calls.check()  # the signal that ended one may have ended all
            raise ChildProcessError(
                "a worker process has died, as one does that is out of memory: run the same "
                "command again, maybe with fewer workers; what is finished is kept"
            ) from None

    def _start(self) -> futures.ProcessPoolExecutor:
        if self._pool is None:
            # Not forked: jax, which this package stands beside, runs threads.
            context = multiprocessing.get_context("spawn")
            stop, reports = context.Event(), context.Queue()
            thread = threading.Thread(
                target=_pass_on, args=(reports, self._calls.report), daemon=True
            )
            thread.start()
            self._pool = futures.ProcessPoolExecutor(
                self._count,
                mp_context=context,
                initializer=_enter,
                initargs=(stop, reports, os.getpid()),
            )
            # Last in, first out: tasks end, then their processes, then what heard of them.
            self._stack.callback(thread.join)
            self._stack.callback(reports.put, None)
            self._stack.callback(self._pool.shutdown, cancel_futures=True)
            self._stack.callback(stop.set)
        return self._pool


def _pass_on(reports: Any, report: Callable[[int, int], None]) -> None:
    for numbers in iter(reports.get, None):
        report(*numbers)


def _enter(stop: Any, reports: Any, parent: int) -> None:
    """Makes a worker of a new process."""
    global _calls
    # Ctrl-C reaches all processes of a terminal: the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def check() -> None:
        if stop.is_set() or os.getppid() != parent:
            raise Stopped

    _calls = Calls(check, lambda size, tokens: reports.put((size, tokens)))


def _call(function: _Function[_Task, _Result], task: _Task) -> _Result:
    assert _calls is not None
    return function(task, _calls)
