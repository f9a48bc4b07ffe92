"""Every benchmark: ``python -m benchmarks [--rounds 20] [--only speed kernels link]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import kernels, link, pipeline, report, slicing, small_tensors, speed

_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    benchmarks = {
        "speed": lambda rounds: speed.measure(rounds),
        "small_tensors": lambda rounds: small_tensors.measure(5 * rounds),
        "kernels": lambda rounds: kernels.measure(rounds),
        "slicing": lambda rounds: slicing.measure(rounds),
        "pipeline": lambda rounds: pipeline.measure(rounds),
        "link": lambda rounds: link.measure(max(3, rounds // 4)),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(benchmarks), default=list(benchmarks))
    arguments = parser.parse_args()
    sections = []
    for name in arguments.only:
        print(f"{name} …", flush=True)
        sections.append(benchmarks[name](arguments.rounds))
        print(sections[-1].markdown(), flush=True)
    if set(arguments.only) == set(benchmarks):
        report.write(_RESULTS, "cpu", sections)


if __name__ == "__main__":
    main()
