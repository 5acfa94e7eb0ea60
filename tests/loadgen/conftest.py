"""Fakes on real sockets for every test of the load generator and of the engine's data path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))
