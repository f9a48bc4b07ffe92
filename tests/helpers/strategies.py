"""Hypothesis strategies: parameter pytrees with a loss over them, meshes, and chains of transforms."""

import math
from dataclasses import dataclass, field

import optree
import torch
from hypothesis import strategies as st

import shardlib as sl

SHAPES = st.lists(st.integers(0, 5), max_size=3).filter(lambda shape: math.prod(shape) <= 60)
KINDS = st.sampled_from(["float", "float", "float", "float", "integer", "tied"])
SKELETON = st.recursive(
    st.tuples(SHAPES, KINDS).map(lambda drawn: ("leaf", *drawn)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.lists(inner, min_size=1, max_size=2).map(lambda parts: ("tuple", *parts))
    ),
    max_leaves=8,
)


@dataclass
class Model:
    """Parameters, the order in which the loss uses them (some twice, some never, some in blocks), and the bytes up to which
    neighbouring units are merged."""

    params: dict
    program: list = field(repr=False)
    merged: int = 0

    def loss_fn(self, params, batch):
        leaves = optree.tree_leaves(params)
        h = batch
        for positions, as_block in self.program:
            used = [leaves[position % len(leaves)] for position in positions]
            h = (BLOCK if as_block else fold)(used, h)
        return (h * fold(params["base"], batch)).mean()


def fold(leaves, h):
    """Mix every element of the leaves into ``h``, none of them alike."""
    for leaf in optree.tree_leaves(leaves):
        flat = leaf.reshape(-1).to(h.dtype)
        waves = torch.cos(torch.arange(flat.numel(), dtype=h.dtype))
        h = torch.tanh(h * (1.3 + 0.2 * (flat * waves).sum()) + 0.3 * flat.square().sum() / (1 + flat.numel()))
    return h


BLOCK = sl.block(fold)


@st.composite
def models(draw):
    """A tree with at least one trained leaf, that the loss uses."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    made = []

    def build(node):
        if isinstance(node, dict):
            return {key: build(child) for key, child in node.items()}
        if isinstance(node, list):
            return [build(child) for child in node]
        if node[0] == "tuple":
            return tuple(build(child) for child in node[1:])
        _, shape, kind = node
        if kind == "integer":
            return torch.randint(-3, 4, shape, generator=generator)
        if kind == "tied" and made:
            return made[len(made) // 2]
        made.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        return made[-1]

    base = torch.randn(draw(st.integers(1, 7)), generator=generator, dtype=torch.float64)
    params = {"base": base, "rest": build(draw(SKELETON)), "units": [build(draw(SKELETON)) for _ in range(3)]}
    step = st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=3), st.booleans())
    return Model(params, draw(st.lists(step, max_size=5)), draw(st.sampled_from([0, 300, 1 << 20])))


MESHES = st.sampled_from(
    [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 3}, {"b": 2, "a": 2}, {"a": 3, "b": 1}]
)
STAGE = st.integers(0, 3)


@st.composite
def data_parallel(draw, mesh):
    """One or two ZeROs that use every axis of the mesh; also (ways, copies, stage) where the plain one can follow."""
    stage, options = draw(STAGE), {"axis": "a", "prefetch": draw(st.booleans())}
    if stage == 3:
        options["keep"] = draw(st.sampled_from([None, "forward", 300]))
    if "b" not in mesh:
        return [sl.zero(stage, **options)], (mesh["a"], 1, stage)
    if draw(st.booleans()):
        return [sl.zero(stage, replicate="b", **options)], (mesh["a"], mesh["b"], stage)
    return [sl.zero(stage, **options), sl.zero(draw(STAGE), axis="b")], None


@st.composite
def chains(draw, mesh):
    """Legal transforms in any order, micro-batches, and (ways, copies, stage) or None."""
    transforms, plain = draw(data_parallel(mesh))
    microbatches = draw(st.sampled_from([1, 2, 3]))
    splits = any(zero.stage >= 2 for zero in transforms)
    if microbatches > 1:
        sync = draw(st.sampled_from([None, "last", "each"] if splits else [None, "last"]))
        transforms.append(sl.accumulate(microbatches, sync=sync))
        if sync == "last" and plain and plain[2] >= 2:
            plain = None  # the plain one reduces split gradients after every micro-batch
    if draw(st.booleans()):
        transforms.append(sl.remat(draw(st.sampled_from(["full", "dots"]))))
    return draw(st.permutations(transforms)), microbatches, plain
