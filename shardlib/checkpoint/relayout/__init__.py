"""Experts moved between ranks, to balance loads, with all that a train state has of them.

`verbs` has the functions that users call, `layers` knows layers and their seats, `tensors` finds what moves, `moves` says
from where to where, and `journey` sends it.
"""

from shardlib.checkpoint.relayout.verbs import relayout, relayout_payload

__all__ = ["relayout", "relayout_payload"]
