"""What commands refuse: types of arguments, and what is wrong with several together, as one line."""

from __future__ import annotations

import argparse

from shardlib.plan.tables import parse_size


def positive(text: str) -> int:
    """An argument that counts something of which there is one at least."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An argument that counts something, or nothing."""
    return _integer(text, 0)


def size(text: str) -> int:
    """An argument in bytes, such as 24GiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _integer(text: str, least: int) -> int:
    if text.isdecimal() and int(text) >= least:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
