"""The simulator where theory has an answer: queues with known waiting times, Little's law, and a batch of one by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.random import PCG64, Generator
from sim_points import cluster_of, constant_cost, make_point, rows_of, session, use_blocks, use_cost, watch, workload

from ppd_bench.core.point import PolicySpec, SimSettings
from ppd_bench.sim.cluster import Cluster
from ppd_bench.sim.recording import to_columns

BARE = SimSettings(step_overhead_s=0.0, sequence_overhead_s=0.0, visit_overhead_s=0.0, router_overhead_s=0.0)
N_BATCHES = 24


def _waits(monkeypatch: pytest.MonkeyPatch, rate: float, lengths: np.ndarray, rng: Generator) -> np.ndarray:
    """Seconds in queue of Poisson arrivals at one server: an engine with one slot whose step takes a second."""
    use_cost(monkeypatch, constant_cost(1.0))
    use_blocks(monkeypatch, 1_000_000)
    arrivals = np.cumsum(rng.exponential(1 / rate, len(lengths)))
    sessions = [session(f"s{i}", float(t), (1, int(n))) for i, (t, n) in enumerate(zip(arrivals, lengths, strict=True))]
    point = make_point("1R", workload((1, 1)), timeout_s=1e9, sim=BARE, max_num_seqs=1, max_model_len=10_000)
    columns = to_columns(point, cluster_of(point, sessions), keep_gaps=False)
    return np.array(columns["decode_start_s"]) - np.array(columns["sent_s"])


def _assert_mean(waits: np.ndarray, expected: float, largest_error: float) -> None:
    """Within four standard errors of the mean, from batch means (waiting times are correlated) after a warm-up.

    ``largest_error``: the standard error, relative, above which the test would prove nothing.
    """
    steady = waits[len(waits) // 20 :]
    means = np.array([batch.mean() for batch in np.array_split(steady, N_BATCHES)])
    error = means.std(ddof=1) / math.sqrt(N_BATCHES)
    assert error < largest_error * expected
    assert abs(means.mean() - expected) < 4 * error


def test_constant_service_waits_as_m_d_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-token requests, one step each: Wq = rho / (2 (1 - rho)) service times."""
    rho = 0.7
    waits = _waits(monkeypatch, rho, np.ones(10_000), Generator(PCG64(1)))
    _assert_mean(waits, rho / (2 * (1 - rho)), 0.06)


def test_geometric_service_waits_as_its_exact_formula_which_is_nearly_m_m_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of G tokens take G steps, P(G = k) = p (1 - p)^(k - 1): E S = 1/p and E S^2 = (2 - p) / p^2.

    Pollaczek-Khinchine: Wq = lambda E S^2 / (2 (1 - rho)) = rho (2 - p) / (2 p (1 - rho)); M/M/1 with mean service 1/p has
    rho / (p (1 - rho)), which is larger by p/2 in 1.
    """
    rho, p = 0.6, 0.05
    rng = Generator(PCG64(2))
    waits = _waits(monkeypatch, rho * p, rng.geometric(p, 10_000).astype(float), rng)
    exact = rho * (2 - p) / (2 * p * (1 - rho))
    m_m_1 = rho / (p * (1 - rho))
    assert exact == pytest.approx(m_m_1 * (1 - p / 2))
    _assert_mean(waits, exact, 0.06)


def test_littles_law_holds_for_what_is_inside_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time integral of waiting and running requests, seen after every event, is the sum of the turns' times."""
    state = {"last_s": 0.0, "n": 0, "area": 0.0}

    def observe(cluster: Cluster) -> None:
        state["area"] += state["n"] * (cluster.now_s - state["last_s"])
        state["last_s"] = cluster.now_s
        state["n"] = sum(len(worker.running) + len(worker.waiting) for worker in cluster.workers)

    watch(monkeypatch, observe)
    use_blocks(monkeypatch, 100)
    sessions = [session(f"s{i}", 0.03 * i, (100, 50), (40, 80)) for i in range(60)]
    point = make_point("2R", workload((1, 1)), sim=BARE, timeout_s=1e6, max_model_len=1000)
    columns = to_columns(point, cluster_of(point, sessions).cluster, keep_gaps=False)  # type: ignore[attr-defined]
    assert sum(columns["n_preemptions"]) > 0
    total_s = sum(end - sent for end, sent in zip(columns["end_s"], columns["sent_s"], strict=True))
    assert state["area"] == pytest.approx(total_s, rel=1e-9)
    assert state["n"] == 0


# -- a batch of one, from formulas written down here --------------------------------------------------------------------

KNOTS = np.array(
    "2:5.95 16:6.35 64:6.52 128:6.70 192:7.31 256:7.74 320:8.82 384:9.54 512:10.9 640:13.4 768:15.3 1024:20.6 1536:29.8 "
    "2048:40.2 3072:60.1 4096:81.2 6144:126.6 8192:170.1".replace(":", " ").split(),
    dtype=float,
).reshape(-1, 2)
Step = Callable[[int, int], float]


def _table_prefill_s(new: int, cached: int) -> float:
    base = np.interp(new, KNOTS[:, 0], KNOTS[:, 1])
    return float(base + 0.64 + 8.84e-7 * (new * cached + new**2 / 2)) / 1e3


def _table_decode_s(context: int) -> float:
    return (5.95 + 0.336 + 0.00389 + 4.273e-5 * context) / 1e3


def _roofline_s(new: int, cached: int) -> float:
    flop = 2 * 6_979_321_856 * new + 2 * 525_336_576 + 524_288 * (new * cached + new**2 / 2)
    read_s = 2 * 7_504_658_432 / (3.35e12 * 0.73) + 131_072 * (new + cached) / (3.35e12 * 0.9)
    return max(flop / (989e12 * 0.67), read_s)


def _roofline_decode_s(context: int) -> float:
    return 2 * 7_504_658_432 / (3.35e12 * 0.73) + 131_072 * context / (
        3.35e12 * 0.9
    )  # batch one is never compute-bound


MODELS: dict[str, tuple[Step, Callable[[int], float]]] = {
    "table": (_table_prefill_s, _table_decode_s),
    "roofline": (_roofline_s, _roofline_decode_s),
}
VISIT_S, ROUTER_S, STEP_S, SEQ_S, LATENCY_S = 0.015, 0.001, 0.0012, 7.5e-6, 0.0005
OVERHEAD_S = STEP_S + SEQ_S


def _turns(kind: str, topology: str, policy: str, handoff: str) -> list[dict[str, Any]]:
    """Turn 1: 1,024 in, 128 out; turn 2: 250 in, 40 out; alone on the machine."""
    point = make_point(
        topology,
        workload((1, 1)),
        policy=PolicySpec(decider=policy),
        handoff=handoff,
        sim=SimSettings(cost_model=kind),
    )
    cluster = cluster_of(point, [session("a", 2.0, (1024, 128), (250, 40), think_time_s=1.0)])
    return rows_of(to_columns(point, cluster, keep_gaps=False))


def _assert_turn(
    row: dict[str, Any], ttft_s: float, prompt: int, output: int, decode_s: Callable[[int], float]
) -> None:
    """TTFT as given; then token k + 1 is a decode step over prompt + k tokens."""
    rest_s = sum(decode_s(prompt + k) + OVERHEAD_S for k in range(1, output))
    assert row["first_token_s"] - row["sent_s"] == pytest.approx(ttft_s, rel=1e-9)
    assert row["last_token_s"] - row["first_token_s"] == pytest.approx(rest_s, rel=1e-9)
    assert row["itl_count"] == output - 1


@pytest.mark.parametrize("kind", MODELS)
def test_turns_alone_on_a_replica_take_what_the_formulas_say(kind: str) -> None:
    prefill_s, decode_s = MODELS[kind]
    first, second = _turns(kind, "1R", "node", "push_blocking")
    start_s = ROUTER_S + VISIT_S + OVERHEAD_S
    _assert_turn(first, start_s + prefill_s(1024, 0), 1024, 128, decode_s)
    cached = 1151 // 16 * 16  # the last sampled token has no KV
    _assert_turn(second, start_s + prefill_s(1402 - cached, cached), 1402, 40, decode_s)
    assert second["sent_s"] == first["last_token_s"] + 1.0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("handoff", ["push_blocking", "pull_async"])
def test_turns_alone_through_p_take_what_the_formulas_say(kind: str, handoff: str) -> None:
    """P's step; then transfer and D's visit side by side (push) or one after the other (pull); then D's step of one token."""
    prefill_s, decode_s = MODELS[kind]
    first, second = _turns(kind, "1P_1D", "always_pd", handoff)
    for row, new, cached_p, cached_d in ((first, 1024, 0, 0), (second, 378, 1024, 1151 // 16 * 16)):
        prompt, output = new + cached_p, row["output_tokens"]
        moved = prompt if handoff == "push_blocking" else prompt - cached_d
        transfer_s = moved * 131_072 / 150e9 + LATENCY_S
        between_s = max(VISIT_S, transfer_s) if handoff == "push_blocking" else VISIT_S + transfer_s
        ttft_s = ROUTER_S + VISIT_S + prefill_s(new, cached_p) + OVERHEAD_S
        ttft_s += between_s + prefill_s(1, prompt - 1) + OVERHEAD_S
        assert (row["route"], row["prefill_cached_tokens"], row["cached_tokens"]) == ("pd", cached_p, cached_d)
        _assert_turn(row, ttft_s, prompt, output, decode_s)


@pytest.mark.parametrize("kind", MODELS)
def test_a_local_turn_alone_takes_what_the_formulas_say(kind: str) -> None:
    prefill_s, decode_s = MODELS[kind]
    _, second = _turns(kind, "1P_1pD", "node", "push_blocking")
    cached = 1151 // 16 * 16
    assert (second["route"], second["cached_tokens"]) == ("local", cached)
    ttft_s = ROUTER_S + VISIT_S + prefill_s(1402 - cached, cached) + OVERHEAD_S
    _assert_turn(second, ttft_s, 1402, 40, decode_s)
