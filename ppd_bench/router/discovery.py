"""Which engines are there: a file that may change, and heartbeats over ZeroMQ (paper, B.4: every 10 s, gone after 30 s).

A heartbeat is what vLLM's P2P connector sends from a DEALER socket, a msgpack map ``{"type": "P" or "D", "http_address":
"HOST:PORT", "zmq_address": ...}`` (``disagg_proxy_p2p_nccl_xpyd.py``), with three keys of our own, all optional: ``engine_id``,
``start_time`` (seconds; it changes with a restart) and ``leaving`` (true: forget me). Whoever may send one may have prompts and
keys sent to any address, so the socket binds loopback unless told otherwise, and can ask for a shared ``token``.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import LaunchError, SpecError
from ppd_bench.engine.endpoints import PROCESS_ROLES, EndpointSet, load_endpoints
from ppd_bench.policy.query import stable_unit

HEARTBEAT_S = 10.0
SILENCE_S = 30.0
"""An engine that was not heard of for so long is gone."""
MAX_HEARTBEAT_BYTES = 4096
MAX_MEMBERS = 1024
GOODBYE_MS = 500
"""How long the end of a sender waits for its last message to leave."""
ROLES = {"R": Role.REPLICA, "P": Role.PREFILL, "D": Role.DECODE}

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An engine that says, or of which a file says, that it is there. ``start_s``: its own time of start, where it tells."""

    role: Role
    host: str
    port: int
    engine_id: str | None = None
    start_s: float | None = None

    @property
    def address(self) -> Address:
        return self.host, self.port


# -- a file ----------------------------------------------------------------------------------------------------------


class EndpointsFile:
    """An endpoints file that is looked at again. ``problem``: what is wrong with its present content, null when nothing is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self._seen: tuple[int, ...] | None = None

    def read(self) -> EndpointSet:
        """What the file says now.

        Raises:
            SpecError: it cannot be read, or every problem of it.
        """
        try:
            self._seen = self._version()
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{self.path}: cannot be read ({error}); give an endpoints file") from error
        return load_endpoints(text, file=str(self.path))

    def reread(self) -> EndpointSet | None:
        """What it says where it has changed and can be used; null otherwise, and ``problem`` says why not."""
        try:
            if self._version() == self._seen:
                return None
            found = self.read()
        except (OSError, SpecError) as error:
            self.problem = str(error)
            return None
        self.problem = None
        return found

    def _version(self) -> tuple[int, ...]:
        stat = self.path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def members_of(endpoints: EndpointSet) -> tuple[Member, ...]:
    """A file's engines, in its order within each role."""
    return tuple(Member(role=e.role, host=e.host, port=e.port, engine_id=e.engine_id) for e in endpoints.endpoints)


# -- heartbeats ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One message. ``leaving``: the engine asks not to be sent anything more."""

    member: Member
    leaving: bool = False


def read_heartbeat(data: bytes, *, token: str = "") -> Heartbeat | str:
    """A message's content, or in a few words why it is none.

    Raises:
        LaunchError: the package msgpack is missing.
    """
    try:
        content = _package("msgpack").unpackb(data, strict_map_key=False)
    except LaunchError:
        raise
    except Exception:  # the package raises a dozen types, its own and built-in ones
        return "not msgpack"
    if not isinstance(content, Mapping):
        return "not a map"
    if token and not hmac.compare_digest(str(content.get("token")).encode(), token.encode()):
        return "wrong token"
    role, address = ROLES.get(str(content.get("type"))), read_address(content.get("http_address"))
    if role is None or address is None:
        return "no usable type and http_address"
    start_s, engine_id = content.get("start_time"), content.get("engine_id")
    member = Member(
        role=role,
        host=address[0],
        port=address[1],
        engine_id=engine_id if isinstance(engine_id, str) else None,
        start_s=float(start_s) if isinstance(start_s, int | float) else None,
    )
    return Heartbeat(member=member, leaving=content.get("leaving") is True)


def read_address(value: Any) -> Address | None:
    """Host and port of ``HOST:PORT``, with or without ``http://``, or null."""
    if not isinstance(value, str) or len(value) > 300:
        return None
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    plain = parts.scheme == "http" and not (parts.path.rstrip("/") or parts.query or parts.fragment or parts.username)
    return (host, port) if plain and host and port else None


class Registry:
    """Who was heard of lately. Pure: instants come in."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._heard: dict[Address, tuple[Member, float]] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for member, _ in self._heard.values())

    def heard(self, beat: Heartbeat, now_s: float) -> bool:
        """Take a heartbeat. Whether it changed who is there, or what is known of them."""
        address = beat.member.address
        known = self._heard.get(address)
        if beat.leaving:
            return self._heard.pop(address, None) is not None
        if known is None and len(self._heard) >= MAX_MEMBERS:
            return False
        self._heard[address] = beat.member, now_s
        return known is None or known[0] != beat.member

    def expire(self, now_s: float) -> bool:
        """Forget who was silent for too long. Whether anybody was."""
        silent = [address for address, (_, heard_s) in self._heard.items() if now_s - heard_s >= self._silence_s]
        for address in silent:
            del self._heard[address]
        return bool(silent)

    def silent_for_s(self, address: Address, now_s: float) -> float | None:
        """Seconds since this engine's last heartbeat; null where none is known."""
        known = self._heard.get(address)
        return None if known is None else now_s - known[1]


class HeartbeatListener:
    """A ROUTER socket that heartbeats arrive at. Needs the packages pyzmq and msgpack."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 30001, token: str = "") -> None:
        self.host = host
        self.port = port
        self.n_messages = 0
        self.n_malformed = 0
        self.last_problem: str | None = None
        self._token = token
        self._socket: Any = None
        self._context: Any = None

    def open(self) -> None:
        """Bind, so that a router that cannot listen says so when it starts. ``port`` 0 becomes what the system chose.

        Raises:
            LaunchError: a package is missing, or the address cannot be listened on.
        """
        zmq, self._context, socket = _open_socket("ROUTER")
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an engine that starts anew under its old name is heard
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEARTBEAT_BYTES)
        socket.setsockopt(zmq.IPV6, int(":" in self.host))
        try:
            socket.bind(_zmq_url(self.host, self.port or "*"))
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.term()
            raise LaunchError(
                f"heartbeats cannot be heard at {self.host}:{self.port} ({error}); give another address or port"
            ) from error
        self.port = int(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0").rpartition(":")[2])
        self._socket = socket

    async def run(self, take: Callable[[Heartbeat], None]) -> None:
        """Give every heartbeat to ``take`` until cancelled. Opens the socket where ``open`` was not called.

        Raises:
            LaunchError: as ``open``.
        """
        if self._socket is None:
            self.open()
        try:
            while True:
                self._on_message(await self._socket.recv_multipart(), take)
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._context.term()
            self._socket = None

    def _on_message(self, frames: Sequence[bytes], take: Callable[[Heartbeat], None]) -> None:
        self.n_messages += 1
        beat = read_heartbeat(frames[-1], token=self._token) if len(frames) > 1 else "no content"
        if isinstance(beat, str):
            self.n_malformed += 1
            self.last_problem = beat
        else:
            take(beat)


async def send_heartbeats(
    router: Address,
    beat: Mapping[str, Any],
    *,
    every_s: float = HEARTBEAT_S,
    say_goodbye: bool = True,
    look: Callable[[], Awaitable[Mapping[str, Any] | None]] | None = None,
) -> None:
    """Announce an engine until cancelled, and then that it is leaving. For engines that do not do it themselves.

    ``beat``: the content of a heartbeat, see the top of this module. ``look`` is asked before each one for what to add; null:
    the engine does not answer, and nothing is sent.

    Raises:
        LaunchError: a package is missing.
    """
    packb = _package("msgpack").packb
    _, context, socket = _open_socket("DEALER")
    try:
        socket.connect(_zmq_url(*router))
        while True:
            more = {} if look is None else await look()
            if more is not None:
                await socket.send(packb({**beat, **more}))
            await asyncio.sleep(every_s)
    finally:
        if say_goodbye:
            socket.send(packb({**beat, "leaving": True}))
        socket.close(linger=GOODBYE_MS)
        context.term()


def _open_socket(kind: str) -> tuple[Any, Any, Any]:
    zmq, context = _package("zmq"), _package("zmq.asyncio").Context()
    return zmq, context, context.socket(getattr(zmq, kind))


def _package(name: str) -> Any:
    """A package that only heartbeats need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LaunchError("heartbeats need the packages pyzmq and msgpack; run: pip install pyzmq msgpack") from error


def _zmq_url(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


# -- who takes which place -------------------------------------------------------------------------------------------


def place(
    members: Sequence[Member], slots: Sequence[tuple[str, Role]], held: Mapping[str, Address]
) -> dict[str, Member]:
    """Engines for the slots (worker id, role) of a topology, as far as they reach.

    An engine keeps the slot that it holds. The others are matched by rendezvous hashing, best pairs first, so that the result
    does not depend on the order in which they were heard, and one engine more or less moves few of the others (ROUTER.md B21).
    """
    by_address = {member.address: member for member in members}
    placed: dict[str, Member] = {}
    for slot, role in slots:
        member = by_address.get(held[slot]) if slot in held else None
        if member is not None and member.role is role:
            placed[slot] = by_address.pop(member.address)
    pairs = [
        (stable_unit(member.host, member.port, slot), slot, member)
        for slot, role in slots
        for member in by_address.values()
        if slot not in placed and member.role is role
    ]
    for _, slot, member in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2].address)):
        if slot not in placed and member.address in by_address:
            placed[slot] = by_address.pop(member.address)
    return placed


def process_role(role: Role) -> Role:
    """What an engine must be to take a worker's place: D for a pD."""
    return role if role in PROCESS_ROLES else Role.DECODE
