"""The closed vocabularies: roles, routes, statuses, executors."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a worker is for. D and pD are the same vLLM process; only the policy treats them differently."""

    REPLICA = "R"
    PREFILL = "P"
    DECODE = "D"
    DECODE_LOCAL = "pD"


class Route(StrEnum):
    """Where a turn's prompt is prefilled.

    ``pd``: on P, KV sent to D. ``pd_readback``: the same after P pulled the session's KV from D.
    ``local``: append-prefill on the decode worker that holds the KV. ``replica``: prefill and decode on R.
    """

    PD = "pd"
    PD_READBACK = "pd_readback"
    LOCAL = "local"
    REPLICA = "replica"


class Status(StrEnum):
    """How a turn ended. Everything but ``ok`` is a failure."""

    OK = "ok"
    TIMEOUT = "timeout"
    ERROR = "error"
    ABORTED = "aborted"
    UNSENT = "unsent"


class Executor(StrEnum):
    """Who ran a point. Part of every artefact, so that a simulated number is never taken for a measured one."""

    SIM = "sim"
    LIVE = "live"

    @property
    def evidence(self) -> str:
        """The word for people: ``simulated`` or ``measured``."""
        return "simulated" if self is Executor.SIM else "measured"
