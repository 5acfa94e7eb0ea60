"""The error tree. A message says what happened, where, and what to do; the class carries the exit code.

::

    PpdBenchError (1)
    ├── Interrupted (130)          stopped by Ctrl-C
    ├── SpecError (2)              a sweep, workload or argument that cannot be used
    ├── EngineError (3)            engines that cannot be launched or have died
    │   ├── LaunchError
    │   ├── NotReady
    │   └── WorkerDied
    ├── StoreError (4)             run folders and their files
    │   ├── SchemaMismatch
    │   └── Incomplete
    └── TableError (5)             decision tables
        ├── WrongDomain
        └── NoEvidence

A request that fails is data (a status column), never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence


class PpdBenchError(Exception):
    """Base of every error that a user can cause or meet; ``exit_code`` is the process' exit status."""

    exit_code = 1


class Interrupted(PpdBenchError):
    """Ctrl-C during a verb that can go on later."""

    exit_code = 130


class SpecError(PpdBenchError):
    """Input that cannot be used. ``problems`` holds one line per problem, all found in one pass."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class EngineError(PpdBenchError):
    """An engine could not be used."""

    exit_code = 3


class LaunchError(EngineError):
    """Engines cannot be started here."""


class NotReady(EngineError):
    """An engine did not answer a real generation in time."""


class WorkerDied(EngineError):
    """An engine process ended while it was needed."""


class StoreError(PpdBenchError):
    """A run folder or one of its files cannot be read or written."""

    exit_code = 4


class SchemaMismatch(StoreError):
    """A file was written with a schema that this version cannot read."""


class Incomplete(StoreError):
    """A run lacks points that the command needs."""


class TableError(PpdBenchError):
    """A decision table cannot be used."""

    exit_code = 5


class WrongDomain(TableError):
    """The table was made for another topology, model, GPU or schema."""


class NoEvidence(TableError):
    """Too many cells of the table rest on nothing."""
