"""The few file operations that the run log needs, in one place so that tests can put a faulty disk under it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from .errors import RunLogError


class Disk:
    """The real one. Everything raises OSError as the system does."""

    def make_folder(self, path: Path) -> None:
        """Also its parents; each new one's entry is on the disk when this returns."""
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self.sync_folder(folder.parent)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def open_append(self, path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def lock(self, handle: int, path: Path) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunLogError(f"{path}: another process is writing this run; give another folder") from error
            raise

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def write(self, handle: int, data: bytes) -> int:
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def close(self, handle: int) -> None:
        os.close(handle)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)
