"""A state goes on under another train step: other micro-batches, another optimizer, other parameters trained."""

import pytest
import torch
from helpers.trees import assert_close, assert_same

import shardlib as sl
from shardlib.errors import DonatedStateError, IllegalComposition, TreeError

_DRAW = torch.Generator().manual_seed(0)
PARAMS = {name: torch.randn(6, 6, generator=_DRAW).double() / 2 for name in ("body", "head")}
BATCHES = [torch.randn(8, 6, generator=_DRAW).double() for _ in range(6)]


def loss_fn(params, batch):
    return (torch.tanh(batch @ params["body"]) @ params["head"] - batch).square().mean()


def trained(mesh, transform, old=None, steps=range(3), params=PARAMS, anew=()):
    """A state after some steps, begun anew or from another one's."""
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.adamw(1e-2))
    state = state if old is None else sl.checkpoint.carry(old, state, anew=anew)
    for number in steps:
        batch = BATCHES[number]
        state, _ = step(state, batch.chunk(mesh.size)[mesh.rank])
    return state


def values(state):
    return sl.unshard(state.params)


def torchs(frozen=()):
    """Plain PyTorch: of 6 steps the last 3 without ``frozen``."""
    params = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    tx = torch.optim.AdamW(params.values(), lr=1e-2, weight_decay=1e-4, foreach=False)
    for number, batch in enumerate(BATCHES):
        tx.zero_grad()
        loss_fn(params, batch).backward()
        for name in frozen if number >= 3 else ():
            params[name].grad = None
        tx.step()
    return {name: leaf.detach() for name, leaf in params.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_micro_batches_and_frozen_parameters(stage):
    def run(mesh):
        state = trained(mesh, sl.zero(stage))
        params = sl.unshard(state.params)
        ramped = trained(mesh, sl.chain(sl.zero(stage), sl.accumulate(4)), state, range(3, 6), params=params)
        with pytest.raises(DonatedStateError, match="carry has taken over"):
            state.opt  # noqa: B018
        assert ramped.step == 6
        state = trained(mesh, sl.zero(stage))
        frozen = sl.chain(sl.zero(stage), sl.freeze("head"))
        frozen = trained(mesh, frozen, state, range(3, 6), params=sl.unshard(state.params), anew=["opt/*/head"])
        return [values(ramped), values(frozen)]

    for result in sl.simulate(run, mesh={"data": 2}):
        assert_close(result, [torchs(), torchs(["head"])], 1e-10)


@pytest.mark.parametrize(
    "transform",
    [
        sl.chain(sl.zero(0), sl.onebit()),
        sl.chain(sl.zero(2), sl.quantize(gradients="int8")),
        sl.chain(sl.zero(0), sl.powersgd(rank=1)),
        sl.chain(sl.zero(3), sl.precision("fp16")),
    ],
    ids=repr,
)
def test_residuals_masters_and_the_loss_scale(transform):
    """Another schedule, of the same values, goes on to the bit."""
    params = {name: leaf.float() for name, leaf in PARAMS.items()}

    def run(mesh):
        def stepped(state, step, numbers):
            for number in numbers:
                state, _ = step(state, BATCHES[number].float().chunk(2)[mesh.rank])
            return state

        def made(sharded, rate):
            return sl.make_train_step(loss_fn, sharded, sl.optim.adamw(rate), donate=False)

        state, step = made(sl.shard(params, mesh, transform), 1e-2)
        state = stepped(state, step, range(3))
        due = stepped(state, step, range(3, 6))
        fresh, other = made(state.params, lambda count: 1e-2)
        found = stepped(sl.checkpoint.carry(state, fresh, donate=False), other, range(3, 6))
        return [(each.step, values(each), each.comm, each.opt.masters, each.scale) for each in (due, found)]

    for due, found in sl.simulate(run, mesh={"data": 2}):
        assert due[4] == found[4] and due[0] == found[0]
        assert_same(found[1:4], due[1:4])


def test_what_begins_anew_and_what_does_not_fit():
    first, adamw = trained(sl.make_mesh(), sl.zero(0)), sl.optim.adamw(1e-2)

    def carried(tx, params=None, **options):
        fresh, step = sl.make_train_step(loss_fn, first.params if params is None else params, tx, donate=False)
        return sl.checkpoint.carry(first, fresh, donate=False, **options), step

    state, _ = carried(adamw, anew=["opt/inner/*mu/*"])
    assert state.step == 3 and state.opt.inner.count == 3
    moments = [next(iter(each.values())) for each in (state.opt.inner.mu, state.opt.inner.nu, first.opt.inner.nu)]
    assert not moments[0].any() and torch.equal(moments[1], moments[2])
    with pytest.raises(TreeError, match=r"does not fit(.|\n)*opt/inner/mu/body: in the old state alone(.|\n)*anew="):
        carried(sl.optim.sgd(0.1))
    state, step = carried(sl.optim.sgd(0.1), anew=["opt/inner/*"])
    assert step(state, BATCHES[3])[0].step == 4
    with pytest.raises(TreeError, match=r"mu/body: \(6, 6\) in the old state, \(6, 7\) in the new one"):
        carried(adamw, {**PARAMS, "body": torch.zeros(6, 7)})
    packed, _ = sl.make_train_step(loss_fn, {"w": torch.zeros(128, 64)}, sl.optim.adamw8bit(1e-2))
    with pytest.raises(IllegalComposition, match="in few bits, cannot be carried over: save it"):
        sl.checkpoint.carry(packed, packed)

    def elsewhere(mesh):
        state = trained(mesh, sl.zero(2))
        return trained(mesh, sl.zero(0), state, params=sl.unshard(state.params))

    with pytest.raises(TreeError, match="mu/body: on other ranks in the old state"):
        sl.simulate(elsewhere, mesh={"data": 2})
