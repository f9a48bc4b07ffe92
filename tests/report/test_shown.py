"""What values show in a notebook and in a terminal."""

import copy
import io
import time

import pytest
import torch
from helpers.shown_pages import Page
from rich.console import Console

import shardlib as sl
from shardlib.common.display.colours import KINDS, PALETTE, PHASES, ROLES, ink_on
from shardlib.common.display.panels import Fold
from shardlib.models import gpt
from shardlib.plan.tables import parse_size, size

CONFIG = gpt.GPTConfig(vocab=64, layers=3, width=32, heads=4, sequence=16)
TOKENS = torch.arange(4 * 17).view(4, 17) % 64
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
EVIL = "<script>alert('\"&')</script>"


def terminal(value, width=120):
    """What rich prints in a terminal."""
    console = Console(file=io.StringIO(), width=width)
    console.print(value)
    return console.file.getvalue()


def plan_of(mesh, *transforms, blocks=False):
    loss_fn = gpt.make_sequential(CONFIG) if blocks else gpt.make_loss(CONFIG)
    params = gpt.init(CONFIG, device="meta")
    params = gpt.to_blocks(params) if blocks else params
    job = {"loss_fn": loss_fn, "batch": BATCH, "optimizer": sl.optim.adamw(1e-3)}
    return sl.make_plan(params, mesh, sl.chain(*transforms), **job)


def test_a_mesh_is_drawn_as_a_grid_of_ranks():
    mesh = sl.simulate(lambda mesh: mesh, mesh={"data": 2, "model": 3})[4]
    page = Page(mesh._repr_html_())
    assert "rank 4: data=1, model=1" in page.hints and [t for t in page.texts if t.isdigit()] == list("012345")
    assert "this is rank 4 (data=1, model=1) on cpu" in page.text
    assert "data=1   3 [4] 5" in terminal(mesh)
    cube = Page(sl.abstract_mesh(pipe=2, data=2, model=2)._repr_html_())
    assert "rank 6: pipe=1, data=1, model=0" in cube.hints and "pipe=1:  model = 0…1 →" in cube.texts
    large = sl.abstract_mesh(data=512, model=8)
    assert len(large._repr_html_()) < 40_000 and "… and 3,968 more ranks" in Page(large._repr_html_()).text
    assert "… and 3,968 more ranks" in terminal(large)


def test_a_plan_folds_leaves_by_block():
    rules = gpt.slicing_rules(CONFIG)
    plan = plan_of(
        sl.abstract_mesh(data=2, model=2), sl.tensor_slicing(rules), sl.zero(3), sl.precision("bf16"), sl.offload()
    )
    page = Page(plan._repr_html_())
    assert page.tags.count("details") >= 4 and "embed" in page.text and "attn/qkv/weight" in page.texts
    (hint,) = [hint for hint in page.hints if hint.startswith("blocks/0…2/attn/qkv/weight: ")]
    assert "stored P(('model', 'data'))" in hint and "optimizer P(('model', 'data')) in host memory" in hint
    # Bytes are the plan's own: of the state in each memory, and sent.
    for memory in ("device", "host"):
        whole = sum(plan.bytes(role, memory) for role in ("param", "grad", "optimizer"))
        assert size(whole) in page.texts
    assert {size(sent) for sent in plan.payload().values()} <= set(page.texts)
    folds = [panel for panel in plan.shown() if isinstance(panel, Fold) and "a rank holds" in panel.line]
    held = sum(parse_size(row[-1]) for fold in folds for row in fold.inside[0].rows)
    assert len(folds) == 3 and held == pytest.approx(plan.bytes("param"), rel=1e-2)  # shown in four digits
    shown = terminal(plan)
    assert "▸ blocks/0…2: 36 leaves" in shown and "state, host" in shown and "attn/qkv" not in shown


def test_a_pipelines_plan_shows_its_schedule():
    page = Page(plan_of(sl.abstract_mesh(pipe=2), sl.pipeline("1f1b", microbatches=3), blocks=True)._repr_html_())
    assert "Schedule 1f1b: 2 ranks, 2 stages, 3 micro-batches" in page.text
    assert "rank 1: backward of micro-batch 2 in stage 1, 8 to 10" in page.hints and "forward" in page.text


@pytest.mark.parametrize("names", ["alike", "all different"])
def test_large_trees_are_quick_and_small(names):
    path = (
        (lambda i: ("layers", i // 256, f"e{i % 256}")) if names == "alike" else (lambda i: (f"n{i}x{i % 7}", f"q{i}"))
    )
    tree: dict = {}
    for number in range(16_000):
        first, *rest = path(number)
        inside = tree.setdefault(first, {})
        inside["/".join(map(str, rest))] = torch.empty(4, device="meta")
    plan = sl.make_plan(tree, sl.abstract_mesh(data=8), sl.zero(3))
    start = time.process_time()
    html = plan._repr_html_()
    assert time.process_time() - start < 2 and len(html) < 100_000  # seconds on a busy machine; 0.5 on an idle one
    page = Page(html)
    assert any("more" in text or "further" in text for text in page.texts)


def test_sharded_trees_and_states_show_this_rank():
    def train(mesh):
        params = sl.shard(lambda: gpt.init(CONFIG), mesh, sl.chain(sl.zero(3), sl.precision("bf16")))
        state, step = sl.make_train_step(gpt.make_loss(CONFIG), params, sl.optim.adamw(1e-3))
        old = state
        state, _ = step(state, BATCH)
        held = sum(buffer.nbytes for buffer in state.params.buffers.values())
        return Page(state._repr_html_()), Page(old._repr_html_()), terminal(state), terminal(old), held

    for rank, (page, old, shown, gone, held) in enumerate(sl.simulate(train, mesh={"data": 2})):
        assert f"Sharded parameters: rank {rank} of mesh(data=2) holds {size(held)}" in page.text
        assert {"masters", "optimizer", "48×32", "bfloat16"} <= set(page.texts)
        assert "masters" in shown and "▸ blocks/0…2" in shown
        assert "TrainState(donated)" in old.text and "TrainState(donated)" in gone


def test_a_tree_that_was_taken_says_so():
    params = sl.shard({"w": torch.ones(4)}, sl.make_mesh())
    state, step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), params, sl.optim.sgd(0.1))
    old = copy.copy(state.params)
    step(state, torch.ones(4))
    assert "was donated" in Page(old._repr_html_()).text and "was donated" in terminal(old)


def test_names_are_escaped():
    tree = {EVIL: {"w": torch.ones(4), "[bold]x": torch.ones(2)}}
    plan = sl.make_plan(tree, sl.abstract_mesh(data=2), sl.zero(3))
    page = Page(plan._repr_html_())  # which refuses scripts
    assert any(EVIL.split("/")[0] in text for text in page.texts) and EVIL.partition("/")[0] in terminal(plan)
    assert any(hint.startswith(f"{EVIL}/w: stored ") for hint in page.hints)
    params = sl.shard(tree, sl.make_mesh())
    Page(params._repr_html_())
    schedule = sl.schedules.from_orders(sl.schedules.gpipe(2, 2).orders, name=EVIL)
    assert any(EVIL in text for text in Page(schedule._repr_html_()).texts)


def test_layouts_are_small_pictures():
    layout = sl.sparse.fixed(96, local=2, causal=True)
    html = layout._repr_html_()
    page = Page(html)
    assert html.count("<path") == 1 and "keys 0…95 →" in page.texts and len(html) < 4_000
    assert "██  ██████" in terminal(layout) and "6 × 6 blocks of 16" in page.text
    heads = torch.stack(
        [torch.eye(8, dtype=torch.bool), torch.ones(8, 8, dtype=torch.bool), torch.eye(8, dtype=torch.bool)]
    )
    page = Page(sl.sparse.Layout.from_dense(heads, 16)._repr_html_())
    assert "head 0 and 1 more alike" in page.texts and "head 1" in page.texts
    assert len(sl.sparse.bigbird(65_536)._repr_html_()) < 60_000


def test_schedules_and_timelines():
    schedule = sl.schedules.zero_bubble_h1(2, 4)
    page = Page(schedule._repr_html_())
    assert {"forward", "input gradient", "weight gradient"} <= set(page.texts) and "F0" in terminal(schedule)
    timeline = sl.schedules.simulate(schedule)
    assert timeline.summary in Page(timeline._repr_html_()).text and timeline.summary in terminal(timeline, 200)
    html = sl.schedules.gpipe(32, 64)._repr_html_()  # of so many actions none is a box of its own
    assert "<rect" not in html and len(html) < 200_000
    stuck = sl.schedules.from_orders([row[::-1] for row in sl.schedules.gpipe(2, 2).orders])
    assert "cannot run" in Page(stuck._repr_html_()).text and "cannot run" in terminal(stuck)


def test_profiles():
    def measure(mesh):
        params = sl.shard(lambda: gpt.init(CONFIG), mesh, sl.zero(3))
        state, step = sl.make_train_step(gpt.make_loss(CONFIG), params, sl.optim.adamw(1e-3))
        found = sl.profile(step, state, BATCH, steps=1, warm=1)
        late = sl.report.stragglers(step, found.state, BATCH, steps=1, warm=0)
        return found, late, sl.report.comm(step, late.state, BATCH, warm=0)

    found, late, comm = sl.simulate(measure, mesh={"data": 2})[0]
    page = Page(found._repr_html_())
    assert found.summary in page.text and any(hint.startswith("rank 1: backward: blocks/1, ") for hint in page.hints)
    assert "Predicted and measured" in page.texts and found.memory.summary in page.text
    assert str(found).startswith(found.summary) and "wait" in terminal(found)
    assert "rank 0" in Page(comm._repr_html_()).texts and "all_gather" in terminal(comm)
    assert "medians of 1 steps" in Page(late._repr_html_()).text and "busy, ms" in terminal(late)
    assert "planned" not in Page(found.memory._repr_html_()).text and "At the peak" in terminal(found.memory)


def test_colours_have_ink_that_can_be_read():
    """A contrast of 4.5 at least, by WCAG's formula."""

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in {*PALETTE, *PHASES.values(), *KINDS.values(), *ROLES.values()}:
        dark, light = sorted((luminance(colour), luminance(ink_on(colour))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour
