"""What a sweep asks about engines that an earlier ppd-bench, killed, left running."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import typer
from rich.console import Console

from ppd_bench.engine.orphans import Orphan


def orphan_question(console: Console, *, clean: bool) -> Callable[[Sequence[Orphan]], bool]:
    """Shows the orphans and says whether to end them: with ``clean`` yes, at a terminal by asking, else no, with advice."""

    def end_them(orphans: Sequence[Orphan]) -> bool:
        for orphan in orphans:
            engine = orphan.engine
            console.print(
                f"{engine.worker_id} on port {engine.port} was left behind by a ppd-bench that was killed "
                f"(process {orphan.owner_pid})"
            )
        if clean:
            console.print(f"ending {len(orphans)} of them")
            return True
        if console.is_terminal and sys.stdin.isatty():
            return typer.confirm("End them now?", default=True)
        console.print("they keep their memory and their ports; --clean ends them")
        return False

    return end_them
