"""Files that are there whole or not at all, and OS errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ppd_bench.core.errors import StoreError
from ppd_bench.store.layout import TEMP_SUFFIX

_FREE_SPACE = "free some space, then give the same command again: finished points are kept"
_ELSEWHERE = "check its permissions, or choose another folder (--out)"
_ADVICE = {
    errno.ENOSPC: f"the disk is full; {_FREE_SPACE}",
    errno.EDQUOT: f"your disk quota is used up; {_FREE_SPACE}",
    errno.EFBIG: f"the file would pass the size limit of this process or file system; {_FREE_SPACE}",
    errno.EROFS: f"the file system is read-only; {_ELSEWHERE}",
    errno.EACCES: f"permission denied; {_ELSEWHERE}",
    errno.EPERM: f"permission denied; {_ELSEWHERE}",
}


@contextmanager
def explained(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn an ``OSError`` of the body into a ``StoreError`` that names ``path`` and what to do."""
    try:
        yield
    except OSError as error:
        unforeseen = f"{error.strerror or error}; check the disk and the path, then try again"
        reason = _ADVICE.get(error.errno or 0, unforeseen)
        raise StoreError(f"{path}: cannot {doing}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path`` that takes its place, on disk, when the body ends without an exception.

    Raises:
        StoreError: the file cannot be written (full disk, no permission); ``path`` is as before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMP_SUFFIX}")
    with explained(path):
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            # After the replacement there is nothing to remove; after a failure the half-written file only takes space.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically."""
    with replacing(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: without it a rename may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents where they are missing."""
    with explained(folder, "create the folder"):
        folder.mkdir(parents=True, exist_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that a killed process left in ``folder``."""
    with explained(folder, "remove temporary files"):
        for leftover in folder.glob(f".*{TEMP_SUFFIX}"):
            leftover.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """16 hex digits of the SHA-256 of a file's bytes."""
    with explained(path, "read"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def bytes_digest(data: bytes) -> str:
    """What ``file_digest`` gives for a file with this content."""
    return hashlib.sha256(data).hexdigest()[:16]
