"""Only one file, `shardlib/common/_compat.py`, uses private names of torch."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for path in (ROOT / "shardlib").rglob("*.py") if path.name != "_compat.py")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


# Of what torch gives out: the names of its own that are no one's business.
INSIDE = {
    name
    for thing in (
        torch.Tensor,
        torch.nn.Module(),
        torch.UntypedStorage,
        torch.ops.aten.mm.default,
        torch.optim.Optimizer,
    )
    for name in dir(thing)
    if is_private(name)
}
# Of named tuples, handles, and transformers' models.
OTHERS = {"_fields", "_path", "_tp_plan", "_init_weights", "_attn_implementation", "_is_expert_parallel"} | {
    f"_keys_to_ignore_on_{when}" for when in ("load_unexpected", "load_missing", "save")
}


def inside_of_torch(source: str) -> Iterator[str]:
    """Uses of torch's private names in a source: by import, from a module, of an object, or by a string."""
    tree = ast.parse(source)
    modules = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [(name.name, name.asname or name.name.partition(".")[0]) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [(f"{node.module}.{name.name}", name.asname or name.name) for name in node.names]
        else:
            continue
        for path, name in paths:
            if path.partition(".")[0] == "torch":
                modules.add(name)
                if any(map(is_private, path.split("."))):
                    yield f"line {node.lineno}: {path}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            first = owner.id if isinstance(owner, ast.Name) else None
            own = isinstance(node.value, ast.Name) and first in ("self", "cls")
            if first in modules or (node.attr in INSIDE and not own):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr")
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in OTHERS:
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "source",
    [
        "from torch._utils import _flatten_dense_tensors",
        "import torch.utils._pytree as pytree",
        "import torch\ntorch._foreach_add_([], [])",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "def changed(tensor, version):\n    return tensor._version != version",
        "getattr(tensor.grad_fn, '_set_sequence_nr')",
        "class Owner:\n    def buffers(self):\n        return self.module._buffers",
    ],
)
def test_private_names_of_torch_are_found(source):
    assert list(inside_of_torch(source))


def test_only_one_file_uses_private_names_of_torch():
    found = {str(path.relative_to(ROOT)): list(inside_of_torch(path.read_text())) for path in SOURCES}
    assert not {path: positions for path, positions in found.items() if positions}


def test_what_takes_long_is_not_imported():
    """All of the library leaves the compiler alone, which takes as long; the library itself waits for a first use."""
    code = "import sys, shardlib; print(sorted(name for name in sys.modules if name.startswith(%r)))"

    def imported(prefixes, everything):
        environment = {**os.environ, "EAGER_IMPORT": "1" if everything else ""}
        command = [sys.executable, "-c", code % (prefixes,)]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout

    assert imported(("torch._dynamo", "torch._inductor", "triton"), everything=True).strip() == "[]"
    assert len(ast.literal_eval(imported(("shardlib",), everything=True))) > 300
    assert len(ast.literal_eval(imported(("shardlib",), everything=False))) < 5
