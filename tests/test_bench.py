"""What the bench of OPPO makes of short trainings: medians of ratios inside a block, from calls whose times are given."""

from __future__ import annotations

import pytest

from nowait import bench
from nowait.bench import SKIPPED, VARIANTS, step_times, variants
from nowait.config import load
from nowait.runtime.timeline import Span, Timeline

SECONDS = {"sequential": 4.0, "intra": 3.2, "inter": 2.5, "both": 2.0, "inter_paper": 3.0, "both_paper": 2.5}
WORK = {"a": 1.8, "b": 0.8}  # seconds of calls per step and device, whatever the variant


@pytest.fixture
def experiments() -> dict:
    return variants(lambda method, more: load("oppo/stackexchange_7b", "smoke", more, method))


@pytest.fixture
def short(monkeypatch):
    """Trainings of given seconds per step; in block 1 everything takes twice as long. Steps that do not count take 100 s."""
    names = {}

    def short_training(experiment, clock, steps, seed):
        label = names[experiment.method, experiment.overlap.delta]
        rows, timeline, now = [], Timeline(), 0.0
        for step in range(steps):
            seconds = SECONDS[label] * (1 + seed) if step >= SKIPPED else 100.0
            rows.append({"time/step": seconds, "perf/occupancy": 0.8 if label == "both" else 0.4, "time/generate": 1.5, "time/train": 0.3})
            spent = {device: s * (1 + seed) if step >= SKIPPED else 50.0 for device, s in WORK.items()}
            timeline.spans += [Span(device, "worker", "call", now, now + s, step) for device, s in spent.items()]
            timeline.spans.append(Span("driver", "scorer", "finish", now, now + seconds, step))
            now += seconds
        return rows, timeline

    monkeypatch.setattr(bench, "short_training", short_training)
    return names


def test_speedups_are_medians_over_blocks_of_ratios_inside_a_block(experiments, short):
    short |= {(e.method, e.overlap.delta): name for name, e in experiments.items()} | {("inter", 1): "inter", ("both", 1): "both"}
    out = step_times({n: experiments[n] for n in ("sequential", "intra", "inter", "both")}, blocks=2, steps=5)
    assert (out["speedup_both"], out["speedup_intra"], out["speedup_inter"]) == pytest.approx((2.0, 1.25, 1.6))
    assert out["occupancy_gain"] == pytest.approx(2.0)
    assert out["utilisation_gain"] == pytest.approx(2.0)  # 2.6 s of work on two devices in 2 instead of 4 s
    assert out["overlap_efficiency"] == pytest.approx(0.9)  # device a works 1.8 of 2 s
    assert out["overcommit_share"] == 0.25  # Δ = 1 at B = 4
    rows = {row["variant"]: row for row in out["rows"]}
    assert rows["both"]["blocks"] == pytest.approx([2.0, 4.0]) and rows["sequential"]["seconds_per_step"] == pytest.approx(6.0)
    assert rows["both"]["utilisation"] == pytest.approx(0.65) and rows["sequential"]["overcommit_share"] == 0


def test_the_variants_differ_in_their_overlaps_and_in_the_slots_that_these_need():
    made = variants(lambda method, more: load("oppo/stackexchange_7b", "cpu", more, method))
    assert list(made) == list(VARIANTS)
    assert {name: (e.overlap.intra, e.overlap.inter, e.overlap.delta, e.sampler.slots) for name, e in made.items()} == {
        "sequential": (False, False, 0, 16),
        "intra": (True, False, 0, 16),
        "inter": (False, True, 5, 21),
        "both": (True, True, 5, 21),
        "inter_paper": (False, True, 1, 17),  # 7 % of 16
        "both_paper": (True, True, 1, 17),
    }


@pytest.mark.slow
def test_a_real_bench_reports_every_variant_with_its_share(experiments):
    out = step_times(experiments, blocks=1, steps=2)
    assert {row["variant"]: row["overcommit_share"] for row in out["rows"]} == {n: 0.25 if share else 0.0 for n, (_, share) in VARIANTS.items()}
    assert all(0 < row["utilisation"] <= 1 and row["seconds_per_step"] > 0 for row in out["rows"])
    assert out["overlap_efficiency"] <= 1
