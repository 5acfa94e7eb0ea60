"""A process that stands in for an engine: a fake engine on a port, which fails as told.

``python engine_driver.py PORT [HOW...]``: ``dies`` (prints and ends with status 3 before it listens), ``hangs`` (listens, never
answers), ``deaf`` (never listens), ``stubborn`` (ignores SIGTERM), ``child`` (keeps a child process in its group),
``dies-after=SECONDS`` (ends with status 4), ``no-kv`` (hands over, but moves nothing), ``dies-once=FILE`` (as ``dies`` if FILE is
absent, which it then makes).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))

from fake_engine import Behaviour, FakeEngine


def options(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def die() -> None:
    for number in range(30):
        print(f"loading shard {number}", flush=True)
    print("RuntimeError: out of luck", file=sys.stderr, flush=True)
    sys.exit(3)


async def serve(port: int, how: dict[str, str]) -> None:
    engine = FakeEngine(f"engine-{port}", behaviour=Behaviour(hang="hangs" in how))
    if "no-kv" in how:
        engine.hit_tokens = len  # everything is here already, so that nothing is pulled
    await engine.start(port)
    print(f"serving on {port}", flush=True)
    if "dies-after" in how:
        await asyncio.sleep(float(how["dies-after"]))
        print("Segmentation fault (not really)", flush=True)
        sys.exit(4)
    await asyncio.Event().wait()


def main() -> None:
    port, how = int(sys.argv[1]), options(sys.argv[2:])
    if "stubborn" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in how:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    once = Path(how["dies-once"]) if "dies-once" in how else None
    if "dies" in how or (once is not None and not once.exists()):
        if once is not None:
            once.touch()
        die()
    if "deaf" in how:
        signal.pause()
    asyncio.run(serve(port, how))


if __name__ == "__main__":
    main()
