"""Any nn.Module as a pure function: its tree, ties and buffers."""

import threading

import pytest
import torch
from helpers import training
from helpers.trees import assert_close, assert_same
from oracle import one_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrizations, prune

import shardlib as sl
from shardlib.errors import LossError, TreeError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Tied(nn.Module):
    """An embedding that is also the output layer, in a ModuleDict, with a buffer that stays."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {"embed": nn.Embedding(11, 6), "blocks": nn.ModuleList(nn.Linear(6, 6) for _ in range(2))}
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.parts["embed"].weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        x = self.parts["embed"](tokens)
        for block in self.parts["blocks"]:
            x = x + self.scale * torch.tanh(block(x))
        return self.head(x)


def tied():
    torch.manual_seed(20)
    return Tied()


def test_the_tree_follows_the_module():
    module = tied()
    apply, params = sl.from_module(module)
    assert set(params) == {"parts", "head"} and set(params["parts"]) == {"embed", "blocks"}
    assert isinstance(params["parts"]["blocks"], list) and set(params["parts"]["blocks"][1]) == {"weight", "bias"}
    assert params["head"]["weight"] is params["parts"]["embed"]["weight"]
    assert (
        params["head"]["weight"].data_ptr() == module.head.weight.data_ptr()
        and not params["head"]["weight"].requires_grad
    )
    tokens = torch.arange(6).view(2, 3)
    assert torch.equal(apply(params, tokens), module(tokens))
    units = {placement.unit for placement in sl.make_plan(params, sl.abstract_mesh(data=2), stage=3).placements}
    assert units == {"head", "parts/blocks/0", "parts/blocks/1"} or units == {
        "parts",
        "parts/blocks/0",
        "parts/blocks/1",
    }


def test_the_module_itself_stays_as_it_was():
    module = tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply, params = sl.from_module(module)
    changed = {"parts": params["parts"], "head": {"weight": torch.zeros(11, 6)}}
    assert not apply(changed, torch.arange(3)).any()
    assert_same(dict(module.state_dict()), before)
    assert module.head.weight is module.parts["embed"].weight


@STAGES
def test_ties_are_trained_once(stage):
    module = tied().double()
    apply, params = sl.from_module(module)
    batches = [torch.randint(11, (6, 4)) for _ in range(3)]

    def loss_fn(params, tokens):
        return nn.functional.cross_entropy(apply(params, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    got = training.simulate({"data": 3}, loss_fn, params, batches, sl.zero(stage), training.optimizer(0.3))
    wanted = one_device.train(loss_fn, params, batches, max_norm=0.3)
    assert_close(got[2], wanted[2], 1e-10)
    assert got[2]["head"]["weight"] is got[2]["parts"]["embed"]["weight"]


def test_frozen_parameters_are_in_the_plan():
    module = tied()
    module.parts["blocks"][0].requires_grad_(False)
    with pytest.raises(TreeError, match=r"(?s)2 parameters have requires_grad=False.*parts.blocks.0.weight.*sl.freeze"):
        sl.from_module(module)
    _, params, frozen = sl.from_module(module, frozen=True)
    assert frozen == ["parts/blocks/0/weight", "parts/blocks/0/bias"]
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(3), sl.freeze(frozen)))
    assert [path for bucket in plan.buckets if not bucket.trainable for path in bucket.paths] == sorted(frozen)
    module.requires_grad_(True)
    assert sl.from_module(module, frozen=True)[-1] == sl.from_module(module, buffers=True, frozen=True)[-1] == []


def test_buffers_that_change_must_be_asked_for():
    apply, params = sl.from_module(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(TreeError, match=r"(?s)changed its buffers.*0.num_batches_tracked.*buffers=True"):
        apply(params, torch.randn(4, 3))


class Rebinding(nn.Module):
    """Writes its buffers as users do: in place, by a new tensor, one that is None at first, one that it registers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", None)
        self.register_buffer("quiet", torch.tensor(2.0, dtype=torch.float64), persistent=False)

    def forward(self, x, how="all"):
        if how in ("rebind", "all"):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if how in ("in place", "all"):
            self.count += 1
        if how in ("none", "all"):
            self.last = x.detach().sum()
        if how == "register":
            self.register_buffer("new", x.sum())
        if how == "fail":
            self.mean = self.mean + 1
            self.count += 1
            raise KeyError("on the way")
        if how == "parameter":
            self.weight = nn.Parameter(torch.zeros(3))
        return (x * self.weight - self.mean) * self.quiet


def test_changed_buffers_are_returned():
    apply, params, buffers = sl.from_module(Rebinding(), buffers=True)
    module, given = Rebinding(), dict(buffers)
    assert given["last"] is None and set(given) == {"mean", "count", "last", "quiet"}
    for step in range(3):
        x = torch.randn(4, 3, dtype=torch.float64)
        out, buffers = apply(params, buffers, x)
        assert torch.equal(out, module(x).detach())
        assert_same(buffers, {name: getattr(module, name) for name in ("mean", "count", "last", "quiet")})
        assert buffers["count"] == step + 1
    assert given["mean"].sum() == 0 and given["count"] == 0 and given["last"] is None
    with pytest.raises(KeyError):
        apply(params, buffers, x, how="fail")
    assert_same(apply(params, given, x, how="")[1], given)
    assert "new" in apply(params, given, x, how="register")[1]
    assert "new" not in apply(params, given, x, how="")[1]
    with pytest.raises(TypeError, match="NoneType"):  # not a call without buffers
        apply(params, None, x, how="")


@pytest.mark.parametrize(
    ("how", "name"), [("rebind", "mean"), ("in place", "count"), ("none", "last"), ("register", "new")]
)
def test_a_write_that_is_refused_leaves_nothing_behind(how, name):
    apply, params = sl.from_module(Rebinding())
    x = torch.randn(4, 3, dtype=torch.float64)
    wanted = apply(params, x, how="")
    for _ in range(2):  # every time, not the first alone
        with pytest.raises(TreeError, match=rf"(?s)changed its buffers.*- {name}\nUse.*buffers=True"):
            apply(params, x, how=how)
        with pytest.raises(KeyError):
            apply(params, x, how="fail")
        assert torch.equal(apply(params, x, how=""), wanted)


def test_statistics_of_a_refused_call_are_undone():
    """batch_norm writes them without raising their versions."""

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, train):
            return self.norm.train(train)(x)

    apply, params = sl.from_module(Switched())
    x = torch.randn(4, 3)
    for _ in range(2):
        with pytest.raises(TreeError, match=r"(?s)changed its buffers.*norm.num_batches_tracked"):
            apply(params, x + 5, train=True)
        assert torch.equal(apply(params, x, train=False), nn.BatchNorm1d(3).eval()(x))


def test_parameters_are_inputs():
    apply, params = sl.from_module(Rebinding())
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(TreeError, match=r"(?s)replaced its parameters.*- weight.*register_buffer"):
        apply(params, x, how="parameter")
    assert torch.equal(apply(params, x, how=""), 2 * x)
    with pytest.raises(
        TreeError, match=r"(?s)not the parameters of Rebinding.*weight: missing.*wait: the module has no"
    ):
        apply({"wait": params["weight"]}, x)


@pytest.mark.parametrize("stage", [0, 3])
def test_rebound_buffers_train(stage):
    """A mean that is a function of what is trained: one micro-batch's graph does not reach into the next one's."""

    class Centred(nn.Linear):
        def __init__(self):
            super().__init__(3, 3, dtype=torch.float64)
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            out = super().forward(x)
            self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
            return out - self.mean

    torch.manual_seed(6)
    module = Centred()
    apply, params, buffers = sl.from_module(module, buffers=True)

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.square().mean(), buffers

    batches = torch.randn(3, 8, 3, dtype=torch.float64)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.accumulate(2)))
        state, step = sl.make_train_step(
            loss_fn, sharded, sl.optim.sgd(0.1), buffers=buffers, buffer_kinds={"mean": "averaged"}
        )
        for x in batches:
            state, _ = step(state, torch.cat([part.chunk(2)[mesh.rank] for part in x.chunk(2)]))
        return sl.unshard(state.params), state.buffers["mean"]

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    held = [buffers["mean"]] * 2
    for x in batches:
        total = 0
        for part in x.chunk(2):  # two micro-batches, of two ranks each
            for rank in (0, 1):
                loss, after = loss_fn(leaves, {"mean": held[rank]}, part.chunk(2)[rank])
                held[rank], total = after["mean"].detach(), total + loss / 4
        grads = torch.autograd.grad(total, list(leaves.values()))
        leaves = {n: (p - 0.1 * g).detach().requires_grad_() for (n, p), g in zip(leaves.items(), grads)}
        held = [(held[0] + held[1]) / 2] * 2
    for final, mean in sl.simulate(run, mesh={"data": 2}):
        assert_close(final, {name: leaf.detach() for name, leaf in leaves.items()}, 1e-10)
        assert_close(mean, held[0], 1e-10)


def test_statistics_over_ranks_and_micro_batches():
    """Statistics pass from micro-batch to micro-batch, then are averaged over ranks; integers are rank-local."""
    apply, params, buffers = sl.from_module(nn.BatchNorm1d(3, dtype=torch.float64), buffers=True)
    x = torch.randn(2, 12, 3, dtype=torch.float64) * torch.arange(1.0, 3.0).view(2, 1, 1)

    def loss_fn(params, buffers, batch):
        out, buffers = apply(params, buffers, batch)
        return out.square().mean(), buffers

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(0), sl.accumulate(3)))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.0), buffers=buffers)
        return step(state, x[mesh.rank])[0].buffers

    ranks = [nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2)]
    for rank, norm in enumerate(ranks):
        for part in x[rank].chunk(3):
            norm(part)
    wanted = {name: (getattr(ranks[0], name) + getattr(ranks[1], name)) / 2 for name in ("running_mean", "running_var")}
    for got in sl.simulate(run, mesh={"data": 2}):
        assert got.pop("num_batches_tracked") == 3
        assert_close(got, wanted, 1e-12)


def test_a_thread_may_come_while_another_is_in_a_call():
    """Ranks of a simulation do so: a thread must not copy the module while it holds another call's weights."""

    class Meeting(nn.Linear):
        def forward(self, x):
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=lambda: found.append(apply(params, x)))
                other.start()
                other.join()
            return super().forward(x)

    found = []
    apply, params = sl.from_module(Meeting(3, 3))
    params = {name: 2 * leaf.requires_grad_() for name, leaf in params.items()}  # torch refuses to copy such tensors
    x = torch.randn(2, 3)
    assert torch.equal(apply(params, x), found[0])


def test_a_first_call_in_inference_does_not_spoil_training():
    apply, params = sl.from_module(tied())
    with torch.inference_mode():
        apply(params, torch.arange(3))
    params["parts"]["blocks"][1]["weight"].requires_grad_()
    (grad,) = torch.autograd.grad(apply(params, torch.arange(3)).sum(), params["parts"]["blocks"][1]["weight"])
    assert grad.abs().sum() > 0


# --- as blocks ----------------------------------------------------------------------------------------------------


class Embed(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, carry, batch):
        return self.embedding(batch[:, :-1])


class Ids(nn.Module):
    def forward(self, carry, batch):
        return batch[:, :-1]


class Layer(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, carry, batch, rng):
        return carry + 0.5 * torch.tanh(sl.dropout(self.linear(carry), 0.2, rng))


class Squash(nn.Module):
    def forward(self, carry, batch):
        return carry / (1 + carry.abs())


class Score(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, carry, batch):
        return nn.functional.cross_entropy(self.head(carry).flatten(0, 1), batch[:, 1:].flatten())


def in_blocks(module):
    layers = [Layer(linear) for linear in module.parts["blocks"]]
    return [Embed(module.parts["embed"]), *layers, Squash(), Score(module.head)]


def test_blocks_have_a_tree_each():
    module = tied()
    loss_fn, params = sl.from_module(module, blocks=in_blocks(module))
    assert [list(tree) for tree in params] == [["embedding"], ["linear"], ["linear"], [], ["head"]] and params[3] == {}
    assert params[0]["embedding"]["weight"] is params[4]["head"]["weight"]
    tokens, key = torch.randint(11, (6, 4)), sl.Key(3)
    x = module.parts["embed"](tokens[:, :-1])
    for number, linear in enumerate(module.parts["blocks"], 1):
        x = x + 0.5 * torch.tanh(sl.dropout(linear(x), 0.2, key.fold_in(number)))
    scores = module.head(x / (1 + x.abs()))
    wanted = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.equal(loss_fn(params, tokens, rng=key), wanted.detach())


@STAGES
def test_blocks_in_stages(stage):
    module = tied().double()
    loss_fn, params = sl.from_module(module, blocks=in_blocks(module))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(11, (8, 4), generator=generator) for _ in range(3)]
    step = iter(range(3))
    wanted = one_device.train(
        lambda p, b: loss_fn(p, b, rng=sl.Key(2).fold_in(next(step))), params, batches, max_norm=0.3
    )
    transform = sl.chain(sl.zero(stage), sl.pipeline("1f1b", 2, partition="count"))
    mesh = {"data": 2, "pipe": 2}
    got = training.simulate(mesh, loss_fn, params, batches, transform, training.optimizer(0.3), rng=2)
    assert_close(got[2], wanted[2], 1e-10)


def test_blocks_on_the_meta_device_are_initialised():
    with torch.device("meta"):
        module = Tied()
    loss_fn, init = sl.from_module(module, blocks=in_blocks(module))

    def run(mesh):
        torch.manual_seed(4)
        return sl.unshard(sl.shard(init, mesh, stage=3))

    for params in sl.simulate(run, mesh={"data": 2}):
        assert params[0]["embedding"]["weight"] is params[4]["head"]["weight"] and params[3] == {}
        assert loss_fn(params, torch.randint(11, (6, 4)), rng=sl.Key(0)).isfinite()


def test_parameters_that_blocks_leave_out_are_named():
    module = tied()
    with pytest.raises(TreeError, match=r"(?s)none of the blocks has.*parts.embed.weight.*parts.blocks.0.bias"):
        sl.from_module(module, blocks=in_blocks(tied()))
    with pytest.raises(TreeError, match="returns no buffers"):
        sl.from_module(module, buffers=True, blocks=in_blocks(module))
    changing = Score(nn.Sequential(nn.Embedding(11, 11), nn.BatchNorm1d(3)))
    loss_fn, params = sl.from_module(changing, blocks=[Ids(), changing])
    with pytest.raises(TreeError, match=r"(?s)changed its buffers.*head.1.num_batches_tracked.*not with blocks"):
        loss_fn(params, torch.randint(11, (6, 4)))


# --- refused ------------------------------------------------------------------------------------------------------


def normed_and_used():
    module = nn.utils.spectral_norm(nn.Linear(3, 3))
    module(torch.ones(1, 3))
    return module


def distributed():
    module = nn.Linear(3, 3)
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    module.weight = nn.Parameter(DTensor.from_local(module.weight.detach(), mesh, [Replicate()]))
    return module


def with_attribute(make):
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].extra = make(module[0])
    return module


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lambda params: params, "takes a torch.nn.Module and got function"),
        (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3))), r"0.weight: .*parametrizations.weight_norm"),
        (normed_and_used, r"weight: .*parametrizations.spectral_norm"),
        (lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5), r"weight: .*prune.remove\(module, name\)"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"0.weight: has no shape yet; call the module once"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), "scripted; pass the module that it was made from"),
        (distributed, "weight: a DTensor; pass the module before fully_shard"),
        (lambda: nn.DataParallel(nn.Linear(3, 3)), "DataParallel; pass the wrapped module, .module"),
        (
            lambda: with_attribute(lambda layer: layer.weight * 2),
            "0.extra: a tensor with a graph; compute it in forward",
        ),
        (lambda: with_attribute(lambda layer: threading.Lock()), "0.extra: .*cannot pickle '_thread.lock'"),
    ],
)
def test_modules_that_cannot_be_taken(make, message):
    with pytest.raises(TreeError, match=f"(?s){message}"):
        sl.from_module(make())


def test_the_remedies_work():
    lazy, wrapped = nn.LazyLinear(3), nn.DataParallel(nn.Linear(3, 3))
    lazy(torch.ones(1, 3))
    pruned = prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5)
    prune.remove(pruned, "weight")
    norms = [norm(nn.Linear(3, 3)).eval() for norm in (parametrizations.weight_norm, parametrizations.spectral_norm)]
    x = torch.randn(2, 3)
    for module in (lazy, wrapped.module, pruned, *norms):
        apply, params = sl.from_module(module)
        torch.testing.assert_close(apply(params, x), module(x))


def test_a_module_in_place_of_parameters_or_of_a_function():
    module, params, mesh = nn.Linear(3, 3), {"w": torch.ones(3)}, {"data": 2}
    loss = lambda params, batch: params["w"].sum()  # noqa: E731
    for take in (
        lambda: sl.simulate(lambda mesh: sl.shard(module, mesh, stage=3), mesh=mesh),
        lambda: sl.make_plan(module, sl.abstract_mesh(**mesh)),
        lambda: sl.make_train_step(loss, module, sl.optim.sgd(0.1)),
        lambda: sl.value_and_grad(loss)(module, None),
    ):
        with pytest.raises(TreeError, match=r"Linear is a module.*apply, params = sl.from_module\(module\)"):
            take()
    for take in (
        lambda: sl.make_train_step(module, params, sl.optim.sgd(0.1)),
        lambda: sl.value_and_grad(module)(params, None),
        lambda: sl.make_eval_step(module, params),
    ):
        with pytest.raises(LossError, match=r"a module, Linear.*sl.from_module\(module\)"):
            take()
    with pytest.raises(TreeError, match=r"<lambda> was passed for parameters .* missing a required argument: 'params'"):
        sl.make_train_step(params, loss, sl.optim.sgd(0.1))
    with pytest.raises(LossError, match=r"the loss function must be a function of \(params, batch\) and is dict"):
        sl.make_train_step(params, params, sl.optim.sgd(0.1))


def test_what_has_values_on_a_module_partly_on_the_meta_device_keeps_them():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module[0] = nn.Linear(4, 4)
    module[1].bias = nn.Parameter(torch.full((4,), 3.0))
    module[1].running_mean = torch.full((4,), 2.0)
    before = module[0].weight.detach().clone()
    _, init, buffers = sl.from_module(module, buffers=True)
    params = sl.shard(init, sl.make_mesh())
    found = sl.models.state_dict(module, params, buffers)
    assert torch.equal(found["0.weight"], before) and torch.equal(module[0].weight, before)
    assert found["1.bias"].tolist() == [3] * 4 and found["1.weight"].tolist() == [1] * 4
    assert found["1.running_mean"].tolist() == [2] * 4 and found["1.running_var"].tolist() == [1] * 4
    assert 0 < found["2.weight"].abs().max() <= 0.5
