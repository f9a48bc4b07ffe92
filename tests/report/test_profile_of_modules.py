"""Profiles of modules without blocks: their layers and what stands beside them, forward, backward and recomputed."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, logging

import shardlib as sl
from shardlib.report.profile.modules import parts_of
from shardlib.report.profile.recording import OUTSIDE
from shardlib.tree import tree_map

logging.set_verbosity_error()
WAYS = ("forward", "backward", "recompute")
ROWS, WIDTH = 4, 8
ONCE = 2 * ROWS * WIDTH * WIDTH  # operations of one product


class Layer(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.linear, self.again = nn.Linear(WIDTH, WIDTH), again

    def forward(self, x, *, scale):
        return checkpoint(self._run, x, scale, use_reentrant=False) if self.again else self._run(x, scale)

    def _run(self, x, scale):
        return {"out": self.linear(x).mul_(scale).relu_()}  # in place, as torchvision's, and not a tensor


class Net(nn.Module):
    """Products outside of its parts too, a part that runs twice, one that is recomputed, and one that never runs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer(again=True)]), "unused": nn.Linear(1, 1)})
        self.free = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.twice = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = F.gelu(self.first(x))
        for layer in self.body["layers"]:
            x = layer(x, scale=0.5)["out"] + x
        x = torch.tanh(x @ self.free)
        return self.twice(self.twice(x))


def profiled(net, transform, loss_fn=None, place=""):
    """Name -> (forward, backward, recompute), in operations, of a step on two ranks."""
    apply, params = sl.from_module(net)

    def loss_of(params, batch):
        return apply(params, batch).square().mean()

    def run(mesh):
        tree = {place: params, "other": torch.ones(())} if place else params
        loss = (lambda tree, batch: loss_of(tree[place], batch) * tree["other"]) if place else loss_of
        state, step = sl.make_train_step(loss, sl.shard(tree, mesh, transform), sl.optim.sgd(0.1))
        found = sl.profile(step, state, torch.ones(ROWS, WIDTH), steps=1, warm=1)
        assert sum(found.by_kind.values()) == pytest.approx(found.seconds)
        operations = {}
        for part, count in found.operators.flops.items():
            operations.setdefault(part.name, {})[part.way] = count
        return {name: tuple(ways.get(way, 0) for way in WAYS) for name, ways in operations.items()}, found

    return sl.simulate(run, mesh={"data": 2})[0]


@pytest.mark.parametrize("place", ["", "student"])
@pytest.mark.parametrize("transform", [sl.zero(0), sl.chain(sl.zero(3), sl.remat())], ids=["stage 0", "stage 3"])
def test_operations_by_part(transform, place):
    """Against the products that each part has: backward computes two for each of forward, without the input's one."""
    torch.manual_seed(0)
    names, found = profiled(Net(), transform, place=place)
    before = f"{place}/" if place else ""
    assert {name: ways for name, ways in names.items() if any(ways)} == {
        f"{before}first": (ONCE, ONCE, 0),
        f"{before}body/layers/0": (ONCE, 2 * ONCE, 0),
        f"{before}body/layers/1": (ONCE, 2 * ONCE, ONCE),
        OUTSIDE: (ONCE, 2 * ONCE, 0),
        f"{before}twice": (2 * ONCE, 4 * ONCE, 0),
    }
    used = {f"{before}{name}" for name in ("first", "body/layers/0", "body/layers/1", "twice")}
    assert found.by_block.keys() == used | {OUTSIDE}
    kept = {change.name.of for change in found.memory.changes if change.name.kind == "activations"}
    assert used <= kept <= used | {OUTSIDE}


class Biased(nn.Module):
    """A layer that hands on what all layers share, as T5's hand on the first one's biases of positions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shared):
        shared = self.linear(x) if shared is None else shared
        return torch.tanh(self.linear(x + shared)), shared


class Sharing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Biased() for _ in range(3)])

    def forward(self, x):
        x, shared = self.first(x), None
        for layer in self.layers:
            x, shared = layer(x, shared)
        return x


def test_what_a_part_hands_on_is_not_its_result():
    """Its gradient is there when the backward of the part that made it begins, and no other part's."""
    names, _ = profiled(Sharing(), sl.zero(0))
    assert {name: ways for name, ways in names.items() if any(ways)} == {
        "first": (ONCE, ONCE, 0),
        "layers/0": (2 * ONCE, 4 * ONCE, 0),
        "layers/1": (ONCE, 2 * ONCE, 0),
        "layers/2": (ONCE, 2 * ONCE, 0),
    }


@pytest.mark.parametrize("remat", [[], [sl.remat()]], ids=["kept", "recomputed"])
def test_what_a_block_hands_on_is_not_its_result(remat):
    def first(p, _, x):
        made = x @ p["w"]
        return torch.tanh(made @ p["w"]), made

    def layer(p, carry, _):
        x, made = carry
        return torch.tanh(x @ p["w"]) + made @ p["w"], made

    loss_fn = sl.sequential([first, layer, layer, layer, lambda p, carry, _: (carry[0] @ p["w"]).square().mean()])
    params = sl.shard([{"w": torch.eye(WIDTH)} for _ in range(5)], sl.make_mesh(), sl.chain(*remat))
    state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(1e-3))
    flops = sl.profile(step, state, torch.ones(ROWS, WIDTH), steps=1, warm=1).operators.flops
    backward = [sum(n for part, n in flops.items() if part[1:] == ("backward", str(number))) for number in range(5)]
    assert backward == [3 * ONCE, 4 * ONCE, 4 * ONCE, 4 * ONCE, 2 * ONCE]  # the batch has no gradient


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("place", ["", "student"])
def test_modules_that_the_loss_calls_itself(stage, place):
    """By torch's functional_call, twice and after a failure, beside a module with parameters of its own."""
    torch.manual_seed(0)
    nets, teacher = threading.local(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    params = dict(Net().named_parameters())
    tree = {place: params} if place else params

    def loss_fn(tree, batch):
        net = nets.__dict__.setdefault("net", Net())  # of this rank: a call puts tensors into the module itself
        given = tree[place] if place else tree
        with contextlib.suppress(RuntimeError):
            functional_call(net, given, (torch.ones(ROWS, WIDTH + 1),))
        out = functional_call(net, given, (batch,))
        assert not any(module._forward_hooks for module in net.modules())
        return (out - functional_call(net, given, (batch,)) * teacher(batch)).square().mean()

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(tree, mesh, stage=stage), sl.optim.sgd(0.1))
        found = sl.profile(step, state, torch.ones(ROWS, WIDTH), steps=1, warm=1)
        operations = {}
        for part, count in found.operators.flops.items():
            operations.setdefault(part.name, {})[part.way] = count
        return {
            name: tuple(ways.get(way, 0) for way in WAYS) for name, ways in operations.items() if any(ways.values())
        }

    before = f"{place}/" if place else ""
    for found in sl.simulate(run, mesh={"data": 2}):
        assert found == {
            f"{before}first": (2 * ONCE, 2 * ONCE, 0),
            f"{before}body/layers/0": (2 * ONCE, 4 * ONCE, 0),
            f"{before}body/layers/1": (2 * ONCE, 4 * ONCE, 2 * ONCE),
            OUTSIDE: (3 * ONCE, 4 * ONCE, 0),
            f"{before}twice": (4 * ONCE, 8 * ONCE, 0),
        }
    assert not _global_forward_hooks and not _global_forward_pre_hooks


def test_dotted_names_have_the_place_of_their_dictionary():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    tree = {"nets": [dict(net.named_parameters())]}
    loss = lambda tree, batch: functional_call(net, tree["nets"][0], (batch,)).sum()  # noqa: E731
    found = sl.profile(*reversed(sl.make_train_step(loss, tree, sl.optim.sgd(0.1))), torch.ones(ROWS, WIDTH), steps=1)
    assert found.by_block.keys() == {"nets/0/0", "nets/0/1", "nets/0/2", OUTSIDE}


WORDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
MODELS = {
    "llama": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **WORDS)),
        {"model/embed_tokens", "model/rotary_emb", "model/layers/0", "model/layers/1", "model/norm", "lm_head"},
    ),
    "bert": (
        lambda: BertForMaskedLM(BertConfig(max_position_embeddings=8, **SIZES, **WORDS)),
        {"bert/embeddings", "bert/encoder/layer/0", "bert/encoder/layer/1", "cls"},
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_that_recompute(kind):
    made, names = MODELS[kind]
    model = made().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply, params = sl.from_module(model)
    tokens = torch.randint(50, (2, 8))

    def loss_fn(params, tokens):
        return apply(params, input_ids=tokens, labels=tokens).loss

    params = sl.shard(params, sl.make_mesh(), stage=3)
    found = sl.profile(*reversed(sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1))), tokens, steps=1, warm=1)
    assert found.by_block.keys() == names | {OUTSIDE}
    again = {name for name, ways in found.by_block.items() if ways["recompute"]}
    assert again == {name for name in names if "/layer" in name}
    counts = {(part.name, part.way): count for part, count in found.operators.flops.items()}
    for name in again:
        assert counts[name, "backward"] >= 2 * counts[name, "forward"] > 0
        assert 0 < counts[name, "recompute"] <= counts[name, "forward"]  # a checkpoint stops at its last saved tensor


def test_blocks_go_before_parts():
    apply, params = sl.from_module(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    block = sl.block(lambda params, x: apply(params["all"], x))
    others = tree_map(torch.clone, params)

    def loss_fn(params, batch):
        return (block(params["inside"], batch) + apply(params["outside"], batch)).sum()

    state, step = sl.make_train_step(loss_fn, {"inside": {"all": params}, "outside": others}, sl.optim.sgd(0.1))
    found = sl.profile(step, state, torch.ones(ROWS, WIDTH), steps=1, warm=1)
    assert found.by_block.keys() == {"inside/all/0", "outside/0", "outside/1", OUTSIDE}


def test_steps_that_are_not_profiled_have_no_hooks():
    hooks, net = [], Net()
    net.register_forward_pre_hook(lambda module, _: hooks.append(sum(len(m._forward_hooks) for m in module.modules())))
    apply, params = sl.from_module(net)
    state, step = sl.make_train_step(lambda p, x: apply(p, x).sum(), params, sl.optim.sgd(0.1))
    found = sl.report.comm(step, state, torch.ones(ROWS, WIDTH), warm=0)
    step(found.state, torch.ones(ROWS, WIDTH))
    assert hooks == [len(parts_of(net)), 0]
