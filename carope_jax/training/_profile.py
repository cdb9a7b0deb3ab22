"""A trace of a few updates, for TensorBoard or xprof."""

from typing import Any, Self

import jax


class Profiler:
    """Traces the updates from `first` to `last`, if any are asked for."""

    def __init__(self, folder: str, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps, self._running = folder, steps, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Begins the trace before update `first`."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, metrics: dict[str, Any]) -> None:
        """Ends it after update `last` is computed."""
        if self._running and self._steps is not None and step == self._steps[1]:
            jax.block_until_ready(metrics)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
