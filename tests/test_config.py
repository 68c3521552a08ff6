from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nowait import reference
from nowait.config import KEYS, LEAVES, METHODS, Experiment, diff, digest, load, to_yaml
from nowait.config_files import ConfigError, Layers, find, read_whole

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(file.relative_to(ROOT / "paper_configs").with_suffix("").as_posix() for file in (ROOT / "paper_configs").glob("[ao]*po/*.yaml"))


@pytest.fixture
def write(tmp_path):
    """Writes a config file and returns its path."""

    def write(text: str) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def message(path, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    return str(caught.value)


# The shipped configs


@pytest.mark.parametrize("scale", ["paper", "cpu", "smoke"])
@pytest.mark.parametrize("stem", SHIPPED)
def test_every_shipped_config_loads_at_every_scale_with_every_method_of_its_paper(stem, scale):
    for method in methods_of(stem):
        experiment = load(stem, scale, method=method)
        assert (experiment.name, experiment.scale, experiment.method) == (stem, scale, method)


def methods_of(stem: str) -> list[str]:
    return [method for method, settings in METHODS.items() if (settings["schedule.kind"] == "overlapped") == stem.startswith("oppo/")]


def test_the_setups_of_both_papers_are_shipped():
    tasks = ("gsm8k_7b", "opencoder_3b", "stackexchange_3b", "stackexchange_7b", "two_nodes")
    assert SHIPPED == ["a3po/setup1", "a3po/setup2", *(f"oppo/{task}" for task in tasks)]


def test_paper_setting_of_setup_1_follows_the_figures():
    x = load("a3po/setup1", "paper")
    assert (x.schedule.max_staleness, x.learner.lr, x.learner.minibatches, x.schedule.steps) == (8, 8.5e-6, 4, 300)
    assert (x.algorithm.clip_low, x.algorithm.clip_high, x.algorithm.behav_weight_cap, x.algorithm.fresh) == (0.4, 0.4, 5.0, "behave")


def test_areal_variant_holds_what_the_shipped_example_has_instead():
    changed = {key: (a, b) for key, a, b in diff(load("a3po/setup1", "paper"), load("a3po/setup1", "paper", variant="areal"))}
    order = ("strict", "completion")
    assert changed == {"learner.lr": (8.5e-6, 1.7e-5), "learner.minibatches": (4, 1), "schedule.max_staleness": (8, 2), "schedule.order": order}


@pytest.mark.parametrize("stem", ["a3po/setup1", "a3po/setup2"])
def test_cpu_scale_is_the_default_and_stale_enough_for_the_methods_to_differ(stem):
    x = load(stem)
    assert x == load(stem, "cpu") == load(stem, "cpu", method="loglinear")
    assert x.schedule.max_staleness >= 4 and x.learner.minibatches >= 2
    assert load(stem, "paper").schedule.steps // load(stem, "paper").schedule.eval_every == 10
    assert x.schedule.steps % x.schedule.eval_every == 0


@pytest.mark.parametrize("stem", SHIPPED)
def test_vllm_samples_at_paper_scale_and_the_built_in_sampler_below(stem):
    engines = {scale: load(stem, scale).sampler.engine for scale in ("paper", "gpu1", "cpu", "smoke")}
    assert engines == {"paper": "vllm", "gpu1": "transformers", "cpu": "transformers", "smoke": "transformers"}


@pytest.mark.parametrize("stem", SHIPPED)
def test_methods_differ_in_nothing_but_what_they_declare(stem):
    for method in methods_of(stem):
        changed = {key for key, *_ in diff(load(stem), load(stem, method=method))} - {"method"}
        assert all(any(key.startswith(declared) for declared in METHODS[method]) for key in changed), (method, changed)


@pytest.mark.parametrize("stem", SHIPPED)
def test_paper_setting_leaves_nothing_to_a_default(stem):
    document = read_whole(find(stem), LEAVES)
    stated = {f"{section}.{key}" for section, block in document.items() if isinstance(block, dict) for key in block}
    ours = ("name", "title", "scale", "method", "task.options", "runtime.costs")
    if stem.startswith("a3po/"):  # without frozen models, critic and overlap
        ours += "reward", "critic", "overlap", *(f"algorithm.{key}" for key in ("advantage", "gamma", "lam", "value", "kl"))
    assert {key for key in KEYS if not key.startswith(ours)} <= stated


@pytest.mark.parametrize("stem", SHIPPED)
def test_every_value_of_the_paper_setting_names_its_source(stem):
    paper = find(stem).read_text().split("\nscales:")[0]
    tag = re.compile(r"# (post|figure|example|docs|inferred|chosen|setup 1|note|review|library|template)\b")
    values = [line for line in paper.splitlines() if re.match(r" +\w+: +\S|\w+: +{", line) and not line.startswith("    ")]
    assert len(values) > 40 or "\nbase: " in paper
    assert [line for line in values if not tag.search(line)] == []


def test_a_file_builds_on_its_base_key_by_key_and_replaces_tables_whole(write):
    file = write("base: oppo/stackexchange_7b\nname: mine\nlearner: {lr: 0.5}\nscales: {cpu: {task: {options: {operand_cap: 8}}}}")
    mine, base = load(file), load("oppo/stackexchange_7b")
    changed = {key: new for key, old, new in diff(base, mine)}
    assert changed == {"name": "mine", "task.options.operand_cap": 8, "task.options.operand_mean": None, "task.options.operand_sigma": None}
    assert load(file, "paper").learner.lr == 0.5 and mine.learner.lr == base.learner.lr  # the base's scale comes after the file's own setting


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("overlap.delta=20", "overlap.delta: 20 is not within delta_min 0 and delta_max 8"),
        ("sampler.slots=20", "24 requests in flight x 1 samples need 24 slots, sampler.slots is 20"),
        ("schedule.group_size=2", "24 requests in flight x 2 samples need 48 slots"),
        ("runtime.placement={a: [sampler, learner]}", "reward, reference must be on exactly one device"),
        ("runtime.placement={a: [sampler, learner, reward], b: [reward, reference]}", "reward must be on exactly one device"),
        ("schedule.max_staleness=2", "overlapped training bounds staleness by its deferrals"),
        ("overlap.chunk_candidates=[8]", "one candidate leaves nothing to try"),
        ("overlap.chunk_candidates=[8, 8]", "names a size twice"),
        ("overlap={chunk_candidates: [4, 8], chunk_period: 3}", "trying 2 candidates twice takes longer than a period of 3 steps"),
        ("overlap={rule: trend, window: 2}", "a trend needs at least 3 rewards"),
        ("algorithm={kl_coef: 0.0, kl_target: 6.0}", "an adaptive beta of 0 stays 0"),
        ("runtime.clock=wall", "nothing would overlap on the wall clock"),
        ("schedule.kind=synchronous", "reward.path: synchronous training has no reward model, reference or critic"),
    ],
)
def test_impossible_combinations_of_overlapped_training_are_refused(override, said):
    assert said in message("oppo/stackexchange_7b", overrides=[override])


def test_a_role_that_is_not_needed_may_stay_in_the_placement():
    assert load("oppo/gsm8k_7b", overrides=["algorithm.kl_coef=0.0"]).runtime.placement["b"] == ["reward", "reference"]


def test_a_base_cannot_have_a_base(write):
    assert "base: builds on a file that itself has the base oppo/stackexchange_7b" in message(write("base: oppo/gsm8k_7b\nname: x"))


def test_no_number_in_a_config_is_text_to_yaml():
    exponent = re.compile(r"(?<![\w.])\d+[eE][-+]?\d+|\d\.\d*[eE]\d")
    for file in (ROOT / "paper_configs").rglob("*.yaml"):
        values = [line.split("#")[0] for line in file.read_text().splitlines()]
        assert not [value for value in values if exponent.search(value)], file


# Layers


FILE = """
name: mine
learner: {lr: 0.1, minibatches: 3, weight_decay: 0.1}
task: {options: {operand_mean: 5.0, operand_cap: 20}}
scales:
  cpu: {learner: {lr: 0.3, minibatches: 5}, task: {options: {operand_cap: 10}}}
variants:
  other: {learner: {lr: 0.2, weight_decay: 0.2}, schedule: {max_staleness: 7}}
"""


def test_later_layers_win(write):
    file = write(FILE)

    def learner(*args, **kwargs):
        x = load(file, *args, **kwargs).learner
        return x.lr, x.minibatches, x.weight_decay

    assert learner("paper") == (0.1, 3, 0.1)
    assert learner("paper", variant="other") == (0.2, 3, 0.2)
    assert learner("cpu", variant="other") == (0.3, 5, 0.2)
    assert learner("cpu", variant="other", method="reuse") == (0.3, 1, 0.2)
    assert learner("cpu", ["learner.lr=0.4", "learner.lr=0.5"], variant="other", method="reuse") == (0.5, 1, 0.2)
    assert load(file, method="sync", variant="other").schedule.max_staleness == 0


def test_sections_merge_and_tables_are_replaced(write):
    file = write(FILE)
    assert load(file, "paper").task.options == {"operand_mean": 5.0, "operand_cap": 20}
    assert load(file, "cpu").task.options == {"operand_cap": 10}
    assert load(file, "paper", ["task.options.operand_cap=12"]).task.options == {"operand_mean": 5.0, "operand_cap": 12}
    assert load(file, "paper", ["task.options={operand_cap: 12}"]).task.options == {"operand_cap": 12}
    assert load(file, "paper", ["learner={lr: 0.9}"]).learner.minibatches == 3


@pytest.mark.parametrize(
    ("override", "section", "expected"),
    [
        ("learner.lr=1e-4", "learner", {"lr": 1e-4}),
        ("learner.lr=2E-4", "learner", {"lr": 2e-4}),
        ("learner.lr=1", "learner", {"lr": 1.0}),
        ("learner.betas=[9e-1, 0.95]", "learner", {"betas": (0.9, 0.95)}),
        ("algorithm.behav_weight_cap=null", "algorithm", {"behav_weight_cap": None}),
        ("algorithm.advantage_std=false", "algorithm", {"advantage_std": False}),
        ("model.path='1e4'", "model", {"path": "1e4"}),
        ("runtime.placement={x: [learner], y: [sampler]}", "runtime", {"placement": {"x": ["learner"], "y": ["sampler"]}}),
    ],
)
def test_override_values_are_yaml(override, section, expected):
    changed = getattr(load("a3po/setup1", overrides=[override]), section).model_dump()
    assert {key: changed[key] for key in expected} == expected


@given(st.floats(1e-12, 1e6))
@settings(max_examples=30, deadline=None)
def test_any_number_survives_as_an_override(lr):
    assert load("a3po/setup1", overrides=[f"learner.lr={lr!r}"]).learner.lr == lr


def test_layers_do_not_share_state():
    block = {"task": {"options": {"operand_cap": 10}}}
    layers = Layers(LEAVES)
    layers.merge(block, "")
    layers.set("task.options.operand_cap", 3, "override")
    assert block == {"task": {"options": {"operand_cap": 10}}}


def test_colocated_method_places_both_workers_on_both_devices():
    assert load("a3po/setup1", method="sync_colocated").runtime.placement == {"a": ["sampler", "learner"], "b": ["sampler", "learner"]}


# Errors: each names file, key and remedy


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("learner.lrr=1", "learner.lrr: unknown key", "did you mean learner.lr?"),
        ("learner.temperature=1", "learner.temperature: unknown key", "sampler.temperature or evaluation.temperature"),
        ("learner.zzz=1", "learner.zzz: unknown key", "known here: lr, warmup_steps"),
        ("scheduel.steps=1", "scheduel: unknown key", "did you mean schedule?"),
        ("learner.lr='0.1'", "learner.lr: got '0.1'", "without quotes"),
        ("learner.lr=.nan", "learner.lr: got nan", "finite"),
        ("learner.minibatches=2.0", "learner.minibatches: got 2.0", "whole number"),
        ("learner=3", "learner: got 3", "key: value"),
        ("algorithm.anchor=log", "algorithm.anchor: got 'log'", "'loglinear'"),
        ("algorithm.clip_low=1.0", "algorithm.clip_low: got 1.0", "less than 1"),
        ("algorithm.dual_clip=1.0", "algorithm.dual_clip: got 1.0", "greater than 1"),
        ("schedule.max_staleness=-1", "schedule.max_staleness: got -1", "greater than or equal to 0"),
        ("schedule.group_size=1", "schedule.group_size: ", "at least 2"),
        ("schedule.group_size=256", "schedule.group_size: 256 samples", "sampler.slots"),
        ("learner.minibatches=129", "learner.minibatches: 129 cannot be cut from 128", "batch_size"),
        ("sampler.top_p=0.9", "sampler.top_p: got 0.9", "set 1.0"),
        ("sampler.top_k=50", "sampler.top_k: got 50", "set 0"),
        ("sampler.engine_options={seed: 1}", "sampler.engine_options: engine transformers has none", "sampler.engine=vllm"),
        ("sampler={engine: vllm, engine_options: {seed: 1, dtype: half}}", "sampler.engine_options: dtype, seed follow from", "drop them"),
        ("schedule.kind=synchronous", "schedule.max_staleness: synchronous", "set 0"),
        ("schedule.kind=synchronous", "algorithm.anchor: loglinear", "take behave"),
        ("schedule.kind=colocated", "runtime.placement: colocated", "set {a: [sampler, learner], b: [sampler, learner]}"),
        ("runtime.placement={a: [sampler]}", "runtime.placement: asynchronous", "set {a: [sampler], b: [learner]}"),
        ("runtime.placement={a: [sampler, learner], b: [learner]}", "runtime.placement: asynchronous", "set {a: [sampler], b: [learner]}"),
        ("runtime.placement={a: [samplr]}", "runtime.placement.a: got ['samplr']", "'sampler'"),
        ("task.name=arithmetics", "task.name: unknown task", "arithmetic"),
        ("task.options.operand_capp=3", "task.options: ", "operand_cap"),
        ("task.options.operand_cap=3.5", "task.options.operand_cap: got 3.5", "whole number"),
        ("evaluation.benchmarks={hard: {name: nothing}}", "evaluation.benchmarks.hard.name: unknown task", "arithmetic"),
        ("task.options.operand_cap=[1]", "task.options.operand_cap: got [1]", "write a number"),
        ("scale=cpu", "scale: ", "ask load"),
        ("method=sync", "method: ", "ask load"),
        ("learner.lr", "override 'learner.lr': ", "key=value"),
        ("learner.lr=[1", "learner.lr: cannot read '[1'", "quote"),
    ],
)
def test_error_names_file_key_and_remedy(override, key, remedy):
    text = message("a3po/setup1", overrides=[override])
    line = next(line for line in text.splitlines() if key in line)
    assert text.startswith(str(find("a3po/setup1"))) and remedy in line


def test_anchor_reuse_refuses_a_second_optimiser_step():
    assert "set learner.minibatches=1" in message("a3po/setup1", method="reuse", overrides=["learner.minibatches=4"])
    text = message("a3po/setup1", method="reuse", overrides=["learner.epochs=2"])
    assert "learner.epochs: anchor reuse allows one optimiser step per batch, not 2" in text
    load("a3po/setup1", method="reuse")


def test_combinations_are_checked_without_a_file_too():
    with pytest.raises(ValidationError, match="schedule.group_size: .* choose at least 2"):
        Experiment.model_validate({"name": "x", "schedule": {"group_size": 1}})


def test_asynchronous_schedule_takes_zero_staleness_and_the_behave_anchor():
    x = load("a3po/setup1", overrides=["schedule.max_staleness=0"], method="behave")
    assert (x.schedule.kind, x.schedule.max_staleness, x.algorithm.anchor) == ("asynchronous", 0, "behave")


def test_several_problems_are_listed_with_the_layer_that_caused_them(write):
    file = write("name: x\nlearner: {lr: -1.0}\nscales: {cpu: {learner: {epochs: 0}}}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, overrides=["schedule.steps=0"])
    assert [problem.key for problem in caught.value.problems] == ["learner.lr", "learner.epochs", "schedule.steps"]
    assert "3 problems" in str(caught.value)
    whats = [problem.what for problem in caught.value.problems]
    assert whats == ["got -1.0", "got 0 (set by scales.cpu)", "got 0 (set by override)"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\nlearner: {lr: 1e-4}", "learner.lr: YAML reads 1e-4 as text; write 1.0e-4"),
        ("name: x\nscales: {cpu: {learner: {lr: 1.5e4}}}", "scales.cpu.learner.lr: YAML reads 1.5e4 as text; write 1.5e+4"),
        ("name: x\ntask: {options: {operand_mean: 1e1}}", "task.options.operand_mean: YAML reads 1e1 as text; write 1.0e+1"),
        ("name: x\nlearner: {betas: [0.9, 9e-1]}", "learner.betas.1: YAML reads 9e-1 as text; write 9.0e-1"),
        ("name: x\nlearner: {lr: 1.0}\nlearner: {epochs: 2}", "line 1: key 'learner' occurs twice"),
        ("name: x\nlearner: {lr: [}", "line 2: "),
        ("- name", "write `key: value` lines"),
        ("title: no name", "name: no value; add what is missing"),
        ("name: x\nlearner:\n", "learner: got None; write `key: value` lines"),
    ],
)
def test_bad_file_is_an_error(write, text, expected):
    file = write(text)
    assert message(file, scale="paper").startswith(f"{file}: ") and expected in message(file, scale="paper")


def test_quoted_text_that_looks_like_a_number_stays_text(write):
    assert load(write("name: x\ntitle: '1e4'")).title == "1e4"


def test_unknown_names_list_what_exists():
    assert "choose from: paper, cpu, gpu1, smoke" in message("a3po/setup1", scale="gpu8")
    assert "choose from: areal" in message("a3po/setup1", variant="trl")
    assert "choose from: none" in message("a3po/setup2", variant="areal")
    assert all(method in message("a3po/setup1", method="grpo") for method in METHODS)
    assert "did you mean a3po/setup1?" in message("a3po/setpu1")
    assert "a3po/setup1, a3po/setup2" in message("nonsense")


def test_tasks_are_known_and_their_options_judged_at_every_scale():
    assert load("a3po/setup1", "paper").task.name == "gsm8k"
    assert load("a3po/setup1", overrides=["task={name: gsm8k, options: {path: my.jsonl}}"]).task.options["path"] == "my.jsonl"
    assert "task.name: unknown task 'gsm9k'" in message("a3po/setup1", scale="paper", overrides=["task.name=gsm9k"])
    assert "task.options.held_out: got 0" in message("a3po/setup1", scale="paper", overrides=["task.options.held_out=0"])


def test_error_survives_a_process_boundary():
    with pytest.raises(ConfigError) as caught:
        load("a3po/setup1", overrides=["learner.lr=-1", "learner.epochs=0"])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems) == (str(caught.value), caught.value.problems)


# Finding, writing, comparing


def test_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch):
    expected = load("a3po/setup1")
    monkeypatch.chdir(tmp_path)
    assert load("a3po/setup1") == load("a3po/setup1.yaml") == load("paper_configs/a3po/setup1.yaml") == expected


def test_configs_of_the_working_folder_come_first(tmp_path, monkeypatch):
    (tmp_path / "paper_configs" / "a3po").mkdir(parents=True)
    (tmp_path / "paper_configs" / "a3po" / "setup1.yaml").write_text("name: changed")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert (load("a3po/setup1").name, load("a3po/setup2").name) == ("changed", "a3po/setup2")


@pytest.mark.parametrize("scale", ["paper", "cpu"])
def test_written_experiment_reads_back_equal(write, scale):
    x = load("a3po/setup2", scale, ["algorithm.anchor=linear", "learner.lr=1e-7"])
    file = write(to_yaml(x))
    assert load(file) == load(file, scale) == x
    assert "already resolved" in message(file, scale="smoke")


def test_digest_is_stable_and_sensitive():
    x = load("a3po/setup1")
    assert digest(x) == digest(load("a3po/setup1", "cpu")) and re.fullmatch("[0-9a-f]{12}", digest(x))
    assert digest(load("a3po/setup1", overrides=["learner.weight_decay=0"])) == digest(load("a3po/setup1", overrides=["learner.weight_decay=0.0"]))
    assert digest(x) == digest(load("a3po/setup1", overrides=["task.options={operand_cap: 12, operand_mean: 4.5}"])), "order of keys"
    others = [["learner.lr=1.01e-4"], ["task.options.operand_cap=13"], ["runtime.clock=measured"], ["evaluation.samples=3"], ["title=other"]]
    assert len({digest(x), *(digest(load("a3po/setup1", overrides=o)) for o in others)}) == 6


def test_digest_is_equal_in_every_process():
    code = "from nowait.config import Experiment, digest; print(digest(Experiment(name='x')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == digest(Experiment(name="x"))


def test_diff_lists_dotted_keys_and_both_values():
    a, b = load("a3po/setup1"), load("a3po/setup1", method="sync", overrides=["task.options={operand_cap: 12}"])
    assert diff(a, a) == []
    assert diff(a, b) == [
        ("algorithm.anchor", "loglinear", "behave"),
        ("method", "loglinear", "sync"),
        ("schedule.kind", "asynchronous", "synchronous"),
        ("schedule.max_staleness", 4, 0),
        ("task.options.operand_mean", 4.5, None),
    ]


def test_loading_imports_no_torch():
    code = "import sys; from nowait.config import load; load('a3po/setup1'); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_wheel_lists_every_package():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT / "src").parts) for file in (ROOT / "src" / "nowait").rglob("*.py")}
    assert found <= set(tool["packages"])
    assert tool["package-dir"]["nowait.paper_configs"] == "paper_configs" and "nowait.paper_configs" in tool["packages"]


def test_the_documented_files_can_be_loaded_and_the_complete_one_has_every_setting(write):
    small, example = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    changed = {key for key, *_ in diff(load(write(small)), load("a3po/setup1"))}
    assert changed == {"name", "task.options.operand_mean", "learner.lr"}
    assert example == reference.example() + "\n", "replace it by the output of: python -c 'from nowait import reference; print(reference.example())'"
    leaves = set()
    for section, block in yaml.safe_load(example).items():
        for key, value in block.items() if isinstance(block, dict) else [(None, block)]:
            name = section if key is None else f"{section}.{key}"
            leaves |= {f"{name}.{part}" for part in value} if name == "runtime.costs" else {name}
    assert leaves == set(KEYS)
    assert diff(load(write(example)), load("a3po/setup1")) == []


def test_every_setting_is_explained_and_choices_are_named():
    found = reference.settings(load("a3po/setup1", overrides=["learner.lr=0.5"]))
    assert list(found.index) == list(KEYS) and found["meaning"].str.len().min() > 5
    assert found.loc["learner.lr"].tolist() == [0.5, "", "Adam step size, constant after warm-up"]
    assert found.loc["overlap.rule", "choices"] == "fixed | slope | algorithm1 | trend | module:function"
    assert found.loc["schedule.kind", "meaning"].startswith("synchronous; colocated:")  # written above the field


def test_an_override_cannot_make_another_method_of_the_one_asked_for():
    with pytest.raises(ConfigError, match=r"algorithm.anchor: got 'recompute', but method loglinear means 'loglinear'"):
        load("a3po/setup1", method="loglinear", overrides=["algorithm.anchor=recompute"])


@pytest.mark.parametrize(
    ("override", "label"), [("algorithm.anchor=recompute", "recompute"), ("algorithm.anchor=ppo", "custom"), ("learner.lr=1e-5", "loglinear")]
)
def test_the_label_says_what_the_settings_are(override, label):
    assert load("a3po/setup1", overrides=[override]).method == label


def test_asynchrony_on_the_wall_clock_needs_processes():
    with pytest.raises(ConfigError, match="nothing would overlap"):
        load("a3po/setup1", overrides=["runtime.clock=wall"])


def test_colocated_training_refuses_an_unsharded_forward_pass():
    with pytest.raises(ConfigError, match="does not shard the forward pass"):
        load("a3po/setup1", method="sync_colocated", overrides=["algorithm.anchor=recompute"])
