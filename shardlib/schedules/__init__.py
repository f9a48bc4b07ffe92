"""Pipeline schedules as data: made by pure functions, checked, simulated on a virtual clock, lowered to messages.

A schedule is a list of actions for each rank, in the order in which the rank runs them. An `Action` is ``(stage, kind,
micro-batch)``, and its `Kind` a forward ``F``, a backward ``B``, or a backward split into ``I`` (the input's gradient) and
``W`` (the weights'). Pass your own lists to ``sl.pipeline(lists, microbatches=...)``, which adds the messages. Orders that
cannot run are refused when the plan is made, with all that is missing.
"""

from shardlib.schedules.actions import Schedule, check, from_orders
from shardlib.schedules.clock import Costs, Timeline, peak_in_flight, peak_of_stages, simulate
from shardlib.schedules.dualpipe import dualpipe_v
from shardlib.schedules.events import Action, Event, Kind
from shardlib.schedules.generators import (
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble_h1,
)
from shardlib.schedules.make import NAMES, make_schedule, named_schedule, read_table, write_table
from shardlib.schedules.messages import acknowledged, lower, peer, tag
from shardlib.schedules.partition import by_cost, by_count, by_regex

__all__ = [
    "acknowledged",
    "Action",
    "by_cost",
    "by_count",
    "by_regex",
    "check",
    "Costs",
    "dualpipe_v",
    "Event",
    "from_orders",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "Kind",
    "looped_bfs",
    "lower",
    "make_schedule",
    "named_schedule",
    "NAMES",
    "one_f_one_b",
    "peak_in_flight",
    "peak_of_stages",
    "peer",
    "read_table",
    "Schedule",
    "simulate",
    "tag",
    "Timeline",
    "write_table",
    "zbv",
    "zero_bubble_h1",
]
