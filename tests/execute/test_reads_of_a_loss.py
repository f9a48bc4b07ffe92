"""What a compiled loss reads and is not given: each change of it is another graph, as it is another step without one."""

import dataclasses
import enum
import functools
import types
from collections import deque

import numpy
import pytest
import torch
import torch.nn.functional as F

import shardlib as sl

imported, X = types.ModuleType("users_settings"), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def losses(loss_fn, change, compile, batches=None, around=None):
    """The losses of three steps; before each something is set."""
    params = {"w": torch.linspace(-1, 1, 18).view(6, 3)}
    state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1), compile=compile)
    found = []
    for number, batch in enumerate(batches or [{"x": X}] * 3):
        change(float(number + 1))
        state, metrics = step(state, batch)
        found.append(metrics["loss"].item())
    return found, step


def plain(params, batch):
    return (batch["x"] @ params["w"]).square().mean()


def scaled(value, settings):
    return value * settings.power


class Settings:
    power = 1.0

    def __init__(self):
        self._power = 1.0

    @property
    def own(self):
        return self._power

    def __call__(self, value, other=None):
        return (plain(value, other) if other else value) * self._power


@dataclasses.dataclass(slots=True)
class Slots:
    power: float = 1.0


class Kind(enum.Enum):
    ONE, TWO, THREE = 1.0, 2.0, 3.0


class Reversed(torch.autograd.Function):
    power = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad * Reversed.power


def of_classes():
    return lambda p, b: plain(p, b) * Settings.power, lambda value: setattr(Settings, "power", value)


def of_modules():
    return lambda p, b: plain(p, b) * imported.power, lambda value: setattr(imported, "power", value)


def of_a_callable():
    settings = Settings()
    return settings, lambda value: setattr(settings, "_power", value)


def of_a_callable_inside():
    settings = Settings()
    return lambda p, b: settings(plain(p, b)), lambda value: setattr(settings, "_power", value)


def of_properties():
    settings = Settings()
    return lambda p, b: plain(p, b) * settings.own, lambda value: setattr(settings, "_power", value)


def of_what_is_passed_on():
    settings = types.SimpleNamespace(power=1.0)
    return lambda p, b: scaled(plain(p, b), settings), lambda value: setattr(settings, "power", value)


def of_names_as_text():
    settings = types.SimpleNamespace(power=1.0)
    return lambda p, b: plain(p, b) * getattr(settings, "power"), lambda value: setattr(settings, "power", value)  # noqa: B009


def of_arguments_that_are_bound():
    settings = types.SimpleNamespace(power=1.0)
    bound = functools.partial(lambda p, b, settings: plain(p, b) * settings.power, settings=settings)
    return bound, lambda value: setattr(settings, "power", value)


def of_slots():
    slots = Slots()
    return lambda p, b: plain(p, b) * slots.power, lambda value: setattr(slots, "power", value)


def of_numpy():
    table = [numpy.float32(1)]
    return lambda p, b: plain(p, b) * float(table[0]), lambda value: table.__setitem__(0, numpy.float32(value))


def of_arrays():
    array = numpy.ones(2)
    return lambda p, b: plain(p, b) * float(array[1]), lambda value: array.fill(value)


def of_queues():
    queue = deque([torch.ones(())], maxlen=2)
    return lambda p, b: plain(p, b) * sum(queue), lambda value: queue.append(torch.tensor(value))


def of_sets():
    known = set()
    return lambda p, b: plain(p, b) * len(known), lambda value: known.add(value)


def of_enumerations():
    table = [Kind.ONE]
    return lambda p, b: plain(p, b) * table[0].value, lambda value: table.__setitem__(0, Kind(value))


def beside_a_large_table():
    words, table = {f"word {number}": number for number in range(5000)}, [1.0]
    return lambda p, b: plain(p, b) * table[0] * (len(words) > 0), lambda value: table.__setitem__(0, value)


def of_two_of_one_name():
    def make(power):
        return lambda x: x * power[0]

    first, second = [1.0], [1.0]
    both = [make(first), make(second)]
    return lambda p, b: both[1](both[0](plain(p, b))), lambda value: first.__setitem__(0, value)


def of_torchs_modules():
    criterion = torch.nn.SmoothL1Loss()
    return lambda p, b: criterion(b["x"] @ p["w"], b["x"][:, :3]), lambda value: setattr(criterion, "beta", value)


def of_a_module_that_is_another():
    held = [torch.nn.Linear(3, 1)]
    return lambda p, b: held[0](b["x"] @ p["w"]).mean(), lambda value: held.__setitem__(
        0, torch.nn.Linear(3, int(value))
    )


def of_backward():
    return lambda p, b: plain(p | {"w": Reversed.apply(p["w"])}, b), lambda value: setattr(Reversed, "power", value)


def of_a_block():
    settings = types.SimpleNamespace(power=1.0)
    block = sl.block(lambda p, b: plain(p, b) * settings.power)
    return lambda p, b: block(p, b), lambda value: setattr(settings, "power", value)


def of_the_shape_of_a_tensor():
    table = torch.ones(1)
    return lambda p, b: plain(p, b) * table.numel(), lambda value: setattr(table, "data", torch.ones(int(value)))


CASES = [
    *(
        of_classes,
        of_modules,
        of_a_callable,
        of_a_callable_inside,
        of_properties,
        of_what_is_passed_on,
        of_names_as_text,
    ),
    *(
        of_arguments_that_are_bound,
        of_slots,
        of_numpy,
        of_arrays,
        of_queues,
        of_sets,
        of_enumerations,
        beside_a_large_table,
    ),
    *(
        of_two_of_one_name,
        of_torchs_modules,
        of_a_module_that_is_another,
        of_backward,
        of_a_block,
        of_the_shape_of_a_tensor,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_changes_are_seen(case):
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        values, step = losses(*case(), compile)
        found.append(values)
    assert found[0] == found[1] and len(set(found[0])) == 3
    assert len(step.graph.graphs) == 3


def test_an_object_in_a_batch_that_changes():
    settings = Settings()

    def run(compile):
        batches = [{"x": X, "settings": settings}] * 3
        return losses(
            lambda p, b: plain(p, b) * b["settings"].own, lambda v: setattr(settings, "_power", v), compile, batches
        )[0]

    assert run(True) == run(False)


def test_autocast_and_conjugates_around_steps():
    """One step is in bf16, and a batch is a lazy conjugate."""
    complex_x = torch.complex(X, X.flip(0))

    def loss_fn(params, batch):
        with torch.autocast("cpu", enabled=False):
            exact = batch["x"].imag @ params["w"]
        return F.mse_loss((batch["x"].real @ params["w"]).float(), exact.tanh())

    def run(compile):
        state, step = sl.make_train_step(loss_fn, {"w": torch.ones(6, 3)}, sl.optim.sgd(0.1), compile=compile)
        found = []
        for casts, conjugate in ((True, True), (True, False), (False, False), (False, True), (True, True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                state, metrics = step(state, {"x": complex_x.conj() if conjugate else complex_x})
            found.append(metrics["loss"].item())
        return found

    assert run(True) == run(False)


def that_counts():
    counted = [0]

    def loss_fn(params, batch):
        counted[0] += 1
        return plain(params, batch) * (2.0 if counted[0] > 4 else 1.0), counted[0]

    return loss_fn, lambda: counted


def that_keeps_an_average():
    held = [torch.zeros(3)]

    def loss_fn(params, batch):
        hidden = batch["x"] @ params["w"]
        loss = (hidden - held[0]).square().mean()
        held[0] = 0.9 * held[0] + 0.1 * hidden.mean(0).detach()
        return loss, None

    return loss_fn, lambda: held[0].tolist()


def that_writes_to_a_constant():
    written = torch.zeros(3)

    def loss_fn(params, batch):
        written.add_(1)
        return plain(params, batch) * written.sum(), None

    return loss_fn, lambda: written.tolist()


def that_keeps_a_list():
    kept = []

    def loss_fn(params, batch):
        kept.append((batch["x"] @ params["w"]).detach().sum())
        return plain(params, batch), None

    return loss_fn, lambda: [float(each) for each in kept]


def of_a_module_that_counts():
    module = Counting()
    apply, _ = sl.from_module(module)
    return lambda p, b: ((b["x"] @ p["w"]).square().mean() * apply({}, torch.ones(())), None), lambda: None


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (2.0 if self.calls > 4 else 1.0)


@pytest.mark.parametrize(
    "case",
    [that_counts, that_keeps_an_average, that_writes_to_a_constant, that_keeps_a_list, of_a_module_that_counts],
    ids=lambda case: case.__name__,
)
def test_what_a_loss_changes_is_changed_as_without_a_graph(case):
    found = []
    for compile in (False, True):
        loss_fn, left = case()
        state, step = sl.make_train_step(loss_fn, {"w": torch.ones(6, 3)}, sl.optim.sgd(0.1), compile=compile)
        for _ in range(6):
            state, metrics = step(state, {"x": X})
            found.append((metrics["loss"].item(), metrics.get("aux"), left()))
    assert found[:6] == found[6:]


class Cached(torch.nn.Module):
    """Positions are made for the longest sequence so far."""

    def __init__(self):
        super().__init__()
        self.linear, self.longest = torch.nn.Linear(4, 4), 0

    def forward(self, x):
        length = x.shape[1]
        if length > self.longest:
            self.longest, self.places = length, torch.arange(length).sin()[:, None]
        if length not in table:
            table[length] = torch.arange(length).cos()[:, None]
        return self.linear(x) * self.places[:length] + remembered(length) * table[length]


table = {}


@functools.lru_cache
def remembered(length):
    return torch.arange(length).tan()[:, None]


def test_caches_that_a_trace_fills_have_values_afterwards():
    """Each length is seen first by a trace, and then by an evaluation."""

    def run(compile):
        torch.manual_seed(0)
        table.clear()
        remembered.cache_clear()
        apply, params = sl.from_module(Cached())
        loss_fn = lambda params, batch: apply(params, batch).square().mean()  # noqa: E731
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1), compile=compile)
        evaluate, found = sl.make_eval_step(loss_fn, params), []
        for length in (3, 3, 5, 4, 7):
            batch = torch.randn(2, length, 4)
            state, metrics = step(state, batch)
            found += [metrics["loss"].item(), evaluate(state.params, batch).item()]
        return found

    assert run(True) == run(False)


def test_what_a_loss_leaves_for_others_is_told(caplog):
    seen = types.SimpleNamespace(hidden=None)

    def loss_fn(params, batch):
        seen.hidden = batch["x"] @ params["w"]
        return seen.hidden.square().mean()

    _, step = losses(loss_fn, lambda value: None, True)
    assert len(step.graph.graphs) == 1 and type(seen.hidden) is torch.Tensor
    assert "writes to seen.hidden" in caplog.text


WEIGHTS = torch.tensor([1.0, 2.0])


def seeded(params, batch, rng):
    torch.manual_seed(3)
    return (batch["x"] @ params["w"] * torch.rand(3)).square().mean()


def forked(params, batch, rng):
    with torch.random.fork_rng():
        noise = torch.rand(3)
    return (batch["x"] @ params["w"] * noise * torch.rand(3)).square().mean()


def by_a_seed(params, batch, rng):
    return plain(params, batch) * numpy.random.default_rng(rng.seed).random()


def by_values(params, batch, rng):
    return plain(params, batch) * sum(WEIGHTS.tolist()) * float(WEIGHTS.numpy()[0])


def drawn(params, batch, rng):
    torch.rand(5)
    return (F.dropout(batch["x"] @ params["w"], 0.5) * torch.rand(3)).square().mean()


def assigned(params, batch, rng):
    hidden = batch["x"] @ params["w"]
    noise = torch.zeros_like(hidden)
    noise.data = noise.data + hidden.detach()
    return (hidden * noise).mean()


@pytest.mark.parametrize("loss_fn", [seeded, forked, by_a_seed, by_values, drawn, assigned], ids=lambda fn: fn.__name__)
def test_seeds_and_values_that_are_read(loss_fn, caplog):
    def run(compile):
        WEIGHTS.fill_(1)
        return losses(loss_fn, lambda value: WEIGHTS.fill_(value), compile)

    (eager, _), (compiled, step) = run(False), run(True)
    assert compiled == eager and len(set(eager)) == 3
    assert len(step.graph.graphs) == (loss_fn in (drawn, assigned))


def test_a_later_form_that_cannot_be_traced(caplog):
    def loss_fn(params, batch):
        return plain(params, batch) * (float(batch["factor"]) if "factor" in batch else 1.0)

    def run(compile):
        batches = [{"x": X}, {"x": X}, {"x": X, "factor": torch.tensor(2.0)}, {"x": X}]
        return losses(loss_fn, lambda value: None, compile, batches)[0]

    assert run(True) == run(False)
    assert "for a batch of another form" in caplog.text and 'float(batch["factor"])' in caplog.text
