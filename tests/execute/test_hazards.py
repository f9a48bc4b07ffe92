"""Everything that user code may do with parameters inside a loss: each hazard of handles, at every stage."""

import functools
import signal

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import Counted, count_payload
from helpers.models import Linear, mlp, regression_batch, share
from helpers.trees import assert_close, assert_same, copy_of
from oracle import one_device
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.errors import DonatedStateError, HandleError, LossError, TreeError

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])
RANKS = 2
BATCHES = [regression_batch(8, 6, 4, seed=seed) for seed in range(3)]


def network(seed=0):
    """Two units of which the first is wide; float64."""
    return mlp([6, 9, 4], seed=seed)[1]


def layer(p, x):
    return F.linear(x, p["weight"], p["bias"])


def mean_of_shares(loss_fn):
    """The mean of the losses of the ranks' shares, computed on one device; the loss need not be linear."""

    def mean(params, batch):
        return sum(loss_fn(params, share(batch, rank, RANKS)) for rank in range(RANKS)) / RANKS

    return mean


def check(loss_fn, params, stage, batches=BATCHES, extra=None, tolerance=1e-10):
    """Three steps train like one device."""
    transform = sl.zero(stage) if extra is None else sl.chain(sl.zero(stage), extra)
    got = training.simulate({"data": RANKS}, loss_fn, params, batches, transform, training.optimizer(0.5))
    wanted = one_device.train(mean_of_shares(loss_fn), params, batches, max_norm=0.5)
    assert got[0] == pytest.approx(wanted[0], rel=tolerance)
    assert_close(got[2], wanted[2], tolerance)


def run_step(loss_fn, stage, params=None, batch=BATCHES[0], ranks=RANKS):
    """One step on simulated ranks."""

    def run(mesh):
        sharded = sl.shard(network() if params is None else params, mesh, stage=stage)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        return step(state, batch)

    return sl.simulate(run, mesh={"data": ranks})


# --- code below __torch_function__ -----------------------------------------------------------------------------


@STAGES
def test_a_users_autograd_function(stage):
    def loss_fn(params, batch):
        first, last = params["layers"]
        return (layer(last, Linear.apply(batch[0], first["weight"]).tanh()) - batch[1]).square().mean()

    check(loss_fn, network(), stage)


@pytest.mark.parametrize("sync", ["each", "last"])
def test_an_own_autograd_function_in_several_micro_batches(sync):
    """Nothing but the function uses the first unit: its gradients come late, and are summed all the same."""

    def loss_fn(params, batch):
        first, last = params["layers"]
        return (layer(last, Linear.apply(batch[0], first["weight"]).tanh()) - batch[1]).square().mean()

    check(loss_fn, network(), 3, extra=sl.accumulate(2, sync=sync))


@STAGES
def test_a_parameter_used_by_a_users_function_and_otherwise(stage):
    def loss_fn(params, batch):
        first, last = params["layers"]
        x = Linear.apply(batch[0], first["weight"]) + layer(first, batch[0])
        return (Linear.apply(x, last["weight"]) - batch[1]).square().mean() + first["weight"].square().sum()

    check(loss_fn, network(), stage)


@STAGES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_first_touch_without_gradients(stage, mode):
    def loss_fn(params, batch):
        x, y = batch
        for p in params["layers"]:
            with mode():
                scale = p["weight"].abs().max().item()
            x = layer(p, x) / (1 + scale)
        return (x - y).square().mean()

    check(loss_fn, network(), stage)


# --- writing, printing -----------------------------------------------------------------------------------------


def multiply(w):
    w *= 2


WRITES = {
    "add_": lambda w: w.add_(1),
    "item": lambda w: w.__setitem__(0, 0.0),
    "*=": multiply,
    "init": lambda w: nn.init.zeros_(w),
    "out": lambda w: torch.add(w, 1, out=w),
    "copy_": lambda w: w.copy_(torch.zeros(9, 6)),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_parameter_is_refused(write):
    def loss_fn(params, batch):
        with torch.no_grad():
            WRITES[write](params["layers"][0]["weight"])
        return mlp([6, 9, 4])[0](params, batch)

    with pytest.raises(HandleError, match=r"parameter layers/0/weight"):
        run_step(loss_fn, 3)


def test_printing_a_parameter_on_one_rank_gathers_nothing():
    printed = []

    def run(mesh):
        def loss_fn(params, batch):
            if mesh.rank == 1:
                before = sent()["data"]
                w = params["layers"][0]["weight"]
                printed.extend([repr(w), str(w), f"{w}", f"{w.shape} {w.dtype} {len(w)} {w.numel()} {w.requires_grad}"])
                assert sent()["data"] == before == 0
            return mlp_loss(params, batch)

        mlp_loss = mlp([6, 9, 4])[0]
        state, step = sl.make_train_step(loss_fn, sl.shard(network(), mesh, stage=3), sl.optim.sgd(0.1))
        sent = count_payload(mesh)
        step(state, BATCHES[0])

    sl.simulate(run, mesh={"data": 2})
    assert all("layers/0/weight" in text and "(9, 6)" in text for text in printed[:3])
    assert printed[3] == "torch.Size([9, 6]) torch.float64 9 54 True"


# --- saved tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [False, True])
@STAGES
def test_activations_written_to_after_they_were_saved_are_refused(stage, written):
    """Torch refuses them too, but cannot check tensors that are saved through hooks; gradients would be wrong. They are as
    they were made, or have been written to before they were saved."""

    def loss_fn(params, batch):
        first, last = params["layers"]
        x = layer(first, batch[0])
        x = x.mul_(2).sigmoid_() if written else x.sigmoid()  # its backward needs what it gave
        x += 1
        return (layer(last, x) - batch[1]).square().mean()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_step(loss_fn, stage)


@STAGES
def test_activations_written_to_in_place(stage):
    """Writes are allowed if backward needs the new values."""

    def loss_fn(params, batch):
        first, last = params["layers"]
        x = F.relu(layer(first, batch[0]), inplace=True).clone()
        x[:, 0] = 0
        return (layer(last, x.mul_(2)) - batch[1]).square().mean()

    check(loss_fn, network(), stage)


@STAGES
def test_a_view_that_is_used_after_its_unit_was_released(stage):
    def loss_fn(params, batch):
        *hidden, last = params["layers"]
        x, kept = batch[0], last["weight"].T
        for each in hidden:
            x = layer(each, x).tanh()
        return (x @ kept - batch[1]).square().mean()

    check(loss_fn, mlp([6, 9, 7, 5, 4])[1], stage)


@STAGES
def test_empty_and_sparse_saved_tensors(stage):
    params = {**network(), "empty": torch.zeros(0, 6, dtype=torch.float64), "more": [{"none": torch.zeros(3, 0)}]}

    def loss_fn(params, batch):
        first, last = params["layers"]
        mixing = torch.eye(len(batch[0]), dtype=torch.float64).to_sparse()
        x = torch.sparse.mm(mixing, batch[0] @ first["weight"].T)
        nothing = (batch[0] @ params["empty"].T).exp().sum() + params["more"][0]["none"].square().sum()
        return (layer(last, x) - batch[1]).square().mean() + nothing

    check(loss_fn, params, stage)


@STAGES
def test_sparse_gradients_arrive_whole(stage):
    """An embedding with sparse=True: the library keeps dense gradients, so the oracle takes them dense."""
    params = {"table": [{"w": torch.randn(11, 4, dtype=torch.float64)}], "head": torch.randn(4, dtype=torch.float64)}
    batches = [(torch.randint(11, (8,)), torch.randn(8, dtype=torch.float64)) for _ in range(3)]

    def loss_fn(params, batch, sparse=True):
        return (
            ((F.embedding(batch[0], params["table"][0]["w"], sparse=sparse) @ params["head"]) - batch[1])
            .square()
            .mean()
        )

    transform, tx = sl.zero(stage), training.optimizer()
    got = training.simulate({"data": RANKS}, loss_fn, params, batches, transform, tx)
    assert_close(got[2], one_device.train(functools.partial(loss_fn, sparse=False), params, batches)[2], 1e-10)


# --- autocast, compile, torch.func -----------------------------------------------------------------------------


def autocast_loss(params, batch):
    x, y = batch
    first, last = params["layers"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = layer(last, torch.tanh(layer(first, x.float())))
    assert x.dtype == torch.bfloat16
    return (x.double() - y).square().mean()


def test_autocast_is_refused_at_stage_3_where_it_copies_and_fine_below():
    params = optree.tree_map(torch.Tensor.float, network())
    with pytest.raises(
        HandleError, match=r"autocast is on while unit 'layers/0' .* sl.precision\('bf16', autocast=True\)"
    ):
        run_step(autocast_loss, 3, params)
    for stage in (0, 1, 2):
        # In fp32, which autocast casts; every product is rounded alike, whoever computes it.
        check(autocast_loss, params, stage, tolerance=1e-5)


def test_a_compiled_loss_is_refused_at_stage_3_and_fine_below(pool):
    loss_fn = mlp([6, 9, 4])[0]
    compiled = torch.compile(loss_fn, backend="eager")
    with pytest.raises(HandleError, match=r"ZeRO stage 3 .*compile='inductor'"):
        run_step(compiled, 3)
    wanted = one_device.train(mean_of_shares(loss_fn), network(), BATCHES, max_norm=0.5)

    def run(mesh, stage):
        loss_fn = torch.compile(mlp([6, 9, 4])[0], backend="aot_eager")
        return training.train(mesh, loss_fn, network(), BATCHES, sl.zero(stage), training.optimizer(0.5))

    for stage in (0, 1, 2):
        for losses, _, final in pool.run(run, stage, mesh={"data": RANKS}):
            assert losses == pytest.approx(wanted[0], rel=1e-10)
            assert_close(final, wanted[2], 1e-10)


@pytest.mark.parametrize(
    ("backend", "stage"),
    [
        ("eager", 3),
        ("aot_eager", 0),
        *(pytest.param("aot_eager", stage, marks=pytest.mark.nightly) for stage in (1, 2)),  # whole parameters, as at 0
        ("aot_eager", 3),
    ],
)
@pytest.mark.parametrize("extra", [None, sl.remat()])
def test_a_compiled_block(pool, backend, stage, extra):
    """Runs in real processes, as compilation is global state, which simulated ranks would share."""

    def run(mesh):
        block = sl.block(torch.compile(lambda p, x: torch.tanh(layer(p, x)), backend=backend))

        def loss_fn(params, batch):
            x, y = batch
            for p in params["layers"]:
                x = block(p, x)
            return (x - y).square().mean()

        transform = sl.zero(stage) if extra is None else sl.chain(sl.zero(stage), extra)
        return training.train(mesh, loss_fn, network(), BATCHES, transform, training.optimizer(0.5))

    def plain_loss(params, batch):
        x, y = batch
        for p in params["layers"]:
            x = torch.tanh(layer(p, x))
        return (x - y).square().mean()

    wanted = one_device.train(plain_loss, network(), BATCHES, max_norm=0.5)
    for losses, _, final in pool.run(run, mesh={"data": RANKS}):
        assert losses == pytest.approx(wanted[0], rel=1e-10)
        assert_close(final, wanted[2], 1e-10)


def func_loss(params, batch):
    """The norm of a function's derivative, by torch.func."""
    first, last = params["layers"]

    def energy(x):
        return layer(last, torch.tanh(layer(first, x))).square().sum()

    return torch.func.vmap(torch.func.grad(energy))(batch[0]).square().mean()


def vmap_loss(params, batch):
    first, last = params["layers"]
    out = torch.func.vmap(lambda x: layer(last, torch.tanh(layer(first, x))))(batch[0])
    return (out - batch[1]).square().mean()


@pytest.mark.parametrize("stage", range(4))
def test_torch_func_inside_the_loss(stage):
    check(func_loss, network(), stage)
    check(vmap_loss, network(), stage)


def test_torch_func_inside_of_a_recomputed_block():
    def loss_fn(params, batch):
        slope = torch.utils.checkpoint.checkpoint(
            lambda x: torch.func.grad(lambda x: layer(params["layers"][0], x).sum())(x), batch[0], use_reentrant=False
        )
        return slope.square().mean()

    with pytest.raises(HandleError, match=r"in a recomputed block \(sl.remat.*Call it outside"):
        run_step(loss_fn, 3)


# --- recompute, higher derivatives, several forwards -----------------------------------------------------------


def checkpointed(params, batch, reentrant):
    x, y = batch
    x = x.clone().requires_grad_()  # reentrant checkpointing asks for an input that needs a gradient
    for p in params["layers"]:
        x = checkpoint(lambda x, p=p: torch.tanh(layer(p, x)), x, use_reentrant=reentrant)
    return (x - y).square().mean()


@STAGES
def test_checkpointing(stage):
    check(functools.partial(checkpointed, reentrant=False), network(), stage)


@STAGES
def test_reentrant_checkpointing_is_refused(stage):
    with pytest.raises(LossError, match=r"use_reentrant=False .*or use sl.block"):
        run_step(functools.partial(checkpointed, reentrant=True), stage)


@STAGES
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_remat_of_blocks(stage, policy):
    block = sl.block(lambda p, x: torch.tanh(layer(p, x)))

    def loss_fn(params, batch):
        x, y = batch
        for p in params["layers"]:
            x = block(p, x)
        return (x - y).square().mean()

    check(loss_fn, network(), stage, extra=sl.remat(policy))


def test_what_remat_computes_again():
    """Everything, or all but matrix products."""
    block = sl.block(lambda w, x: torch.tanh(x @ w))

    def loss_fn(params, x):
        for w in params:
            x = block(w, x)
        return x.square().mean()

    found = {}
    for policy in (None, "full", "dots"):
        transform = sl.zero(0) if policy is None else sl.remat(policy)
        sharded = sl.shard([torch.eye(4)] * 3, sl.make_mesh(), transform)
        with Counted() as counted:
            sl.value_and_grad(loss_fn)(sharded, torch.ones(2, 4))
        found[policy] = [counted.calls[op] for op in (torch.ops.aten.mm.default, torch.ops.aten.tanh.default)]
    products, others = found[None]
    assert others == 3 and found == {None: [products, 3], "full": [products + 3, 6], "dots": [products, 6]}


@STAGES
def test_a_penalty_on_the_gradient_by_inputs(stage):
    def loss_fn(params, batch):
        x = batch[0].clone().requires_grad_()
        out = layer(params["layers"][1], torch.tanh(layer(params["layers"][0], x)))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out - batch[1]).square().mean() + (slope.norm(dim=1) - 1).square().mean()

    check(loss_fn, network(), stage)


@STAGES
@pytest.mark.parametrize("which", [["weight"], ["weight", "bias"]])
def test_a_penalty_on_the_gradient_by_parameters(stage, which):
    def loss_fn(params, batch):
        first, last = params["layers"]
        fit = (layer(last, torch.tanh(layer(first, batch[0]))) - batch[1]).square().mean()
        leaves = [p[name] for p in (first, last) for name in which]
        slopes = torch.autograd.grad(fit, leaves, create_graph=True)
        return fit + sum(slope.square().sum() for slope in slopes)

    check(loss_fn, network(), stage)


@STAGES
def test_a_second_forward_in_one_step(stage):
    def loss_fn(params, batch):
        fit = mlp([6, 9, 4])[0]
        return fit(params, batch) + 0.5 * fit(params, (batch[0].flip(1), batch[1])).sin() + fit(params, batch)

    check(loss_fn, network(), stage)


@STAGES
def test_other_units_in_a_later_step(stage):
    """The units that a step touches, and their order, may change from step to step if they are the same on all ranks."""

    def loss_fn(params, batch):
        x = torch.tanh(layer(params["layers"][0], batch[0]))
        if batch[2] == 1:
            return x.square().mean()
        if batch[2] == 2:
            return layer(params["layers"][1], x).sum() + (layer(params["layers"][1], x) - batch[1]).square().mean()
        return (layer(params["layers"][1], x) - batch[1]).square().mean()

    batches = [(*batch, torch.tensor(kind)) for kind, batch in zip((0, 1, 2, 0), [*BATCHES, BATCHES[0]])]

    def mean(params, batch):
        x, y, kind = batch
        return sum(loss_fn(params, (x.chunk(2)[rank], y.chunk(2)[rank], kind)) for rank in (0, 1)) / 2

    wanted = one_device.train(mean, network(), batches)

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(network(), mesh, stage=stage), training.optimizer())
        for x, y, kind in batches:
            state, _ = step(state, (x.chunk(RANKS)[mesh.rank], y.chunk(RANKS)[mesh.rank], kind))
        return sl.unshard(state.params)

    got = sl.simulate(run, mesh={"data": RANKS})
    assert_close(got[0], wanted[2], 1e-10)


# --- modules ---------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = x[:, None] * torch.linspace(0.5, 1.5, 3, dtype=x.dtype)[:, None]
        return self.head(self.attention(x, x, x)[0].mean(1))


def weight_normed():
    first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 7))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(7, 4))


def encoder():
    inner = nn.TransformerEncoderLayer(6, 2, dim_feedforward=10, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), inner, nn.Flatten(), nn.Linear(6, 4))


MODULES = {"lstm": Recurrent, "attention": Attention, "weight_norm": weight_normed, "encoder": encoder}


@STAGES
@pytest.mark.parametrize("name", MODULES)
def test_modules_train_unmodified(stage, name):
    torch.manual_seed(8)
    apply, params = sl.from_module(MODULES[name]().double())
    check(lambda params, batch: (apply(params, batch[0]) - batch[1]).square().mean(), params, stage)


@STAGES
def test_buffers_that_change(stage):
    """BatchNorm: each rank normalises its own share; the running statistics are the mean over ranks."""
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)).double()
    apply, params, buffers = sl.from_module(module, buffers=True)

    def loss_fn(params, buffers, batch):
        out, buffers = apply(params, buffers, batch[0])
        return (out - batch[1]).square().mean(), buffers

    def run(mesh):
        sharded = sl.shard(params, mesh, stage=stage)
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(), buffers=buffers)
        for x, y in BATCHES:
            state, _ = step(state, (x.chunk(RANKS)[mesh.rank], y.chunk(RANKS)[mesh.rank]))
        return sl.unshard(state.params), state.buffers

    # One device, with the two shares as two passes.
    leaves = optree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
    tx = torch.optim.AdamW(optree.tree_leaves(leaves), lr=1e-3, eps=1e-5, weight_decay=0.01)
    held = buffers
    for x, y in BATCHES:
        passes = [loss_fn(leaves, held, share) for share in zip(x.chunk(RANKS), y.chunk(RANKS))]
        tx.zero_grad()
        sum(loss / RANKS for loss, _ in passes).backward()
        tx.step()
        mean = {name: (passes[0][1][name] + passes[1][1][name]) / RANKS for name in held}
        held = {name: value.to(held[name].dtype) for name, value in mean.items()}
    for final, statistics in sl.simulate(run, mesh={"data": RANKS}):
        assert_close(final, optree.tree_map(torch.Tensor.detach, leaves), 1e-10)
        assert_close(statistics, held, 1e-10)


# --- states ----------------------------------------------------------------------------------------------------


@STAGES
def test_using_a_donated_state_is_an_error(stage):
    def run(mesh):
        params = sl.shard(network(), mesh, stage=stage)
        old, step = sl.make_train_step(mlp([6, 9, 4])[0], params, sl.optim.sgd(0.1))
        new, _ = step(old, BATCHES[0])
        for use in (
            lambda: step(old, BATCHES[0]),
            lambda: old.params,
            lambda: params["layers"],
            lambda: sl.unshard(params),
        ):
            with pytest.raises(DonatedStateError, match=r"step 0\) was donated.*donate=False"):
                use()
        assert "donated" in repr(old)
        step(new, BATCHES[0])

    sl.simulate(run, mesh={"data": RANKS})


@STAGES
def test_without_donation_old_states_stay_valid(stage):
    def run(mesh):
        params = sl.shard(network(), mesh, stage=stage)
        first, step = sl.make_train_step(mlp([6, 9, 4])[0], params, training.optimizer(), donate=False)
        _, donating = sl.make_train_step(mlp([6, 9, 4])[0], params, training.optimizer())
        second, _ = step(first, BATCHES[0])
        before = copy_of((sl.unshard(second.params), second.opt))
        third, _ = step(second, BATCHES[1])
        again, _ = step(second, BATCHES[1])
        assert_same(sl.unshard(third.params), sl.unshard(again.params))
        assert_same((sl.unshard(second.params), second.opt), before)
        assert_same(sl.unshard(first.params), network())
        last, _ = donating(second, BATCHES[1])
        assert_same(sl.unshard(last.params), sl.unshard(third.params))

    sl.simulate(run, mesh={"data": RANKS})


@STAGES
@pytest.mark.parametrize("position", ["before", "forward", "backward"])
def test_an_interrupted_step_leaves_the_state_usable(stage, position):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyboardInterrupt

    def loss_fn(params, batch):
        x = batch[0]
        if failing and position == "before":
            raise KeyboardInterrupt
        x = torch.tanh(layer(params["layers"][0], x))
        if failing and position == "forward":
            raise KeyboardInterrupt
        x = Fail.apply(x) if failing else x
        return (layer(params["layers"][1], x) - batch[1]).square().mean()

    failing = False

    def run(mesh):
        nonlocal failing
        state, step = sl.make_train_step(loss_fn, sl.shard(network(), mesh, stage=stage), training.optimizer())
        for number, batch in enumerate(BATCHES):
            mine = tuple(t.chunk(RANKS)[mesh.rank] for t in batch)
            if number != 1:
                failing = True
                with pytest.raises(KeyboardInterrupt):
                    step(state, mine)
                sl.collectives.all_reduce(torch.zeros(1), "data", dst="varying")  # every rank was interrupted
                failing = False
                sl.collectives.all_reduce(torch.zeros(1), "data", dst="varying")
            state, _ = step(state, mine)
        return sl.unshard(state.params)

    wanted = one_device.train(loss_fn, network(), BATCHES)[2]
    for final in sl.simulate(run, mesh={"data": RANKS}):
        assert_close(final, wanted, 1e-10)


@STAGES
@pytest.mark.parametrize("how", [torch.Tensor.requires_grad_, lambda p, value: setattr(p, "requires_grad", value)])
def test_flags_of_parameters_are_the_plans(stage, how):
    """The loop over a discriminator's parameters while the generator trains, which a handle would not pass on."""

    def loss_fn(params, batch):
        hidden = layer(params["layers"][0], batch[0].requires_grad_()).tanh()
        params["layers"][0]["weight"].requires_grad_()  # it is so anyway
        how(params["layers"][1]["weight"], False)
        return (layer(params["layers"][1], hidden) - batch[1]).square().mean()

    with pytest.raises(HandleError, match=r"requires_grad of .* is set .*sl\.freeze\(globs\).*p\.detach\(\)"):
        run_step(loss_fn, stage)


@pytest.fixture
def ctrl_c():
    """What presses Ctrl-C, which raises in a shell's background job too, where it is ignored at first."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def rate_that_calls(*calls):
    """A learning rate, read in each update, which then makes the next of these calls."""
    left = list(calls)

    def rate(count):
        if left:
            left.pop(0)()
        return 0.1

    return rate


@pytest.mark.parametrize("donate", [True, False])
def test_an_interrupt_during_an_update_comes_after_it_and_leaves_a_state(ctrl_c, donate):
    def nothing():
        pass

    def run(*calls):
        state, step = sl.make_train_step(
            mlp([6, 9, 4])[0], network(), sl.optim.sgd(rate_that_calls(*calls)), donate=donate
        )
        while state.step < len(BATCHES):
            try:
                state, _ = step(state, BATCHES[state.step])
            except KeyboardInterrupt:
                interrupts.append(state.step)
        return sl.unshard(state.params)

    interrupts = []
    wanted = run()
    assert_same(run(nothing, ctrl_c, nothing, ctrl_c), wanted)
    assert interrupts == ([2] if donate else [1, 2])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_state_whose_update_raised_says_that_it_is_lost():
    def fail():
        raise IndexError("beyond the table")

    state, step = sl.make_train_step(mlp([6, 9, 4])[0], network(), sl.optim.sgd(rate_that_calls(fail)))
    with pytest.raises(IndexError):
        step(state, BATCHES[0])
    with pytest.raises(DonatedStateError, match=r"is lost: .* raised IndexError\. Restore a checkpoint"):
        step(state, BATCHES[0])


# --- leaves of every kind --------------------------------------------------------------------------------------


def odd_tree():
    """Nested, tied, unused, scalar, empty, of several dtypes, an integer."""
    generator = torch.Generator().manual_seed(10)

    def normal(*shape, dtype=torch.float64):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    shared = normal(5, 6)
    return {
        "in": shared,
        "blocks": [{"w": normal(7, 5), "deep": {"s": normal()}}, {"w": normal(5, 7), "t": (normal(3), normal(1, 1))}],
        "scalar": normal(),
        "unused": {"a": normal(4), "b": normal(2, 3)},
        "empty": normal(0, 2),
        "narrow": normal(6, dtype=torch.float32),
        "index": torch.tensor([5, 0, 3, 2, 1, 4]),
        "out": [{"tied": shared, "bias": normal(6)}],
    }


def odd_loss(params, batch):
    x = batch[0][:, params["index"]] * params["narrow"]
    x = torch.tanh(x @ params["in"].T) * params["scalar"]
    first, second = params["blocks"]
    x = torch.tanh(x @ first["w"].T * first["deep"]["s"])
    x = x @ second["w"].T + second["t"][0].sum() * second["t"][1]
    x = x @ params["out"][0]["tied"] + params["out"][0]["bias"]
    return (x[:, :4] - batch[1]).square().mean() + params["empty"].sum()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_leaves_of_every_kind(stage):
    params = odd_tree()
    assert not odd_loss(params, BATCHES[0]).isnan()
    got = training.simulate({"data": 3}, odd_loss, params, [regression_batch(9, 6, 4, seed=s) for s in range(3)],
                            sl.zero(stage), training.optimizer(0.5))  # fmt: skip
    wanted = one_device.train(odd_loss, params, [regression_batch(9, 6, 4, seed=s) for s in range(3)], max_norm=0.5)
    narrow, wide = got[2].pop("narrow"), wanted[2].pop("narrow")
    assert_close(narrow, wide, 1e-6)  # float32
    assert_close(got[2], wanted[2], 1e-7)  # float32 in the way
    assert got[2]["in"] is got[2]["out"][0]["tied"]
    assert torch.equal(got[2]["index"], params["index"])


@STAGES
def test_frozen_leaves_do_not_change_and_have_no_state(stage):
    params = odd_tree()
    params["narrow"] = params["narrow"].double()
    frozen = {("blocks", 0, "w"), ("blocks", 0, "deep", "s"), ("scalar",)}
    batches = [regression_batch(8, 6, 4, seed=s) for s in range(3)]
    transform = sl.chain(sl.zero(stage), sl.freeze(["blocks/0/*", "scalar", "blocks/1/*"], exclude="blocks/1/*"))
    got = training.simulate({"data": 2}, odd_loss, params, batches, transform, training.optimizer(0.5))
    wanted = one_device.train(odd_loss, params, batches, max_norm=0.5, frozen=frozen)
    assert_close(got[2], wanted[2], 1e-10)
    assert torch.equal(got[2]["blocks"][0]["w"], params["blocks"][0]["w"])
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), transform, optimizer=sl.optim.adamw(1e-3))
    trained = sum(b.owned for b in plan.trained)
    assert plan.bytes("optimizer") == 2 * 8 * trained
    assert {path for b in plan.trained for path in b.paths}.isdisjoint({"blocks/0/w", "blocks/0/deep/s", "scalar"})


@STAGES
def test_tree_map_over_shards_then_training(stage):
    def run(mesh):
        params = sl.shard(network(), mesh, stage=stage)
        halved = optree.tree_map(lambda shard: shard / 2, params)
        assert isinstance(halved, sl.Sharded)
        state, step = sl.make_train_step(mlp([6, 9, 4])[0], halved, training.optimizer())
        for batch in BATCHES:
            state, _ = step(state, tuple(t.chunk(RANKS)[mesh.rank] for t in batch))
        return sl.unshard(state.params)

    halved = optree.tree_map(lambda leaf: leaf / 2, network())
    wanted = one_device.train(mlp([6, 9, 4])[0], halved, BATCHES)[2]
    for final in sl.simulate(run, mesh={"data": RANKS}):
        assert_close(final, wanted, 1e-10)


@STAGES
def test_tree_map_that_changes_shapes_is_refused(stage):
    def run(mesh):
        params = sl.shard(network(), mesh, stage=stage)
        cut = optree.tree_map(lambda shard: shard.reshape(-1)[:2], params)
        with pytest.raises(TreeError, match=r"(?s)layers/0/bias: shape \(2,\), planned .*with sl.shard"):
            sl.make_train_step(mlp([6, 9, 4])[0], cut, sl.optim.sgd(0.1))

    sl.simulate(run, mesh={"data": RANKS})


@STAGES
def test_evaluation_and_a_mean_over_ranks(stage):
    fit, batch = mlp([6, 9, 4])[0], BATCHES[0]

    def run(mesh):
        params = sl.shard(network(), mesh, stage=stage)
        evaluate = sl.make_eval_step(lambda p, b: (sl.Mean(fit(p, b) * len(b[0]), len(b[0])), b[0].sum()), params)
        uneven = tuple(t[:3] if mesh.rank == 0 else t[3:] for t in batch)
        return [evaluate(params, uneven) for _ in range(2)]

    whole = fit(network(), batch)
    for rank, results in enumerate(sl.simulate(run, mesh={"data": RANKS})):
        for mean, own in results:
            torch.testing.assert_close(mean, whole)
            torch.testing.assert_close(own, (batch[0][:3] if rank == 0 else batch[0][3:]).sum())


@STAGES
def test_a_weighted_mean_as_the_loss(stage):
    """Masked rows: totals and weights add up over ranks and micro-batches, so uneven masks weigh right."""
    mask = (torch.arange(8) % 3 != 0).double()

    def rows(params, x, y):
        first, last = params["layers"]
        return (layer(last, torch.tanh(layer(first, x))) - y).square().mean(1)

    def loss_fn(params, batch):
        x, y, mask = batch
        return sl.Mean((rows(params, x, y) * mask).sum(), mask.sum())

    def whole_loss(params, batch):
        x, y, mask = batch
        return (rows(params, x, y) * mask).sum() / mask.sum()

    batches = [(*batch, mask) for batch in BATCHES]
    transform = sl.chain(sl.zero(stage), sl.accumulate(2))
    got = training.simulate({"data": RANKS}, loss_fn, network(), batches, transform, training.optimizer(0.5))
    wanted = one_device.train(whole_loss, network(), batches, max_norm=0.5)
    assert got[0] == pytest.approx(wanted[0], rel=1e-10)
    assert_close(got[2], wanted[2], 1e-10)


def test_a_unit_without_a_name_is_called_by_its_leaves():
    def loss_fn(params, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return (params["w"] * batch).sum() + params["v"].sum()

    def run(mesh):
        sl.value_and_grad(loss_fn)(sl.shard({"v": torch.ones(2, 2), "w": torch.ones(2, 2)}, mesh, stage=3), 1.0)

    with pytest.raises(HandleError, match=r"unit 'v and 1 more' is gathered"):
        sl.simulate(run, mesh={"data": 2})


def test_a_function_of_value_and_grad_serves_all_simulated_ranks():
    """They are threads; one plan's runner for all of them would hang."""
    grad_fn = sl.value_and_grad(lambda params, batch: (batch @ params["w"]).square().mean())

    def run(mesh):
        params = sl.shard({"w": torch.ones(4, 4)}, mesh, stage=3)
        return [float(grad_fn(params, torch.full((2, 4), mesh.rank + 1.0))[0]) for _ in range(2)]

    assert sl.simulate(run, mesh={"data": 2}) == [[40.0, 40.0]] * 2
