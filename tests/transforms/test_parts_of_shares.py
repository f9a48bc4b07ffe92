"""Layers that are several in one: parts of a rank's share of their outputs are refused, and what is right is not."""

import pytest
import torch
import torch.nn.functional as F
from helpers.trees import assert_close
from models.test_huggingface_slicing import made, parts_of

import shardlib as sl
from shardlib.errors import HandleError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 6, generator=GENERATOR, dtype=torch.float64)
PARAMS = {
    "up": {"weight": torch.randn(16, 6, generator=GENERATOR, dtype=torch.float64)},
    "down": {"weight": torch.randn(6, 16, generator=GENERATOR, dtype=torch.float64)},
    "half": {"weight": torch.randn(6, 8, generator=GENERATOR, dtype=torch.float64)},
}


def up(params, x):
    return F.linear(x, params["up"]["weight"])


def after(params, y, name="half"):
    return F.linear(y, params[name]["weight"]).square().sum()


def chunked(params, x):
    gate, value = up(params, x).chunk(2, dim=-1)
    return after(params, gate.sigmoid() * value)


def sliced(params, x):
    y = up(params, x)
    return after(params, y[..., :8].sigmoid() * y[:, :, 8:] if y.shape[-1] == 16 else y[..., :4] * y[:, :, 4:])


def by_glu(params, x):
    return after(params, F.glu(up(params, x)))


def cut_by_torch(params, x):
    gate, value = torch.tensor_split(up(params, x), 2, -1)
    return after(params, gate * value)


def narrowed(params, x):
    y = up(params, x)
    size = y.shape[-1] // 2
    return after(params, y.narrow(2, 0, size) * y.narrow(-1, size, size))


def split(params, x):
    y = up(params, x)
    gate, value = y.split(y.shape[-1] // 2, -1)
    return after(params, gate * value)


def split_after_an_activation(params, x):
    y = F.gelu(up(params, x)).transpose(1, 2)
    gate, value = torch.split(y, [y.shape[1] // 2] * 2, 1)
    return after(params, (gate * value).mT)


def by_its_first(params, x):
    y = up(params, x)
    return after(params, y * y[..., 0, None], "down")


@pytest.mark.parametrize(
    ("loss_fn", "taken"),
    [
        *((loss_fn, "8 outputs .* in 2 parts") for loss_fn in (chunked, by_glu, cut_by_torch, split)),
        *((loss_fn, "outputs 0 to 3 of the 8") for loss_fn in (sliced, narrowed)),
        (split_after_an_activation, "8 outputs .* in 2 parts"),
        (by_its_first, "outputs 0 to 0 of the 8"),
    ],
)
def test_parts_of_a_share_are_refused(loss_fn, taken):
    plan = sl.tensor_slicing({"up": "column", "half": "row", "down": "row"})
    message = rf"up/weight is sliced \(column over axis 'model'\), .* takes its {taken}(.|\n)*gather=True"
    with pytest.raises(HandleError, match=message):
        sl.simulate(lambda mesh: sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, plan), X), mesh={"model": 2})


# Four heads of four, as code that fixes their number makes them: of a rank's share, four of two.
FIXED = {
    "view": lambda y: y.view(2, 3, 4, -1),
    "reshape": lambda y: y.exp().reshape((2, 3, 4, -1)),
    "unflatten": lambda y: y.unflatten(-1, (4, -1)),
    "transposed": lambda y: y.transpose(1, 2).unflatten(1, (4, -1)).permute(0, 3, 1, 2),
    "without others": lambda y: y.view(6, 4, -1).view(2, 3, 4, -1),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("style", ["column", sl.column(heads=4)])
def test_as_many_groups_as_all_ranks_have_are_refused(name, style):
    """All shapes fit: attention would see heads of half the size."""
    rules = sl.tensor_slicing({"up": style, "down": "row"})

    def loss_fn(params, x):
        heads = FIXED[name](up(params, x)).transpose(1, 2)
        return after(params, F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2), "down")

    def run(mesh):
        return sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, rules), X)[0]

    with pytest.raises(HandleError, match=r"makes 4 groups of 2 of its 8 outputs on this rank. .*view\(..., -1, 4\)"):
        sl.simulate(run, mesh={"model": 2})
    torch.testing.assert_close(sl.simulate(run, mesh={"model": 1})[0], loss_fn(PARAMS, X))


TOGETHER = {
    "softmax": lambda y: y.softmax(-1),
    "log_softmax": lambda y: F.log_softmax(y, dim=2),
    "mean": lambda y: y - y.mean((0, -1), keepdim=True),
    "norm": lambda y: y / y.norm(dim=-1, keepdim=True),
    "normalize": lambda y: F.normalize(y, dim=-1),
    "layer_norm": lambda y: F.layer_norm(y, y.shape[-1:]),
    "std": lambda y: y / y.std(),
    "vector_norm": lambda y: y / torch.linalg.vector_norm(y),
    "amax": lambda y: y - torch.amax(y, dim=-1, keepdim=True),
    "topk": lambda y: y - y.topk(1)[0],
    "sort": lambda y: y.sort().values * y,
    "roll": lambda y: y.roll(1, -1),
    "flip": lambda y: y.flip(-1),
    "matmul": lambda y: y * (y @ y.mT).sum(-1, keepdim=True),
    "linear": lambda y: y + F.linear(y, torch.ones(1, y.shape[-1], dtype=y.dtype)),
    "einsum": lambda y: y * torch.einsum("btd, btd -> bt", y, y)[..., None],
    "cosine_similarity": lambda y: y * F.cosine_similarity(y, y, dim=-1)[..., None],
    "group_norm": lambda y: F.group_norm(y.mT, 4).mT,
    "conv1d": lambda y: y + F.conv1d(y.mT, torch.ones(1, y.shape[-1], 1, dtype=y.dtype)).mT,
    "scaled_dot_product_attention": lambda y: F.scaled_dot_product_attention(y, y, y),
    "softmin": lambda y: F.softmin(y, -1),
    "median": lambda y: y - y.median(-1, keepdim=True)[0],
    "quantile": lambda y: y - y.quantile(0.5, -1, keepdim=True),
    "kthvalue": lambda y: y - y.kthvalue(2, -1, keepdim=True)[0],
    "var_mean": lambda y: y / torch.var_mean(y, -1, keepdim=True)[0],
    "aminmax": lambda y: y - y.aminmax(dim=-1, keepdim=True)[0],
    "cummax": lambda y: y.cummax(-1)[0],
    "diff": lambda y: F.pad(y.diff(dim=-1), (1, 0)),
    "instance_norm": lambda y: F.instance_norm(y),
    "local_response_norm": lambda y: F.local_response_norm(y.mT, 3).mT,
    "pairwise_distance": lambda y: y * F.pairwise_distance(y, 2 * y)[..., None],
    "inner": lambda y: y * torch.inner(y, y[0, 0])[..., None],
    "vecdot": lambda y: y * torch.linalg.vecdot(y, y)[..., None],
    "fft_rfft": lambda y: y + torch.fft.rfft(y).abs().sum(-1, keepdim=True),
    "an index": lambda y: y[..., torch.arange(y.shape[-1] - 1, -1, -1)],
    "an index ": lambda y: y.index_select(-1, torch.arange(y.shape[-1] - 1, -1, -1)),
    "cross_entropy": lambda y: (
        y + F.cross_entropy(y.flatten(0, 1), torch.zeros(y.shape[:2].numel(), dtype=torch.int64))
    ),
}
# What stands between a layer and what takes its outputs together.
BETWEEN = {
    "nothing": lambda y: y,
    "activation": lambda y: F.silu(y) * y,
    "operators": lambda y: 1 - 2 / (3 + y.exp()) ** 2,
    "in place": lambda y: y.mul(2).add_(1).clamp_(min=0),
    "where": lambda y: torch.where(y > 0, y, 0.1 * y).to(torch.float64),
    "the larger of two": lambda y: torch.max(y, -0.1 * y).minimum(y).min(y + 1),
    "another norm": lambda y: F.normalize(y, dim=1),
    "views": lambda y: y.view(6, -1).unsqueeze(0)[0, None].reshape(2, 3, -1),
    "dimensions": lambda y: y.permute(2, 0, 1).transpose(0, 1).mT,
    "heads and back": lambda y: y.unflatten(-1, (-1, 4)).mul(2).flatten(2),
}


@pytest.mark.parametrize(
    ("name", "between"), [*((name, "nothing") for name in TOGETHER), *(("norm", way) for way in BETWEEN)]
)
def test_sums_over_a_share_are_refused(name, between):
    """All shapes fit, and every rank would train with a norm of its own. Along an axis of one rank nothing is missing."""
    rules = sl.tensor_slicing({"up": "column", "down": "row"})

    def loss_fn(params, x):
        return after(params, TOGETHER[name](BETWEEN[between](up(params, x))), "down")

    def run(mesh):
        return sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, rules), X)[0]

    with pytest.raises(
        HandleError, match=rf"{name.strip()}.* takes all outputs of up/weight together(.|\n)*gather=True"
    ):
        sl.simulate(run, mesh={"model": 2})
    torch.testing.assert_close(sl.simulate(run, mesh={"model": 1})[0], loss_fn(PARAMS, X))


JOINED = {
    "cat": lambda a, b: torch.cat([a, b], -1),
    "cat by name": lambda a, b: torch.concat(tensors=(F.silu(a), b), dim=2),
    "stack": lambda a, b: torch.stack([a, b], -2).flatten(-2),
    "stack first": lambda a, b: torch.stack([a, b]).permute(1, 2, 0, 3).reshape(*a.shape[:2], -1),
    "repeat": lambda a, b: a.repeat(1, 1, 2),
    "pad": lambda a, b: F.pad(a, (0, a.shape[-1])),
}


@pytest.mark.parametrize("name", JOINED)
def test_joined_shares_are_refused(name):
    """All shapes fit: half of the next layer's weight is for the first layer's outputs alone."""
    wide = PARAMS | {"down": {"weight": torch.cat([PARAMS["down"]["weight"]] * 2, 1)}}
    rules = sl.tensor_slicing({"up": "column", "down": "row"})

    def loss_fn(params, x):
        a = up(params, x)
        return after(params, JOINED[name](a, a.square()), "down")

    def run(mesh):
        return sl.value_and_grad(loss_fn)(sl.shard(wide, mesh, rules), X)[0]

    with pytest.raises(HandleError, match=r"gives down/weight its share joined with others(.|\n)*gather=True"):
        sl.simulate(run, mesh={"model": 2})
    torch.testing.assert_close(sl.simulate(run, mesh={"model": 1})[0], loss_fn(wide, X))


def test_a_sum_over_heads_is_refused():
    rules = sl.tensor_slicing({"up": sl.column(heads=4), "down": "row"})

    def loss_fn(params, x):
        heads = up(params, x).unflatten(-1, (-1, 4))
        return after(params, (heads - heads.mean(2, keepdim=True)).flatten(2), "down")

    with pytest.raises(HandleError, match="mean takes all heads or other groups of outputs of up/weight together"):
        sl.simulate(lambda mesh: sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, rules), X), mesh={"model": 2})


@pytest.mark.parametrize("first", ["value", "gate"])
def test_a_share_is_known_after_another_layers(first):
    """Both of two layers that are given the same input are known, whichever ran last."""
    params = {**PARAMS, "gate": {"weight": PARAMS["up"]["weight"].flip(0)}}
    rules = sl.tensor_slicing({"up": "column", "gate": "column", "down": "row"})

    def loss_fn(params, x):
        gate, value = F.linear(x, params["gate"]["weight"]), up(params, x)
        y = gate.sigmoid() * (value / value.norm(dim=-1, keepdim=True) if first == "value" else value)
        return after(params, y / (1 if first == "value" else gate.norm(dim=-1, keepdim=True)), "down")

    with pytest.raises(HandleError, match=f"norm takes all outputs of {'up' if first == 'value' else 'gate'}/weight"):
        sl.simulate(lambda mesh: sl.value_and_grad(loss_fn)(sl.shard(params, mesh, rules), X), mesh={"model": 2})


def normed_over_positions(params, x):
    return after(params, F.normalize(up(params, x), dim=1).softmax(dim=1), "down")


def looked_at(params, x):
    """A number that changes nothing."""
    y = F.relu(up(params, x))
    assert float(y.detach().norm()) > 0
    return after(params, torch.max(y, 2 * y), "down")


def attended(heads_of, size):
    """Attention of heads with a norm of each, as models have it whose heads are as many as the share says."""

    def loss_fn(params, x):
        heads = F.normalize(heads_of(up(params, x)), dim=-1)
        heads = torch.cat([-heads[..., size // 2 :], heads[..., : size // 2]], -1) + heads.softmax(-1)  # as rotary ones
        heads = heads.permute(0, 2, 1, 3)
        scores = (heads @ heads.transpose(-1, -2)).softmax(-1)
        y = (scores @ heads).transpose(1, 2) + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
        y = torch.stack([y[:, :, head] for head in range(y.shape[2])], 2)
        return after(params, y.reshape(*x.shape[:-1], -1) * 2, "down")

    return loss_fn


def by_channels(params, x):
    """Each output by itself, over positions."""
    y = up(params, x).transpose(1, 2)
    y = F.conv1d(y, torch.ones(y.shape[1], 1, 3, dtype=y.dtype), padding=1, groups=y.shape[1]).flip(-1)
    return after(params, torch.einsum("bdt,ts->bsd", y, torch.ones(3, 3, dtype=y.dtype)), "down")


def with_nothing(params, x):
    """Tensors without elements, as of a batch's share without rows."""
    y = up(params, x)
    none = [y[..., :0].exp().chunk(2, -1)[0], y.split([0, y.shape[-1]], -1)[0], y.unsqueeze(1)[..., 0:0].flatten(1, 2)]
    rows = y[:0].reshape(0, 3, 2, y.shape[-1] // 2).unflatten(dim=2, sizes=(2, 1)).flatten(2)
    return after(params, torch.cat([torch.cat([*none, y], -1), rows]), "down")


def in_heads(params, x):
    """Heads of four, each one chunk."""
    y = up(params, x)
    return after(params, torch.cat([head.softmax(-1) for head in y.chunk(y.shape[-1] // 4, dim=-1)], -1), "down")


def interleaved(params, x):
    y = up(params, x)
    return after(params, y[..., ::2].sigmoid() * y[..., 1::2])


def along_another_dimension(params, x):
    first, *rest = up(params, x).chunk(3, dim=1)
    return after(params, first * torch.stack(rest).sum(0), "down")


RIGHT = {
    "heads": (in_heads, {"up": sl.column(heads=4), "down": sl.row(heads=4)}),
    "interleaved": (interleaved, {"up": "column", "half": "row"}),
    "positions": (along_another_dimension, {"up": "column", "down": "row"}),
    "sums over positions": (normed_over_positions, {"up": "column", "down": "row"}),
    "attention": (attended(lambda y: y.view(2, 3, -1, 4), 4), {"up": "column", "down": "row"}),
    "attention of known heads": (
        attended(lambda y: y.view(2, 3, y.shape[-1] // 4, -1), 4),
        {"up": sl.column(heads=4), "down": sl.row(heads=4)},
    ),
    "attention of one head": (attended(lambda y: y.unflatten(-1, (-1, 8)), 8), {"up": "column", "down": "row"}),
    "attention of what may be one head": (
        attended(lambda y: y.view(2, 3, y.shape[-1] // 8, 8), 8),
        {"up": "column", "down": "row"},
    ),
    "channels": (by_channels, {"up": "column", "down": "row"}),
    "nothing": (with_nothing, {"up": "column", "down": "row"}),
    "looked at": (looked_at, {"up": "column", "down": "row"}),
    "gathered": (chunked, {"up": sl.column(gather=True), "half": sl.row(split=True)}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_other_parts_train_as_on_one_device(case):
    loss_fn, rules = RIGHT[case]

    def run(mesh):
        loss, grads = sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, sl.tensor_slicing(rules)), X)
        return loss, sl.unshard(grads)

    loss, grads = sl.value_and_grad(loss_fn)(PARAMS, X)
    for found in sl.simulate(run, mesh={"model": 2}):
        torch.testing.assert_close(found[0], loss, rtol=1e-10, atol=0)
        assert_close(found[1], grads, 1e-10)


@pytest.mark.parametrize("kind", ["phi3", "glm", "glm4"])
def test_a_users_rules_for_gate_and_up_in_one(kind):
    """The model's own plan gathers their outputs."""
    loss_fn, params = parts_of(made(kind))
    rules = {"*/gate_up_proj": "column", "*/down_proj": "row"}
    with pytest.raises(HandleError, match=r"layers/0/mlp/gate_up_proj/weight is sliced(.|\n)*in 2 parts"):
        sl.make_plan(
            params, sl.abstract_mesh(model=2), sl.tensor_slicing(rules), loss_fn=loss_fn, batch=torch.ones(2, 4).long()
        )
