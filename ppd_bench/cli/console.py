"""The terminal that verbs print to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; 160 columns where the output goes to a file."""
    from rich.console import Console  # here, because --help should not wait for it

    terminal = Console(highlight=False, soft_wrap=False, stderr=stderr)
    return terminal if terminal.is_terminal else Console(highlight=False, width=160, stderr=stderr)
