"""SIGTERM and SIGHUP as a cancelled task, so that ``finally`` blocks run; Ctrl-C already is one under ``asyncio.run``."""

from __future__ import annotations

import asyncio
import signal
import threading

from ppd_bench.core.errors import Interrupted

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""A closed terminal (SIGHUP) must not leave engines behind either: they are in sessions of their own."""


class SignalsAsCancel:
    """Between ``install`` and ``uninstall`` an ending signal cancels the task that called ``install``."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._installed: list[signal.Signals] = []
        self._caught: list[signal.Signals] = []

    def install(self) -> None:
        """Take the signals over, except those that are ignored (nohup). Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._task = asyncio.current_task()
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
                self._installed.append(number)

    def uninstall(self) -> None:
        """Give the signals their default back."""
        for number in self._installed:
            asyncio.get_running_loop().remove_signal_handler(number)
        self._installed.clear()

    def raise_if_caught(self) -> None:
        """
        Raises:
            Interrupted: a signal came, in place of the cancellation that it caused.
        """
        if self._caught and self._task is not None:
            for _ in self._caught:
                self._task.uncancel()
            raise Interrupted(
                f"stopped by {self._caught[0].name}; all engines were ended; give the same command again to go on"
            )

    def _on_signal(self, number: signal.Signals) -> None:
        self._caught.append(number)
        if self._task is not None:
            self._task.cancel()
