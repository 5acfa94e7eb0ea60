"""A process that supervises fake engines until a signal ends it: ``python engine_owner.py FOLDER TOPOLOGY [WORKER:HOW ...]``.

Prints ``pid N`` per engine, then ``up`` when all are warm (or at once, when one is ``deaf``).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from engine_plans import driver_plan

from ppd_bench.engine.supervisor import Progress, Supervisor, SupervisorLimits


def tell(progress: Progress) -> None:
    if progress.detail.startswith("pid "):
        print(progress.detail, flush=True)
        if any("deaf" in word for word in sys.argv[3:]):
            print("up", flush=True)


async def main() -> None:
    folder = Path(sys.argv[1])
    how = {worker_id: text for worker_id, _, text in (word.partition(":") for word in sys.argv[3:])}
    limits = SupervisorLimits(stop_grace_s=60.0)
    async with Supervisor(
        driver_plan(sys.argv[2], how),
        log_folder=folder / "logs",
        state_folder=folder / "state",
        limits=limits,
        on_progress=tell,
    ):
        print("up", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
