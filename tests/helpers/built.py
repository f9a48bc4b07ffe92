"""`python -m helpers.built`: compiles all that the tests load, which otherwise the first test to need it waits for."""

import contextlib
from pathlib import Path

from helpers import kernels, rig
from shardlib.kernels.common import native
from shardlib.kernels.common.build import BuildError

if __name__ == "__main__":
    with contextlib.suppress(BuildError):  # tests say what is missing
        rig.start()
        for source in sorted(Path(native.__file__).parents[1].glob("*/*.c[pu]*")):
            if source.suffix == ".cpp":
                native.cpp_path(source.stem)
            elif source.suffix == ".cu":
                kernels.cuda_on_cpu(source.stem)
