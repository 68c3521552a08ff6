"""A run that stops goes on as if it had not: with real models, whatever moment it was killed at, and never from somebody else's checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from tiny import exact, experiment, train
from transformers import PreTrainedTokenizerBase

from nowait import checkpoint, runs
from nowait.config import load
from nowait.runs import RunFailed, RunResult

OPPO = ["schedule.steps=5", "schedule.checkpoint_every=1", "schedule.eval_every=3", "algorithm.kl_target=1.0", "algorithm.kl_horizon=20"]
KEPT = ("schedule.steps=6", "schedule.checkpoint_every=2", "schedule.eval_every=3", "schedule.max_staleness=2")


@pytest.mark.slow
def test_overlapped_training_resumed_after_any_step_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    """With policy, critic, reward model and reference: Δ, the chunk's trials, the KL coefficient, deferral counts and read tokens all go on."""
    x = load("oppo/stackexchange_7b", "smoke", OPPO)
    records, weights = train(x, tmp_path / "whole")
    states = [record.state for record in records if record.state]
    for state in states[:-1]:
        checkpoint.save(tmp_path / "saved", state["step"], state)
        rest, resumed = train(x, tmp_path / "resumed", state=checkpoint.latest(tmp_path / "saved")[1])
        assert exact(rest) == exact(records[-len(rest) :]) and len(rest) == 5 - state["step"] and resumed == weights
    assert len({state["controller"]["delta"] for state in states}) > 1 and len({state["learner"]["kl_coef"] for state in states}) == 5
    ages = [state["step"] - admitted for state in states for _, admitted in state["admitted"]]
    assert max(ages) > 1 and len(states[0]["tuner"]) and any(len(set(state["rollouts"]["parts"][:, 2].tolist())) > 1 for state in states)


# The process forks once for every moment, so that it need not load everything again; each child leaves in the middle of something.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import nowait.training, nowait.workers.learner, nowait.workers.sampler
import tiny
from nowait import runs

def attempt(path, moment=0):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate") and str(path) in str(args[0]):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    try:
        runs.run(x, 0, path, use_wandb=False)
    except BaseException:
        os._exit(1)
    os._exit(0)

folder = Path(sys.argv[1])
x = tiny.experiment(sys.argv[2], "loglinear", *sys.argv[3:])
assert attempt(folder / "whole") == 0
for moment in range(1, 1000, 4):
    path = folder / f"{moment:03}"
    path.mkdir()
    if (status := attempt(path, moment)) == 0:
        break
    assert status == -signal.SIGKILL
    shutil.copytree(path, folder / f"{moment:03}-killed")
    assert attempt(path) == 0, moment
print(moment)
"""


@pytest.mark.slow
def test_killed_at_any_moment_a_run_loses_no_record_and_ends_as_if_nothing_had_happened(tiny, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), tiny, *KEPT]
    moments = int(subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True, stdout=subprocess.PIPE).stdout)
    x, whole = experiment(tiny, "loglinear", *KEPT), RunResult(tmp_path / "whole")
    weights = (whole.path / "policy" / "model.safetensors").read_bytes()
    reached = []
    for killed in sorted(tmp_path.glob("*-killed")):
        result = runs.run(x, 0, tmp_path / killed.name.removesuffix("-killed"), use_wandb=False)  # found again
        assert result.finished and result.metrics.equals(whole.metrics) and result.evaluations.equals(whole.evaluations), killed
        assert set(result.timeline.spans) >= set(whole.timeline.spans), killed
        assert (result.path / "policy" / "model.safetensors").read_bytes() == weights and not (result.path / "checkpoint").exists()
        before, after = (path / "metrics.jsonl" for path in (killed, result.path))
        assert not before.exists() or after.read_bytes().startswith(before.read_bytes())
        recorded = len(before.read_text().splitlines()) - 1 if before.exists() else 0  # the first line is the evaluation of step 0
        saved = checkpoint.latest(killed / "checkpoint")
        reached.append((recorded, saved[0] if saved else 0))
        assert len(list(killed.glob("checkpoint/step-*"))) <= runs.CHECKPOINTS_KEPT + 1
        assert RunResult(killed).finished or recorded - 2 <= reached[-1][1] <= max(recorded, 0)  # a finished run drops its checkpoints
    assert moments > 40 and {saved for _, saved in reached} == {0, 2, 4}


def test_a_run_keeps_its_two_newest_checkpoints_until_it_is_finished(tiny, tmp_path, monkeypatch):
    x, kept, save = experiment(tiny, "sync", "schedule.steps=5", "schedule.checkpoint_every=1"), [], checkpoint.save

    def noted(folder, step, state):
        kept.append(sorted(path.stem for path in folder.glob("step-*.npz")))
        return save(folder, step, state)

    monkeypatch.setattr(checkpoint, "save", noted)
    runs.run(x, 0, tmp_path / "run", use_wandb=False)
    assert kept == [[], ["step-000001"], ["step-000001", "step-000002"], ["step-000002", "step-000003"]]
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_a_checkpoint_of_other_settings_is_refused_with_what_to_do(tiny, tmp_path, monkeypatch, moved):
    x, other = (experiment(tiny, "sync", "schedule.steps=3", "schedule.checkpoint_every=1", f"learner.lr={lr}") for lr in (1e-2, 2e-2))
    folder = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(PreTrainedTokenizerBase, "save_pretrained", lambda *_: 1 / 0)
        with pytest.raises(RunFailed):
            runs.run(x, 0, folder, use_wandb=False)
    if moved:
        shutil.copytree(folder / "checkpoint", tmp_path / "other" / "checkpoint")
        folder = tmp_path / "other"
    else:
        (folder / "manifest.json").unlink()
    with pytest.raises(RunFailed, match=f"the checkpoint in {folder} is that of other settings, .* delete {folder}/checkpoint, to train"):
        runs.run(other, 0, folder, use_wandb=False)
    assert moved or runs.run(x, 0, folder, use_wandb=False).finished
