"""Learning with experts: what is compared, runs that were stopped, and the table of what was found."""

import math

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.harness.case import Setting
from benchmarks.harness.results import read_rows
from benchmarks.learning import byte_gpt, expert_report, experts
from benchmarks.learning.expert_models import DENSE, EXPERTS, PR_MOE, SMALL, SOONER, TASK, TUNED_ON, models
from benchmarks.learning.expert_report import CLAIMS, Claim, Point, Trial, best_rate, ratios, reached, verdict
from shardlib.models import gpt
from shardlib.tree import leaves_of

NAMED = {model.name: model for model in models(TASK)}


def one_by_one(job, arguments, processes=None):
    yield from (job(*each) for each in arguments)


def trial(name, seed, *losses, rate=1.0):
    return Trial(name, rate, seed, tuple(Point(100 * (i + 1), loss, 1.5) for i, loss in enumerate(losses)))


def test_a_token_meets_what_it_meets_in_the_dense_model_but_for_routers_and_second_biases():
    dense = NAMED[DENSE]
    for model in NAMED.values():
        if model.config.layers == dense.config.layers:
            assert 0 <= model.met - dense.met <= 0.03 * dense.met, model.name
            assert model.config.moe is None or model.parameters > 1.5 * dense.parameters
    assert NAMED[PR_MOE].parameters < NAMED[EXPERTS].parameters


def test_what_a_token_meets_is_what_has_gradients():
    torch.manual_seed(0)
    for model in models(SMALL):
        params = gpt.init(model.config)
        leaves = leaves_of(params)
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point())
        gpt.logits(model.config, params, torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
        blocks = [block["moe"]["experts"] for block in params["blocks"] if "moe" in block]
        met = [int((up["up"].grad.abs().sum((1, 2)) > 0).sum()) for up in blocks]
        assert met == [model.chosen] * len(blocks)


def test_students_come_after_their_teachers_and_ablations_last():
    tuned = [trial(name, TUNED_ON, 2.0, rate=rate) for name, rate in ((DENSE, 1.0), (EXPERTS, 2.0))]
    order = [job for group in experts.compared(TASK, tuned, range(2)) for job in group]
    assert len(order) == len(set(order)) == 2 * len(NAMED)
    for name, rate, seed in order:
        assert rate == (1.0 if name == DENSE else 2.0)
        if teacher := NAMED[name].teacher:
            assert order.index((teacher, rate, seed)) < order.index((name, rate, seed))
    ablations = [NAMED[name].ablation for name, _, _ in order]
    assert ablations == sorted(ablations)


def test_a_stopped_measurement_goes_on_and_can_be_collected(tmp_path, monkeypatch, capsys):
    """The table is the same whether it was stopped or not; a run that was stopped in its middle begins anew."""
    ran = []

    def stopped(job, arguments, processes=None):
        for each in arguments:
            if len(ran) == 7:
                raise KeyboardInterrupt
            ran.append(each)
            yield job(*each)

    setting = Setting("cpu", torch.device("cpu"), 1, small=True, work=tmp_path)
    monkeypatch.setattr(experts, "_WINDOWS", 1)
    monkeypatch.setattr(byte_gpt, "side_by_side", stopped)
    with pytest.raises(KeyboardInterrupt):
        experts.measure(setting)
    partial = experts.result(SMALL, tmp_path, range(1))
    assert len(partial.missing) == len(NAMED) - (7 - len(experts.grids(SMALL)))
    cut = next(tmp_path.glob(f"{PR_MOE},*.csv"))
    cut.write_text("\n".join(cut.read_text().splitlines()[:2]) + "\n")

    monkeypatch.setattr(byte_gpt, "side_by_side", one_by_one)
    monkeypatch.setattr(experts, "TASK", SMALL)
    whole = experts.measure(setting)
    assert not whole.missing and whole.text != partial.text
    assert main(["collect", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert whole.text.splitlines()[4] in (tmp_path / "out" / "learning_experts.md").read_text()
    rows = read_rows(tmp_path / "out" / "learning_experts.csv")
    assert {row["model"] for row in rows} == set(NAMED)
    assert (tmp_path / "out" / "learning_experts.png").stat().st_size > 1000
    lone = experts.train(SMALL, tmp_path, SOONER, 3e-3, 9)
    assert [point.step for point in lone.curve] == [5, 6] and math.isfinite(lone.final.loss)


def test_a_curve_reaches_a_loss_between_two_evaluations():
    curve = trial("one", 0, 3.0, 2.0, 1.0)
    assert [reached(curve, loss) for loss in (4.0, 3.0, 2.5, 1.0, 0.5)] == [100, 100, 150, 300, math.inf]
    dense, sooner = trial(DENSE, 0, 3.0, 2.5), trial(EXPERTS, 0, 3.0, 2.0)
    assert expert_report.shares_of_steps([dense, sooner, trial(EXPERTS, 1, 1.0)]) == [0.75]


def test_claims_are_held_to_the_seeds_that_both_models_have():
    trials = [trial("a", 0, 1.0), trial("b", 0, 2.0), trial("a", 1, 3.0), trial("b", 1, 2.0), trial("a", 2, 9.0)]
    own, papers = Claim("", "a", "b", 1.0), Claim("", "a", "b", 1.0, "2201.05596, 4.2")
    assert ratios(own, trials) == [0.5, 1.5]
    assert verdict(own, [0.5, 1.5]) == "met" and verdict(own, [0.6, 1.5]) == "missed"
    assert verdict(papers, [0.5, 0.9]) == "shown" and verdict(papers, [0.5, 1.5]) == "not shown at this scale"
    assert verdict(own, []) == "not measured"
    assert {name for claim in CLAIMS for name in (claim.mine, claim.other)} == set(NAMED)


def test_a_rate_is_that_of_the_lowest_loss_at_the_end():
    tuned = [trial("a", TUNED_ON, first, last, rate=rate) for rate, first, last in ((1.0, 1.0, 3.0), (2.0, 4.0, 2.0))]
    assert best_rate("a", tuned) == 2.0


def test_a_collection_without_grids_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 0 of the 6 runs that rates are chosen by; finish them first"):
        experts.result(TASK, tmp_path)
