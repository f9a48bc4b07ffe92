"""Counted floating-point operations: closed forms of models, and torch's own counter where it counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardlib as sl
from shardlib.execute.counting import WorkCount, flops_of
from shardlib.models import bert, gpt
from shardlib.report.profile.value import operators_of

B, S, H, L, V = 2, 64, 64, 2, 256
LAYER = 24 * B * S * H**2 + 4 * B * S**2 * H  # forward of one layer: products by weights, and attention in full
HEAD = 2 * B * S * H * V


def counted(loss_fn, params, batch, *transforms, steps=0):
    """Floating-point operations of one train step: forward, backward, recomputed."""
    state, step = sl.make_train_step(
        loss_fn, sl.shard(params, sl.make_mesh(), sl.chain(*transforms)), sl.optim.sgd(0.1)
    )
    done = operators_of(step, state, batch)[1]
    ways = {"forward": 0, "backward": 0, "recompute": 0}
    for part, flops in done.flops.items():
        if part.kind == "compute":
            ways[part.way] += flops
    again = sum(done.again.values())
    return ways["forward"], ways["backward"] - again, ways["recompute"] + again


def tokens(vocab=V):
    drawn = torch.randint(vocab, (B, S + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def a_gpt(**more):
    return gpt.GPTConfig(vocab=V, layers=L, width=H, heads=4, sequence=S, **more)


RESCORED = L * 2 * B * S**2 * H  # fused attention computes scores again in backward


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gpt_against_its_closed_form(stage):
    forward, backward, again = counted(gpt.make_loss(a_gpt()), gpt.init(a_gpt()), tokens(), sl.zero(stage))
    assert forward == pytest.approx(L * LAYER + HEAD, rel=1e-3)
    assert backward == pytest.approx(2 * (L * LAYER + HEAD), rel=1e-3)
    assert again == RESCORED
    assert forward == 33_554_432  # as torch's counter finds with attention by matrix products
    whole = 72 * B * S * L * H**2 * (1 + S / (6 * H) + V / (12 * L * H))  # Megatron's
    assert forward + backward == pytest.approx(whole, rel=1e-3)


def test_full_recompute():
    """One more forward of the layers, but for their last product, before which a checkpoint stops."""
    forward, backward, again = counted(gpt.make_loss(a_gpt()), gpt.init(a_gpt()), tokens(), sl.remat())
    assert (forward, backward) == counted(gpt.make_loss(a_gpt()), gpt.init(a_gpt()), tokens())[:2]
    last = 8 * B * S * H**2
    assert again == pytest.approx(L * (LAYER - last) + RESCORED, rel=1e-3)


def test_selective_recompute():
    """Products are kept, so that only fused attention's own scores are computed again."""
    assert counted(gpt.make_loss(a_gpt()), gpt.init(a_gpt()), tokens(), sl.remat("dots"))[2] == RESCORED


def test_what_is_kept_by_name_is_not_computed_again():
    """With the MLP's hidden values kept, the products of attention are computed again and that of the MLP is not."""
    again = counted(gpt.make_loss(a_gpt()), gpt.init(a_gpt()), tokens(), sl.remat(save=["mlp/hidden"]))[2]
    attention = 8 * B * S * H**2 + 4 * B * S**2 * H
    assert again == pytest.approx(L * attention + RESCORED, rel=1e-3)


def test_a_users_own_checkpoint_is_recompute():
    def loss_fn(p, x):
        layer = lambda x: torch.tanh(x @ p["w"]) @ p["w"]  # noqa: E731
        return torch.utils.checkpoint.checkpoint(layer, x * p["g"], use_reentrant=False).sum()

    params = {"w": torch.randn(16, 16), "g": torch.ones(16)}
    product = 2 * 8 * 16 * 16
    assert counted(loss_fn, params, torch.ones(8, 16)) == (2 * product, 4 * product, product)


def test_bert_against_its_closed_form():
    config = bert.BERTConfig(vocab=V, layers=L, width=H, heads=4, sequence=S)
    forward, backward, again = counted(bert.make_loss(config), bert.init(config), tokens())
    head = HEAD + 2 * B * S * H**2  # the output layer, and the dense layer before it
    assert forward == pytest.approx(L * LAYER + head, rel=1e-3)
    assert backward == pytest.approx(2 * (L * LAYER + head), rel=1e-3)
    assert again == RESCORED


def test_experts_against_their_closed_form():
    """k·T rows pass through experts in place of T through an MLP, and every token through the router."""
    experts, k = 4, 2
    config = a_gpt(moe=gpt.Experts((experts,), sl.nn.MoEConfig(sl.nn.routers.top_k(k), "gelu_tanh")))
    forward, backward, _ = counted(gpt.make_loss(config), gpt.init(config), tokens())
    layer = LAYER - 16 * B * S * H**2 + k * 16 * B * S * H**2 + 2 * B * S * H * experts
    assert forward == pytest.approx(L * layer + HEAD, rel=1e-3)
    assert backward == pytest.approx(2 * (L * layer + HEAD), rel=1e-3)


def both(call):
    """Operations of a call, by torch's counter and by ours."""
    with FlopCounterMode(display=False) as theirs:
        call()
    with WorkCount() as ours:
        call()
    return theirs.get_total_flops(), sum(ours.flops)


@pytest.mark.parametrize("bias", [True, False])
def test_equal_to_torchs_counter_where_that_counts(bias):
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.Tanh(), nn.Linear(16, 4), nn.Flatten(), nn.Linear(12, 1))
    x = torch.randn(5, 3, 8)
    theirs, ours = both(lambda: model(x).sum().backward())
    assert theirs == ours > 0
    image, conv = torch.randn(2, 3, 9, 9), nn.Conv2d(3, 4, 3)
    assert len(set(both(lambda: conv(image).sum().backward()))) == 1
    a, b = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    assert len(set(both(lambda: torch.einsum("bij,bkj->bik", a, b).sum().backward()))) == 1
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    manual = both(lambda: ((q @ q.transpose(-1, -2)).softmax(-1) @ q).sum().backward())
    assert len(set(manual)) == 1


def test_what_torchs_counter_leaves_out():
    q = torch.randn(2, 3, 8, 4)
    scores = 2 * 2 * 3 * 8 * 8 * 4
    attend = F.scaled_dot_product_attention
    assert both(lambda: attend(q, q, q)) == (0, 2 * scores)
    leaf = q.clone().requires_grad_()
    assert both(lambda: attend(leaf, leaf, leaf).sum().backward()) == (0, 7 * scores)
    assert both(lambda: torch.ones(3, 4) @ torch.ones(4)) == (0, 24)
    assert both(lambda: torch.ones(4) @ torch.ones(4)) == (0, 8)
    assert both(lambda: torch.addmv(torch.ones(3), torch.ones(3, 4), torch.ones(4))) == (0, 24)
    assert both(lambda: torch.addr(torch.ones(3, 4), torch.ones(3), torch.ones(4))) == (0, 24)
    assert both(lambda: torch.addbmm(torch.ones(3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5))) == (0, 240)


def test_scores_that_are_computed_again_have_the_width_of_queries():
    """Of the five products of a backward three do, and two that of values, as in latent attention."""
    rows, heads, sequence, width, of_values = 2, 4, 16, 24, 8
    query, value = (torch.empty(rows, heads, sequence, n, device="meta") for n in (width, of_values))
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    found = flops_of(backward, (value, query, query, value), {}, (query, query, value))
    scores = 2 * rows * heads * sequence**2
    assert found == (scores * (3 * width + 2 * of_values), scores * width)


def test_products_that_are_added_in_place():
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    assert both(lambda: torch.zeros(3, 5).addmm_(a[0], b[0])) == (0, 120)
    assert both(lambda: torch.zeros(2, 3, 5).baddbmm_(a, b)) == (0, 240)
    assert both(lambda: torch.zeros(3, 5).addbmm_(a, b)) == (0, 240)
    assert both(lambda: torch.zeros(3).addmv_(a[0], b[0, :, 0])) == (0, 24)
    assert both(lambda: torch.zeros(3, 4).addr_(torch.ones(3), torch.ones(4))) == (0, 24)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("of_input", [False, True])
def test_a_convolutions_backward_does_its_product_for_each_gradient(transposed, groups, of_input):
    """Torch's counter takes the weight of one group for that of all of them."""
    conv = (nn.ConvTranspose2d if transposed else nn.Conv2d)(3, 6, 3, stride=2, padding=1, groups=groups)
    image = torch.randn(2, 3, 9, 7, requires_grad=of_input)
    with WorkCount() as work:
        conv(image).sum().backward()
    forward = 2 * conv.weight.numel() * 2 * (9 * 7 if transposed else 5 * 4)
    assert work.flops == (forward, (1 + of_input) * forward)


def test_recurrent_layers():
    """At each of 5 steps of 2 rows the weights of 4 gates multiply 16 inputs and 8 states; backward has two such products."""
    layer, x = nn.LSTM(16, 8, num_layers=1), torch.randn(5, 2, 16)
    with WorkCount() as work:
        layer(x)[0].sum().backward()
    product = 2 * 5 * 2 * 4 * 8 * (16 + 8)
    assert work.flops == (product, 2 * product)


def test_a_teacher_in_inference_mode_counts():
    """Where autograd takes no operator apart: a composite one is seen by its parts."""

    def loss_fn(p, x):
        with torch.inference_mode():
            target = F.linear(x, torch.ones(8, 16)).tanh()
        return F.mse_loss(F.linear(x, p["w"]), target.clone())

    product = 2 * 4 * 16 * 8
    assert counted(loss_fn, {"w": torch.randn(8, 16)}, torch.randn(4, 16)) == (2 * product, product, 0)


def test_grouped_products():
    offsets = torch.tensor([3, 3, 8], dtype=torch.int32)
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(3, 16, 24, dtype=torch.bfloat16)
    assert both(lambda: F.grouped_mm(a, b, offs=offsets))[1] == 2 * 8 * 16 * 24
    by_columns = torch.ones(3, 24, 16, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
    assert both(lambda: F.grouped_mm(*by_columns, offs=offsets))[1] == 2 * 8 * 16 * 24


def test_the_librarys_operations_count_for_torch_too():
    from shardlib.kernels.grouped_matmul import grouped_matmul

    x, weight = torch.ones(6, 8, requires_grad=True), torch.ones(3, 5, 8, requires_grad=True)
    product = 2 * 6 * 8 * 5
    theirs, ours = both(lambda: grouped_matmul(x, weight, torch.tensor([2, 2, 6])).sum().backward())
    assert theirs == ours == 3 * product


def test_sparse_attention():
    """Of a layout's blocks alone: two products in forward, and in backward five, the first of which is of scores again."""
    layout = sl.sparse.sliding_window(64, block=16, causal=False, window=3)
    q = torch.randn(2, 2, 64, 16, requires_grad=True)
    product = 2 * 2 * 2 * (4 + 2 * 3) * 16 * 16 * 16  # batch, heads, blocks of the band, block², head
    assert both(lambda: sl.nn.sparse_attention(q, q, q, layout).sum().backward())[1] == 7 * product


def test_the_fused_output_layer():
    """It computes its gradients in forward, where they are wanted: three products there, none in backward."""
    from shardlib.kernels.linear_cross_entropy import linear_cross_entropy

    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    targets, product = torch.zeros(6, dtype=torch.int64), 2 * 6 * 8 * 10
    with WorkCount() as work:
        linear_cross_entropy(x, weight, targets).backward()
    assert work.flops == (3 * product, 0)
    with WorkCount() as work, torch.no_grad():
        linear_cross_entropy(x, weight, targets)
    assert work.flops == (product, 0)
