"""A mesh of one device, and the command lines as functions."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

from carope_jax import command
from carope_jax.training import MeshConfig, make_mesh


@pytest.fixture
def one_device():
    """A mesh of one device."""
    return make_mesh(MeshConfig(), jax.devices()[:1])


class Ran:
    """A command's exit code and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run_command(capfd: pytest.CaptureFixture[str]) -> Callable[[str, Sequence[str]], Ran]:
    """Runs train.py or eval.py in this process, to its exit code."""

    def run(script: str, arguments: Sequence[Any]) -> Ran:
        main = importlib.import_module(script.removesuffix(".py")).main
        with pytest.raises(SystemExit) as stopped:
            command.run(main, [str(a) for a in arguments])
        out, err = capfd.readouterr()
        return Ran(int(stopped.value.code or 0), out, err)

    return run
