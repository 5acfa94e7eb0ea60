"""Finding a YAML file by name or path: an explicit path, else the current folder's copy, else the bundled one."""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

import ppd_bench
from ppd_bench.core.errors import SpecError

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Text of a file, and the path by which messages name it."""

    text: str
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Files of one kind: ``folder`` in the current folder, and ``package`` inside the installed distribution."""

    noun: str
    folder: str
    package: str

    def read(self, name_or_path: str) -> Source:
        """The file of that name or path.

        Raises:
            SpecError: nothing of that name (the message lists the names), or a file that cannot be read.
        """
        if is_path(name_or_path):
            return self._text(Path(name_or_path), name_or_path)
        for folder, note in self._folders():
            candidate = folder / f"{name_or_path}.yaml"
            if candidate.is_file():
                return self._text(candidate, f"{self.folder}/{name_or_path}.yaml{note}")
        raise SpecError(self._unknown(name_or_path))

    def names(self) -> tuple[str, ...]:
        """Every name that ``read`` finds, sorted."""
        files = (file.name for folder, _ in self._folders() if folder.is_dir() for file in folder.iterdir())
        return tuple(sorted({name.removesuffix(".yaml") for name in files if name.endswith(".yaml")}))

    def _folders(self) -> Iterator[tuple[Traversable, str]]:
        yield Path(self.folder), ""
        try:
            yield importlib.resources.files(self.package), " (bundled)"
        except ModuleNotFoundError:  # a checkout: the wheel maps the top-level folder into the package
            yield Path(ppd_bench.__file__).parent.parent / self.folder, " (bundled)"

    def _text(self, file: Traversable, shown: str) -> Source:
        try:
            return Source(text=file.read_text(encoding="utf-8"), shown=shown)
        except FileNotFoundError as error:
            raise SpecError(f"{shown}: no such {self.noun} file; {self._advice()}") from error
        except OSError as error:
            raise SpecError(f"{shown}: cannot be read ({error.strerror}); {self._advice()}") from error
        except UnicodeDecodeError as error:
            raise SpecError(f"{shown}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.names(), n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        return f"unknown {self.noun} {name!r}{hint}; {self._advice()}"

    def _advice(self) -> str:
        return f"allowed: the path of a .yaml file, or one of {', '.join(self.names())}"


def is_path(name_or_path: str) -> bool:
    """Whether the text names a file rather than an entry of a shelf."""
    return name_or_path.endswith(SUFFIXES) or "/" in name_or_path or "\\" in name_or_path
