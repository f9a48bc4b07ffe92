"""Compilation of a Triton kernel for sm_90 without a GPU, and limits of the registers and memory it may use."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_BYTES = 227 * 1024  # that a program can have on sm_90


@dataclass(frozen=True)
class Case:
    """A kernel and how it is launched.

    Attributes:
        types: of what is passed when it runs.
        constants: what is compiled in.
        exact: a product is rounded before it is added.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    exact: bool = True


def compiled(case: Case) -> Any:
    """What Triton makes of a kernel."""
    types = {name: "constexpr" if name in case.constants else case.types[name] for name in case.kernel.arg_names}
    constants = {name: value for name, value in case.constants.items() if name in types}
    # As the launcher finds them: torch's memory is aligned.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind[0] == "*"}
    options = {"enable_fp_fusion": not case.exact, "num_warps": case.warps, "num_stages": case.stages}
    source = ASTSource(case.kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check(case: Case, folder: Path) -> None:
    """Compile, and fail where registers are spilled or shared memory does not suffice."""
    made = compiled(case)
    assert made.metadata.shared <= SHARED_BYTES
    if case.exact:
        assert "fma.rn.f32" not in made.asm["ptx"]
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, local = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage).groups()
    assert (stack, local) == ("0", "0"), usage
