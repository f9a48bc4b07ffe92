"""Every notebook runs from top to bottom, and was committed with its outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "commit the notebook executed, with its outputs"
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]


def test_there_are_notebooks():
    assert NOTEBOOKS
