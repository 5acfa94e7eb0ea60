"""The README's Python is run as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = "tables/2P_2D.json"
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
EMBEDDED = [block for block in BLOCKS if "ppd_bench.policy" in block]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the README's run in it, as far as a table goes."""
    place = tmp_path / "results/paper-sim" / TABLE
    place.parent.mkdir(parents=True)
    shutil.copy(ROOT / "results/reference-sim" / TABLE, place)
    return tmp_path


def test_there_is_something_to_embed() -> None:
    assert EMBEDDED


def test_a_table_and_a_policy_decide_elsewhere_as_the_readme_says(folder: Path) -> None:
    heavy = "import sys\nassert not {'numpy', 'pandas', 'httpx', 'asyncio'} & set(sys.modules)\n"
    program = "\n".join([*EMBEDDED, heavy])
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    looked_up, decided = done.stdout.splitlines()
    assert re.search(r"^(local|pd)\b.*\btable [0-9a-f]{16} \w+/\w+/\S+ simulated ", looked_up)
    assert "turn-1" in decided
