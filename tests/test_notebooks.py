"""Every notebook runs from top to bottom, and was committed with its outputs."""

from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel():
    """One process for all notebooks, which imports torch once; each begins without the names of the one before."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, kernel):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "commit the notebook executed, with its outputs"
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = NotebookClient(notebook, timeout=240, km=kernel)
    client.execute()
    client.kc.stop_channels()
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]


def test_there_are_notebooks():
    assert NOTEBOOKS
