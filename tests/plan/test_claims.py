"""Claims of users' transforms: axes of experts, memories, and conditions on other transforms in a chain."""

import re
from dataclasses import dataclass

import pytest
import torch
from helpers.trees import assert_close

import shardlib as sl
from shardlib import collectives
from shardlib.errors import IllegalComposition
from shardlib.mesh.specs import P
from shardlib.plan import Live, Reduce, Transform, Use


@dataclass(frozen=True)
class Experts(Transform):
    """Each rank along ``axis`` holds its share of the experts, dimension 0 of the leaves that match."""

    axis: str
    glob: str = "experts/*"

    @property
    def name(self):
        return f"experts(axis={self.axis!r})"

    def claims(self, sizes, leaves):
        for leaf in leaves:
            if leaf.matches(self.glob):
                yield Use(leaf.path, spec=P(self.axis), varying=(self.axis,))


def parameters():
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "before": {"w": drawn(6, 6)},
        "experts": {"w": drawn(4, 6, 6), "b": drawn(4, 6)},
        "after": {"w": drawn(3, 6)},
    }


def loss_fn(params, batch):
    """Row i of a rank's four rows goes to expert i, wherever that is."""
    x = batch @ params["before"]["w"].T
    experts = params["experts"]
    if len(experts["w"]) < 4:  # (ranks × experts here, rows from each rank): every rank sends each expert its row
        x = collectives.all_to_all(x[:, None], "data", split_dim=0, concat_dim=1)
    else:
        x = x.view(4, -1, 6) if len(x) == 4 else x.view(-1, 4, 6).transpose(0, 1)
    y = torch.einsum("erk,eok->ero", x, experts["w"]).tanh() + experts["b"][:, None]
    if len(experts["w"]) < 4:
        y = collectives.all_to_all(y, "data", split_dim=1, concat_dim=0)[:, 0]
    else:
        y = y.transpose(0, 1).reshape(-1, 6)
    return (y @ params["after"]["w"].T).square().mean()


def trained(mesh, transform, batches, ranks):
    state, step = sl.make_train_step(loss_fn, sl.shard(parameters(), mesh, transform), sl.optim.adamw(1e-2))
    for batch in batches:
        rows = len(batch) // ranks
        state, metrics = step(state, batch[mesh.rank * rows : (mesh.rank + 1) * rows])
    return sl.unshard(state.params), metrics["grad_norm"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_train_like_one_device(stage, ranks):
    """Their axis shares the batch too: their gradients are complete where they are, and everything else's are summed."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4 * ranks, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    wanted, norm = sl.simulate(lambda mesh: trained(mesh, sl.zero(0), batches, 1), mesh={"data": 1})[0]
    transform = sl.chain(Experts("data"), sl.zero(stage))
    for found, other in sl.simulate(lambda mesh: trained(mesh, transform, batches, ranks), mesh={"data": ranks}):
        assert_close(found, wanted, 1e-10)
        torch.testing.assert_close(other, norm, rtol=1e-10, atol=0)


def test_experts_are_neither_split_nor_summed_over_their_axis():
    plan = sl.make_plan(parameters(), sl.abstract_mesh(data=4), sl.chain(Experts("data"), sl.zero(3)))
    bucket = plan.buckets_of["experts"][0]
    assert bucket.slices == ("data",) and bucket.axes == () and bucket.replicas == ()
    assert re.search(r"experts/w +4×6×6 +float64 +P\('data'\) +P\('data'\) +P\('data'\)", str(plan))
    shared = (
        36 + 20
    ) * 8  # what is not an expert's (18 elements padded to 20) is gathered twice, its gradient reduced once
    assert plan.payload() == {"data": 3 * shared * 3 // 4}


def test_an_axis_of_experts_is_one_of_the_batch():
    with pytest.raises(IllegalComposition, match=r"divides experts, and .* slices layers"):
        slices = sl.tensor_slicing({"before": "column"}, axis="data")
        sl.make_plan(parameters(), sl.abstract_mesh(data=2), sl.chain(Experts("data"), slices))


@dataclass(frozen=True)
class Cuts(Transform):
    spec: P

    @property
    def name(self):
        return f"cuts({self.spec})"

    def claims(self, sizes, leaves):
        yield Use("experts/w", spec=self.spec)


def test_transforms_that_cut_other_dimensions_cut_a_leaf_together():
    mesh = sl.abstract_mesh(data=2, model=3)
    both = (Cuts(P(None, None, "model")), Experts("data"))
    plans = [sl.make_plan(parameters(), mesh, sl.chain(*order, sl.zero(3))) for order in (both, both[::-1])]
    assert plans[0] == plans[1] and plans[0].placement_of["experts/w"].compute.spec == P("data", None, "model")
    for spec in (P("model"), P(None, "data"), P.flat("model")):
        with pytest.raises(IllegalComposition, match=r"both claim\n  - the spec of experts/w"):
            sl.make_plan(parameters(), mesh, sl.chain(Experts("data"), Cuts(spec), sl.zero(0)))


def test_the_batch_varies_over_an_axis_of_experts_alone():
    """Leaves that are whole are split over the axes that zero names, and summed over all that the batch varies over."""
    mesh = sl.abstract_mesh(data=2, expert=4)
    alone, both = (sl.make_plan(parameters(), mesh, sl.chain(Experts("expert"), zero)) for zero in (sl.zero(3), TWO))
    assert alone.batch_axes == both.batch_axes == ("data", "expert")
    for plan, whole in ((alone, (("data",), ("expert",))), (both, (("data", "expert"), ()))):
        assert {(bucket.axes, bucket.replicas) for bucket in plan.buckets if not bucket.slices} == {whole}
        (expert,) = plan.buckets_of["experts"]
        assert (expert.slices, expert.axes, expert.replicas) == (("expert",), ("data",), ())


TWO = sl.zero(3, axis=("data", "expert"))


def test_zero_over_several_axes():
    assert repr(TWO) == "sl.zero(3, axis=('data', 'expert'))" and eval(repr(TWO)) == TWO
    assert TWO.over("data", "dp") == "zero(3, axis=('dp', 'expert'))"
    mesh = sl.abstract_mesh(data=2, expert=4)
    apart = sl.chain(sl.zero(3, axis="data"), sl.zero(3, axis="expert"))
    assert sl.make_plan(parameters(), mesh, TWO) == sl.make_plan(parameters(), mesh, apart)
    for wrong in ((), ("data", "data")):
        with pytest.raises(IllegalComposition, match="name one axis of the mesh, or several that differ"):
            sl.zero(1, axis=wrong)
    with pytest.raises(IllegalComposition, match="cannot both split and replicate over axis 'expert'"):
        sl.zero(1, axis=("data", "expert"), replicate="expert")


@dataclass(frozen=True)
class Elsewhere(Transform):
    memory: str

    @property
    def name(self):
        return f"elsewhere({self.memory!r})"

    def claims(self, sizes, leaves):
        yield Live("optimizer", memory=self.memory)


def test_a_role_lives_in_one_memory():
    plan = sl.make_plan(parameters(), sl.abstract_mesh(data=2), sl.chain(Elsewhere("device"), sl.zero(1)))
    assert {bucket.memory for bucket in plan.buckets} == {("device", "device", "device")}
    assert "elsewhere('device'): optimizer in device memory" in str(plan)
    with pytest.raises(IllegalComposition, match="the optimizer state cannot live in memory 'tape'; use one of"):
        sl.make_plan(parameters(), sl.abstract_mesh(data=2), sl.chain(Elsewhere("tape"), sl.zero(1)))
    with pytest.raises(
        IllegalComposition, match=r"both claim\n  - the memory of the optimizer state: device against tape"
    ):
        sl.make_plan(
            parameters(), sl.abstract_mesh(data=2), sl.chain(Elsewhere("device"), Elsewhere("tape"), sl.zero(1))
        )


@dataclass(frozen=True)
class Demanding(Transform):
    """Wants its axis to be one over which the batch varies."""

    axis: str

    @property
    def name(self):
        return f"demanding(axis={self.axis!r})"

    def claims(self, sizes, leaves):
        yield Reduce(self.axis, dtype=torch.float64)

    def check(self, resolved):
        if not resolved.varies_over(self.axis):
            raise IllegalComposition(f"{self.name} wants zero(axis={self.axis!r})")


def test_a_transform_states_its_own_conditions():
    slices = sl.tensor_slicing({"before": "column"}, axis="model")
    mesh = sl.abstract_mesh(data=2, model=2)
    sl.make_plan(parameters(), mesh, sl.chain(Demanding("data"), sl.zero(1), slices))
    with pytest.raises(IllegalComposition, match=re.escape("demanding(axis='data') wants zero(axis='data')")):
        sl.make_plan(parameters(), mesh, sl.chain(Demanding("data"), slices))


def test_nothing_stays_gathered_in_a_pipeline():
    params = [{"w": torch.ones(4, 4)} for _ in range(2)]
    chain = sl.chain(sl.zero(3, keep="forward"), sl.pipeline("1f1b", microbatches=2))
    with pytest.raises(IllegalComposition, match=r"in a pipeline each of the micro-batches .* would keep its own"):
        sl.make_plan(params, sl.abstract_mesh(data=2, pipe=2), chain)
