"""Control calls to engines (never measured ones): one kind of client, one kind of error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from ppd_bench.core.errors import NotReady
from ppd_bench.engine.endpoints import Endpoint

CONTROL_TIMEOUT_S = 30.0


def control_client(timeout_s: float = CONTROL_TIMEOUT_S) -> httpx.AsyncClient:
    """A client for control calls. It ignores proxy variables: engines are on this machine or in its cluster."""
    return httpx.AsyncClient(timeout=timeout_s, trust_env=False)


@contextmanager
def explain(endpoint: Endpoint, what: str) -> Iterator[None]:
    """Turn httpx' errors into one that says which engine, and what for.

    Raises:
        NotReady: in place of every ``httpx.HTTPError``, and of an answer that is not what it should be.
    """
    try:
        yield
    except httpx.HTTPStatusError as error:
        text = " ".join(error.response.text.split())[:300]
        raise NotReady(f"{_name(endpoint)}: cannot {what}: HTTP {error.response.status_code} {text}") from error
    except httpx.HTTPError as error:
        raise NotReady(
            f"{_name(endpoint)}: cannot {what}: {type(error).__name__} {error}".rstrip() + "; look at the engine's log"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise NotReady(
            f"{_name(endpoint)}: cannot {what}: not the answer of a vLLM ({type(error).__name__}: {error})"
        ) from error


def _name(endpoint: Endpoint) -> str:
    return f"{endpoint.worker_id} ({endpoint.url})"
