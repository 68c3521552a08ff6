from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from nowait import assets
from nowait.tasks.arithmetic import Arithmetic

SHORT = replace(assets.RECIPES["policy_small"], steps=20, eval_prompts=4)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    return root, {name: assets.warm_start(SHORT, root / name, progress=False) for name in ("one", "two")}


def test_building_twice_gives_identical_weights(built):
    _, manifests = built
    assert manifests["one"]["sha256"] == manifests["two"]["sha256"]


def test_building_leaves_the_callers_random_state_and_threads(tmp_path):
    torch.manual_seed(5)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(5)
    assets.warm_start(replace(SHORT, steps=1, eval_prompts=1), tmp_path, progress=False)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_training_lowers_the_loss_of_held_out_demonstrations(built, tmp_path):
    def loss(folder):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        text = [Arithmetic().prompt("eval", 0) + Arithmetic().demonstration("eval", 0) + tokenizer.eos_token]
        token = tokenizer(text, return_tensors="pt")["input_ids"]
        return model(input_ids=token, labels=token).loss.item()

    assets.warm_start(replace(SHORT, steps=1, eval_prompts=1), tmp_path, progress=False)
    assert loss(built[0] / "one") < loss(tmp_path) - 0.1


def test_only_responses_and_their_end_are_trained_and_every_row_is_used_once():
    tokenizer, task = assets.character_tokenizer(), SHORT.task
    seen = []
    for token, target in assets._batches(SHORT, tokenizer):
        assert token.numel() <= SHORT.batch_tokens
        trained = target != -100
        assert torch.equal(token[trained], target[trained])
        for row, mask in zip(token, trained, strict=True):
            prompt, _, response = tokenizer.decode(row[row != tokenizer.pad_token_id]).partition("=")
            assert tokenizer.decode(row[mask]) == response
            assert response.endswith("<eos>")
            seen.append(prompt + "=")
        if len(seen) >= assets.POOL:
            break
    assert sorted(seen) == sorted(task.prompt("train", row) for row in range(assets.POOL))


@given(st.text("0123456789+=;#", min_size=1, max_size=80))
@settings(max_examples=50, deadline=None)
def test_saved_tokenizer_has_a_token_per_character_and_gives_the_text_back(built, text):
    tokenizer = AutoTokenizer.from_pretrained(built[0] / "one")
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text)
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_padding_is_not_the_end_of_sequence():
    tokenizer = assets.character_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (14, 15, 16)


def test_verify_finds_changed_weights(built, tmp_path):
    assert assets.verify(built[0]) == ["one", "two"]
    for name in (assets.MANIFEST, assets.WEIGHTS):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / name).write_bytes((built[0] / "one" / name).read_bytes())
    (tmp_path / "broken" / assets.WEIGHTS).open("ab").write(b"0")
    with pytest.raises(ValueError, match="asset 'broken': model.safetensors has SHA-256"):
        assets.verify(tmp_path)


def test_unknown_names_are_answered_with_what_exists():
    with pytest.raises(FileNotFoundError, match="no asset 'asset:policy'; there are: policy_large, policy_small"):
        assets.path("asset:policy")
    with pytest.raises(ValueError, match="no recipe for asset 'policy'; there are: policy_small, policy_large"):
        assets.build("policy")


def test_shipped_policies_are_intact_and_match_their_recipes():
    assert assets.verify() == ["policy_large", "policy_small"]
    for name, recipe in assets.RECIPES.items():
        folder = assets.path(f"asset:{name}")
        manifest = json.loads((folder / assets.MANIFEST).read_text())
        assert manifest["recipe"] == {**asdict(recipe), "task": recipe.task.model_dump()}
        assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000


@pytest.mark.parametrize(("name", "setup", "low", "high"), [("policy_small", "cap12", 0.45, 0.65), ("policy_large", "cap24", 0.35, 0.6)])
def test_shipped_policies_leave_room_that_sharpening_can_gain(name, setup, low, high):
    evaluation = json.loads((assets.path(name) / assets.MANIFEST).read_text())["evaluation"]
    assert low < evaluation[setup]["sampled"]["exact_match"] < high
    assert evaluation[setup]["greedy"]["exact_match"] > evaluation[setup]["sampled"]["exact_match"] + 0.2
    lengths = evaluation["cap64"]["sampled"]
    assert lengths["length_max"] >= 10 * lengths["length_median"]


@pytest.mark.parametrize("name", ["policy_small", "policy_large"])
def test_shipped_policies_answer_when_loaded_by_name(name):
    tokenizer, model = AutoTokenizer.from_pretrained(assets.path(name)), AutoModelForCausalLM.from_pretrained(assets.path(name))
    task, rows = Arithmetic(), range(32)
    inputs = tokenizer([task.prompt("eval", row) for row in rows], return_tensors="pt", padding=True, padding_side="left")
    response = model.generate(**inputs, do_sample=False, max_new_tokens=96)[:, inputs["input_ids"].shape[1] :]
    text = tokenizer.batch_decode(response, skip_special_tokens=True)
    assert sum(task.reward("eval", row, t) for row, t in zip(rows, text, strict=True)) >= 0.85 * len(rows)
