"""The notebooks run as they are opened, say whose numbers they show, and define nothing that a room owns."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
RESULTS_COME_FROM = ("ppd_bench.store", "ppd_bench.analysis", "ppd_bench.policy.table", "ppd_bench.report")
RUNS_ARE_MADE_BY = ("ppd_bench.runner", "ppd_bench.core.slo", "ppd_bench.core.topology")
"""What a notebook may import of the package: no room that measures, and none that prints."""

EVIDENCE = {
    "read_a_sweep": ("paper-sim: simulated, 3,060 points", "simulated"),
    "simulated_vs_measured": ("reference: measured, against it: simulated", "held-out points"),
    "weights_to_table": ("paper-sim: simulated", "evidence"),
}
"""What each must print about where its numbers come from."""


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(notebook: NotebookNode) -> ast.Module:
    return ast.parse("\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code"))


def text_outputs(notebook: NotebookNode) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def test_there_are_three_and_each_is_checked() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(EVIDENCE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_it_is_committed_without_outputs(self, path: Path) -> None:
        notebook = read(path)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert cells
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)

    def test_it_imports_no_room_but_those_that_hold_results(self, path: Path) -> None:
        imported = [node.module or "" for node in ast.walk(code_of(read(path))) if isinstance(node, ast.ImportFrom)]
        ours = [name for name in imported if name.startswith("ppd_bench")]
        assert ours
        allowed = RESULTS_COME_FROM + RUNS_ARE_MADE_BY
        assert [name for name in ours if not any(name == a or name.startswith(f"{a}.") for a in allowed)] == []

    def test_it_defines_no_metric(self, path: Path) -> None:
        """No functions, no arithmetic: a number comes from the analysis room or not at all. A path is joined with a slash."""
        nodes = list(ast.walk(code_of(read(path))))
        assert not [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        sums = [
            n for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub | ast.Mult | ast.Div | ast.Add)
        ]
        joined = [n for n in sums if isinstance(n.op, ast.Div) and isinstance(n.right, ast.Constant | ast.JoinedStr)]
        paths = [n for n in joined if not isinstance(n.right, ast.Constant) or isinstance(n.right.value, str)]
        assert [ast.unparse(n) for n in sums if n not in paths] == []

    @pytest.mark.slow
    def test_it_runs_and_says_whose_numbers_it_shows(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            monkeypatch.setenv(name, str(tmp_path / name))
        notebook = read(path)
        NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
        told = text_outputs(notebook)
        assert [text for text in EVIDENCE[path.stem] if text not in told] == []
        assert "Warning" not in told
