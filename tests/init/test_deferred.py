"""Initialisation unit by unit: the same values as at once, without ever holding the model."""

import pytest
import torch
from helpers.measure import Live
from helpers.trees import assert_same
from torch import nn

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models import gpt


def many_ways():
    """Views, ties, in-place initialisers, constants, one draw for several leaves, integers."""
    generator = torch.Generator().manual_seed(12)
    both = torch.randn(6, 4, generator=generator)
    weight = torch.empty(5, 3)
    nn.init.kaiming_uniform_(weight, generator=generator)
    tied = torch.empty(3, 2).uniform_(-1, 1, generator=generator)
    return {
        "halves": list(both.chunk(2)),
        "turned": both.T.contiguous() * 2,
        "weight": weight,
        "bias": [torch.zeros(5), torch.full((2, 2), 3.0), torch.tensor(0.5)],
        "tied": (tied, tied),
        "parameter": nn.Parameter(torch.randn(4, generator=generator)),
        "positions": torch.arange(7),
        "eye": torch.eye(3)[torch.tensor([2, 0, 1])],
    }


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_values_equal_those_drawn_at_once(stage, ranks):
    def run(mesh):
        return sl.unshard(sl.shard(many_ways, mesh, stage=stage))

    for whole in sl.simulate(run, mesh={"data": ranks}):
        assert_same(whole, many_ways())
        assert whole["tied"][0] is whole["tied"][1]


def test_the_same_random_numbers_from_torchs_own_generator():
    def init():
        return {"layers": [{"w": nn.Linear(4, 3).weight, "b": torch.rand(3)} for _ in range(2)]}

    torch.manual_seed(13)
    (whole,) = sl.simulate(lambda mesh: sl.unshard(sl.shard(init, mesh, stage=3)), mesh={"data": 1})
    torch.manual_seed(13)
    assert_same(whole, init())


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_ever_holds_the_model(ranks):
    layers, width = 12, 64
    largest = 4 * width * width

    def init():
        generator = torch.Generator().manual_seed(14)
        return {"layers": [{"w": torch.randn(width, width, generator=generator) * 0.02} for _ in range(layers)]}

    def run(mesh):
        with Live() as live:
            sharded = sl.shard(init, mesh, stage=3)
        with Live() as eager:
            whole = init()
        assert_same(sl.unshard(sharded), whole)
        return live.peak, eager.peak

    for peak, eager in sl.simulate(run, mesh={"data": ranks}):
        assert eager >= layers * largest
        assert peak <= layers * largest // ranks + 4 * largest


def test_a_module_on_the_meta_device():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 9)
            self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
            self.norm = nn.LayerNorm(9)

        def forward(self, x):
            for block in [self.first, *self.blocks]:
                x = torch.tanh(block(x))
            return self.norm(x)

    with torch.device("meta"):
        hollow = Network()
    apply, init = sl.from_module(hollow)
    torch.manual_seed(15)
    (sharded,) = sl.simulate(lambda mesh: sl.shard(init, mesh, stage=3), mesh={"data": 1})
    whole = sl.unshard(sharded)
    bound = 1 / 3
    assert whole["blocks"][1]["weight"].abs().max() <= bound and whole["blocks"][1]["weight"].std() > bound / 3
    assert torch.equal(whole["norm"]["weight"], torch.ones(9))
    assert apply(whole, torch.randn(2, 6)).isfinite().all()


def test_an_initialiser_that_reads_its_values_is_refused():
    def init():
        w = torch.randn(3)
        return {"w": w if w[0] > 0 else -w}

    with pytest.raises(TreeError, match=r"reads a value it has not computed yet .* pass the pytree to sl.shard"):
        sl.simulate(lambda mesh: sl.shard(init, mesh, stage=3), mesh={"data": 2})


def test_the_gpt_initialises_chunk_by_chunk():
    def run(mesh):
        return sl.unshard(
            sl.shard(lambda: gpt.init(gpt.GPTConfig(vocab=29, layers=2, width=10, heads=2)), mesh, stage=3)
        )

    for whole in sl.simulate(run, mesh={"data": 2}):
        assert_same(whole, gpt.init(gpt.GPTConfig(vocab=29, layers=2, width=10, heads=2)))


def test_planning_from_an_initialiser_runs_nothing():
    calls = []

    def init():
        calls.append(1)
        return {"w": torch.randn(1 << 20, 1 << 20)}  # four terabytes

    plan = sl.make_plan(init, sl.abstract_mesh(data=8), stage=3)
    assert plan.parameters == 1 << 40 and plan.bytes("param") == (1 << 42) // 8
    assert calls == [1]


def test_parameters_that_nothing_writes_are_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.scale, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))

        def reset_parameters(self):
            nn.init.ones_(self.scale)

    with torch.device("meta"):
        hollow = Bare()
    with pytest.raises(TreeError, match=r"(?s)neither reset_parameters.*:\n  - shift: Bare\nAdd a reset_parameters"):
        sl.from_module(hollow)[1]()
    with torch.device("meta"):
        hollow.register_buffer("table", torch.ones(3))
    with pytest.raises(TreeError, match=r"(?s)buffers on the meta device.*  - table: Bare\n"):
        sl.from_module(hollow)
    (params,) = sl.simulate(
        lambda mesh: sl.unshard(sl.shard(lambda: sl.from_module(Bare())[1], mesh)), mesh={"data": 1}
    )
    assert torch.equal(params["shift"], torch.zeros(2))


def test_a_draw_that_is_changed_afterwards():
    """Drawn whole, and then changed: not handed on as drawn."""

    class Padded(nn.Embedding):
        def reset_parameters(self):
            nn.init.normal_(self.weight)
            with torch.no_grad():
                self.weight[2].fill_(0)
                self.weight.mul_(3)

    with torch.device("meta"):
        hollow = nn.ModuleList([nn.Embedding(5, 4), Padded(5, 4)])
    init = sl.from_module(hollow)[1]
    at_once = init()
    assert not at_once[1]["weight"][2].any() and at_once[1]["weight"].std() > 2 > 0 < at_once[0]["weight"].std()
    assert not torch.equal(init(rng=sl.Key(5))[0]["weight"], at_once[0]["weight"])
    for whole in sl.simulate(lambda mesh: sl.unshard(sl.shard(init, mesh, stage=3)), mesh={"data": 3}):
        assert_same(whole, at_once)
