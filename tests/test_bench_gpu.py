"""The bench of a GPU, run on the CPU with tiny shapes."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from nowait import bench_gpu, cli


def check(found: dict) -> None:
    for row in found["recompute"].values():
        assert row["ratio"] == pytest.approx(row["recompute_s"] / row["interpolate_s"]) and row["ratio"] > 1
    o, s = found["overlap"], found["steps"]
    assert 1 <= o["ideal"] <= 2 and o["gain"] > 0 and o["tokens"] == 8 * 4
    assert found["memory"]["logits_bytes"] == 4 * 2 * 16 * 512 and found["memory"]["peak_bytes"] is None
    assert s["speedup_over_recompute"] == s["seconds"]["recompute"] / s["seconds"]["loglinear"] and min(s["seconds"].values()) > 0


def test_tiny_shapes_on_the_cpu_run_every_part(capsys):
    found = bench_gpu.gpu("cpu", clock="measured")
    check(found)
    assert "steps speedup_over_recompute" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_a_table_on_stderr_and_one_json_object_as_its_last_line(capsys):
    assert cli.main(["bench", "gpu", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and "steps seconds recompute" in err
    check(json.loads(out))


@pytest.mark.parametrize(("shape", "parameters"), [(bench_gpu.REAL.small, 494_032_768), (bench_gpu.REAL.large, 1_543_714_304)])
def test_the_shapes_are_those_of_qwen2_5(shape, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, vocab_size=bench_gpu.REAL.vocabulary))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_names_the_way_to_try_the_code(capsys):
    assert cli.main(["bench", "gpu"]) == 1
    assert "bench gpu finds no GPU" in (err := capsys.readouterr().err) and "--device cpu runs the same code with tiny shapes" in err


def test_too_little_memory_is_said_with_a_remedy(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.45 GiB")

    monkeypatch.setattr(bench_gpu, "_recompute", full)
    with pytest.raises(ValueError, match="needs 24 GB of free GPU memory: end what else uses CPU, or add --tiny. CUDA out of memory"):
        bench_gpu.gpu("cpu")
