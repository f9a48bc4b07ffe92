"""Files import only from the floors below their own; pyproject.toml says which those are."""

import subprocess
import sys
from pathlib import Path


def test_no_file_imports_upwards():
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
