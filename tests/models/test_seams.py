"""Modules as people write them: what holds a module's parts beside the module itself, hooks, modes, compiled blocks.

Each trains as plain torch trains the module, or is refused by the path of the parameter.
"""

import dataclasses
import functools
import types

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
from helpers.models import share
from torch import nn

import shardlib as sl
from shardlib.errors import LossError, TreeError

STAGES = pytest.mark.parametrize("stage", [0, 3])


class Held:
    """A plain object."""

    def __init__(self, weight):
        self.weight = weight


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight):
        self.weight = weight


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Net(nn.Module):
    """Two layers, called as ``hold(self)`` says."""

    def __init__(self, hold=None):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 2, dtype=torch.float64)
        self.register_buffer("scale", torch.full((8,), 1.5, dtype=torch.float64))
        self.first = None
        if hold is not None:
            hold(self)

    def forward(self, x):
        return self.b(self.a(x).relu() * self.scale if self.first is None else self.first(x))


def a_closure_over_modules(net):
    parts = nn.ModuleDict({"a": net.a})
    net.first = lambda x: parts["a"](x).relu() * net.scale


def a_closure_over_parameters(net):
    weight, bias, scale = net.a.weight, net.a.bias, net.scale
    net.first = lambda x: (x @ weight.t() + bias).relu() * scale


def defaults(net):
    def first(x, layer=net.a, *, scale=net.scale):
        return layer(x).relu() * scale

    net.first = first


def a_partial(net):
    net.first = functools.partial(lambda layer, x: layer(x).relu() * net.scale, net.a)


def a_plain_object(net):
    net.held, net.slotted = Held(net.a.weight), Slotted(net.a.bias)
    net.first = types.MethodType(
        lambda net, x: F.linear(x, net.held.weight, net.slotted.weight).relu() * net.scale, net
    )


def containers(net):
    net.tensors = {"layers": ([net.a.weight, net.a.bias], (net.scale,))}

    def first(x, net=net):
        (weight, bias), (scale,) = net.tensors["layers"]
        return F.linear(x, weight, bias).relu() * scale

    net.first = first


def a_wrapped_forward(net):
    """As adapters are put around the layers of a model."""
    plain = net.a.forward
    net.a.low, net.a.high = (nn.Parameter(torch.randn(size, dtype=torch.float64) / 2) for size in [(4, 2), (2, 8)])

    @functools.wraps(plain)
    def forward(x, layer=net.a):
        return plain(x) + x @ layer.low @ layer.high

    net.a.forward = forward


def nested_functions(net):
    def outer():
        layer = net.a

        def inner(x):
            nonlocal layer
            layer = net.a
            return layer(x)

        return lambda x: inner(x).relu() * net.scale

    net.first = outer()


def lists_of_parameters(net):
    """Of which a part is taken."""
    net.weights = nn.ParameterList([net.a.weight, net.a.bias, net.b.bias])

    def first(x, net=net):
        weight, bias = net.weights[:2]
        net.again = net.b.bias  # an attribute of the copy
        assert isinstance(weight, nn.Parameter)
        return F.linear(x, weight, bias).relu() * net.scale + 0 * net.again.sum()

    net.first = first


HOLDERS = [
    *(a_closure_over_modules, a_closure_over_parameters, defaults, a_partial, a_plain_object, containers),
    *(a_wrapped_forward, nested_functions, lists_of_parameters),
]


def batches():
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 4, generator=made, dtype=torch.float64), torch.randn(4, 2, generator=made, dtype=torch.float64))
        for _ in range(4)
    ]


def module_of(hold):
    torch.manual_seed(0)
    return Net(hold)


def plain(hold):
    """Losses of plain torch."""
    net, losses = module_of(hold), []
    optimizer = torch.optim.SGD(net.parameters(), 0.3)
    for x, y in batches():
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(mesh, hold, transform):
    apply, params = sl.from_module(module_of(hold))
    params = sl.shard(params, mesh, transform)
    state, step = sl.make_train_step(
        lambda p, batch: F.mse_loss(apply(p, batch[0]), batch[1]), params, sl.optim.sgd(0.3)
    )
    losses = []
    for batch in batches():
        state, metrics = step(state, share(batch, mesh.rank, mesh.size))
        losses.append(metrics["loss"].item())
    return losses


def trains_as_plain(hold, transform, data=2):
    for losses in sl.simulate(train, hold, transform, mesh={"data": data}):
        assert losses == pytest.approx(plain(hold), abs=1e-10)


@STAGES
@pytest.mark.parametrize("hold", HOLDERS)
def test_what_holds_parts_of_a_module_trains_as_in_torch(hold, stage):
    trains_as_plain(hold, sl.zero(stage))


def test_a_function_that_holds_no_part_is_not_copied():
    class Other:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    def hold(net, other=Other()):  # noqa: B008
        net.name = lambda: other

    trains_as_plain(hold, sl.zero(1), data=1)


def test_a_parameter_that_an_autograd_function_gets_from_a_closure_is_refused():
    def hold(net):
        weight = net.a.weight
        net.first = lambda x: (Product.apply(x, weight) + net.a.bias).relu()

    with pytest.raises(TreeError, match=r"a.weight was given to an autograd.Function.*view_as"):
        train(sl.make_mesh(), hold, sl.zero(0))

    def with_view(net):
        weight = net.a.weight
        net.first = lambda x: (Product.apply(x, weight.view_as(weight)) + net.a.bias).relu()

    trains_as_plain(with_view, sl.zero(3))


KEPT = []


def test_a_parameter_outside_of_its_call_is_refused():
    def hold(net):
        weight = net.a.weight
        net.first = lambda x: (KEPT.append(lambda: weight.sum()), net.a(x).relu())[1]

    apply, params = sl.from_module(module_of(hold))
    apply(params, batches()[0][0])
    with pytest.raises(TreeError, match=r"a.weight is used outside of a call that has it"):
        KEPT.pop()()


def a_global(x):
    return F.linear(x, KEPT[0].a.weight).relu()


def test_parameters_of_the_module_itself_are_refused():
    """A global holds one, a loss reads the module beside its parameters: both would never be trained."""
    KEPT.append(net := module_of(lambda net: setattr(net, "first", a_global)))
    apply, params = sl.from_module(net)
    with pytest.raises(TreeError, match=r"Net's a.weight itself is used.*by a_global.*, line \d+ of .*test_seams"):
        apply(params, batches()[0][0])
    KEPT.clear()

    net = module_of(None)
    apply, params = sl.from_module(net)
    params = sl.shard(params, sl.make_mesh(), stage=3)
    for outside in (lambda x: net(x), lambda x: net.a.weight):
        with pytest.raises(LossError, match=r"(?s)the module's own parameters are.*Net's a.weight.*torch.no_grad"):
            sl.value_and_grad(lambda p, x: apply(p, x).mean() + outside(x).mean())(params, batches()[0][0])  # noqa: B023
    with torch.no_grad():
        wanted = module_of(None)(batches()[0][0]).mean()

    def distilled(p, x):
        with torch.no_grad():
            teacher = net(x)
        return apply(p, x).mean() + teacher.mean()

    loss, _ = sl.value_and_grad(distilled)(params, batches()[0][0])
    assert loss.item() == pytest.approx(2 * wanted.item())


def test_a_view_of_a_parameter_is_refused():
    def hold(net):
        net.turned = net.a.weight.detach().t()

    with pytest.raises(TreeError, match=r"holds a view of a.weight .*tensor.clone\(\)"):
        sl.from_module(module_of(hold))


def test_buffers_that_other_objects_hold_are_those_of_the_call():
    def hold(net):
        net.held = Held(net.scale)
        net.first = lambda x: net.a(x) * net.held.weight

    net = module_of(hold)
    apply, params, buffers = sl.from_module(net, buffers=True)
    x = batches()[0][0]
    out, _ = apply(params, {"scale": 2 * buffers["scale"]}, x)
    net.scale.mul_(2)
    assert torch.equal(out, net(x))


# --- what is done to the module after from_module -----------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Settings:
    factor: float


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.config = nn.Linear(4, 4), nn.Dropout(0.5), types.SimpleNamespace(scale=2.0)
        self.factors, self.activation = [1.0], torch.relu
        self.temperature, self.mask = torch.ones(()), np.ones(4, np.float32)
        self.heads, self.nested, self.settings = {0, 1}, ({"rates": [1.0]}, 2), Settings(1.0)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x):
        factor = len(self.heads) * self.nested[0]["rates"][0] * self.settings.factor * self.factors[0]
        x = self.activation(self.drop(self.a(x))) * self.config.scale * factor + self.shift
        return x * torch.from_numpy(self.mask) / self.temperature

    def encode(self, x):
        return self.a(x)


def _through_a_layer(module):
    return lambda x: module.a(x)


CHANGES = {
    "eval": lambda module: module.eval(),
    "an attribute": lambda module: setattr(module.drop, "p", 0.1),
    "a plain object's": lambda module: setattr(module.config, "scale", 3.0),
    "a list in place": lambda module: module.factors.__setitem__(0, 4.0),
    "a tensor in place": lambda module: module.temperature.fill_(2) and None,
    "an array in place": lambda module: module.mask.__setitem__(0, 0.0),
    "a set in place": lambda module: module.heads.add(2),
    "a list in other containers": lambda module: module.nested[0]["rates"].__setitem__(0, 3.0),
    "a slot": lambda module: setattr(module.settings, "factor", 3.0),
    "a buffer in place": lambda module: module.shift.fill_(7) and None,
    "another buffer": lambda module: setattr(module, "shift", torch.tensor(5.0)),
    "a function": lambda module: setattr(module, "activation", _through_a_layer(module)),
    "a new attribute": lambda module: setattr(module, "forward", lambda x: module.a(x) * 2),
    "a hook": lambda module: module.a.register_forward_hook(lambda module, inputs, out: 2 * out),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_done_to_the_module_is_done_to_its_copies(change):
    module, x = Noisy(), torch.randn(3, 4)
    apply, params = sl.from_module(module)

    def equal():
        torch.manual_seed(1)
        found = apply(params, x)
        torch.manual_seed(1)
        return torch.equal(found, module(x))

    assert equal()
    undo = change(module)
    assert equal()
    if isinstance(undo, nn.Module):
        undo.train()
    elif undo is not None:
        undo.remove()
    assert equal()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.a.requires_grad_(False), "a.weight: its requires_grad"),
        (lambda module: module.a.bias.register_hook(lambda grad: 0 * grad), "a.bias: its requires_grad or its hooks"),
        (lambda module: setattr(module, "b", nn.Linear(2, 2)), r"\(top\): its submodules or parameters"),
        (lambda module: setattr(module.a, "low", nn.Parameter(torch.ones(2))), "a: its submodules or parameters"),
    ],
)
def test_changes_that_make_another_tree_are_refused(change, message):
    module = Noisy()
    apply, params = sl.from_module(module)
    apply(params, torch.ones(1, 4))
    change(module)
    with pytest.raises(TreeError, match=f"(?s)changed after from_module.*{message}"):
        apply(params, torch.ones(1, 4))


def test_results_that_a_call_leaves_in_attributes_are_told_of(caplog):
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.loss, self.calls = nn.Linear(4, 4), 0.0, 0

        def forward(self, x):
            y, self.calls = self.a(x), self.calls + 1
            self.loss = y.square().mean()
            return y

    module, x = nn.Sequential(Penalised(), nn.ReLU()), torch.randn(2, 4)
    apply, params = sl.from_module(module)
    params = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    for _ in range(2):
        apply(params, x)
    (record,) = caplog.records
    assert "Penalised.loss, which the module itself does not get" in record.message
    _, loss = apply(params, x, method=lambda module, x: (module(x), module[0].loss))
    assert torch.equal(loss, module[0].a(x).square().mean())


def test_modes_and_methods_of_a_call():
    module, x = Noisy(), torch.randn(8, 4)
    apply, params = sl.from_module(module)
    assert torch.equal(apply(params, x, method="encode"), module.a(x))
    assert torch.equal(apply(params, x, training=False), module.eval()(x))
    assert not torch.equal(apply(params, x, training=True), module(x))
    module.train()
    # An evaluation is one, whatever mode the module is in; compiled functions read the mode too.
    for fn in (lambda p, x: apply(p, x), torch.compile(lambda p, x: apply(p, x), backend="eager")):
        evaluate = sl.make_eval_step(fn, sl.shard(params, sl.make_mesh()))
        assert torch.equal(evaluate(sl.shard(params, sl.make_mesh()), x), module.eval()(x)), fn
        module.train()
        assert not torch.equal(fn(params, x), fn(params, x))
    # One inside of torch.func too.
    evaluate = sl.make_eval_step(lambda p, x: apply(p, x), params)
    found = torch.func.vmap(lambda row: evaluate(params, row), randomness="different")(x)
    torch.testing.assert_close(found, module.eval()(x))


@dataclasses.dataclass(frozen=True)
class Scaled:
    layer: nn.Module
    factor: float


def test_frozen_dataclasses_are_copied_and_followed():
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    module.add_module("inner", nn.Linear(4, 4))
    module.held = Scaled(module.inner, 2.0)
    module.forward = types.MethodType(lambda self, x: self.held.layer(x) * self.held.factor, module)
    apply, params = sl.from_module(module)
    params["inner"] = {name: leaf + 1 for name, leaf in params["inner"].items()}
    expected = F.linear(x, params["inner"]["weight"], params["inner"]["bias"])
    torch.testing.assert_close(apply(params, x), expected * 2)
    module.held = Scaled(module.inner, 3.0)
    torch.testing.assert_close(apply(params, x), expected * 3)


def test_a_module_made_in_forward_takes_no_parameters():
    """Copies of which it would have, without a gradient."""

    def hold(net):
        net.first = lambda x: F.linear(x, *nn.ParameterList([net.a.weight, net.a.bias])).relu()

    with pytest.raises(TreeError, match=r"non-leaf Tensor .* keep them in a list of Python"):
        train(sl.make_mesh(), hold, sl.zero(0))


def test_a_module_without_forward():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

        def encode(self, x):
            return self.down(x)

    apply, params = sl.from_module(Coder())
    with pytest.raises(TreeError, match=r"Coder has no forward.*method='encode'"):
        apply(params, torch.ones(1, 4))
    assert apply(params, torch.ones(1, 4), method="encode").shape == (1, 2)


# --- hooks on parameters ------------------------------------------------------------------------------------------

MASK = torch.tensor([[1.0], [0.0]] * 4, dtype=torch.float64)


def with_hook(hook):
    return lambda net: net.a.weight.register_hook(hook)


@pytest.mark.parametrize(
    "transform",
    [sl.zero(0), sl.zero(3), sl.chain(sl.zero(2), sl.accumulate(2))],
)
def test_hooks_on_parameters_run(transform):
    trains_as_plain(with_hook(lambda grad: MASK * grad), transform)


def test_hooks_that_cannot_run_are_refused():
    for hook in (lambda grad: grad.clamp(-0.01, 0.01), lambda grad: grad / grad.norm()):
        with pytest.raises(TreeError, match=r"hook on parameter a.weight is not linear.*sl.optim.chain"):
            train(sl.make_mesh(), with_hook(hook), sl.zero(0))
    with pytest.raises(TreeError, match=r"(?s)after their gradient was accumulated.*a.weight"):
        sl.from_module(module_of(lambda net: net.a.weight.register_post_accumulate_grad_hook(lambda leaf: None)))
    leaf = nn.Parameter(torch.ones(2))
    leaf.register_hook(lambda grad: 2 * grad)
    with pytest.raises(TreeError, match=r"(?s)have hooks on their gradients.*w.*from_module"):
        sl.shard({"w": leaf}, sl.make_mesh())


# --- compiled blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a module's call", "a module", "a function"])
def test_compiled_parts_stay_compiled(how):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    class Block(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x).relu()

    def hold(net):
        block = Block(net.a)
        if how == "a module's call":
            block.compile(backend=backend)
        else:
            block = torch.compile(
                block if how == "a module" else lambda x, layer=net.a: layer(x).relu(), backend=backend
            )
        net.block, net.first = block, lambda x: net.block(x)

    net, x = module_of(hold), batches()[0][0]
    apply, params = sl.from_module(net)
    out = apply(params, x)
    assert len(compiled) == 1
    assert torch.equal(out, net(x))
