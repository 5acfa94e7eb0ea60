"""Kills writers of a run folder, in forks of one process so that imports are paid once.

``random SEED``: SIGKILL at random moments, restarted until done. ``every-step``: one writer per file operation, killed
just before that operation; it finishes a run, then extends it. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import store_fabricated as fabricated

from ppd_bench.store.schema import points_of

FILE_OPERATIONS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
"""What changes names in the folder; opening adds a temporary file at most, which is there before every rename."""


PAUSE_S = 0.002
"""Between two points, so that a run takes long enough to be killed in."""


def durable(folder: Path) -> set[str]:
    """Points that are in some file of the folder, whatever the manifest says."""
    files = [*folder.glob("*.parquet"), *folder.glob("segments/*.parquet")]
    return {point_id for file in files for point_id, _ in points_of(pq.read_schema(file))}


def write_run(folder: Path, n_points: int, pause_s: float = 0.0) -> None:
    ticks = itertools.count()
    order = fabricated.ids(n_points)
    written = durable(folder)
    with fabricated.open_run(folder, order, clock=lambda: float(next(ticks))) as run:
        assert run.finished == written, f"lost: {written - run.finished}"
        for point_id in order:
            if point_id not in run.finished:
                time.sleep(pause_s)
                # Every third point has no turns: it must count as finished all the same.
                run.append(point_id, fabricated.columns(point_id, 0 if int(point_id[-4:]) % 3 == 1 else 5))
        run.finalise()


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_randomly(folder: Path, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    begin_s = time.monotonic()
    assert wait(forked(lambda: write_run(folder.with_name(f"{folder.name}-timed"), 40, pause_s=PAUSE_S))) == 0
    span_s = time.monotonic() - begin_s  # of this machine, now
    n_kills = 0
    while True:
        pid = forked(lambda: write_run(folder, 40, pause_s=PAUSE_S))
        # Three kills fit into one run; then growing, so that the merge, which starts over after a kill, fits at last.
        time.sleep(rng.uniform(0.0, span_s * (0.3 + 0.15 * max(0, n_kills - 2))))
        os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        if code == 0:
            return {"n_kills": n_kills}
        assert code == -signal.SIGKILL, code
        n_kills += 1


def die_before(operation: int, folder: Path) -> None:
    seen = itertools.count()

    def hook(event: str, args: tuple[object, ...]) -> None:
        is_change = event in FILE_OPERATIONS and (event != "os.remove" or os.path.exists(str(args[0])))
        if is_change and str(folder) in str(args[0]) and next(seen) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    write_run(folder, 1)
    write_run(folder, 2)


def kill_at_every_step(folder: Path) -> dict[str, object]:
    records = set()
    for operation in itertools.count():
        run = folder / f"run{operation:03d}"
        code = wait(forked(lambda run=run, operation=operation: die_before(operation, run)))
        assert code in (0, -signal.SIGKILL), code
        assert wait(forked(lambda run=run: write_run(run, 2))) == 0, operation
        leftovers = sorted(p.name for p in run.iterdir() if p.name not in (".lock", "manifest.json", "records.parquet"))
        assert not leftovers, leftovers
        records.add((run / "records.parquet").read_bytes())
        if code == 0:
            return {"n_kills": operation, "n_different_records": len(records)}


if __name__ == "__main__":
    target, mode = Path(sys.argv[1]), sys.argv[2]
    write_run(target.with_name(f"{target.name}-warm"), 2)  # lazy imports, once
    print(json.dumps(kill_randomly(target, int(sys.argv[3])) if mode == "random" else kill_at_every_step(target)))
