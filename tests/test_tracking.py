from __future__ import annotations

import json
import math
import os
import re
import resource
import struct
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nowait.tracking import NAMESPACES, Tracker, read_metrics

ROWS = {
    1: {"train/global_step": 1, "train/policy_loss": 0.25, "train/tokens": 12, "stale/hist": [4, 0, 2], "rollout/requests": [3, 5]},
    2: {"train/global_step": 2, "train/policy_loss": -0.1, "train/tokens": 9, "stale/hist": [1], "overlap/deferrals": [2, 1], "eval/reward": 0.5},
}


def track(folder, use_wandb=False):
    return Tracker(folder, config={"learner": {"lr": 1e-4}}, name="loglinear-1", group="a3po/setup1", tags=["cpu"], use_wandb=use_wandb)


def log_all(tracker):
    for step, metrics in ROWS.items():
        tracker.log(step, metrics)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers_of(record):
    """What a plot can show of a record."""
    return {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "step"}


# metrics.jsonl


def test_each_step_is_one_line_of_strict_json_on_disk_at_once(tmp_path):
    tracker = track(tmp_path)
    tracker.log(3, {"train/lr": np.float32(0.5), "train/tokens": np.int64(7), "stale/hist": np.array([1, 2])})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "train/lr": 0.5, "train/tokens": 7, "stale/hist": [1, 2]}\n'


def test_a_resumed_run_repeats_steps_and_the_last_record_wins(tmp_path):
    for steps, loss in (((0, 1, 2, 3), 1.0), ((2, 3, 4), 2.0)):
        tracker = track(tmp_path)
        for step in steps:
            tracker.log(step, {"train/policy_loss": loss} if step else {"eval/reward": 0.5})
        tracker.close(failed=loss == 1.0)
    frame = read_metrics(tmp_path / "metrics.jsonl")
    assert frame["step"].tolist() == [0, 1, 2, 3, 4]
    assert frame["train/policy_loss"].tolist()[1:] == [1.0, 2.0, 2.0, 2.0]
    assert math.isnan(frame["train/policy_loss"][0]) and frame["eval/reward"][0] == 0.5


def test_rows_are_sorted_by_step(tmp_path):
    tracker = track(tmp_path)
    for step in (5, 3, 4):
        tracker.log(step, {"time/step": step / 2})
    frame = read_metrics(tmp_path / "metrics.jsonl")
    assert frame["step"].tolist() == [3, 4, 5] and frame["time/step"].tolist() == [1.5, 2.0, 2.5]


def test_killed_at_any_byte_of_the_last_line_the_run_goes_on_after_the_whole_lines(tmp_path):
    log_all(track(tmp_path))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        kept = [1, 2] if cut == len(whole) - 1 else [1]  # without its newline the record is complete all the same
        assert read_metrics(path)["step"].tolist() == kept
        track(tmp_path).log(7, {"train/lr": 0.5})
        assert path.read_bytes() == whole[: len(whole) if len(kept) == 2 else first] + b'{"step": 7, "train/lr": 0.5}\n'


def test_a_first_line_that_was_never_finished_is_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "tra')
    assert read_metrics(tmp_path / "metrics.jsonl").columns.tolist() == ["step"]
    track(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("damaged", ["garbage", '{"train/lr": 0.5}', "[1]", "", '{"step": 2, "train/'])
def test_a_damaged_line_among_whole_ones_is_named_and_left_alone(tmp_path, damaged):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(str(path)) + ", line 2 is not a record"):
        read_metrics(path)
    track(tmp_path)
    assert path.read_bytes() == before


# Not a number


@pytest.mark.parametrize(
    ("key", "rest"),
    [
        ("train/policy_loss", {"train/tokens": 0}),
        ("train/explained_variance", {"train/tokens": 5}),
        ("rollout/reward_mean", {}),
        ("eval/reward", {}),
    ],
)
def test_a_mean_over_nothing_is_null_in_the_file_and_nan_in_the_frame(tmp_path, key, rest):
    track(tmp_path).log(4, {key: float("nan"), **rest})
    assert records(tmp_path) == [{"step": 4, key: None, **rest}]
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[key][0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train/policy_loss", float("nan")),
        ("train/grad_norm", np.float32("nan")),
        ("time/step", float("nan")),
        ("train/explained_variance", float("-inf")),
        ("eval/reward", float("inf")),
        ("stale/hist", [1.0, float("nan")]),
    ],
)
def test_any_other_nan_or_infinity_stops_the_run_naming_run_step_and_metric(tmp_path, key, value):
    tracker = track(tmp_path)
    log_all(tracker)
    with pytest.raises(FloatingPointError, match=rf"run {tmp_path}, step 4: {key} is (nan|-?inf)"):
        tracker.log(4, {"train/tokens": 5, key: value})
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


# Disks that refuse


def test_a_full_disk_gives_one_message_with_run_step_cause_and_remedy(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = track(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        tracker.log(17, ROWS[1])
    for part in (str(tmp_path), "step 17", "No space left on device", "free disk space and resume the run"):
        assert part in str(caught.value)
    tracker.close(failed=True)


def test_a_disk_that_fills_up_within_a_line_costs_only_that_line(tmp_path):
    tracker = track(tmp_path)
    tracker.log(1, ROWS[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, hard))
    try:
        with pytest.raises(RuntimeError, match="step 2"):
            tracker.log(2, ROWS[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert records(tmp_path) == [{"step": 1} | ROWS[1]]
    tracker.log(2, ROWS[2])
    assert read_metrics(tmp_path / "metrics.jsonl")["step"].tolist() == [1, 2]


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=rf"run {tmp_path / 'file' / 'run'}: cannot write metrics.jsonl: .*Not a directory"):
        track(tmp_path / "file" / "run")


# Weights & Biases, without it


class FakeRun:
    def __init__(self):
        self.rows, self.defined, self.exit_code, self.failing = [], {}, None, False

    def define_metric(self, name, step_metric):
        self.defined[name] = step_metric

    def log(self, row):
        if self.failing:
            raise ConnectionError("gone")
        self.rows.append(row)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package; `inits` are the arguments of wandb.init, `runs` what it returned."""
    fake = types.ModuleType("wandb")
    fake.inits, fake.runs, fake.logged_in, fake.logins, fake.silent = [], [], False, [], False

    def init(**arguments):
        fake.inits.append(arguments)
        fake.runs.append(FakeRun())
        return fake.runs[-1]

    def login(**arguments):
        assert fake.silent, "wandb.login prints where it found the key"
        fake.logins.append(arguments)
        return fake.logged_in

    def setup(settings):
        fake.silent = settings["silent"]

    fake.init, fake.login, fake.setup, fake.Settings = init, login, setup, lambda **settings: settings
    fake.Histogram, fake.Image = (lambda np_histogram: np_histogram), (lambda path: ["image", path])
    fake.Table = lambda dataframe: ["table", dataframe]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def test_wandb_receives_the_numbers_of_metrics_jsonl_and_its_histograms(tmp_path, wandb):
    tracker = track(tmp_path, use_wandb=True)
    log_all(tracker)
    tracker.log(3, {"rollout/reward_mean": float("nan"), "time/step": 2, "stale/hist": []})
    received = wandb.runs[0].rows
    assert received[0]["stale/hist"] == ([4, 0, 2], [-0.5, 0.5, 1.5, 2.5])  # counts, edges: d = 0 lies in the middle of the first bin
    assert received[1]["overlap/deferrals"] == ([2, 1], [-0.5, 0.5, 1.5])
    numbers = [numbers_of(row) for row in received]
    assert numbers == [{"train/global_step": record["step"]} | numbers_of(record) for record in records(tmp_path)]
    assert set(received[2]) == {"train/global_step", "time/step"}  # nothing of a mean or histogram over nothing
    assert wandb.runs[0].defined["train/*"] == wandb.runs[0].defined["eval/*"] == "train/global_step"


def test_without_wandb_nothing_of_it_is_called(tmp_path, wandb):
    tracker = track(tmp_path)
    log_all(tracker)
    tracker.log_table("t", pd.DataFrame({"a": [1]}))
    tracker.log_figure("f", tmp_path / "f.png")
    tracker.close()
    assert wandb.inits == wandb.logins == []


@pytest.mark.parametrize(("variable", "logged_in", "mode"), [("", False, "offline"), ("", True, "online"), ("offline", True, "offline")])
def test_wandb_is_offline_unless_logged_in_and_wandb_mode_wins(tmp_path, wandb, monkeypatch, variable, logged_in, mode):
    monkeypatch.setenv("WANDB_MODE", variable)
    wandb.logged_in = logged_in
    track(tmp_path, use_wandb=True)
    assert wandb.inits[0]["mode"] == mode
    assert all(login == {"prompt": False, "verify": False} for login in wandb.logins)  # asks neither the user nor the network


def test_wandb_learns_what_the_run_is(tmp_path, wandb):
    track(tmp_path, use_wandb=True)
    described = wandb.inits[0]
    assert (described["project"], described["group"], described["name"], described["tags"]) == ("nowait", "a3po/setup1", "loglinear-1", ["cpu"])
    assert described["config"] == {"learner": {"lr": 1e-4}} and described["dir"] == str(tmp_path)


def test_online_a_resumed_run_goes_on_as_the_same_wandb_run(tmp_path, wandb):
    wandb.logged_in = True
    for folder in ("one", "one", "two"):
        track(tmp_path / folder, use_wandb=True).close()
    first, again, other = wandb.inits
    assert first["id"] == again["id"] != other["id"] and again["resume"] == "allow"


def test_offline_a_resumed_run_gets_its_own_id_so_that_uploads_do_not_overwrite_each_other(tmp_path, wandb):
    for _ in range(2):
        track(tmp_path, use_wandb=True).close()
    assert all("id" not in arguments and "resume" not in arguments for arguments in wandb.inits)


def test_every_table_and_figure_is_logged_once_as_a_new_object_at_the_current_step(tmp_path, wandb):
    tracker, frame = track(tmp_path, use_wandb=True), pd.DataFrame({"a": [1, 2]})
    tracker.log(5, {})
    tracker.log_table("times", frame)
    tracker.log_table("times", frame)
    tracker.log_figure("reward", tmp_path / "reward.png")
    _, first, second, figure = wandb.runs[0].rows
    assert first["times"] is not second["times"] and first["times"][1] is frame
    assert first["train/global_step"] == figure["train/global_step"] == 5
    assert figure["reward"] == ["image", str(tmp_path / "reward.png")]


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_learns_whether_the_run_failed(tmp_path, wandb, failed):
    track(tmp_path, use_wandb=True).close(failed=failed)
    assert wandb.runs[0].exit_code == int(failed)


def test_wandb_that_cannot_start_is_warned_of_once_and_the_metrics_are_kept(tmp_path, wandb):
    def init(**arguments):
        raise ConnectionError("no route to host")

    wandb.init = init
    with pytest.warns(UserWarning, match="wandb failed .*no route to host.*metrics.jsonl") as caught:
        tracker = track(tmp_path, use_wandb=True)
        log_all(tracker)
        tracker.close()
    assert len(caught) == 1
    assert records(tmp_path) == [{"step": step} | metrics for step, metrics in ROWS.items()]


def test_wandb_that_fails_while_logging_is_warned_of_once_and_the_metrics_are_kept(tmp_path, wandb):
    tracker = track(tmp_path, use_wandb=True)
    wandb.runs[0].failing = True
    with pytest.warns(UserWarning, match="wandb failed .*gone") as caught:
        log_all(tracker)
        tracker.log_table("t", pd.DataFrame())
        tracker.close()
    assert len(caught) == 1
    assert records(tmp_path) == [{"step": step} | metrics for step, metrics in ROWS.items()]


def test_wandb_that_is_not_installed_is_warned_of_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="wandb failed"):
        tracker = track(tmp_path, use_wandb=True)
    log_all(tracker)
    assert len(records(tmp_path)) == 2


# Weights & Biases itself, without network and key

CHILD = """
import sys
from pathlib import Path
import pandas as pd
sys.path.insert(0, sys.argv[2])
import test_tracking as t
folder = Path(sys.argv[1])
for resumed in (False, True):
    tracker = t.track(folder, use_wandb=True)
    t.log_all(tracker)
    tracker.log_table("times", pd.DataFrame({"method": ["sync", "loglinear"], "seconds": [2.0, 1.5]}))
    tracker.close(failed=not resumed)
"""


def run_child(folder, **variables):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_") and key != "NETRC"}
    unreachable = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    home = {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(folder / "run"), os.path.dirname(__file__)]
    return subprocess.run(command, env=kept | unreachable | home | variables, capture_output=True, text=True, timeout=120)


def wandb_records(path):
    """Records of a .wandb file: LevelDB's log format (32 KiB blocks of crc, length, type, payload) behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(b"".join(parts))
            parts = []


def items(entries):
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


@pytest.mark.slow
def test_offline_without_network_and_key_wandb_holds_what_metrics_jsonl_holds(tmp_path):
    child = run_child(tmp_path)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len({file.name for file in files}) == 2
    written = records(tmp_path / "run")
    for file, expected, code in zip(files, (written[:2], written[2:]), (1, 0), strict=True):
        found = list(wandb_records(file))
        *history, table = [items(record.history.item) for record in found if record.HasField("history")]
        assert table["times/nrows"] == 2
        for row, record in zip(history, expected, strict=True):
            assert row["stale/hist/values"] == record["stale/hist"]
            assert {key: value for key, value in row.items() if key in numbers_of(record)} == numbers_of(record)
        assert items(next(record.run for record in found if record.HasField("run")).config.update)["learner"] == {"lr": 1e-4}
        assert [record.exit.exit_code for record in found if record.HasField("exit")] == [code]


def test_wandb_mode_disabled_writes_metrics_jsonl_alone(tmp_path):
    child = run_child(tmp_path, WANDB_MODE="disabled")
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 1, 2]
    assert not list((tmp_path / "run").rglob("*.wandb"))


def test_importing_the_module_loads_neither_wandb_nor_torch():
    code = "import sys, nowait.tracking, nowait.checkpoint; print({'wandb', 'torch'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True)
    assert child.stdout == "set()\n"


# The table of names

METRICS = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
TABLE = METRICS.partition("| metric | meaning |")[2].partition("\n\n")[0]
GLOSSARY = [re.split(r"(?<!\\)\|", line)[1:-1] for line in TABLE.splitlines()[2:]]


def test_the_table_names_exactly_the_metrics_that_training_writes():
    import torch
    from scripted import experiment, train

    from nowait.algorithms.losses import decoupled_ppo_loss, finish_stats, value_loss
    from nowait.batch import Batch
    from nowait.runtime.timeline import Timeline
    from nowait.schedules.common import Crew, describe

    one = torch.zeros(1, 1)
    losses = decoupled_ppo_loss(one, one, one, one, one + 1)[1] | value_loss(one, one, one, one + 1)[1]
    row, column = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    batch = Batch(0, column, column, row, column, row, column, row, row, column, column, column == 1)
    crew = Crew([], [], None, None, Timeline(), {"sampler": ["a"], "learner": ["b"]})
    written = set(describe(crew, batch, finish_stats(losses), (0.0, 1.0), 1.0, 0))
    overlapped = {name for name in train(experiment("overlapped", steps=1)).steps[0] if name.startswith(("overlap/", "time/"))}
    errors = [f"prox_abs_error/{anchor}" for anchor in ("loglinear", "linear", "behave", "reuse")]
    learner = {
        f"train/{x}" for x in ("entropy", "sampler_gap", "grad_norm", "lr", "kl", "kl_coef", "kl_clamped", "value_mean", "return_mean", *errors)
    }
    elsewhere = {"eval/reward", "eval/se", "eval/len_mean", "perf/gpu_utilisation"}  # by evaluations, and by the sampler of runs
    assert {row[0].strip(" `") for row in GLOSSARY} == written | overlapped | learner | elsewhere
    assert {row[0].strip(" `").split("/")[0] for row in GLOSSARY} == set(NAMESPACES)


def test_the_table_has_five_cells_for_every_metric():
    assert {len(row) for row in GLOSSARY} == {5} and len({row[0] for row in GLOSSARY}) == len(GLOSSARY)
