"""Which profile runs: `make test`'s few cases, or `make nightly`'s many and long ones."""

import os

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
