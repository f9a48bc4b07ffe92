"""The command line of all benchmarks.

    python -m benchmarks                                          lists cases and tables
    python -m benchmarks run [names …] [--device cpu|cuda] …      measures some, or all of a kind of device
    python -m benchmarks soak [--seconds 3600]                    kills ranks of a supervised run at random times
    python -m benchmarks versions                                 tries the wheel under each Python and torch that is here
    python -m benchmarks collect FOLDER                           writes learning_experts from the runs finished there

On a GPU everything is checked before anything is measured; all of it takes eight to nine minutes. A table in
``results/`` is written where all its cases were measured in full, and left as it is otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.harness import results
from benchmarks.harness.case import CPU, CUDA, Setting
from benchmarks.harness.provenance import provenance
from benchmarks.harness.run import chosen, run
from benchmarks.learning import experts
from benchmarks.soak.run import soak, write
from benchmarks.tables import tables
from benchmarks.versions import PYTHONS, TORCHES, text, versions


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="cases and tables (as without a command)")
    options = commands.add_parser("run", help="measure")
    options.add_argument("names", nargs="*", help="of cases or tables; all of the device's by default")
    options.add_argument("--device", choices=[CPU, CUDA], default=CPU)
    options.add_argument("--rounds", type=int, default=0, help="in place of each case's own number")
    options.add_argument("--small", action="store_true", help="sizes that mean nothing; cuda's run on a CPU too")
    options.add_argument(
        "--processes", type=int, help="runs side by side where many are trained; one a core by default"
    )
    options.add_argument(
        "--work",
        type=Path,
        help="a folder from which learning_experts, learning_less or learning_curricula goes on after a stop",
    )
    options.add_argument("--out", type=Path, default=results.FOLDER, help="where full tables are written")
    survives = commands.add_parser("soak", help="kill ranks of a run at random times (results/soak.md)")
    survives.add_argument("--seconds", type=float, default=3600.0, help="how long; an uninterrupted run follows")
    survives.add_argument("--seed", type=int, default=0)
    survives.add_argument("--out", type=Path, default=results.FOLDER, help="where the table is written")
    tries = commands.add_parser("versions", help="the wheel under each Python and torch (results/versions.md)")
    tries.add_argument("--pythons", nargs="*", default=PYTHONS)
    tries.add_argument("--torches", nargs="*", default=TORCHES, help="versions, of which CPU builds are taken")
    tries.add_argument("--out", type=Path, default=results.FOLDER, help="where the table is written")
    collects = commands.add_parser("collect", help="write learning_experts from the runs that are finished")
    collects.add_argument("folder", type=Path, help="what --work was given")
    collects.add_argument("--out", type=Path, default=results.FOLDER, help="where the table is written")
    given = parser.parse_args(arguments)
    if given.command == "soak":
        source = provenance(arguments, torch.device(CPU))
        soaked = soak(given.seconds, given.seed)
        write(soaked, source, given.out / "soak.md")
        return 0 if soaked.one_curve else 1
    if given.command == "versions":
        source = provenance(arguments, torch.device(CPU))
        outcomes = versions(given.pythons, given.torches)
        (given.out / "versions.md").write_text(text(outcomes, source))
        return 1 if any("failed" in each for each in outcomes.values()) else 0
    if given.command == "collect":
        table = next(table for table in tables(CPU) if experts.CASE in table.cases)
        found = experts.result(experts.TASK, given.folder)
        print(found.text, *(f"not finished: {run}" for run in found.missing), sep="\n")
        print(f"written: {results.write(table, [found], provenance(arguments, torch.device(CPU)), given.out)}")
        return 0
    if given.command != "run":
        listing()
        return 0
    known, device = tables(given.device), torch.device(given.device)
    if device.type == CUDA and not torch.cuda.is_available():
        if not given.small:
            parser.error("no CUDA device: nothing to measure (--small tries the cases on the CPU)")
        device = torch.device(CPU)
    try:
        chosen(known, given.names)
    except ValueError as error:
        parser.error(str(error))
    setting = Setting(given.device, device, given.rounds, given.small, given.processes, given.work)
    return 0 if run(known, given.names, setting, provenance(arguments, device), given.out) else 1


def listing() -> None:
    """Prints every table with its cases."""
    for kind in (CPU, CUDA):
        for table in tables(kind):
            print(f"{table.name}: {table.title} (--device {kind})")
            for case in table.cases:
                print(f"  {case.name:22} {case.rounds[kind]:4} rounds  {case.about}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
