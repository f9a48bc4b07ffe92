"""Defects of what each step reads: rows, lengths, and samples that may be drawn."""

from ..planting import Defect

_CURRICULUM = "tests/data/test_curriculum.py"
_ANALYZE = "tests/data/test_analyze.py"

DEFECTS = (
    Defect(
        "what was drawn is left",
        "data",
        "data/growing.py",
        "where more samples become eligible, those that the epoch has had are drawn in place of those that it has left",
        "places[~joined] + phase.drawn",
        "places[~joined]",
        (f"{_CURRICULUM}::test_an_epoch_has_every_sample_that_may_be_drawn_once",),
    ),
    Defect(
        "an epoch drawn in the order of the one before",
        "data",
        "data/growing.py",
        "whole epochs under one limit repeat the order in which the phase began",
        "phase.limit, self.seed, phase.epoch + 1 + epoch\n",
        "phase.limit, self.seed, phase.epoch\n",
        (f"{_CURRICULUM}::test_one_limit_is_the_order_of_a_dataset",),
    ),
    Defect(
        "an epoch that ends before others join it",
        "data",
        "data/growing.py",
        "a stream ends where the first samples have been drawn, though others have come into the epoch",
        "math.inf]) if end <= until)",
        "math.inf]))",
        (f"{_CURRICULUM}::test_an_epoch_has_every_sample_that_may_be_drawn_once",),
    ),
    Defect(
        "a pace of rows that is read ahead",
        "data",
        "data/loader.py",
        "batches that are computed together have the first one's rows, whatever the pace says",
        "return most if until is None else min(most, -(-(until - start) // batch))",
        "return most",
        (f"{_CURRICULUM}::test_rows_follow_their_pace_to_the_end_of_the_last_epoch",),
    ),
    Defect(
        "pieces without their row's label",
        "data",
        "data/lengths.py",
        "what belongs to a row goes to pieces of other rows",
        "leaf.repeat_interleave(pieces, 0)",
        "torch.cat([leaf] * pieces)",
        (f"{_CURRICULUM}::test_what_is_cut_off_becomes_rows",),
    ),
    Defect(
        "tokens of the pieces left out",
        "factor",
        "data/lengths.py",
        "a rate by consumed tokens counts the first piece of each row alone",
        "lambda sequence, length: sequence // length)",
        "lambda sequence, length: 1)",
        (f"{_CURRICULUM}::test_what_is_cut_off_becomes_rows",),
    ),
    Defect(
        "a part of another analysis",
        "stale",
        "data/analyze.py",
        "an analysis goes on with parts of another metric",
        "return header if known and {key: header.get(key) for key in self.about} == self.about else None",
        "return header",
        (f"{_ANALYZE}::test_parts_are_those_of_the_same_function",),
    ),
    Defect(
        "a part of other samples",
        "stale",
        "data/analyze.py",
        "an analysis goes on with parts of another dataset that does not say which it is",
        'if found["contents"] == again.contents.checksum:',
        "if True:",
        (f"{_ANALYZE}::test_parts_are_those_of_the_same_samples",),
    ),
    Defect(
        "ties in the order of parts' largest",
        "order",
        "data/merging.py",
        "samples of one value that many parts have lose their order",
        "for run, end in zip(runs, up_to):",
        "for run, end in reversed([*zip(runs, up_to)]):",
        (f"{_ANALYZE}::test_parts_are_merged_in_little_memory",),
    ),
    Defect(
        "padding as rare as the token of its number",
        "data",
        "data/metrics.py",
        "positions that hold no token are looked up by what pads them",
        "self._nats[np.where(held, tokens, 0)]",
        "self._nats[tokens]",
        (f"{_ANALYZE}::test_metrics_of_lists",),
    ),
)
