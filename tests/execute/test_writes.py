"""Writes to parameters and buffers that no version counter sees are refused by name, alike at every stage."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.errors import HandleError, TreeError

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assigned(module, _):
    module.b.weight.data = 0.9 * module.b.weight.data + 0.1 * module.a.weight.data


def made_another(module, _):
    module.b.weight.data = module.a.weight.data


def clamped(module, _):
    module.b.weight.data.clamp_(-0.1, 0.1)


def zeroed_in_part(module, _):
    module.b.weight.detach().data.t()[:, 1].zero_()


def moved_together(module, _):
    torch._foreach_mul_([module.b.weight.data], 0.5)


def buffer_assigned(module, _):
    module.mean.data = module.mean.data + 1


def buffer_added_to(module, _):
    module.mean.data.add_(1.0)


def normalised(module, x):
    return F.batch_norm(x, module.mean, module.var, training=module.training)


class Writing(nn.Module):
    """Two layers, of which something writes to the second, or to buffers, when it is to."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        for name, value in {"mean": 0.0, "var": 1.0}.items():
            self.register_buffer(name, torch.full((4,), value, dtype=torch.float64))
        self.write, self.calls = write, 0

    def forward(self, x, first=0):
        self.calls += 1
        written = self.write(self, x) if self.calls > first else None
        return self.b(self.a(x if written is None else written)).square().mean() + 0 * self.mean.sum()


TO_PARAMETERS = [assigned, made_another, clamped, zeroed_in_part, moved_together]
TO_BUFFERS = [buffer_assigned, buffer_added_to, normalised]
REFUSALS = [(write, HandleError, r"b[/.]weight inside a function.*sl\.optim\.ema") for write in TO_PARAMETERS]
REFUSALS += [(write, TreeError, r"(?s)changed its buffers.*- mean.*buffers=True") for write in TO_BUFFERS]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("write, error, match", REFUSALS)
def test_writes_are_refused_by_name(stage, write, error, match):
    def run(mesh):
        apply, params = sl.from_module(Writing(write))
        params = sl.shard(params, mesh, stage=stage)
        whole = sl.unshard(params)
        state, step = sl.make_train_step(apply, params, sl.optim.sgd(0.1))
        evaluate = sl.make_eval_step(apply, params)
        acts = (lambda: step(state, X), lambda: evaluate(params, X))
        for act in acts if write is not normalised else acts[:1]:  # which an evaluation does not write
            with pytest.raises(error, match=match):
                act()
        assert torch.equal(sl.unshard(state.params)["b"]["weight"], whole["b"]["weight"])  # the state is as it was

    sl.simulate(run, mesh={"data": 2})


@pytest.mark.parametrize("write, error, match", REFUSALS)
def test_writes_to_a_plain_tree_are_refused(write, error, match):
    """In each call of `apply`, the first in another mode among them."""
    module = Writing(write)
    apply, params = sl.from_module(module)
    for _ in range(2):
        with pytest.raises(error, match=match):
            apply(params, X)


def test_what_only_later_steps_write_is_refused_where_it_can_be_seen():
    apply, params = sl.from_module(Writing(assigned))
    state, step = sl.make_train_step(lambda params, x: apply(params, x, first=1), params, sl.optim.sgd(0.1))
    state, _ = step(state, X)
    with pytest.raises(HandleError, match=r"assignment to \.data writes to parameter b/weight"):
        step(state, X)


@pytest.mark.parametrize("write", TO_BUFFERS)
def test_buffers_may_be_written_to_where_they_are_returned(write):
    module = Writing(write)
    apply, params, buffers = sl.from_module(module, buffers=True)
    state, step = sl.make_train_step(apply, params, sl.optim.sgd(0.1), buffers=buffers)
    plain = Writing(write)
    for _ in range(2):
        state, metrics = step(state, X)
        loss = plain(X)
        assert torch.allclose(metrics["loss"], loss, rtol=1e-12)
        plain.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(state.buffers[name], buffer, rtol=1e-12, atol=0)


def test_recomputing_does_not_write_twice():
    """What batch_norm writes changes no version: a checkpointed segment that writes nothing else is repeated on copies."""

    class Checkpointed(Writing):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    apply, params, buffers = sl.from_module(Checkpointed(normalised), buffers=True)
    once = Writing(normalised)
    once(X)
    state, step = sl.make_train_step(apply, params, sl.optim.sgd(0.1), buffers=buffers)
    state, _ = step(state, X)
    assert torch.equal(state.buffers["mean"], once.mean)


def test_compiled_code_runs_compiled_while_it_is_looked_at():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda w, x: (x @ w).sin(), backend=backend, fullgraph=True)
    params = {"w": torch.ones(4, 4, dtype=torch.float64)}
    state, step = sl.make_train_step(lambda p, x: compiled(p["w"], x).sum(), params, sl.optim.sgd(0.1))
    step(state, X)
    assert len(graphs) == 1


@pytest.mark.parametrize("with_buffers", [False, True])
def test_transforms_of_torch_func_around_the_first_call(with_buffers):
    """Their tensors have no memory to look at."""
    apply, params, *held = sl.from_module(Writing(lambda *_: None), buffers=with_buffers)

    def loss(params, x):
        out = apply(params, *held, x)
        return out[0] if with_buffers else out

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, X[:, None])
    assert torch.allclose(grads["b"]["bias"][0], torch.func.grad(loss)(params, X[:1])["b"]["bias"])
