"""Peaks of device memory are the plan's: counted at the test device, for every transform, alone and together."""

import pytest
from helpers.peaks import Case, measured
from helpers.profile import NIGHTLY
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st


@st.composite
def cases(draw):
    """Steps in which parameters, gradients, activations or the optimizer's state may be what is most."""
    ranks, tokens = draw(st.sampled_from([1, 2])), draw(st.sampled_from([32, 128]))
    return Case(
        stage=draw(st.sampled_from([0, 1, 2, 3])),
        ranks=ranks,
        precision=draw(st.sampled_from(["", "bf16", "bf16 sums"])),
        remat=draw(st.sampled_from(["", "full", "dots", "host", "names"])),
        tiles=draw(st.sampled_from([1, 2, 4])),
        offload=draw(st.sampled_from(["", "states", "half", "params", "all"])),
        microbatches=draw(st.sampled_from([1, 2, 3])),
        layers=draw(st.integers(1, 4)),
        width=draw(st.sampled_from([64, 96, 128])),
        vocab=draw(st.sampled_from([64, 256])),
        samples=tokens // 16,
        sequence=16,
    )


@example(Case(stage=3, ranks=2, tiles=4, remat="full", width=96))
@example(Case(stage=2, ranks=2, precision="bf16", microbatches=2, width=96, samples=2))
@example(Case(stage=1, ranks=2, remat="host", samples=2, width=96))
@example(Case(precision="bf16 sums", offload="all", microbatches=2, layers=3, samples=2, width=96))
@settings(max_examples=200 if NIGHTLY else 4, phases=list(Phase) if NIGHTLY else (Phase.explicit, Phase.generate))
@given(case=cases())
def test_the_peak_of_a_step_is_the_plans(rigs, case):
    """Of a first step, in which ranks agree on each gather, and of a second, which gathers ahead; on the slowest links."""

    def run(mesh):
        plan, batch, peaks = measured(mesh, case)
        return plan.peak_bytes + batch, max(peaks)

    for planned, peak in rigs.run(run, mesh={"data": case.ranks}):
        assert peak == pytest.approx(planned, rel=0.01)
