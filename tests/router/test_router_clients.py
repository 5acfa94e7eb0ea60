"""The router as the programs in front of it see it: the OpenAI client over TLS, and Prometheus."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_cases import Rig, on, until, user


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Certificate and key of this machine in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl, which makes the test's certificate, is absent")
    key, path = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(
        [*make, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", path], check=True, capture_output=True
    )
    path.write_text(path.read_text() + key.read_text())
    return path


def test_conversations_of_the_openai_client_stream_side_by_side_over_tls(certificate: Path) -> None:
    async def check(rig: Rig) -> None:
        trusted = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as http:
            url = f"https://127.0.0.1:{rig.running.port}/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key="sk-1", http_client=http, max_retries=0)
            assert [model.id for model in (await client.models.list()).data] == ["fake"]
            await asyncio.gather(*(chat(client, i) for i in range(8)))
        await until(lambda: len(rig.rows()) == 24)
        assert {(row["status"], row["turn"], row["route"]) for row in rig.rows()} == {
            ("ok", 1, "pd"), ("ok", 2, "local"), ("ok", 3, "local"),
        }  # fmt: skip
        assert len({row["session_id"] for row in rig.rows()}) == 8
        assert rig.told[0].rsplit(" ", 1)[1].startswith("https://127.0.0.1:")
        assert not any("sk-1" in path.read_text() for path in rig.folder.glob("log/*"))

    on("1P_2D", check, certificate=certificate, decider="always_local", api_key="sk-1", within_s=60.0)


async def chat(client: openai.AsyncOpenAI, number: int) -> None:
    """Three turns, each with the whole history."""
    messages = [user(f"I am number {number}")]
    for turn in range(3):
        stream = await client.chat.completions.create(
            model="fake",
            messages=messages,
            max_tokens=5,
            stream=True,  # type: ignore[arg-type, call-overload]
        )
        words = [event.choices[0].delta.content or "" async for event in stream if event.choices]
        assert len("".join(words).split()) == 5
        messages += [{"role": "assistant", "content": "".join(words)}, user(f"and {turn}?")]


def test_prometheus_reads_every_metric_and_histograms_count_every_turn() -> None:
    async def check(rig: Rig) -> None:
        for session in ("a", "b"):
            await rig.complete(session=session)
        assert (await rig.http.post("/v1/completions", content=b"{")).status_code == 400
        answer = await rig.http.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        assert all(family.documentation for family in families.values())
        values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families.values()
            for sample in family.samples
        }
        turn = ("path", "/v1/completions")
        assert values["ppd_router_requests_total", turn, ("status", "200")] == 2.0
        assert values["ppd_router_requests_total", turn, ("status", "400")] == 1.0
        assert values["ppd_router_decisions_total", ("reason", "turn-1"), ("route", "pd")] == 2.0
        for stage in ("decide", "to_prefill", "prefill", "to_decode", "first_byte", "stream"):
            assert values["ppd_router_stage_seconds_count", ("stage", stage)] == 2.0
        assert values["ppd_router_overhead_seconds_count",] == 2.0
        assert {families[f"ppd_router_{name}"].type for name in ("stage_seconds", "overhead_seconds")} == {"histogram"}
        assert values["ppd_router_sessions",] == 2.0
        assert values["ppd_router_worker_breaker", ("state", "closed"), ("worker", "P0")] == 1.0

    on("1P_1D", check)
