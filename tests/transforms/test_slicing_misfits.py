"""Rules of tensor slicing that do not fit: each is named with its leaf, and the remedy works."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.trees import assert_close
from oracle import one_device

import shardlib as sl
from shardlib.errors import HandleError, IllegalComposition


def mlp(inner=8):
    generator = torch.Generator().manual_seed(1)
    shapes = {"up": (inner, 4), "down": (4, inner)}
    layer = {n: {"weight": torch.randn(s, generator=generator), "bias": torch.ones(s[0])} for n, s in shapes.items()}
    return {"layers": [layer, {n: {k: v.clone() for k, v in p.items()} for n, p in layer.items()}]}


def loss_fn(params, x):
    for p in params["layers"]:
        x = F.linear(F.linear(x, *p["up"].values()).tanh(), *p["down"].values())
    return x.square().mean()


RULES = {"*/up": "column", "*/down": "row"}


def trains(params, rules, loss_fn=loss_fn, ways=2):
    """Trains sliced and on one device, and compares."""
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    *_, wanted = one_device.train(loss_fn, params, [batch])
    *_, found = training.simulate(
        {"model": ways}, loss_fn, params, [batch], sl.tensor_slicing(rules), training.optimizer()
    )
    assert_close(found, wanted, 1e-5)


def refused(params, rules, ways=2):
    with pytest.raises(IllegalComposition) as error:
        sl.make_plan(params, sl.abstract_mesh(model=ways), sl.tensor_slicing(rules))
    return str(error.value)


def advised(message, rules):
    """The rules with every remedy of a message taken."""
    for line in message.splitlines():
        if taken := re.search(r"by rule '([^']*)':.*; replace it with 'replicated'", line):
            rules = rules | {taken[1]: "replicated"}
        elif taken := re.search(r"; put '([^']*)': 'replicated' before it", line):
            rules = {taken[1]: "replicated"} | rules
        elif taken := re.search(r"rule '([^']*)' matches no parameter; replace it with '([^']*)'", line):
            rules = {(taken[2] if glob == taken[1] else glob): style for glob, style in rules.items()}
        elif taken := re.search(r"rule '([^']*)' matches no parameter; take it out", line):
            rules = {glob: style for glob, style in rules.items() if glob != taken[1]}
        elif taken := re.search(r"rule '([^']*)' never holds: .*; put it before '([^']*)'", line):
            rules = {taken[1]: rules[taken[1]]} | rules
        elif line.startswith("  - "):
            raise AssertionError(f"no remedy in {line}")
    return rules


def test_widths_that_do_not_divide():
    params = mlp(7) | {"last": {"weight": torch.ones(4, 4)}}
    given = RULES | {"last": sl.column(gather=True)}

    def loss(params, x):
        return loss_fn(params, F.linear(x, params["last"]["weight"]))

    result = refused(params, given)
    for layer in (0, 1):
        assert (
            f"layers/{layer}/up/weight: shape (7, 4): dimension 0 of size 7 is not divisible by 2 (model=2), by rule '*/up': "
            "sl.column(); replace it with 'replicated'"
        ) in result
        assert f"layers/{layer}/down/weight: shape (4, 7): dimension 1 of size 7 is not divisible by 2" in result
    assert "(model=2)" in result and "rules fit" not in result
    rules = advised(result, given)
    assert rules == given | dict.fromkeys(RULES, "replicated")
    trains(params, rules, loss)


def test_heads_that_do_not_divide():
    """The message names a smaller axis if one fits; a layer that must not stay whole alone is named by the next one."""
    rules = {"*/up": sl.column(heads=2), "*/down": "row"}
    result = refused(mlp(), rules, ways=4)
    assert (
        "layers/1/up/weight: shape (8, 4): 2 heads do not divide over model=4, by rule '*/up': sl.column(heads=2); use a "
        "size that divides 2, or put 'replicated' in place of all rules of this attention"
    ) in result
    assert "With model=2 all rules fit." in result
    trains(mlp(), rules, ways=2)
    rules["*/up"] = "replicated"
    with pytest.raises(HandleError, match=r"2 inputs on this rank, and got 8; use sl.row\(split=True\)"):
        trains(mlp(), rules, ways=4)
    trains(mlp(), rules | {"*/down": sl.row(split=True)}, ways=4)


def test_outputs_that_are_no_whole_number_of_heads():
    result = refused(mlp(), {"*/up": sl.column(heads=6), "*/down": "row"})
    assert "layers/0/up/weight: shape (8, 4): 8 outputs are not 6 heads of one size, by rule '*/up'" in result
    trains(mlp(), {"*/up": sl.column(heads=4), "*/down": "row"})


@pytest.mark.parametrize(
    ("wrong", "put"), [("layers.*.uo", "layers/*/up"), ("up", "*/up"), ("*/upp", "*/up"), ("zzzz", None)]
)
def test_a_rule_that_matches_nothing(wrong, put):
    given = {wrong: "column", "*/down": "row"}
    result = refused(mlp(), given)
    assert f"rule {wrong!r} matches no parameter; " + (f"replace it with {put!r}" if put else "take it out") in result
    rules = advised(result, given)
    trains(mlp(), rules if put else rules | {"*/down": sl.row(split=True)})


def test_a_rule_that_never_holds():
    rules = {"*": "column", "*/down": "row"}
    result = refused(mlp(), rules)
    assert "rule '*/down' never holds: '*' matches layers/0/down/" in result
    assert "; put it before '*', or take it out" in result
    trains(mlp(), advised(result, rules))
    trains(mlp(), {"*/up": "column", "layers/0/down": "row", "*/down": "row", "*/up/*": "column"})  # none is lost


def test_a_glob_that_matches_leaves_that_cannot_take_the_style():
    params = mlp() | {"scale": torch.tensor(2.0), "ids": torch.arange(4), "kernel": torch.ones(2, 4, 4)}
    rules = {"*/down": "row", "kernel": "vocab", "*": "column"}
    result = refused(params, rules)
    assert (
        "scale: shape (): a single number has no dimension to slice, by rule '*': sl.column(); put 'scale': " in result
    )
    assert "ids: shape (4,): torch.int64 is no layer's weight or bias, by rule '*': sl.column(); put 'ids'" in result
    assert "kernel: shape (2, 4, 4): 'vocab' is for a layer's weight, of 2 dimensions, and its bias, by rule" in result

    def loss(params, x):
        return loss_fn(params, x) * params["scale"] * params["kernel"].sum() * params["ids"].sum()

    trains(params, advised(result, rules), loss)


def test_all_misfits_come_together():
    params = mlp(7) | {"scale": torch.tensor(2.0)}
    rules = {"*/up": sl.column(heads=3), "*/down": "row", "scale": "column", "gone": "row", "*/up/weight": "row"}
    result = refused(params, rules)
    for part in (
        "7 outputs are not 3 heads",
        "dimension 1 of size 7",
        "a single number",
        "'gone' matches no",
        "never holds",
    ):
        assert part in result
    assert not refused_again(params, advised(result, rules))


def refused_again(params, rules):
    """The message of the next refusal, if there is one."""
    try:
        sl.make_plan(params, sl.abstract_mesh(model=2), sl.tensor_slicing(rules))
    except IllegalComposition as error:
        return str(error)


@pytest.mark.parametrize(
    ("style", "put"), [("colum", "column"), ("row_wise", "rowwise"), (None, None), (3, None), ([], None)]
)
def test_invalid_styles(style, put):
    with pytest.raises(IllegalComposition) as error:
        sl.tensor_slicing({"*/up": style, "*/down": "row"})
    result = str(error.value)
    assert f"*/up: {style!r}" + (f"; replace it with {put!r}\n" if put else "\n") in result
    if put:
        sl.tensor_slicing({"*/up": put, "*/down": "row"})


def test_a_norm_that_a_glob_matches_is_refused_at_its_use():
    """No plan can tell its weight from a bias."""
    params = mlp() | {"norm": {"weight": torch.ones(4), "bias": torch.zeros(4)}}
    rules = {"*/down": "row", "*": "column"}

    def loss(params, x):
        return loss_fn(params, F.layer_norm(x, (4,), *params["norm"].values()))

    with pytest.raises(HandleError, match=r"layer_norm uses norm/.* put 'norm': 'replicated' first") as error:
        trains(params, rules, loss)
    put = re.search(r"put '([^']*)': 'replicated'", str(error.value))[1]
    trains(params, {put: "replicated"} | rules, loss)


def up(params):
    return params["layers"][0]["up"]["weight"]


def down(params):
    return params["layers"][0]["down"]["weight"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda weight: weight + weight,
        lambda weight: torch.add(weight, other=0.1),
        lambda weight: torch.stack([weight])[0],
        lambda weight: torch.empty_like(weight).copy_(weight),
        lambda weight: torch.zeros(weight.shape).add_(weight),
    ],
)
def test_a_sliced_weight_that_something_else_uses_first_is_refused(changed):
    """No layer would recognise the result as a slice."""

    def loss_fn(params, x):
        return F.linear(F.linear(x, changed(up(params))).tanh(), changed(down(params))).square().mean()

    with pytest.raises(HandleError, match=r"uses layers/0/up/weight, of which this rank holds a slice") as error:
        trains(mlp(), RULES, loss_fn)
    assert "put 'layers/0/up': 'replicated' first" in str(error.value)
    trains(mlp(), {"layers/0/*": "replicated"} | RULES, loss_fn)


def test_a_sliced_bias_of_heads_is_added_to_outputs():
    """The bias has several dimensions, and is added in several ways."""
    params = {"up": {"weight": mlp()["layers"][0]["up"]["weight"], "bias": torch.linspace(0, 1, 8).view(4, 2)}}
    params["down"] = mlp()["layers"][0]["down"]

    def loss_fn(params, x):
        y = F.linear(x, params["up"]["weight"]).unflatten(-1, (-1, 2))
        bias = params["up"]["bias"]
        y = torch.add(y + bias, other=bias).clone()
        y += bias
        return F.linear(y.tanh().flatten(-2), params["down"]["weight"]).square().mean()

    trains(params, {"up": sl.column(heads=4), "down": "row"}, loss_fn)


def _of_outputs(params, x):
    return F.linear(x, up(params)).flatten().square().mean()  # of outputs of all positions together


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_of_slices_is_refused_with_a_remedy(microbatches):
    """Ranks that share a batch would each report, and train by, their own."""
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    transform = sl.chain(sl.tensor_slicing({"layers/0/up": "column"}), sl.accumulate(microbatches))
    with pytest.raises(HandleError, match=r"differ between ranks:\n  - along axis 'model': \S+, \S+ \(first") as error:
        training.simulate({"model": 2}, _of_outputs, mlp(), [batch], transform, training.optimizer())
    assert "sl.column(gather=True)" in str(error.value) and "'replicated'" in str(error.value)
    trains(mlp(), {"layers/0/up": sl.column(gather=True)}, _of_outputs)
