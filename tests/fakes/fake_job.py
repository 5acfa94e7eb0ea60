"""One request at a fake engine: prefill, hand-off, decode, answer, and what a test has scripted to go wrong."""

from __future__ import annotations

import asyncio
import json
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import orjson
from fake_text import called_tool, opening, pieces_of, prompts_of
from stream_shapes import SHAPES, Step

if TYPE_CHECKING:
    from fake_engine import _Connection

VOCABULARY = 1000
KV_BYTES_PER_TOKEN = 1024
NIXL_KEYS = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")


def answer_ids(prompt: list[int], n: int) -> list[int]:
    """The n tokens that every fake generates after this prompt."""
    start = zlib.crc32(array("q", prompt).tobytes())
    return [(start + 7919 * i) % VOCABULARY for i in range(n)]


@dataclass
class Behaviour:
    """What tests script. ``status``: answer every completion with it. ``hang``: never answer. ``die_after``: reset every
    stream after so many tokens. ``stop_short``: end answers so many tokens early. ``drop_params``: keys that P leaves out.

    After so many tokens: ``error_after`` sends an error event, ``cut_after`` ends the stream without [DONE], ``stall_after``
    goes silent. ``error_in_200``: plain answers are an error with status 200. ``kv_usage`` and ``n_waiting_capacity`` override
    what /metrics says. ``api_key``: what Authorization must carry. ``sick``: /metrics and /health fail too. A prompt of token ids
    beyond ``max_model_len`` is refused.
    """

    prefill_s: float = 0.002
    prefill_s_per_token: float = 0.0
    step_s: float = 0.002
    lease_s: float = 30.0
    status: int | None = None
    hang: bool = False
    die_after: int | None = None
    stop_short: int = 0
    drop_params: tuple[str, ...] = ()
    error_after: int | None = None
    cut_after: int | None = None
    stall_after: int | None = None
    error_in_200: bool = False
    kv_usage: float | None = None
    n_waiting_capacity: int = 0
    api_key: str | None = None
    sick: bool = False
    max_model_len: int = 1_000_000


class Job:
    """One completion request."""

    def __init__(
        self, connection: _Connection, body: dict[str, Any], request_id: str, *, is_chat: bool = False
    ) -> None:
        self.connection = connection
        self.engine = connection.engine
        self.body = body
        self.request_id = request_id
        self.is_chat = is_chat
        self.params: dict[str, Any] = body.get("kv_transfer_params") or {}
        prompts = prompts_of(body)
        self.prompt = prompts[0]
        self.n_choices = len(prompts) * int(body.get("n") or 1)
        self.n_prompt = sum(map(len, prompts))
        self.tool = called_tool(body) if is_chat else None
        self.n_blocks = 0
        self.answer: list[int] = []
        self.position = 0
        self.cached = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._pull: asyncio.Task[None] | None = None

    def begin(self) -> None:
        engine, behaviour = self.engine, self.engine.behaviour
        engine.counts.n_requests += 1
        engine.bodies.append(self.body)
        engine.request_ids.append(self.request_id)
        model = str(self.body.get("model"))
        if model.startswith("shape:"):
            self._play(SHAPES[model.removeprefix("shape:")])
        elif behaviour.status is not None:
            extra = "Retry-After: 7\r\n" if behaviour.status == 503 else ""
            self.connection.answer(behaviour.status, b'{"error":{"message":"scripted failure"}}', extra)
            self.connection.forget()
        elif behaviour.error_in_200 and not self.body.get("stream"):
            self.connection.answer(200, b'{"object":"error","message":"scripted error","code":400}')
            self.connection.forget()
        elif not behaviour.hang:
            self._admit()

    def _later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, action, *arguments))

    # -- scripts -----------------------------------------------------------------------------------------------------

    def _play(self, steps: tuple[Step, ...]) -> None:
        actions: dict[str, Callable[..., None]] = {
            "raw": lambda piece: self.connection.transport.write(piece),
            "head": lambda _: self.connection.start_stream(),
            "chunk": self.connection.chunk,
            "end": lambda _: self.connection.end_stream(),
            "close": lambda _: self.connection.transport.close(),
            "reset": lambda _: self.connection.reset(),
        }
        for at_s, action, piece in steps:
            self._later(at_s, actions[action], piece)

    # -- an engine's work --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        engine = self.engine
        missing = [key for key in NIXL_KEYS if self.params.get(key) is None]
        if self.params.get("do_remote_prefill") and missing:
            engine.counts.n_refused += 1
            self.connection.answer(500, json.dumps({"error": {"message": f"incomplete hand-off: {missing}"}}).encode())
            self.connection.forget()
            return
        engine.running.add(self)
        n = int(self.body.get("max_tokens") or self.body.get("max_completion_tokens") or 16)
        if self.tool is not None:
            n = len(pieces_of(self.tool))
        self.n_blocks = -(-(len(self.prompt) + n) // engine.block_size)
        self.answer = answer_ids(self.prompt, n)[: max(0, n - engine.behaviour.stop_short)]
        self.cached = engine.hit_tokens(self.prompt) if self.prompt else 0
        if self.body.get("stream"):
            self.connection.start_stream()
        if self.params.get("do_remote_prefill"):
            self._pull = asyncio.get_running_loop().create_task(self._pull_kv())
        else:
            engine.counts.sources["local_cache_hit"] += self.cached
            engine.counts.sources["local_compute"] += self.n_prompt - self.cached
            self._prefill(len(self.prompt) - self.cached)

    def _prefill(self, n_tokens: int) -> None:
        behaviour = self.engine.behaviour
        self._later(behaviour.prefill_s + behaviour.prefill_s_per_token * n_tokens, self._prefilled)

    def _prefilled(self) -> None:
        self.engine.cached.update(self.engine.block_keys(self.prompt))
        self.engine.decode(self)

    async def _pull_kv(self) -> None:
        """Read the lacking blocks from P and tell it to free them, which the fake does with one small HTTP call."""
        held = await self._tell_prefiller()
        lacking = len(self.prompt) - self.cached if held else 0
        counts = self.engine.counts
        counts.sources["external_kv_transfer"] += lacking
        counts.sources["local_cache_hit"] += self.cached
        counts.bytes_pulled += lacking * KV_BYTES_PER_TOKEN
        self.cached = int(self.params.get("fake_cached_tokens", 0))
        self._prefill(0)

    async def _tell_prefiller(self) -> bool:
        body = json.dumps({"remote_request_id": self.params["remote_request_id"]}).encode()
        try:
            reader, writer = await asyncio.open_connection(self.params["remote_host"], self.params["remote_port"])
        except OSError:
            return False
        try:
            writer.write(b"POST /fake/pull HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            return b" 200 " in await reader.readline()
        except OSError:
            return False
        finally:
            writer.close()

    def step(self) -> bool:
        """Generate one token; false when there is nothing more to do."""
        if self not in self.engine.running:
            return False
        behaviour = self.engine.behaviour
        if behaviour.die_after == self.position:
            self.connection.reset()
            return False
        if self.body.get("stream") and self._is_disturbed(behaviour):
            return False
        self.position += 1
        if self.body.get("stream"):
            self._send_token() if self.answer else self._send_nothing()
        if self.position < len(self.answer):
            return True
        self._finish()
        return False

    def _is_disturbed(self, behaviour: Behaviour) -> bool:
        """Whether a script ends the stream here, and if so, its end."""
        if behaviour.stall_after == self.position:
            return True
        if behaviour.error_after == self.position:
            self.connection.chunk(b'data: {"error":{"message":"scripted error event","code":500}}\n\n')
            self.connection.chunk(b"data: [DONE]\n\n")
        elif behaviour.cut_after != self.position:
            return False
        self.connection.end_stream()
        self.engine.running.discard(self)
        self.connection.forget()
        return True

    def _send_token(self) -> None:
        token = self.answer[self.position - 1]
        finish = b"null"
        if self.position == len(self.answer):
            finish = b'"length"' if self.tool is None else b'"tool_calls"'
        if self.engine.send_times_s is not None:
            self.engine.send_times_s.setdefault(self.request_id, []).append(perf_counter())
        if self.is_chat and self.position == 1:
            self._send_event(b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}')
        for index in range(self.n_choices):
            self._send_event(
                b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":[%d]}'
                % (index, self._said(token), finish, token)
            )

    def _send_nothing(self) -> None:
        """The end of an answer without a token, as where a model ends at once."""
        said = b'"delta":{"content":""}' if self.is_chat else b'"text":""'
        self._send_event(b'{"index":0,%b,"finish_reason":"stop","token_ids":[]}' % said)

    def _said(self, token: int) -> bytes:
        if self.tool is not None:
            return b'"delta":' + orjson.dumps({"tool_calls": [pieces_of(self.tool)[self.position - 1]]})
        return b'"delta":{"content":" t%d"}' % token if self.is_chat else b'"text":" t%d"' % token

    def _send_event(self, choice: bytes) -> None:
        head = opening(self.request_id, is_chat=self.is_chat, is_chunk=True)
        self.connection.chunk(b'data: {%b,"created":1,"model":"fake","choices":[%b]}\n\n' % (head, choice))

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": len(self.answer) * self.n_choices,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _finish(self) -> None:
        engine = self.engine
        engine.running.discard(self)
        engine.counts.n_completed += 1
        engine.cached.update(engine.block_keys(self.prompt + self.answer[:-1]))
        if self.body.get("stream"):
            if (self.body.get("stream_options") or {"include_usage": True}).get("include_usage"):
                head = opening(self.request_id, is_chat=self.is_chat, is_chunk=True)
                self.connection.chunk(b'data: {%b,"choices":[],"usage":%b}\n\n' % (head, orjson.dumps(self._usage())))
            self.connection.chunk(b"data: [DONE]\n\n")
            self.connection.end_stream()
        else:
            self.connection.answer(200, orjson.dumps(self._plain_answer()))
        self.connection.forget()

    def _plain_answer(self) -> dict[str, Any]:
        text = "".join(f" t{token}" for token in self.answer)
        said: dict[str, Any] = {"text": text}
        if self.tool is not None:
            said = {"message": {"role": "assistant", "content": None, "tool_calls": [self.tool]}}
        elif self.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        finish = "length" if self.tool is None else "tool_calls"
        choices = [
            {"index": index, **said, "finish_reason": finish, "token_ids": self.answer}
            for index in range(self.n_choices)
        ]
        answer = {**orjson.loads(b"{%b}" % opening(self.request_id, is_chat=self.is_chat)), "choices": choices}
        answer["usage"] = self._usage()
        return {**answer, "kv_transfer_params": self._hand_off() if self.params.get("do_remote_decode") else None}

    def _hand_off(self) -> dict[str, Any]:
        engine = self.engine
        n_blocks = -(-len(self.prompt) // engine.block_size)
        engine.pin(self.request_id, n_blocks)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": list(range(n_blocks)),
            "remote_host": engine.host,
            "remote_port": engine.port,
            "tp_size": 1,
            "fake_cached_tokens": self.cached,
        }
        return {key: value for key, value in params.items() if key not in engine.behaviour.drop_params}

    def abort(self) -> None:
        """The client has gone: stop working for it, and let P free what was not pulled yet."""
        for timer in self._timers:
            timer.cancel()
        self.engine.counts.n_aborted += 1
        self.engine.running.discard(self)
