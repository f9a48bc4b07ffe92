"""Code between the layers of a model whose sequences are cut: what mixes positions is refused, and what is right is not."""

import pytest
import torch
import torch.nn.functional as F
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import LossError

WORDS, WIDTH, LENGTH, BATCH = 32, 8, 8, 2
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64) * 0.3


PARAMS = {
    "embed": {"weight": drawn(WORDS, WIDTH)},
    **{name: {"weight": drawn(WIDTH, WIDTH)} for name in ("q", "k", "v", "out")},
    "head": {"weight": drawn(WORDS, WIDTH)},
}
TOKENS = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=GENERATOR)
DATA = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
RULES = {"q": sl.column(heads=2), "k": sl.column(heads=2), "v": sl.column(heads=2), "out": sl.row(heads=2)}
KINDS = {
    "ring": (sl.sequence("seq", "ring"),),
    "ulysses": (sl.sequence("seq", "ulysses"),),
    "megatron": (sl.sequence("seq", "megatron"), sl.tensor_slicing(RULES, axis="seq")),
}


def enter(params, batch):
    return sl.nn.embedding(batch["tokens"], params["embed"]["weight"])


def attend(params, x):
    q, k, v = (F.linear(x, params[name]["weight"]).unflatten(-1, (-1, 4)).transpose(1, 2) for name in "qkv")
    y = sl.nn.attention(q, k, v, causal=True).transpose(1, 2).flatten(2)
    return x + F.linear(y, params["out"]["weight"])


def leave(params, x, batch):
    return sl.nn.linear_cross_entropy(x, params["head"]["weight"], batch["targets"])


def before_attention(does):
    return lambda params, batch: leave(params, attend(params, does(enter(params, batch))), batch)


def after_attention(does):
    return lambda params, batch: leave(params, does(attend(params, enter(params, batch))), batch)


def by_tokens(does):
    """The part is taken of the tokens, and the embedding is torch's."""

    def loss_fn(params, batch):
        x = F.embedding(sl.nn.shard_sequence(batch["tokens"]), params["embed"]["weight"])
        return leave(params, attend(params, does(x)), batch)

    return loss_fn


def shifted(params, batch):
    """The loss of each position's next one, of which parts have one less."""
    logits = attend(params, enter(params, batch)) @ params["head"]["weight"].T
    targets = sl.nn.shard_sequence(batch["tokens"])
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
    return sl.nn.sum_sequence(losses) / (BATCH * (LENGTH - 1))


WRONG = {
    "cumsum": lambda x: x.cumsum(1),
    "softmax": lambda x: x * x.softmax(1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "roll": lambda x: x + x.roll(1, 1),
    "flip": lambda x: x + x.flip(1),
    "conv1d": lambda x: x + F.conv1d(x.mT, torch.ones(WIDTH, 1, 3, dtype=x.dtype), padding=1, groups=WIDTH).mT,
    "F.pad": lambda x: x + F.pad(x, (0, 0, 1, -1)),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "amax": lambda x: x / (1 + x.amax((1, 2), keepdim=True).square()),
    "norm": lambda x: x / x.norm(),
    "an index": lambda x: x + torch.cat([torch.zeros_like(x[..., :1, :]), x[:, :-1]], 1),
    "an index ": lambda x: x + x[:, 0, None],
    "an index   ": lambda x: x + F.pad(x.unflatten(1, (-1, 2))[:, 1:].flatten(1, 2), (0, 0, 2, 0)),
    "an index  ": lambda x: x + x.select(1, -1).unsqueeze(1),
    "an index of positions by numbers": lambda x: x + x[:, torch.zeros(x.shape[1], dtype=torch.int64)],
    "an index of positions by numbers ": lambda x: x + x[torch.arange(len(x)), torch.tensor([1, 0])][:, None],
    "an index of positions by numbers  ": lambda x: x + x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
    "a join of positions": lambda x: torch.cat([x.new_zeros(len(x), 2, WIDTH), x], 1)[:, 2:],
    "softmin": lambda x: x * F.softmin(x, dim=1),
    "median": lambda x: x - x.median(1, keepdim=True)[0],
    "batch_norm": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "matmul": lambda x: x + x @ (x.mT @ x),
    "matmul ": lambda x: x + x @ x.mT @ x,
    "einsum": lambda x: x + torch.einsum("bsw, btw -> btw", x, x),
    "gru": lambda x: x + torch.gru(x, x.new_zeros(1, len(x), WIDTH), GRU, False, 1, 0.0, False, False, True)[0],
}
GRU = [drawn(3 * WIDTH, WIDTH), drawn(3 * WIDTH, WIDTH)]


def trained(loss_fn, kind):
    def run(mesh):
        plan = sl.chain(*KINDS.get(kind, (sl.sequence("seq", kind=Backwards),)))
        loss, grads = sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, plan), DATA)
        return loss, sl.unshard(grads)

    return sl.simulate(run, mesh={"seq": 2})


def refused(loss_fn, kind, what):
    with pytest.raises(LossError, match=rf"{what}.* sees this rank's part of the sequence only \({kind}"):
        trained(loss_fn, kind)


@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_positions_is_refused(name):
    """All shapes fit, and every rank would mix its own."""
    refused(before_attention(WRONG[name]), "ring", name.strip())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [before_attention, after_attention, by_tokens])
def test_wherever_it_stands(kind, place):
    refused(place(lambda x: F.gelu(x).cumsum(1)), kind, "cumsum over positions")


def test_a_loss_of_shifted_parts_is_refused():
    refused(shifted, "ulysses", "an index that leaves out positions")


def of_sums(params, batch):
    """Sums of parts are summands, and numbers to look at are no matter."""
    x = attend(params, enter(params, batch))
    assert float(x.detach().amax()) < 100
    return leave(params, x, batch) + sl.nn.sum_sequence(x.square().sum() + x.norm(dim=-1).sum(1).mean())


def in_pieces(x):
    return torch.cat([x[:, start : start + 2].tanh() for start in range(0, x.shape[1], 2)], 1)


def in_stretches(x):
    stretches = x.unflatten(1, (2, -1))
    return torch.stack([stretches[:, 0].tanh(), stretches.select(1, 1).tanh()], 1).flatten(1, 2)


def within_positions(x):
    x = F.layer_norm(x, (WIDTH,)) + x.softmax(-1) + x.cumsum(2) + x.roll(1, -1) + x - x.mean(-1, keepdim=True)
    return F.pad(x[..., 1:], (1, 0)) + x[:, :, :1] + x.view(*x.shape[:2], 2, -1).flip(2).flatten(2)


class Backwards(sl.collectives.sequence.SequenceKind):
    """Attention of the whole sequence, by code that knows that it has parts, and turns them around twice."""

    name = "backwards"

    def attention(self, q, k, v, how, attend, mesh):
        q, k, v = (x.flip(2) for x in (q, k, v))
        whole = [sl.collectives.all_gather(x.flip(2), self.axis, dim=2, mesh=mesh) for x in (q, k, v)]
        return attend(*whole, how).chunk(mesh.shape[self.axis], dim=2)[mesh.coords[self.axis]]


RIGHT = {
    "sums": of_sums,
    "pieces": before_attention(in_pieces),
    "stretches": before_attention(in_stretches),
    "within positions": after_attention(within_positions),
    "tokens": by_tokens(within_positions),
}


@pytest.mark.parametrize("kind", [*KINDS, "a kind that mixes positions itself"])
@pytest.mark.parametrize("name", RIGHT)
def test_other_code_trains_as_on_one_device(name, kind):
    loss, grads = sl.value_and_grad(RIGHT[name])(PARAMS, DATA)
    for found in trained(RIGHT[name], kind):
        torch.testing.assert_close(found[0], loss, rtol=1e-10, atol=0)
        assert_close(found[1], grads, 1e-10)
