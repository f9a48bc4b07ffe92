"""Defects of `tests/mutation` by which plans train apart: where `bisect` must find each, written down before it was run."""

from typing import NamedTuple


class Planted(NamedTuple):
    """A defect, the case in which it shows, and what is to be named.

    Attributes:
        name: of the defect.
        case: of `cases.CASES`.
        phase: of the step.
        operation: a pattern of the operation.
        leaf: a pattern of the parameter; "" for any or none.
    """

    name: str
    case: str
    phase: str
    operation: str
    leaf: str = ""


PLANTED = (
    # Where parameters lie.
    Planted("a shard off by one", "gathered", "placing", "the shards of parameters", "blocks/0"),
    Planted("the window of the next rank", "sliced", "placing", "the shards of parameters", "blocks/0/attn"),
    Planted("owners numbered from minor to major", "two axes", "placing", "the shards of parameters, .*'a', 'b'"),
    # What the loss function is given.
    Planted("the first micro-batch again and again", "accumulated", "forward", "the micro-batch that"),
    Planted("targets of another micro-batch", "piped", "forward", "the micro-batch that"),
    Planted("a key without the rank", "dropout", "forward", "the random key of the micro-batch"),
    Planted("a key without the micro-batch", "dropout", "forward", "the random key of the micro-batch"),
    Planted("a key without the step", "dropout", "forward", "the random key of the micro-batch"),
    Planted("a second shard of the step before", "two levels", "forward", "the gather of unit .* over axis .*'local'"),
    # Forward.
    Planted("a rank's first word is nobody's", "sliced", "forward", "linear_cross_entropy", "head/weight"),
    Planted("the largest score of a rank's own words", "sliced", "forward", "linear_cross_entropy", "head/weight"),
    Planted("others' words look up the first row", "sliced", "forward", "embedding", "embed/tokens"),
    Planted("a bias on every rank", "sliced", "forward", "linear", "blocks/0/attn/out"),
    Planted("a row layer is not reduced", "sliced", "forward", "embedding", "embed/tokens"),  # by the same sum
    Planted("heads in another order", "ulysses", "forward", "attention|transpose"),
    Planted("the ring's mask of the wrong side", "ring", "forward", "attention|transpose"),
    Planted("positions that begin anew on every rank", "ulysses, dropout", "forward", "dropout"),
    # Backward.
    Planted("copy without its dual", "sliced", "backward", "backward of .*linear", "head/weight|mlp/up|attn/qkv"),
    Planted("a column layer's input without its pair", "sliced", "backward", "backward of .*linear", "mlp/up"),
    Planted("a common loss counted by every rank", "sliced", "backward", "backward of .*linear"),
    Planted(
        "all-to-all back along the same dimensions", "ulysses", "backward", "backward of .*(unbind|attention|transpose)"
    ),
    Planted("a ring forgets its own keys", "ring", "backward", "backward of .*(unbind|attention|transpose)"),
    Planted("the oldest micro-batch goes back", "piped, oldest first", "backward", "backward of"),
    Planted("the first rank's share", "stored", "backward", "the recomputation of layer_norm", ""),
    Planted("weights' gradients twice", "zero bubble", "backward|reduction", "backward of|the sum over micro-batches"),
    # Sums of gradients.
    Planted("a mean over one rank", "plain", "reduction", "the factor of the mean over 4 ranks"),
    Planted("a loss scale that stays in gradients", "scaled", "reduction", "the factor of the mean .* loss scale"),
    Planted("the weight of the last micro-batch", "packed", "reduction", "the factor of the mean"),
    Planted("later micro-batches add nothing", "accumulated", "reduction", "the sum over micro-batches of .* unit"),
    Planted("split gradients overwritten", "split", "reduction", "over micro-batches|after its exchanges"),
    Planted("the second reduction left out", "copied", "reduction", "the all_reduce of .* over axis 'node'"),
    Planted("parts of a sequence are not summed", "parts", "reduction", "the all_reduce of .* over axis 'seq'"),
    Planted("what slices share is not summed", "shared", "reduction", "the all_reduce of .* over axis 'model'", "norm"),
    Planted("experts are summed", "experts", "reduction", "experts", "experts"),
    Planted("a tied leaf's gradient at its first home", "tied", "reduction", "the sum over stages .* axis 'pipe'"),
    Planted("tiles of another order", "tiled", "reduction", "the sum of the gradient of unit", "weight"),
    Planted("residual of the first phase forgotten", "one bit", "reduction", "over axis 'data' in 1 bit"),
    Planted("residual of the second phase forgotten", "one bit", "reduction", "over axis 'data' in 1 bit"),
    Planted("a mean of bits in place of their sum", "one bit", "reduction", "over axis 'data' in 1 bit"),
    Planted("factors leave all of the matrix behind", "low rank", "reduction", "over axis 'data' in"),
    Planted("the scale of the first block for all", "8 bits", "reduction", "over axis 'data' in"),
    # Norms, updates, and what is gathered after them.
    Planted("squares of a rank's own slices", "sliced", "norm", "the norm of the gradients"),
    Planted("copies counted by every rank", "copied", "norm", "the norm of the gradients"),
    Planted("trust ratios of a rank's own shard", "lamb", "update", "lamb"),
    Planted("whole matrices from the wrong ranks", "muon", "update", "muon"),
    Planted("masters that stay", "masters", "update", "parameters|update"),
    Planted("a clip left out of updates by bucket", "offloaded", "update", "clip|update|state"),
    Planted(
        "parameters that are not put back", "plain", "gather after the update", "the gather of unit .* axis 'data'"
    ),
)
