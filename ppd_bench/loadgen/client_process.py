"""One of several client processes: plays its share of a point's conversations and asks the first process for every route."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import uvloop

from ppd_bench.core.decision import Decision
from ppd_bench.core.errors import PpdBenchError
from ppd_bench.core.point import Point
from ppd_bench.core.workload import Session
from ppd_bench.engine.client import Clock
from ppd_bench.loadgen.channel import Channel
from ppd_bench.loadgen.lateness import lateness_of
from ppd_bench.loadgen.player import (
    PlayedPart,
    PlaySettings,
    ReadyPart,
    Target,
    no_long_collections,
    play_part,
    prepare_part,
    with_decision_waits,
)
from ppd_bench.policy.events import Event
from ppd_bench.policy.query import RouteQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """To a client: play these conversations of a point. ``clock`` must be one that all processes share."""

    point: Point
    sessions: Sequence[Session]
    target: Target
    settings: PlaySettings
    clock: Clock


class Start(NamedTuple):
    """To a client: the point's start on the shared clock."""

    start_s: float


class Collect(NamedTuple):
    """To a client: everybody is done; send the records, whose transfer disturbs nobody now."""


class Routed(NamedTuple):
    """To a client: where a turn goes."""

    request_id: str
    decision: Decision


class Ready(NamedTuple):
    """From a client: prompts are drawn; it waits for the start."""


class Done(NamedTuple):
    """From a client: all of its conversations have ended."""


class Refusal(NamedTuple):
    """From a client: its share cannot be played."""

    error: PpdBenchError


class RemoteRouting:
    """A ``Routing`` whose Ledger and policy are in the first process."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self.waits_s: list[float] = []
        self._channel = channel
        self._clock = clock
        self._asked: dict[str, asyncio.Future[Decision]] = {}

    async def take(self, query: RouteQuery, now_s: float) -> Decision:
        asked_s = self._clock()
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._asked[query.request_id] = answer
        self._channel.send(query)
        decision = await answer
        self.waits_s.append(self._clock() - asked_s)
        return decision

    def observe(self, event: Event) -> None:
        self._channel.send(event)

    def routed(self, answer: Routed) -> None:
        """The first process has decided."""
        self._asked.pop(answer.request_id).set_result(answer.decision)


def run_client(end: socket.socket) -> None:
    """The life of a client process: one share after another, until the first process ends or closes the channel.

    Ctrl-C is left to the first process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_serve(end))


async def _serve(end: socket.socket) -> None:
    channel = await Channel.of(end)
    try:
        while True:
            share: Share = await channel.receive()
            await _play(channel, share)
    except EOFError:
        return


async def _play(channel: Channel, share: Share) -> None:
    try:
        ready = prepare_part(share.point, share.sessions, share.settings)
    except PpdBenchError as error:
        channel.send(Refusal(error))
        return
    with no_long_collections():
        channel.send(Ready())
        start: Start = await channel.receive()
        part = await _play_from(channel, share, ready, start.start_s)
    channel.send(Done())
    await channel.receive()  # Collect
    channel.send(part)


async def _play_from(channel: Channel, share: Share, ready: ReadyPart, start_s: float) -> PlayedPart:
    """Play; answers are taken in beside. When the first process ends, every connection is closed at once."""
    routing = RemoteRouting(channel, share.clock)
    play = asyncio.ensure_future(
        play_part(ready, share.target, routing, clock=share.clock, start_s=start_s, on_turn=channel.send)
    )
    answers = asyncio.ensure_future(_take_answers(channel, routing))
    try:
        await asyncio.wait({play, answers}, return_when=asyncio.FIRST_COMPLETED)
        if answers.done():
            answers.result()  # raises: the channel has ended
        return with_decision_waits(play.result(), lateness_of(routing.waits_s))
    finally:
        for task in (play, answers):
            task.cancel()
        await asyncio.gather(play, answers, return_exceptions=True)


async def _take_answers(channel: Channel, routing: RemoteRouting) -> None:
    while True:
        routing.routed(await channel.receive())
