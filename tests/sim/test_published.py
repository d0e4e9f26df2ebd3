"""Published results, predicted: the survey's table, BERT-Large, and the GradientFlow paper's speed-up."""

from __future__ import annotations

import pytest

from gradientflow.lab.workloads import workload
from gradientflow.recipe import Recipe
from gradientflow.sim import paper, survey
from gradientflow.sim.cluster import read
from gradientflow.sim.predict import predict


def test_the_surveys_table() -> None:
    """The bound that is asked for; and a ratchet: what was reached must not be lost."""
    compared = survey.compare(survey.cells())
    assert len(compared) == 91
    verdict = survey.judge(compared)
    assert verdict.holds, verdict.words
    assert verdict.mean <= 4.4 and verdict.worst <= 12.5 and verdict.mean_apart <= 9.8, verdict
    on_resnet = [abs(one.error) for one in compared if one.cell.workload == survey.CALIBRATED_ON]
    assert sum(on_resnet) / len(on_resnet) < 0.06


def test_one_gpu_has_nobody_to_talk_to() -> None:
    for name in ("survey-10gbe", "survey-ib-rdma", "survey-ib-tcp"):
        found = predict(workload("resnet-50", device="2080ti"), Recipe.parse("wfbp"), read(name), 1)
        assert found.speedup == pytest.approx(1) and found.exposed_s < 1e-12 and found.sent_nbytes == 0


def test_bert_large_in_one_host() -> None:
    """441 ms of all-reduce against 163 ms of computing; 1.2x on PCIe; 3.82x with NVLink on V100."""
    profile = workload("bert-large", device="2080ti")
    cluster = read("survey-ib-rdma")
    fused = predict(profile, Recipe.parse("bsp"), cluster, 4)
    assert profile.forward_s + profile.backward_s == pytest.approx(0.163, rel=0.01)
    assert fused.exposed_s == pytest.approx(0.441, rel=0.01)
    assert predict(profile, Recipe.parse("mg-wfbp"), cluster, 4).speedup == pytest.approx(1.2, rel=0.05)
    on_nvlink = predict(workload("bert-large", device="v100"), Recipe.parse("lazy"), read("v100-nvlink-4"), 4)
    assert on_nvlink.speedup == pytest.approx(3.82, rel=0.02)


def test_a_small_message_on_infiniband() -> None:
    wire = read("survey-ib-rdma").between
    assert wire is not None
    link = wire.link()
    assert link.seconds(16384) == pytest.approx(7.85e-6)
    assert all(link.seconds(2 * size) > 1.3 * link.seconds(size) for size in (4096, 8192, 16384, 32768))


def test_the_papers_speedup_lies_in_a_narrow_band() -> None:
    lines, holds = paper.report()
    assert holds, lines
    cases = paper.band()
    # 95 epochs in 90 s follow: from the same cases, no other input.
    assert min(case.training_s for case in cases) < paper.SECONDS < max(case.training_s for case in cases)


def test_each_technique_of_the_paper_adds_something() -> None:
    speedups = [speedup for _, speedup in paper.bars()]
    assert speedups == sorted(speedups)
    ours = predict(paper.alexnet(paper.USUAL[0]), Recipe.parse(paper.OURS), read("gradientflow-512"), paper.WORLD)
    assert ours.speedup > speedups[-1]
    assert paper.naive() == pytest.approx(paper.NAIVE_SPEEDUP, rel=0.2)
