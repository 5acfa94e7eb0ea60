"""Messages between the processes of one load generator: Python objects over a socket pair, length first.

Only our own processes are at either end, so pickling is safe, and the engines' types need no second encoding.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import Any

HEADER_BYTES = 8


class Channel:
    """One end. Messages arrive whole and in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, end: socket.socket) -> Channel:
        """Take one end of ``socket.socketpair()``."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: object) -> None:
        """Hand the message to the kernel or its buffer; a peer that is gone is noticed by ``receive``."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

    async def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the peer has ended.
        """
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return pickle.loads(await self._reader.readexactly(int.from_bytes(header, "big")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the process at the other end has ended") from error

    def close(self) -> None:
        """The peer's ``receive`` raises EOFError."""
        self._writer.close()
