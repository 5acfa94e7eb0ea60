"""One clear message and an exit code for every error that a user can cause or meet."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ppd_bench.core.errors import PpdBenchError, SpecError

BROKEN_PIPE_EXIT = 141


def guarded(run: Callable[[], None]) -> int:
    """Run a program; errors become a message on stderr and their exit code, never a traceback."""
    try:
        run()
    except SpecError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except PpdBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return BROKEN_PIPE_EXIT
    return 0
