"""Shared by all rooms: where the project's shared material is, and a small sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Shared cores pause at any moment: how long an example takes says nothing.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ../shared beside the checkout; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: this test compares with material that does not ship with the project")
    return folder
