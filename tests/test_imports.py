from __future__ import annotations

import os
import subprocess
import sys

HEAVY = "torch transformers vllm ray wandb datasets matplotlib"


def loaded_after(*modules: str, check: str = "pass") -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after importing the modules."""
    code = f"import sys, {', '.join(modules)}; {check}; print(*[m for m in '{HEAVY}'.split() if m in sys.modules])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_reading_runs_and_scheduling_need_no_torch():
    light = ["nowait", "nowait.config", "nowait.batch", "nowait.published", "nowait.runs", "nowait.tracking", "nowait.checkpoint"]
    light += ["nowait.runtime.device", "nowait.schedules.asynchronous", "nowait.schedules.synchronous", "nowait.tasks.arithmetic"]
    light += ["nowait.tasks.data_sets", "nowait.tasks.graders", "nowait.tasks.mathematics", "nowait.tasks.gym", "nowait.tasks.sandbox"]
    assert loaded_after(*light) == set()


def test_workers_load_what_they_need_and_leave_cuda_alone():
    check = "import torch; assert not torch.cuda.is_initialized()"
    assert loaded_after("nowait.workers.sampler", "nowait.workers.learner", "nowait.training", check=check) <= {"torch", "transformers"}
