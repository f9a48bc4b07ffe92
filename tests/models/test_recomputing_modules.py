"""torch.utils.checkpoint inside a module of from_module: recomputed values equal the first ones."""

import gc
import threading
import weakref

import optree
import pytest
import torch
from helpers import training
from helpers.architectures import ARCHITECTURES, build
from helpers.decoders import decoder, in_float64, label_batches, whole_loss
from helpers.trees import assert_close, assert_same
from oracle import one_device
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.errors import LossError
from shardlib.models import huggingface
from shardlib.models.functional_module import FunctionalModule

STAGES = pytest.mark.parametrize("stage", range(4))
TWICE = 2  # forward, and again in backward


class Counted(nn.Module):
    """A checkpoint of a plain function: it reads parameters, a buffer and a submodule. Counts how often it runs."""

    runs = 0

    def __init__(self, keep=False):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("scale", torch.tensor(1.0))
        self.keep = keep

    def _inner(self, x):
        type(self).runs += 1
        if x.isnan().any():
            raise FloatingPointError("not a number")
        return torch.tanh(nn.functional.linear(self.norm(self.first(x)), self.weight * self.scale.clone()))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(1.5)  # before the checkpoint, which reads it, and once more behind it
        out = self._inner(x) if self.keep else checkpoint(self._inner, x, use_reentrant=False)
        with torch.no_grad():
            self.scale.mul_(2)
        return out


def counted(keep=False):
    torch.manual_seed(3)
    return Counted(keep).double()


X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def trained(params):
    return optree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), params)


def both():
    """The same function without a checkpoint and with one."""
    kept, _, _ = sl.from_module(counted(keep=True), buffers=True)
    return kept, *sl.from_module(counted(), buffers=True)


def test_gradients_and_buffers_are_those_without_a_checkpoint():
    kept, apply, params, buffers = both()
    buffers["scale"] = torch.tensor(0.25, dtype=torch.float64)  # not the module's own
    leaves, results = trained(params), []
    given = {name: buffer.clone() for name, buffer in buffers.items()}
    for fn in (kept, apply):
        Counted.runs = 0
        out, after = fn(leaves, buffers, X)
        copies = {name: buffer.clone() for name, buffer in after.items()}
        grads = torch.autograd.grad(out.square().sum(), optree.tree_leaves(leaves))
        assert Counted.runs == (1 if fn is kept else TWICE)
        assert_same(after, copies)  # BatchNorm's statistics were not moved again
        results.append((grads, after))
    assert_same(results[0], results[1])
    assert_same(buffers, given)
    assert results[0][1]["scale"] == 0.75


def test_two_forwards_before_one_backward():
    kept, apply, params, buffers = both()
    one, other = trained(params), trained(optree.tree_map(lambda leaf: 0.5 * leaf + 0.1, params))

    def loss(fn):
        first, after = fn(one, buffers, X)
        second, _ = fn(other, after, X.flip(0))
        return (first * second).sum() + fn(one, after, X + 1)[0].sum()

    leaves = optree.tree_leaves((one, other))
    assert_same(torch.autograd.grad(loss(apply), leaves), torch.autograd.grad(loss(kept), leaves))


def test_a_second_derivative():
    kept, apply, params, buffers = both()
    leaves, x = trained(params), X.clone().requires_grad_()

    def penalty(fn):
        (slope,) = torch.autograd.grad(fn(leaves, buffers, x)[0].sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), optree.tree_leaves(leaves), allow_unused=True)

    for got, wanted in zip(penalty(apply), penalty(kept)):
        assert (got is None) == (wanted is None) and (got is None or torch.equal(got, wanted))


class Outer(nn.Module):
    """A checkpoint in a module that another module's call is in, and a backward while calls are under way."""

    def __init__(self, inner):
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.7, dtype=torch.float64))
        self.register_buffer("shift", torch.tensor(0.5, dtype=torch.float64))
        self.inner = inner

    def forward(self, x, params, buffers):
        x = x.clone().requires_grad_()
        out = checkpoint(lambda x: self.inner(params, buffers, x * self.weight + self.shift)[0], x, use_reentrant=False)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.sum() + slope.square().sum()


def test_calls_within_calls():
    kept, apply, params, buffers = both()
    leaves, found = trained(params), []
    for fn in (kept, apply):
        outer, own, held = sl.from_module(Outer(fn), buffers=True)
        own = trained(own)
        held["shift"] = held["shift"] + 1
        loss, _ = outer(own, held, X, leaves, buffers)
        found.append(torch.autograd.grad(loss, [own["weight"], leaves["first"]["weight"], leaves["weight"]]))
    assert_same(found[1], found[0])


def test_after_an_exception_the_module_is_as_it_was():
    kept, apply, params, buffers = both()
    leaves = trained(params)
    for fn in (apply, kept):
        with pytest.raises(FloatingPointError):
            fn(leaves, buffers, X * float("nan"))
    out, wanted = apply(leaves, buffers, X)[0], kept(leaves, buffers, X)[0]
    with pytest.raises(FloatingPointError):  # between forward and backward
        apply(params, buffers, X * float("nan"))
    grads = [torch.autograd.grad(value.sum(), optree.tree_leaves(leaves)) for value in (out, wanted)]
    assert_same(grads[0], grads[1])


def test_without_gradients_nothing_is_kept():
    _, apply, params, buffers = both()
    Counted.runs = 0
    with torch.no_grad():
        out, _ = apply(trained(params), buffers, X)
    assert Counted.runs == 1 and not out.requires_grad


def test_parameters_live_no_longer_than_the_graph():
    _, apply, params, buffers = both()
    leaves = trained(params)
    kept = 2 * leaves["weight"]
    alive = weakref.ref(kept)
    loss = apply(leaves | {"weight": kept}, buffers, X)[0].sum()
    del kept
    gc.collect()
    assert alive() is not None
    loss.backward()
    del loss
    gc.collect()
    assert alive() is None


def test_backward_in_another_thread_than_forward():
    kept, apply, params, buffers = both()
    leaves, found = trained(params), []
    losses = [fn(leaves, buffers, X)[0].sum() for fn in (kept, apply)]

    def run():
        apply(params, buffers, X + 1)  # this thread has a copy of its own
        found.append([torch.autograd.grad(loss, optree.tree_leaves(leaves)) for loss in losses])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_same(found[0][1], found[0][0])


def test_in_a_compiled_function(monkeypatch):
    def inner(self, x):  # neither counts nor branches: no graph break
        return torch.tanh(nn.functional.linear(self.norm(self.first(x)), self.weight * self.scale.clone()))

    monkeypatch.setattr(Counted, "_inner", inner)
    kept, apply, params, buffers = both()
    leaves = trained(params)
    with torch.no_grad():
        apply(params, buffers, X)  # the copy is made outside of what is compiled
    compiled = torch.compile(lambda p: apply(p, buffers, X)[0].sum(), backend="aot_eager", fullgraph=True)
    grads = [
        torch.autograd.grad(loss, optree.tree_leaves(leaves))
        for loss in (compiled(leaves), kept(leaves, buffers, X)[0].sum())
    ]
    assert_close(grads[0], grads[1], 1e-10)


@STAGES
def test_on_every_stage(stage):
    """Two ranks' copies in threads; two micro-batches each, whose buffers go from one to the next."""
    kept, apply, params, buffers = both()
    found = []
    for fn in (kept, apply):

        def loss_fn(params, buffers, batch, fn=fn):
            out, buffers = fn(params, buffers, batch)
            return out.square().mean(), buffers

        def run(mesh, loss_fn=loss_fn):
            sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.accumulate(2)))
            state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(), buffers=buffers)
            for _ in range(2):
                state, metrics = step(state, X.chunk(2)[mesh.rank])
            return metrics["grad_norm"], sl.unshard(state.params), state.buffers

        found.append(sl.simulate(run, mesh={"data": 2}))
    assert_close(found[1], found[0], 1e-12)


def test_reentrant_checkpoints_are_refused_with_a_remedy():
    class Reentrant(nn.Linear):
        def forward(self, x, use_reentrant=True):
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    apply, params = sl.from_module(Reentrant(6, 6))
    leaves, x = trained(params), torch.randn(2, 6)
    with pytest.raises(
        LossError, match=r"(?s)use_reentrant=False.*gradient_checkpointing_enable\({'use_reentrant': False}\)"
    ):
        apply(leaves, x)
    with torch.no_grad():
        assert torch.equal(apply(leaves, x), apply(leaves, x, use_reentrant=False))
    apply(leaves, x, use_reentrant=False).sum().backward()
    assert torch.equal(leaves["weight"].grad, x.sum(0).expand(6, 6))


# --- transformers ---------------------------------------------------------------------------------------------------


def tiny(kind):
    torch.manual_seed(0)
    module = build(kind).train()
    with torch.no_grad():  # no bias at zero: softmax ignores a key's, which would then hold rounding noise alone
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module


def batches_for(kind):
    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        draw = lambda: {  # noqa: E731
            "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
            "labels": torch.randint(5, (4,), generator=generator),
        }
    else:
        draw = lambda: dict.fromkeys(("input_ids", "labels"), torch.randint(3, 50, (4, 9), generator=generator))  # noqa: E731
    return [draw() for _ in range(2)]


EVERYDAY = {"gpt2": (0, 3), "llama": (3,), "t5": (3,), "bert": (2,)}


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        pytest.param(kind, stage, marks=[] if stage in EVERYDAY.get(kind, (3,)) else [pytest.mark.nightly])
        for kind in ARCHITECTURES
        for stage in range(4)
    ],
)
def test_transformers_own_checkpointing(kind, stage, monkeypatch):
    module, batches = tiny(kind), batches_for(kind)
    held = FunctionalModule.holding
    put_in = []
    monkeypatch.setattr(FunctionalModule, "holding", lambda *args: (put_in.append(1), held(*args))[1])

    def loss_of(module):
        apply, params = sl.from_module(module)
        return lambda params, batch: apply(params, **batch).loss, params

    loss_fn, params = loss_of(module)
    wanted = one_device.train(loss_fn, params, batches, max_norm=1.0)
    assert len(put_in) == len(batches)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    loss_fn, params = loss_of(module)
    got = training.simulate({"data": 2}, loss_fn, params, batches, sl.zero(stage), training.optimizer(max_norm=1.0))
    layers = 4 if kind == "t5" else 2
    assert len(put_in) == len(batches) + 2 * len(batches) * (1 + layers)  # each layer again in backward, on two ranks
    # In fp32: these models compute their own loss in it, whatever the dtype of the weights.
    training.assert_same_training(got, wanted, 1e-5)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("kind", "schedule"), [("llama", "1f1b"), ("gpt2", "zb-h1")])
def test_in_pipelines(kind, schedule, stage):
    """Several micro-batches are under way through one copy, each with parameters gathered for itself."""
    module = in_float64(decoder(kind).train())
    batches = label_batches(2, 8)
    wanted = one_device.train(
        whole_loss(module), sl.from_module(module, blocks=huggingface.decoder_blocks(module))[1], batches
    )
    module.gradient_checkpointing_enable({"use_reentrant": False})
    loss_fn, params = sl.from_module(module, blocks=huggingface.decoder_blocks(module))
    transform = sl.chain(sl.zero(stage), sl.pipeline(schedule, 2))
    got = training.simulate({"data": 2, "pipe": 2}, loss_fn, params, batches, transform, training.optimizer())
    training.assert_same_training(got, wanted)


@pytest.mark.parametrize(
    ("transform", "marked", "said"),
    [
        (sl.remat(), False, 1),
        (sl.remat(), True, 0),
        (sl.remat(store="host"), False, 0),  # where checkpoints of the function's own keep their inputs
        (sl.chain(), False, 0),
    ],
    ids=["remat", "blocks", "a store", "none"],
)
def test_a_loss_without_blocks_that_are_to_be_recomputed_is_told_of_once(transform, marked, said, caplog):
    apply, params = sl.from_module(nn.Linear(4, 4))
    layer = sl.block(apply) if marked else apply

    def run(mesh):
        placed = sl.shard(params, mesh, sl.chain(sl.zero(1), sl.accumulate(2), transform))
        state, step = sl.make_train_step(lambda p, x: layer(p, x).sum(), placed, sl.optim.sgd(0.1))
        for _ in range(2):
            state, _ = step(state, torch.ones(4, 4))

    sl.simulate(run, mesh={"data": 2})
    assert sum("remat recomputes blocks, and the loss function has none" in text for text in caplog.messages) == said
