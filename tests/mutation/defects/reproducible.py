"""Defects of sums in one order: the tree over micro-batches, exact sums, and how ranks divide them."""

from ..planting import Defect

_TREE = "tests/collectives/test_tree_sum.py"
_BITS = "tests/transforms/test_reproducible.py"
_DIVISORS = f"{_BITS}::test_any_number_of_ranks_that_divides_the_micro_batches"
_SUM = "collectives/tree_sum.py"
_IN_ORDER = "collectives/codecs/in_order.py"

DEFECTS = (
    Defect(
        "added to whichever neighbour is there",
        "order",
        _SUM,
        "a sum is added to that of the leaves before or behind it, as they come",
        "            if sibling.place < width:\n",
        "            sibling = next((n for n in self._held if n.height == height and abs(n.place - place) == 1), sibling)\n"
        "            if sibling.place < width:\n",
        (f"{_TREE}::test_any_order_gives_the_same_bits",),
    ),
    Defect(
        "a node without a neighbour stays below",
        "reduction",
        _SUM,
        "the odd last node of a level does not go up",
        "            if sibling.place < width:\n                if sibling not in self._held:\n                    break\n",
        "            if sibling not in self._held:\n                break\n            if sibling.place < width:\n",
        (f"{_TREE}::test_any_order_gives_the_same_bits",),
    ),
    Defect(
        "only the first node of a rank",
        "reduction",
        _IN_ORDER,
        "of a rank's nodes the first is added, and the others are dropped",
        "enumerate(nodes_of(self.leaves, first, self.share)):",
        "enumerate(nodes_of(self.leaves, first, self.share)[:1]):",
        (f"{_DIVISORS}[{{'data': 4, 'stage': 0}}]",),
    ),
    Defect(
        "ranks from last to first",
        "order",
        _IN_ORDER,
        "the rows of the last rank are taken for those of the first",
        "tree.add(node, arrived[number, rank])",
        "tree.add(node, arrived[number, self.rows.ways - 1 - rank])",
        (f"{_DIVISORS}[{{'data': 3, 'stage': 2}}]",),
    ),
    Defect(
        "every group of ranks is the first",
        "axis",
        "plan/exchanges.py",
        "on a hybrid mesh each node finishes the tree as if it had the first micro-batches",
        "group=rank_of(groups, coords),",
        "group=0,",
        (f"{_DIVISORS}[{{'node': 4, 'data': 3, 'stage': 2}}]",),
    ),
    Defect(
        "micro-batches numbered rank by rank",
        "offset",
        "execute/gradients.py",
        "every rank adds its micro-batches as if they were the first ones",
        "tree.add(Node(0, self._first + self._microbatch),",
        "tree.add(Node(0, self._microbatch),",
        (f"{_DIVISORS}[{{'data': 4, 'stage': 0}}]",),
    ),
    Defect(
        "gradients summed by the transport",
        "order",
        "transforms/reproducible.py",
        "between ranks the library that sends them adds",
        'yield Reduce("*", codec=InOrder(self.microbatches), summation=EXACT)',
        'yield Reduce("*", summation=EXACT)',
        (f"{_BITS}::test_the_bits_of_one_device[{{'data': 8, 'stage': 0}}]",),
    ),
    Defect(
        "losses and norms summed as they come",
        "norm",
        "transforms/reproducible.py",
        "they are rounded to float64 at every addition",
        'yield Reduce("*", codec=InOrder(self.microbatches), summation=EXACT)',
        'yield Reduce("*", codec=InOrder(self.microbatches)) if EXACT else None',
        (f"{_BITS}::test_the_bits_of_one_device[{{'data': 8, 'stage': 0}}]",),
    ),
    Defect(
        "a place without its carry",
        "numerics",
        "kernels/exact_sum/digits.py",
        "what a sum of digits has above 2³² is lost",
        "out[..., 1:PLACES] += sums[..., :-1] >> 32",
        "out[..., 1:PLACES] += (sums[..., :-1] >> 32) * 0",
        ("tests/kernels/test_kernels_exact_sum.py::test_sums_are_rounded_once",),
    ),
    Defect(
        "a user's tensor is added to",
        "stale",
        "execute/gradients.py",
        "the tree adds to a gradient that the loss function holds",
        "whole.clone() if bucket.alone else whole)",
        "whole)",
        (f"{_BITS}::test_gradients_that_a_user_holds_are_not_added_to",),
    ),
    Defect(
        "nodes counted once in the payload",
        "bytes",
        _IN_ORDER,
        "the plan has as many bytes for ranks with several nodes as for those with one",
        "times = self.sent if self.rows.scattered else self.sent + self.left",
        "times = 1 if self.rows.scattered else 2",
        (f"{_BITS}::test_several_nodes_of_the_tree_are_planned",),
    ),
    Defect(
        "gradients of a weight in halves' own order",
        "order",
        "execute/zero_bubble.py",
        "the second half of a backward adds what products hand over before what comes by way of other nodes",
        "if not handed.isdisjoint(_beneath(product.edge.node, after))",
        "if handed.isdisjoint(handed) and not handed.isdisjoint(_beneath(product.edge.node, after))",
        (f"{_BITS}::test_halves_of_backward_add_the_gradients_of_a_weight_in_its_order",),
    ),
    Defect(
        "uses of a gathered weight added first",
        "order",
        "execute/executor.py",
        "at stage 3 the gradients of a leaf's uses are added before they reach the sums",
        "BucketState(bucket, mesh, run.routes[bucket.name], self._splits, plan.step.tree)",
        "BucketState(bucket, mesh, run.routes[bucket.name], self._splits, False)",
        (f"{_BITS}::test_tied_leaves_used_by_two_units",),
    ),
)
