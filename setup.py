"""Only glue: pyproject.toml has the metadata, .ci/build_backend/ppd_build.py the build."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent / ".ci" / "build_backend"))

import ppd_build

setup(**ppd_build.setup_arguments())
