"""Every benchmark: ``python -m benchmarks [--rounds 20] [--only speed kernels link]``."""

from __future__ import annotations

import argparse

from benchmarks import (
    dense_kernels,
    kernels,
    large_batch,
    learning,
    link,
    optimizer_kernels,
    pipeline,
    report,
    slicing,
    slow_network,
    small_tensors,
    speed,
)

# What is written together, once all of it is measured.
_TABLES = {
    "cpu": ("speed", "small_tensors", "kernels", "slicing", "pipeline", "link"),
    "kernels_cpu": ("optimizer_kernels", "dense_kernels"),
}


def main() -> None:
    sections = {
        "speed": lambda rounds: speed.measure(rounds),
        "small_tensors": lambda rounds: small_tensors.measure(5 * rounds),
        "kernels": lambda rounds: kernels.measure(rounds),
        "optimizer_kernels": lambda rounds: optimizer_kernels.measure(rounds),
        "dense_kernels": lambda rounds: dense_kernels.measure(rounds),
        "slicing": lambda rounds: slicing.measure(rounds),
        "pipeline": lambda rounds: pipeline.measure(rounds),
        "link": lambda rounds: link.measure(max(3, rounds // 4)),
    }
    # With results of their own.
    tables = {"slow_network": slow_network.run, "learning": learning.run, "large_batch": large_batch.run}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=[*sections, *tables], default=[*sections, *tables])
    arguments = parser.parse_args()
    found = {}
    for name in arguments.only:
        print(f"{name} …", flush=True)
        if name in sections:
            found[name] = sections[name](arguments.rounds)
        print(tables[name]() if name in tables else found[name].markdown(), flush=True)
    for results, names in _TABLES.items():
        if set(arguments.only) >= set(names):
            report.write(results, [found[name] for name in names])


if __name__ == "__main__":
    main()
