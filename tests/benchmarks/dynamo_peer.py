"""Time the offline replay simulator of ai-dynamo (PyPI) on two-turn conversations.

    pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2
    taskset -c 0 python dynamo_peer.py --topology 4R --sessions 4000 --repeats 3

A request is one turn, as in the replay's own report: a conversation makes two.
Turn 2 starts when turn 1 completes; its prompt is turn 1's prompt, turn 1's
output and the new tokens. The timed span is the replay call alone, which reads
the trace file, simulates and builds the report; importing the library and
writing the trace are outside.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

Topology = Literal["4R", "1P_3D"]
Router = Literal["round_robin", "kv_router"]

BLOCK = 16  # tokens in a KV block, of the trace and of the engine
KV_TOKENS = 432_992  # an H100's KV cache for Llama-3.1-8B
FIRST_INPUT, NEXT_INPUT, OUTPUT = 1024, 256, 128  # tokens, each a whole number of blocks


def trace_rows(n_sessions: int, qps: float, seed: int) -> Iterator[dict[str, Any]]:
    """Give the conversations, arriving as a Poisson process, as Mooncake trace rows."""
    rng = random.Random(seed)
    second_input = FIRST_INPUT + OUTPUT + NEXT_INPUT
    per_session = second_input // BLOCK
    now_s = 0.0
    for session in range(n_sessions):
        now_s += rng.expovariate(qps)
        # The replay renumbers hash ids from 0 by first appearance, and fills a block's
        # tokens with the new number. These already are those numbers, so that turn 1's
        # output tokens can be named to match what turn 2 repeats; without
        # output_token_ids the output is random, and turn 2 cannot reuse its blocks.
        ids = list(range(session * per_session, (session + 1) * per_session))
        said = ids[FIRST_INPUT // BLOCK : (FIRST_INPUT + OUTPUT) // BLOCK]
        common = {"session_id": f"s{session}", "output_length": OUTPUT}
        yield common | {
            "timestamp": now_s * 1e3,
            "input_length": FIRST_INPUT,
            "hash_ids": ids[: FIRST_INPUT // BLOCK],
            "output_token_ids": [block for block in said for _ in range(BLOCK)],
        }
        # The delay, in ms, counts from the completion of the session's previous turn.
        yield common | {"delay": 0.0, "input_length": second_input, "hash_ids": ids}


def load_replay(topology: Topology, router: Router) -> Callable[[Path], dict[str, Any]]:
    """Import the simulator and give a call that replays a trace file in this process."""
    # Otherwise 1P_3D logs a warning per request. Read when the library is first imported.
    os.environ.setdefault("DYN_LOG", "error")
    try:
        from dynamo._core import MockEngineArgs
        from dynamo.replay import run_trace_replay
    except ImportError as error:
        raise SystemExit(
            f"ai-dynamo is not usable here ({error}); install it with\n"
            "  pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2"
        ) from error

    def engine(worker_type: str) -> Any:
        return MockEngineArgs(
            num_gpu_blocks=KV_TOKENS // BLOCK,
            block_size=BLOCK,
            enable_prefix_caching=True,
            worker_type=worker_type,
        )

    options: dict[str, Any] = {"trace_block_size": BLOCK, "router_mode": router}
    if topology == "4R":
        options |= {"extra_engine_args": engine("aggregated"), "num_workers": 4}
    else:
        options |= {"prefill_engine_args": engine("prefill"), "num_prefill_workers": 1}
        options |= {"decode_engine_args": engine("decode"), "num_decode_workers": 3}
    return lambda trace: run_trace_replay(trace, **options)


def dynamo_replay(
    topology: Topology, n_sessions: int, qps: float, seed: int, router: Router = "round_robin"
) -> tuple[int, float, float]:
    """Give the completed requests (turns), wall seconds and CPU seconds of one replay."""
    replay = load_replay(topology, router)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        with trace.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in trace_rows(n_sessions, qps, seed))
        wall, cpu = time.perf_counter(), time.process_time()
        report = replay(trace)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    requests = int(report["completed_requests"])
    if requests != 2 * n_sessions:  # what does not fit is rejected, without an error
        raise RuntimeError(f"only {requests} of {2 * n_sessions} requests completed")
    return requests, wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="Time ai-dynamo's offline replay.")
    parser.add_argument("--topology", choices=["4R", "1P_3D"], default="4R")
    parser.add_argument("--router", choices=["round_robin", "kv_router"], default="round_robin")
    parser.add_argument("--sessions", type=int, default=4000)
    parser.add_argument("--qps", type=float, default=8.0, help="conversations a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.repeats):
        n, wall, cpu = dynamo_replay(args.topology, args.sessions, args.qps, args.seed, args.router)
        print(f"{args.topology}: {n} requests, {wall:.3f} s, {cpu:.3f} s CPU, {n / wall:.0f}/s")


if __name__ == "__main__":
    main()
