"""The papers' numbers as data: complete, traceable, consistent with each other, each with a rule."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from nowait import published
from nowait.config import load
from nowait.tasks.arithmetic import HELD_OUT

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("identifier", "value", "source", "unit"),
    [
        ("tables.training_hours.setup1.sync", 2.36, "blog", "hours"),
        ("tables.benchmarks_setup2.math500.loglinear.se", 2.11, "blog", "%"),
        ("tables.areal_gsm8k_300_steps_staleness8.minutes.linear", 163, "areal_docs", "minutes"),
        ("figures.eval_reward.setup1.loglinear.300", 0.7913, "digitised", "reward"),
        ("figures.eval_reward.setup2.hours.sync.1100", 23.89, "digitised", "hours"),
        ("figures.clipped_tokens.setup1.loglinear.3-15", 243, "digitised", "tokens"),
        ("figures.ratio_max.setup2.recompute_spikes.553", 9.5e17, "digitised", "ratio"),
        ("figures.proximal_seconds.setup1.recompute.range.high", 4.7, "digitised", "s"),
    ],
)
def test_a_number_is_found_under_its_path_with_source_and_unit(identifier, value, source, unit):
    (entry,) = [entry for entry in published.entries("a3po") if entry.id == identifier]
    assert entry == published.Entry(identifier, value, source, unit)


def test_oppo_keeps_mixed_units_apart():
    units = {entry.id: entry.unit for entry in published.entries("oppo")}
    assert units["tables.minutes_to_target.gsm8k_7b.speedup"] == "ratio"
    assert units["tables.minutes_to_target.stackexchange_3b.trl"] == "minutes"
    assert units["figures.chunk_size.best"] == "tokens" and units["figures.chunk_size.best_seconds_per_step"] == "s"


@pytest.mark.parametrize("paper", published.PAPERS)
def test_entries_are_unique_and_name_a_known_source_and_a_unit(paper):
    entries, sources = published.entries(paper), published.load(paper)["sources"]
    assert len({entry.id for entry in entries}) == len(entries)
    assert all(entry.source in sources and entry.unit for entry in entries)
    assert entries == published.entries(paper)


def test_every_point_of_a_curve_is_one_entry_named_by_its_step():
    clipped = [entry.id for entry in published.entries("a3po") if entry.id.startswith("figures.clipped_tokens.setup1.")]
    assert len(clipped) == 3 + 3 * 11  # the first step, then eleven bins, for three methods
    unnamed = [entry.id for entry in published.entries("a3po") if entry.id.rsplit(".", 1)[1] in {"0", "2"}]
    assert unnamed == [f"figures.proximal_seconds.setup2.recompute.per_100_steps.{i}" for i in (0, 2)]


@pytest.mark.parametrize("setup", ["setup1", "setup2"])
def test_the_tables_agree_with_each_other(setup):
    facts = published.load("a3po")
    hours, steps = facts["tables"]["training_hours"][setup], facts["setups"][setup]["steps"]
    for method, seconds in facts["tables"]["seconds_per_step"][setup].items():
        assert hours[method] * 3600 / steps == pytest.approx(seconds, abs=0.15)
    for method, speedup in facts["tables"]["speedup_over_sync"][setup].items():
        assert hours["sync"] / hours[method] == pytest.approx(speedup, abs=0.05)
    assert hours["recompute"] / hours["loglinear"] == pytest.approx(facts["tables"]["speedup_over_recompute"][setup]["loglinear"], abs=0.005)
    for method, reward in facts["tables"]["final_eval_reward"][setup].items():
        assert facts["figures"]["eval_reward"][setup][method][-1] == pytest.approx(reward, abs=0.0011)


def test_loading_gives_a_fresh_copy_and_names_the_papers_that_exist():
    published.load("a3po")["tables"].clear()
    assert published.load("a3po")["tables"]
    with pytest.raises(ValueError, match="a3po, oppo"):
        published.load("ppo")


@pytest.mark.parametrize("paper", published.PAPERS)
def test_every_number_has_a_rule_and_every_rule_a_number(paper):
    rules, used = published.load("targets")[paper]["entries"], set()
    for entry in published.entries(paper):
        matches = [i for i, rule in enumerate(rules) if fnmatchcase(entry.id, rule["match"])]
        assert matches, f"{entry.id} has no rule in targets.yaml"
        used.add(matches[0])
    assert used == set(range(len(rules)))
    assert all(("judge" in rule) != ("reason" in rule) for rule in rules)
    assert len(published.load("targets")[paper]["shapes"]) == len(published.load(paper)["shape_targets"])


def test_deviations_start_with_the_fresh_tokens_and_give_a_reason_each():
    deviations = published.load("deviations").get("a3po", [])
    assert deviations[0]["id"] == "fresh-tokens"
    assert len({item["id"] for item in deviations}) == len(deviations) > 10
    assert all(set(item) == {"id", "section", "ours", "why", "effect"} and all(item.values()) for item in deviations)


def test_deviations_state_what_the_configs_hold():
    ours = {item["id"]: item["ours"] for item in published.load("deviations").get("a3po", [])}
    first, second = load("a3po/setup1"), load("a3po/setup2")
    for experiment in (first, second):
        plan = experiment.schedule
        size, evaluations = f"{plan.steps} steps of {plan.batch_size} prompts x {plan.group_size} samples", -(-plan.steps // plan.eval_every)
        assert f"{experiment.name.removeprefix('a3po/setup')}: {size}, {evaluations} evaluations" in ours["run-length"]
        assert float(re.search(r"lr ([\d.e-]+)", ours["run-length"]).group(1)) == experiment.learner.lr
        assert (
            f"epsilon is {experiment.algorithm.clip_low} at cpu scale, not the {load(experiment.name, scale='paper').algorithm.clip_low}"
            in ours["clip"]
        )
        assert f"{experiment.evaluation.prompts} fixed prompts x {experiment.evaluation.samples} samples at temperature 1" in ours["evaluation"]
    assert f"{first.schedule.max_staleness} and {second.schedule.max_staleness} are the limits at cpu scale" in ours["unknown-settings"]
    assert "held out by a hash" in ours["evaluation"] and f"1 in {HELD_OUT} " in (ROOT / "notebooks/a3po/04_evaluation_reward.ipynb").read_text()
    lengths = [task.options for task in second.evaluation.benchmarks.values()]
    chains = " and of ".join(f"{options['operand_floor']} to {options['operand_cap']}" for options in lengths)
    asked = f"{second.evaluation.prompts} prompts with {second.evaluation.benchmark_samples} sample each"
    assert f"chains of {chains} operands, {asked}" in ours["benchmarks"]
    assert f"RL sees (up to {second.task.options['operand_cap']})" in ours["benchmarks"]


def test_numbers_figures_and_report_need_no_torch():
    code = "import sys, nowait.published, nowait.analysis.figures, nowait.analysis.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
