"""Notebooks run from the first cell to the last, and their page in the docs shows their cells."""

from __future__ import annotations

import os
import sys

import pytest

from tests.docs.test_docs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_page_shows_the_notebooks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import notebooks

    assert sorted(notebooks.NOTEBOOKS) == NOTEBOOKS
    assert notebooks.PAGE.read_text("utf-8") == notebooks.page(), "python scripts/notebooks.py"


@pytest.mark.slow  # a kernel and a Ray of its own, and whole trainings
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_notebook_runs(file, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="in the extra dev")
    nbformat = pytest.importorskip("nbformat", reason="in the extra dev")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not one that another test has started
    notebook = nbformat.read(file, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
