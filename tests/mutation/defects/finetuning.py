"""Defects of fine-tuning: what is a target, what a weight's bytes are, what is written."""

from ..planting import Defect

_RECORDS = "tests/data/test_records.py"
_LINEARS = "tests/models/test_quantized_linears.py"
_WEIGHTS = "tests/sharded/test_streamed_weights.py"

DEFECTS = (
    Defect(
        "prompts trained too",
        "mask",
        "data/examples.py",
        "every token of a prompt with a completion is a target",
        "    if not prompt:\n        trained[:] = True",
        "    if prompt:\n        trained[:] = True",
        (f"{_RECORDS}::test_an_assistants_answers_are_trained",),
    ),
    Defect(
        "an answer's end not trained",
        "mask",
        "data/examples.py",
        "what ends an assistant's message is no target, so that the model never ends",
        "return len(asked), len(answered)",
        "return len(asked), len(asked) + len(messages[number]['content'])",
        (f"{_RECORDS}::test_an_assistants_answers_are_trained",),
    ),
    Defect(
        "targets of the token before",
        "index",
        "data/tokens.py",
        "a position's target counts where the position itself, not the next one, is trained",
        "self._trained[start + 1 : start + len(read)]",
        "self._trained[start : start + len(read) - 1]",
        (f"{_RECORDS}::test_targets_of_packed_documents",),
    ),
    Defect(
        "halves of a byte exchanged",
        "order",
        "models/quantized_linears.py",
        "the first of two values lies in the lower half, as in no file of bitsandbytes",
        "upper, lower = F.pad",
        "lower, upper = F.pad",
        (f"{_LINEARS}::test_the_bytes_are_those_of_bitsandbytes",),
    ),
    Defect(
        "whole weights kept for backward",
        "memory",
        "models/quantized_linears.py",
        "a layer in 4 bits keeps its bytes for backward as floats, too",
        "        ctx.save_for_backward(packed)\n        ctx.save_for_forward(packed)",
        "        ctx.save_for_backward(packed, packed.float())\n        ctx.save_for_forward(packed)",
        (f"{_LINEARS}::test_a_layer_keeps_bytes_for_backward",),
    ),
    Defect(
        "all weights gathered for some",
        "payload",
        "sharded/unshard.py",
        "a stream of some weights gathers the buckets of all",
        "if only is None or not only.isdisjoint(bucket.paths):",
        "if True:",
        (f"{_WEIGHTS}::test_of_what_is_not_wanted_nothing_is_sent",),
    ),
)
