"""The page: structure, self-containment, escaping, reproducibility."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pandas as pd
import pytest

from ppd_bench.core.errors import SpecError, TableError
from ppd_bench.policy.table import DecisionTable
from ppd_bench.report.page import ReportInput, render_page
from ppd_bench.report.plots import Plot
from ppd_bench.report.tables import decision_table, frame_table, provenance_table

Attributes = dict[str, str | None]
VOID = {"meta", "link", "img", "br"}


class Outline(HTMLParser):
    """Elements in order, with a check that tags nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Attributes]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.setdefault(self._open[-1], []).append(data.strip())

    def all(self, tag: str) -> list[Attributes]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def content(
    paired_summaries: pd.DataFrame, paired_deltas: pd.DataFrame, table_texts: list[str], plots: list[Plot]
) -> ReportInput:
    published = pd.DataFrame(
        {"table": ["table 1"], "row": ["1P_3D"], "column": ["low"], "published": [-57.8], "computed": [-60.1]}
    )
    return ReportInput(
        run_name="demo",
        evidence="simulated",
        manifest={
            "name": "demo",
            "spec": {"qps": [2, 8, 20], "note": "<b>&"},
            "spec_hash": "0123abcd",
            "seed": 0,
            "versions": {"ppd_bench": "9.9.9"},
            "records_digest": None,
            "resumed": [],
        },
        summaries=paired_summaries,
        deltas=paired_deltas,
        tables=table_texts,
        published=published,
        plots=plots,
    )


@pytest.fixture(scope="module")
def html(content: ReportInput) -> str:
    return render_page(content)


@pytest.fixture(scope="module")
def page(html: str) -> Outline:
    return Outline(html)


def without_plots(content: ReportInput, **changes: Any) -> ReportInput:
    return dataclasses.replace(content, **{"plots": (), **changes})


def test_the_summary_comes_first_then_plots_tables_and_provenance(page: Outline) -> None:
    assert page.texts["h2"] == ["Summary", "Plots", "Tables", "Decision tables", "Provenance"]
    assert page.texts["h3"][:2] == ["Which split for which goal", "What each choice costs"]
    assert len(page.all("h1")) == 1


def test_the_page_says_its_language_title_and_executor(page: Outline) -> None:
    assert page.all("html") == [{"lang": "en"}]
    assert page.texts["title"] == ["ppd-bench: demo (simulated)"]
    assert page.texts["span"][0] == "simulated"
    assert "5 configurations, 3 workloads, 3 QPS levels, 1 repeat, 45 points" in " ".join(page.texts["p"])


def test_nothing_is_loaded_from_anywhere(html: str, page: Outline) -> None:
    assert page.all("script") == []
    for tag, attributes in page.elements:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), tag
    assert not re.search(r"https?://|url\(|@import", html)


def test_every_image_has_a_text_and_is_a_drawing(page: Outline) -> None:
    images = page.all("img")
    assert len(images) == 5
    for image in images:
        assert len(image["alt"] or "") > 40
        kind, _, data = (image["src"] or "").partition(";base64,")
        assert kind == "data:image/svg+xml"
        assert b"<svg" in base64.b64decode(data)


def test_tables_have_captions_and_headers_with_a_scope(page: Outline) -> None:
    tables = len(page.all("table"))
    assert tables == len(page.all("caption")) == 11
    assert {th.get("scope") for th in page.all("th")} == {"col", "row"}
    assert "Decision table: 1P_3D and 1P_3pD" in page.texts["caption"]
    assert "Beside the published figures" in page.texts["caption"]


def test_provenance_names_hash_versions_and_seed_and_shows_the_whole_spec(page: Outline, html: str) -> None:
    rows = page.texts["th"]
    assert {"spec_hash", "versions.ppd_bench", "seed"} <= set(rows)
    assert not {"records_digest", "resumed"} & set(rows)
    assert {"0123abcd", "9.9.9", "0"} <= set(page.texts["td"])
    assert "&lt;b&gt;&amp;" in html


def test_names_from_outside_are_escaped(content: ReportInput) -> None:
    evil = '<script>alert("x")</script>'
    html = render_page(without_plots(content, run_name=evil, manifest={"name": evil, "spec": None}))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3


def test_the_same_input_gives_the_same_bytes(content: ReportInput) -> None:
    first = without_plots(content, plots=content.plots[-1:] if content.plots else ())
    assert render_page(first) == render_page(dataclasses.replace(first, summaries=content.summaries.copy()))


def test_the_page_is_small_enough_to_mail(html: str) -> None:
    assert len(html.encode()) < 6_000_000


def test_partial_runs_give_a_page(partial_summaries: pd.DataFrame) -> None:
    page = Outline(
        render_page(ReportInput(run_name="p", evidence="simulated", manifest={}, summaries=partial_summaries, plots=()))
    )
    assert page.texts["h2"] == ["Summary", "Plots", "Tables", "Provenance"]
    assert "No plots." in page.texts["p"]


def test_a_page_draws_the_standard_plots_when_none_are_given(build: Callable[..., pd.DataFrame]) -> None:
    summaries = build(("4R",), ("small_tiny",), (2.0,))
    page = Outline(render_page(ReportInput(run_name="p", evidence="simulated", manifest={}, summaries=summaries)))
    assert len(page.all("img")) == 4


def test_a_damaged_table_is_an_error_and_not_half_a_page(content: ReportInput, table_texts: list[str]) -> None:
    with pytest.raises(TableError):
        render_page(without_plots(content, tables=[table_texts[0].replace('"local"', '"pd"', 1)]))


def test_measured_and_simulated_points_are_refused_on_one_page(content: ReportInput) -> None:
    mixed = content.summaries.copy()
    mixed.loc[mixed["topology"] == "4R", "executor"] = "live"
    with pytest.raises(SpecError):
        render_page(without_plots(content, summaries=mixed))


def test_decisions_are_letters_with_a_mark_for_their_evidence(table_texts: list[str]) -> None:
    table = DecisionTable.from_json(table_texts[0])
    shown = dict(decision_table(table).rows)
    for cell in table.cells:
        text = shown[f"{cell.context}, {cell.type}"][table.axes.qps.index(cell.qps)]
        assert text.text[0] == {"local": "L", "pd": "P"}[cell.decision]
        expected = {"simulated": "" if cell.rule == "equation1" else "!", "extrapolated": "*", "insufficient": "?"}
        assert text.text[1:] == expected[cell.evidence]
        assert cell.evidence in text.hint


def test_small_frames_become_tables_with_dashes_for_what_is_unknown() -> None:
    frame = pd.DataFrame({"row": ["a", "b"], "n_cells": [3, 4], "computed": [1.23456, float("nan")]})
    table = frame_table(frame, caption="c")
    assert table.head == ("row", "n cells", "computed")
    assert [[cell.text for cell in cells] for _, cells in table.rows] == [["3", "1.23"], ["4", "–"]]


def test_provenance_flattens_everything_but_the_spec() -> None:
    table = provenance_table({"spec": {"a": 1}, "machine": {"spec": {"cpu": "x"}}, "n_points": 3060})
    assert [(name, cells[0].text) for name, cells in table.rows] == [("machine.spec.cpu", "x"), ("n_points", "3060")]


def test_plots_are_data(content: ReportInput) -> None:
    assert content.plots is not None
    assert all(isinstance(plot, Plot) for plot in content.plots)
