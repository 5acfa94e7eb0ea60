"""The routes: what is answered at which address. Everything else is 404, in the error form of the OpenAI API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import httpx
import orjson

from ppd_bench.core.errors import NotReady
from ppd_bench.engine.control import explain
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.router.asked import forwarded_headers
from ppd_bench.router.http_request import Headers, HttpRequest, error_body
from ppd_bench.router.metrics import EXPOSITION
from ppd_bench.router.ready import Readiness
from ppd_bench.router.relay import JSON_TYPE
from ppd_bench.router.responder import Responder
from ppd_bench.router.state import RouterState
from ppd_bench.router.status import status_of
from ppd_bench.router.turns import serve_turn

MODELS_LIMIT_S = 10.0

Page = Callable[[HttpRequest, Responder], Awaitable[None]]


class App:
    """The handler of the router's HTTP server."""

    def __init__(self, state: RouterState, control: httpx.AsyncClient) -> None:
        self._state = state
        self._control = control
        self._readiness = Readiness(state)
        self._pages: Mapping[str, tuple[str, Page]] = {
            "/v1/chat/completions": ("POST", self._turn),
            "/v1/completions": ("POST", self._turn),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/status": ("GET", self._status),
        }

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        """Answer one request."""
        method, page = self._pages.get(request.path, ("", self._not_found))
        allowed = (method, "HEAD") if method == "GET" else (method,)
        if method and request.method not in allowed:
            message = f"{request.path} takes {method}, not {request.method}"
            _send_error(responder, 405, message, (("allow", ", ".join(allowed)),))
            self._state.metrics.on_request(request.path, 405)
            return
        await page(request, responder)

    async def _turn(self, request: HttpRequest, responder: Responder) -> None:
        await serve_turn(self._state, request, responder)

    async def _not_found(self, request: HttpRequest, responder: Responder) -> None:
        known = ", ".join(self._pages)
        _send_error(responder, 404, f"nothing is served at {request.path}; this router serves {known}")
        self._state.metrics.on_request("other", 404)

    async def _health(self, request: HttpRequest, responder: Responder) -> None:
        """The process serves; whether engines do is ``/ready``'s question."""
        _send_json(responder, 200, {"status": "ok"})

    async def _ready(self, request: HttpRequest, responder: Responder) -> None:
        problems = await self._readiness.check(forwarded_headers(request.headers))
        _send_json(responder, 503 if problems else 200, {"ready": not problems, "problems": problems})

    async def _metrics(self, request: HttpRequest, responder: Responder) -> None:
        responder.send(200, (("content-type", EXPOSITION),), self._state.metrics.exposition())

    async def _status(self, request: HttpRequest, responder: Responder) -> None:
        _send_json(responder, 200, status_of(self._state))

    async def _models(self, request: HttpRequest, responder: Responder) -> None:
        """The list of the first engine that gives it; they all serve the same."""
        state = self._state
        endpoints = state.fleet.engines().endpoints
        problem = "no engine is available"
        for worker, endpoint in enumerate(endpoints):
            if state.fleet.available(worker):
                try:
                    answer = await self._ask_models(endpoint, forwarded_headers(request.headers))
                except NotReady:
                    problem = f"{endpoint.worker_id} does not list its models"
                    continue
                kind = answer.headers.get("content-type", "application/json")
                responder.send(answer.status_code, (("content-type", kind),), answer.content)
                return
        _send_error(responder, 503, problem, (("retry-after", str(state.settings.retry_after_s)),))

    async def _ask_models(self, endpoint: Endpoint, headers: Mapping[str, str]) -> httpx.Response:
        with explain(endpoint, "list models"):
            answer = await self._control.get(f"{endpoint.url}/v1/models", headers=dict(headers), timeout=MODELS_LIMIT_S)
            if answer.status_code >= 500:
                answer.raise_for_status()
            return answer


def _send_json(responder: Responder, status: int, content: object) -> None:
    responder.send(status, (JSON_TYPE,), orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _send_error(responder: Responder, status: int, message: str, headers: Headers = ()) -> None:
    responder.send(status, (JSON_TYPE, *headers), error_body(status, message))
