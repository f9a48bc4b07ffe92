"""A student and its teacher in one loss: numbers, what is trained, and the step at which the teacher is left."""

import pytest
import torch
import torch.nn.functional as F
from helpers.models import shaken
from helpers.trees import assert_close
from optree import tree_leaves

import shardlib as sl
from shardlib.models import gpt, students
from shardlib.nn import routers

EXPERTS = gpt.Experts((0, 4), sl.nn.MoEConfig(routers.top_k(2), "gelu_tanh"), load=0.1)
SIZES = {"vocab": 29, "width": 12, "heads": 2, "sequence": 8, "dtype": torch.float64, "moe": EXPERTS}
TEACHER, STUDENT = gpt.GPTConfig(layers=4, **SIZES), gpt.GPTConfig(layers=2, **SIZES)
WEIGHT = sl.optim.piecewise_constant_schedule(0.7, {2: 0.0})


def params():
    return shaken({"student": gpt.init(STUDENT, seed=1), "teacher": gpt.init(TEACHER)}, 0.2)


def batch_of(rows, step, padded=False):
    tokens = torch.randint(29, (rows, 9), generator=torch.Generator().manual_seed(step))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
    if padded:
        batch["targets"][::2, 5:] = -100
        batch["segments"] = torch.where(batch["targets"] == -100, -1, 0)
        batch["positions"] = torch.arange(8).expand(rows, 8)
    return batch | {"distill": float(WEIGHT(step))}


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_written_down(padded, temperature):
    given, batch = params(), batch_of(4, 0, padded)
    loss, aux = sl.value_and_grad(students.make_loss(STUDENT, TEACHER, temperature=temperature))(given, batch)[0]
    own = sl.value_and_grad(gpt.make_loss(STUDENT))(given["student"], batch)[0][0]
    counts = batch["targets"] != -100
    mine, theirs = (
        F.linear(
            gpt.hidden(config, given[name], batch["tokens"], segments=batch.get("segments")),
            given[name]["head"]["weight"],
        )[counts]
        for name, config in (("student", STUDENT), ("teacher", TEACHER))
    )
    apart = F.kl_div(
        (mine / temperature).log_softmax(-1), (theirs / temperature).softmax(-1), reduction="batchmean"
    ) * (temperature**2)
    assert float(aux["distill"]) == pytest.approx(float(apart), rel=1e-10)
    assert float(loss) == pytest.approx(float(own + 0.7 * apart), rel=1e-10)
    assert list(aux["experts"]) == ["1"] and apart > 0.05


def test_masked_tokens_count_nothing():
    """A logit of -inf in both models."""
    student = torch.tensor([[1.0, 2.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    loss = sl.nn.distillation(student, torch.tensor([[2.0, 1.0, -torch.inf]], dtype=torch.float64))
    loss.backward()
    whole = sl.nn.distillation(torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[2.0, 1.0]]).double())
    torch.testing.assert_close(loss, whole)
    assert student.grad.isfinite().all()


RULES = {f"*{glob}": style for glob, style in gpt.slicing_rules(STUDENT).items()}
PLANS = {
    **{f"stage {stage}": ({"data": 2}, (sl.zero(stage),)) for stage in range(4)},
    "recomputed, in micro-batches": ({"data": 1}, (sl.zero(3), sl.remat(), sl.accumulate(2))),
    "sliced": ({"data": 2, "model": 2}, (sl.zero(3), sl.tensor_slicing(RULES))),
}


def trained(mesh, *transforms):
    """The losses and metrics of four steps, and the last parameters; the teacher is left after the second step."""
    sharded = sl.shard(params(), mesh, sl.chain(sl.freeze("teacher/*"), *transforms))
    state, step = sl.make_train_step(students.make_loss(STUDENT, TEACHER), sharded, sl.optim.adamw(1e-2))
    ranks, rank = mesh.shape["data"], mesh.coords["data"]
    losses = []
    for number in range(4):
        batch = {
            name: value.chunk(ranks)[rank] if torch.is_tensor(value) else value
            for name, value in batch_of(8, number).items()
        }
        state, metrics = step(state, batch)
        losses.append((metrics["loss"].item(), float(metrics["aux"]["distill"]), metrics["grad_norm"].item()))
    return losses, sl.unshard(state.params), sharded.plan


@pytest.fixture(scope="module")
def alone():
    return sl.simulate(trained, sl.zero(0), sl.accumulate(2), mesh={"data": 1})[0]


@pytest.mark.parametrize("plan", PLANS)
def test_training_on_meshes(alone, plan):
    mesh, transforms = PLANS[plan]
    losses, final, _ = sl.simulate(trained, *transforms, mesh=mesh)[0]
    for mine, theirs in zip(losses, alone[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)
    assert_close(final["student"], alone[1]["student"], 1e-10)


def test_the_teacher_is_not_trained_and_the_schedule_leaves_it(alone):
    losses, final, plan = alone
    assert [apart > 0 for _, apart, _ in losses] == [True, True, False, False]
    assert all(map(torch.equal, tree_leaves(final["teacher"]), tree_leaves(params()["teacher"])))
    assert not torch.equal(final["student"]["embed"]["tokens"], params()["student"]["embed"]["tokens"])
    size = sum(leaf.numel() for leaf in tree_leaves(params()["student"])) * 8
    assert plan.bytes("grad") == pytest.approx(size, rel=0.01)


def test_without_weight_the_teacher_is_not_computed(monkeypatch):
    calls, hidden = [], students.hidden_and_layers
    monkeypatch.setattr(
        students, "hidden_and_layers", lambda config, *a, **k: calls.append(config) or hidden(config, *a, **k)
    )
    for step in (1, 2):
        students.make_loss(STUDENT, TEACHER)(params(), batch_of(4, step))
    assert calls == [STUDENT, TEACHER, STUDENT]


def test_what_is_refused():
    with pytest.raises(ValueError, match="a student of 29 words and a teacher of 31"):
        students.make_loss(STUDENT, gpt.GPTConfig(vocab=31))
    batch = batch_of(4, 0)
    for distill, kind in ((None, "NoneType"), (torch.ones(()), "Tensor")):
        with pytest.raises(ValueError, match=f"the batch's 'distill' is {kind}"):
            students.make_loss(STUDENT, TEACHER)(params(), batch | {"distill": distill})
    with pytest.raises(ValueError, match=r"logits are \(2, 3\) and the teacher's \(2, 4\)"):
        sl.nn.distillation(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="use a positive temperature"):
        sl.nn.distillation(torch.ones(2, 3), torch.ones(2, 3), temperature=0.0)


def test_sequence_parts():
    """The divergence of a sequence that is cut is that of the whole one."""

    def run(mesh, *transforms):
        def loss_fn(params, batch):
            return students.make_loss(STUDENT, TEACHER)(params, batch)[1]["distill"].total

        sharded = sl.shard(params(), mesh, sl.chain(*transforms))
        return float(sl.make_eval_step(loss_fn, sharded)(sharded, batch_of(4, 0)))

    alone = sl.simulate(run, sl.zero(0), mesh={"data": 1})[0]
    found = sl.simulate(run, sl.sequence("seq", "ring"), sl.zero(1, axis="seq"), mesh={"seq": 2})
    assert found == pytest.approx([alone, alone], rel=1e-10)
