"""The page in a real browser: it renders, and the console stays silent."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from ppd_bench.report.page import ReportInput, render_page
from ppd_bench.report.plots import Plot

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--v=0",
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="CHROMIUM IS ABSENT: the page was not rendered (Debian: chromium)")
def test_the_page_renders_in_headless_chromium_without_console_messages(
    tmp_path: Path,
    paired_summaries: pd.DataFrame,
    paired_deltas: pd.DataFrame,
    table_texts: list[str],
    plots: list[Plot],
) -> None:
    html = render_page(
        ReportInput(
            run_name="browser",
            evidence="simulated",
            manifest={"name": "browser", "seed": 0, "spec": {"qps": [2]}},
            summaries=paired_summaries,
            deltas=paired_deltas,
            tables=table_texts,
            plots=plots,
        )
    )
    # The probe turns what a reader would see into text: an image that does not decode has no natural width.
    probe = """<script>addEventListener('load', () => {
        const images = [...document.images], root = document.documentElement;
        const decoded = images.filter(image => image.naturalWidth > 300).length;
        document.title = `${images.length} images, ${decoded} decoded, overflow ${root.scrollWidth - root.clientWidth}`;
        console.log('probe ran');
    })</script>"""
    file = tmp_path / "page.html"
    file.write_text(html.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    found = _browse(file, tmp_path / "profile")
    assert re.search(r"<title>(.*)</title>", found.stdout, re.S)[1] == "5 images, 5 decoded, overflow 0"  # type: ignore[index]
    console = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    assert len(console) == 1, console
    assert "probe ran" in console[0]


def _browse(file: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={profile}",
        "--window-size=1200,900",
        "--dump-dom",
        file.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
