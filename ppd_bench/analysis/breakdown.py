"""Where the time to the first token goes, and what engines' memory and time were used for: one formula each.

Stages of TTFT, in order; their sum is TTFT (GLOSSARY: first token - sent):

    queue        sent -> the first step that works on the prompt: router, visit, waiting for an engine
    prefill      -> the prompt is computed on P; on a replica or a D that prefills, to the first token
    decode_wait  P has computed -> the KV transfer starts: visit to D, waiting for KV memory there
    transfer     -> the KV is in D
    first_step   -> the first token, from D
    unsplit      what cannot be told apart, where an executor does not know an instant

A records frame has the columns ``core.record.RECORD_FIELDS``. Undefined is NaN, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ppd_bench.analysis.metrics import Floats, floats, labels, prompt_tokens, with_latencies

STAGES = ("queue_s", "prefill_s", "decode_wait_s", "transfer_s", "first_step_s", "unsplit_s")

FULL_KV_RATIO = 0.95
"""KV usage above which an engine's memory counts as full."""


def stages(records: pd.DataFrame) -> pd.DataFrame:
    """Seconds of every turn's stages, the columns ``STAGES``, in order of ``records``. NaN for turns without a first token.

    A stage that a route does not have is 0.
    """
    sent, first = floats(records, "sent_s"), floats(records, "first_token_s")
    through_p = _through_p(records)
    begun = np.where(through_p, floats(records, "prefill_start_s"), floats(records, "decode_start_s"))
    computed = np.where(through_p, floats(records, "prefill_done_s"), first)
    arrives = np.where(through_p, floats(records, "transfer_start_s"), first)
    arrived = np.where(through_p, floats(records, "transfer_done_s"), first)
    instants = [sent, begun, computed, arrives, arrived, first]
    known = ~np.isnan(first)
    found = {name: np.where(known, 0.0, np.nan) for name in STAGES}
    latest, complete = sent, known.copy()
    for name, instant in zip(STAGES[:-1], instants[1:], strict=True):
        complete &= ~np.isnan(instant)
        found[name] = np.where(complete, np.maximum(instant - latest, 0.0), found[name])
        latest = np.where(complete, instant, latest)
    found["unsplit_s"] = np.where(known, first - latest, np.nan)
    return pd.DataFrame(found, index=records.index)


def _through_p(records: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return labels(records, "route", "pd") | labels(records, "route", "pd_readback")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage over ok turns: median and 90th percentile seconds, and its share of all turns' TTFT."""

    stage: str
    p50_s: float
    p90_s: float
    ttft_share_ratio: float


def stage_figures(records: pd.DataFrame) -> list[StageFigures]:
    """One row per stage that some ok turn has, in order. The share is the sum of the stage over the sum of TTFT."""
    ok = records[labels(records, "status", "ok")]
    split = stages(ok)
    total = float(split.to_numpy().sum())
    return [
        StageFigures(
            stage=name.removesuffix("_s"),
            p50_s=float(split[name].median()),
            p90_s=float(split[name].quantile(0.9)),
            ttft_share_ratio=float(split[name].sum()) / total,
        )
        for name in STAGES
        if len(split) and split[name].any()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedWait:
    """The longest wait of a short turn: for whom, where, how long, and the longest prompt that was on the same engine
    meanwhile."""

    request_id: str
    worker: str
    prompt_tokens: int
    wait_s: float
    behind_tokens: int


def longest_short_wait(records: pd.DataFrame, short_tokens: int) -> BlockedWait | None:
    """Head-of-line waiting: the longest wait for an engine or its memory (queue or decode_wait) of a prompt of at most
    ``short_tokens``, and the longest prompt that was under way on that engine while it waited. Null without such turns; turns
    of which an executor does not know when the wait ended are none."""
    turns = records[~floats_missing(records, "sent_s")]
    split = stages(turns)
    wait = np.where(_through_p(turns), split["decode_wait_s"], split["queue_s"])
    tokens = prompt_tokens(turns)
    untold = np.where(
        _through_p(turns), *(floats_missing(turns, name) for name in ("transfer_start_s", "decode_start_s"))
    )
    wait = np.where(~untold & (tokens <= short_tokens), wait, np.nan)
    if not len(wait) or np.isnan(wait).all():
        return None
    at = int(np.nanargmax(wait))
    since = floats(turns, "prefill_done_s" if _through_p(turns)[at] else "sent_s")[at]
    worker = turns["decode_worker"].iloc[at]
    meanwhile = (floats(turns, "sent_s") < since + wait[at]) & (floats(turns, "end_s") > since)
    there = labels(turns, "decode_worker", str(worker)) & meanwhile
    return BlockedWait(
        request_id=str(turns["request_id"].iloc[at]),
        worker=str(worker),
        prompt_tokens=int(tokens[at]),
        wait_s=float(wait[at]),
        behind_tokens=int(tokens[there].max(initial=tokens[at])),
    )


def floats_missing(records: pd.DataFrame, name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Where a column of numbers is null."""
    return np.isnan(floats(records, name))


def start_waits_s(records: pd.DataFrame) -> Floats:
    """Seconds that sent turns waited for leave to be sent (sent - scheduled), such as for a conversation in flight to end."""
    lag = floats(with_latencies(records), "send_lag_s")
    return lag[~np.isnan(lag)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """What the engines of one role did, over their gauges. ``busy_ratio``: share of the time with a step under way.

    ``kv_full_ratio``: share of the readings with KV usage above ``FULL_KV_RATIO``. KV usage counts blocks that requests hold;
    what is merely cached is free.
    """

    role: str
    n_engines: int
    busy_ratio: float
    kv_mean_ratio: float
    kv_max_ratio: float
    kv_full_ratio: float


def role_loads(gauges: pd.DataFrame, roles: Mapping[str, str]) -> list[RoleLoad]:
    """One row per role, and ``all``. ``gauges``: one row per engine and reading with worker_id, time_s, kv_cache_usage_ratio and
    busy_s (cumulated; NaN where engines do not tell, and then so is ``busy_ratio``); ``roles`` by worker id."""
    role = gauges["worker_id"].map(roles)
    groups: Sequence[tuple[str, pd.DataFrame]] = [
        ("all", gauges),
        *((str(r), gauges[role == r]) for r in role.unique()),
    ]
    return [_role_load(name, rows) for name, rows in groups if len(rows)]


def _role_load(role: str, rows: pd.DataFrame) -> RoleLoad:
    last = rows.groupby("worker_id", sort=False)[["busy_s", "time_s"]].max()
    usage = floats(rows, "kv_cache_usage_ratio")
    return RoleLoad(
        role=role,
        n_engines=len(last),
        busy_ratio=float(last["busy_s"].sum(skipna=False) / last["time_s"].sum()),
        kv_mean_ratio=float(usage.mean()),
        kv_max_ratio=float(usage.max()),
        kv_full_ratio=float((usage > FULL_KV_RATIO).mean()),
    )
