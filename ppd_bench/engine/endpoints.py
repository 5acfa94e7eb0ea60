"""Engines that answer at an address: those that were launched here, and those that already run (``--endpoints FILE``).

The file::

    tensor_parallel_size: 1        # optional
    engines:
      - {role: P, url: "http://10.0.0.1:8100"}
      - {role: D, url: "http://10.0.0.2:8100", engine_id: decode-a}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, Strict, ValidationError

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import SpecError
from ppd_bench.core.topology import Topology
from ppd_bench.workload.strict_model import Origin, StrictKeys, problems_of
from ppd_bench.workload.strict_yaml import read_mapping

PROCESS_ROLES = (Role.REPLICA, Role.PREFILL, Role.DECODE)
"""What a process can be. pD is D to the engine; only the policy tells them apart."""

URL_ALLOWED = "http://HOST:PORT, without a path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One running engine. ``worker_id`` is the topology's (R0, P0, D0 ...); ``role`` is the process' (R, P or D).

    ``engine_id`` is the name that its KV connector uses, where somebody knows it.
    """

    worker_id: str
    role: Role
    host: str
    port: int
    engine_id: str | None = None

    @property
    def url(self) -> str:
        """``http://HOST:PORT``, brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSet:
    """Engines of one layout, in the order of ``layout.workers``."""

    layout: Topology
    endpoints: tuple[Endpoint, ...]

    def serving(self, topology: Topology) -> tuple[Endpoint, ...]:
        """The engines as the workers of ``topology``, index by index.

        Raises:
            SpecError: the topology needs another layout.
        """
        if topology.layout != self.layout:
            raise SpecError(
                f"topology {topology.name!r} needs the layout {topology.layout.name}, and these engines are "
                f"{self.layout.name}; list other engines, or ask for topologies of that layout"
            )
        return self.endpoints


class EngineKeys(StrictKeys):
    """One entry of ``engines``."""

    role: Literal["R", "P", "D"] = Field(description="R, P or D (a pD of a topology is a D process)")
    url: Annotated[str, Strict()] = Field(description=URL_ALLOWED)
    engine_id: Annotated[str, Strict()] | None = Field(default=None, description="text")


class EndpointKeys(StrictKeys):
    """The keys of an endpoints file."""

    tensor_parallel_size: Annotated[int, Strict(), Field(ge=1)] = Field(
        default=1, description="a whole number of GPUs per engine, 1 or more"
    )
    engines: tuple[EngineKeys, ...] = Field(description="a list of {role: R, P or D, url: http://HOST:PORT}")


def load_endpoints(text: str, *, file: str) -> EndpointSet:
    """Parse the YAML text of an endpoints file; ``file`` is how messages name it.

    Raises:
        SpecError: every problem of the file, one line each.
    """
    data, problems = read_mapping(text, file=file)
    origin = Origin(file=file)
    try:
        keys = EndpointKeys.model_validate(data)
    except ValidationError as error:
        raise SpecError(problems + problems_of(error, EndpointKeys, origin)) from error
    problems += _url_problems(keys.engines, origin)
    layout = _layout(keys, origin, problems)
    if problems or layout is None:
        raise SpecError(problems)
    return EndpointSet(layout=layout, endpoints=_endpoints(layout, keys.engines))


def _address(url: str) -> tuple[str, int] | None:
    """Host and port, or null when the URL is not ``http://HOST:PORT``."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    extra = parts.path.rstrip("/") or parts.query or parts.fragment or parts.username
    return (host, port) if parts.scheme == "http" and host and port and not extra else None


def _url_problems(engines: Sequence[EngineKeys], origin: Origin) -> list[str]:
    first: dict[tuple[str, int], int] = {}
    lines = []
    for index, engine in enumerate(engines):
        loc = ("engines", index, "url")
        address = _address(engine.url)
        if address is None:
            lines.append(origin.line(loc, f"is not an engine's address, got {engine.url!r}", URL_ALLOWED))
        elif first.setdefault(address, index) != index:
            lines.append(origin.line(loc, f"is the address of engines[{first[address]}] too", "each engine once"))
    return lines


def _layout(keys: EndpointKeys, origin: Origin, problems: list[str]) -> Topology | None:
    roles = [engine.role for engine in keys.engines]
    try:
        return Topology(
            n_replica=roles.count("R"),
            n_prefill=roles.count("P"),
            n_decode=roles.count("D"),
            tensor_parallel_size=keys.tensor_parallel_size,
        )
    except SpecError as error:
        what = str(error) if roles else "is empty"
        problems.append(origin.line(("engines",), what, "R engines, or at least one P and one D"))
        return None


def _endpoints(layout: Topology, engines: Sequence[EngineKeys]) -> tuple[Endpoint, ...]:
    ordered = [engine for role in PROCESS_ROLES for engine in engines if engine.role == role]
    addresses = [_address(engine.url) or ("", 0) for engine in ordered]
    return tuple(
        Endpoint(worker_id=worker.worker_id, role=worker.role, host=host, port=port, engine_id=engine.engine_id)
        for worker, engine, (host, port) in zip(layout.workers, ordered, addresses, strict=True)
    )
