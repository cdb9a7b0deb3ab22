"""Tasks in processes of their own, or in this one: with progress, and stopped cleanly."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from carope_jax.data._preparing import Calls

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_Function = Callable[[_Task, Calls], _Result]

_calls: Calls | None = None


class Stopped(Exception):  # noqa: N818 - named for what happened
    """The parent has ended, or wants to."""


def run_tasks(
    function: _Function[_Task, _Result],
    tasks: Sequence[_Task],
    workers: int,
    calls: Calls,
) -> Generator[tuple[int, _Result], None, None]:
    """Gives (number of the task, result) as each is done; in the tasks' order with one worker.

    Args:
        function: of a module, as other processes must find it.
        tasks: what can be pickled, like the results.
        workers: processes; with 1 all is done in this one.
        calls: what this process calls, also for the others.

    Raises:
        ChildProcessError: a process has died.
        Exception: what the function or `calls.check` raises; the other tasks are stopped first.
    """
    if workers == 1 or len(tasks) < 2:
        for number, task in enumerate(tasks):
            yield number, function(task, calls)
        return
    # Not forked: jax, which this package stands beside, runs threads.
    context = multiprocessing.get_context("spawn")
    stop, reports = context.Event(), context.Queue()
    thread = threading.Thread(target=_pass_on, args=(reports, calls.report), daemon=True)
    thread.start()
    pool = futures.ProcessPoolExecutor(
        min(workers, len(tasks)),
        mp_context=context,
        initializer=_enter,
        initargs=(stop, reports, os.getpid()),
    )
    try:
        numbers = {pool.submit(_call, function, task): i for i, task in enumerate(tasks)}
        waiting = set(numbers)
        while waiting:
            calls.check()
            done, waiting = futures.wait(waiting, 0.2, futures.FIRST_COMPLETED)
            for future in done:
                yield numbers[future], future.result()
    except BrokenProcessPool:
        calls.check()  # the signal that ended this one may have ended all
        raise ChildProcessError(
            "a worker process has died, as one does that is out of memory: run the same command "
            "again, maybe with fewer workers; what is finished is kept"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        reports.put(None)
        thread.join()


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
