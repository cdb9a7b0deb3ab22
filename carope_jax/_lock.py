"""A folder that one process at a time writes to."""

import fcntl
import os
import socket
from types import TracebackType
from typing import Self

from etils import epath

_NAME = "lock"


class FolderInUse(ValueError):  # noqa: N818 - named for what happened
    """Another process writes to the folder."""


class FolderLock:
    """Held while entered, and let go by the system however the process ends.

    Buckets have no locks: there it does nothing.

    Args:
        folder: which is made where it is missing.
    """

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def __enter__(self) -> Self:
        """Raises FolderInUse where another process has it, named by what that one wrote."""
        if "://" in str(self._folder):
            return self
        self._folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self._folder / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            raise FolderInUse(
                f"{self._folder} is in use by another run ({holder}): wait for it, stop it, or "
                "give another folder"
            ) from error
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
