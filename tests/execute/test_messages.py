"""What passes between stages: trees that change from message to message, and receives that are posted ahead."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.collectives import primitives
from shardlib.execute.gradients import Gradients
from shardlib.execute.stages.messages import (
    TAGS,
    IncomingTree,
    PeerLink,
    facts_of,
    finish,
    send_tree,
)
from shardlib.tree import tensors_of

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)


def passed_on(mesh, trees):
    """The bytes of each tree that stage 0 sends, and what stage 1 gets."""
    here = mesh.coords["pipe"]
    link, got, sizes = PeerLink(mesh, "pipe", 1 - here), [], []
    expected = ()
    for number, tree in enumerate(trees):
        before = mesh.traffic.payload.get("pipe", 0)
        if here:
            incoming = IncomingTree(link, number * TAGS, expected)
            expected = incoming.open()
            got.append(incoming.wait())
        else:
            finish(send_tree(link, tree, number * TAGS, expected))
            expected = facts_of(tensors_of(tree))
        sizes.append(mesh.traffic.payload.get("pipe", 0) - before)
    return sizes, got


def made(shapes, note):
    """A tree with a tensor of each dtype and size, and a note that makes a header long."""
    values = [torch.arange(size).to(DTYPES[kind]).view(-1, 1) for kind, size in shapes]
    return {"values": values, "note": note, "graph": torch.ones(2, requires_grad=bool(shapes))}


trees = st.lists(
    st.builds(
        made,
        st.lists(st.tuples(st.integers(0, len(DTYPES) - 1), st.integers(0, 3)), max_size=3),
        st.sampled_from(["", "n" * 3000]),
    ),
    min_size=1,
    max_size=5,
)


def same(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one["note"] == other["note"]
        pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
        assert all(a.dtype is b.dtype and a.requires_grad == b.requires_grad and torch.equal(a, b) for a, b in pairs)


@settings(max_examples=40)
@given(trees)
def test_trees_may_change_from_message_to_message(some):
    (_, _), (_, got) = sl.simulate(passed_on, some, mesh={"pipe": 2})
    same(got, some)


def test_trees_change_between_processes(pool):
    some = [made(shapes, note) for shapes in ([(0, 3)], [(0, 2)], [(0, 3), (2, 4)], []) for note in ("", "n" * 3000)]
    for _, got in pool.run(passed_on, some, mesh={"data": 2, "pipe": 2})[1::2]:
        same(got, some)


def test_a_tensor_alone_of_its_dtype_is_sent_contiguous():
    """Simulated ranks and processes refuse others; a carry of one column has the stride of a row, the gradient of its sum the
    stride 0."""
    column, expanded = torch.arange(12.0).view(3, 4)[:, 1], torch.ones((), dtype=torch.float64).expand(5, 2)
    _, (got,) = sl.simulate(passed_on, [{"values": [column, expanded], "note": ""}], mesh={"pipe": 2})[1]
    assert torch.equal(got["values"][0], column) and torch.equal(got["values"][1], expanded)


def test_only_a_tree_unlike_the_one_before_is_sent_with_fillers():
    def sized(rows):
        return {"values": [torch.ones(rows, 4)], "note": "", "graph": torch.ones(0)}

    (sizes, _), _ = sl.simulate(passed_on, [sized(rows) for rows in (3, 3, 2, 2)], mesh={"pipe": 2})
    assert sizes == [48, 48, 32 + 48, 32]


# --- ahead of their turn -----------------------------------------------------------------------------------------

MICROBATCHES = 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_while_a_stage_computes_the_next_receive_is_posted(monkeypatch, schedule):
    """gloo begins to send a message once its receive is posted."""
    events, receive = ([], []), primitives.recv

    def recv(mesh, axis, out, peer, tag):
        if out.dtype is torch.float32:  # not a header's
            events[mesh.rank].append("receive")
        return receive(mesh, axis, out, peer, tag)

    def train(mesh):
        def layer(w, x, batch):
            events[mesh.rank].append("forward")
            return (batch if x is None else x) @ w

        loss_fn = sl.sequential([layer, lambda w, x, batch: layer(w, x, batch).sum()])
        params = sl.shard([torch.ones(3, 3)] * 2, mesh, sl.pipeline(schedule, MICROBATCHES))
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1))
        step(state, torch.ones(2 * MICROBATCHES, 3))

    monkeypatch.setattr(primitives, "recv", recv)
    sl.simulate(train, mesh={"pipe": 2})
    second = events[1]
    forwards = [number for number, event in enumerate(second) if event == "forward"]
    assert [second[:number].count("receive") for number in forwards] == [2, 3, 4, 4] and MICROBATCHES == 4


def test_the_stage_before_does_not_wait_for_reductions(monkeypatch):
    """A backward's input gradients are sent before the rank waits for its parameters' gradients to be summed."""
    events, send, land = {}, primitives.send, Gradients._land

    def noted_send(mesh, axis, tensor, peer, tag, **options):
        events.setdefault(mesh.rank, []).append("send")
        return send(mesh, axis, tensor, peer, tag, **options)

    def noted_land(sums):
        events.setdefault(sums._mesh.rank, []).append("land")
        land(sums)

    def train(mesh):
        loss_fn = sl.sequential([lambda w, x, batch: batch @ w, lambda w, x, batch: (x @ w).sum()])
        parallel = sl.chain(sl.zero(2), sl.pipeline("1f1b", MICROBATCHES, sync="each"))
        state, step = sl.make_train_step(loss_fn, sl.shard([torch.ones(3, 3)] * 2, mesh, parallel), sl.optim.sgd(0.1))
        step(state, torch.ones(MICROBATCHES, 3))

    monkeypatch.setattr(primitives, "send", noted_send)
    monkeypatch.setattr(Gradients, "_land", noted_land)
    sl.simulate(train, mesh={"pipe": 2, "data": 2})
    assert events[3][: 2 * MICROBATCHES] == ["send", "land"] * MICROBATCHES
