"""`python -m tests.mutation`: plants the defects one after the other, prints what notices each, and writes the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .defects import DEFECTS
from .running import Outcome, control, project, run
from .table import PAGE, read, written


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="defects to plant; by default all, after a run without any")
    parser.add_argument("--write", action="store_true", help=f"write what noticed them into {PAGE.name}")
    parser.add_argument("--likely", action="store_true", help="leave it at the tests that are likely to notice")
    options = parser.parse_args()
    if unknown := set(options.names) - {defect.name for defect in DEFECTS}:
        parser.error(f"no such defects: {', '.join(sorted(unknown))}")
    chosen = [defect for defect in DEFECTS if not options.names or defect.name in options.names]
    noticed, words = read(), Counter[str]()
    with project() as made:
        if not options.names and (found := control(made, (test for defect in chosen for test in defect.tests))).test:
            print(f"without a defect {found.test} fails:\n{found.output[-3000:]}")
            return 1
        for defect in chosen:
            start = time.monotonic()
            try:
                found = run(made, defect, options.likely)
            except RuntimeError as error:
                found = Outcome("", False, str(error))
            words[found.word] += 1
            if found.noticed:
                noticed[defect.name] = found.test
            elif not found.skipped:
                print(found.output[-3000:])
            print(f"{found.word:12} {defect.name:45} {time.monotonic() - start:5.0f} s  {found.test}", flush=True)
    print(f"{len(chosen)} defects: " + ", ".join(f"{count} {word}" for word, count in words.items()))
    if options.write:
        PAGE.write_text(written(noticed))
    return int(not set(words) <= {"noticed", "skipped"})


if __name__ == "__main__":
    sys.exit(main())
