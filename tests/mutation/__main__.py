"""`python -m tests.mutation`: plants the defects one after the other, prints what notices each, and writes the table."""

from __future__ import annotations

import argparse
import sys
import time

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
    chosen = [defect for defect in DEFECTS if defect.runs and (not options.names or defect.name in options.names)]
    noticed, missed = read(), 0
    with project() as made:
        if not options.names and (found := control(made, chosen)).test:
            print(f"without a defect {found.test} fails:\n{found.output[-3000:]}")
            return 1
        for defect in chosen:
            start = time.monotonic()
            try:
                found = run(made, defect, options.likely)
            except RuntimeError as error:
                found = Outcome("", False, str(error))
            if found.noticed:
                noticed[defect.name] = found.test
            else:
                missed += 1
                print(found.output[-3000:])
            word = "noticed" if found.noticed else "hangs" if found.hung else "NOT NOTICED"
            print(f"{word:12} {defect.name:45} {time.monotonic() - start:5.0f} s  {found.test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} defects noticed")
    if options.write:
        PAGE.write_text(written(noticed))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
