from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2ForCausalLM

from nowait import assets, preferences, warm_start
from nowait.preferences import Pair, step_labels
from nowait.tasks.arithmetic import Arithmetic

SHORT = replace(assets.RECIPES["policy_small"], steps=20, eval_prompts=4)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    return root, {name: warm_start.warm_start(SHORT, root / name) for name in ("one", "two")}


def test_building_twice_gives_identical_weights(built):
    _, manifests = built
    assert manifests["one"]["sha256"] == manifests["two"]["sha256"]


def test_building_leaves_the_callers_random_state_and_threads(tmp_path):
    torch.manual_seed(5)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(5)
    warm_start.warm_start(replace(SHORT, steps=1, eval_prompts=1), tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_training_lowers_the_loss_of_held_out_demonstrations(built, tmp_path):
    def loss(folder):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        text = [Arithmetic().prompt("eval", 0) + Arithmetic().demonstration("eval", 0) + tokenizer.eos_token]
        token = tokenizer(text, return_tensors="pt")["input_ids"]
        return model(input_ids=token, labels=token).loss.item()

    warm_start.warm_start(replace(SHORT, steps=1, eval_prompts=1), tmp_path)
    assert loss(built[0] / "one") < loss(tmp_path) - 0.1


def test_only_responses_and_their_end_are_trained_and_every_row_is_used_once():
    tokenizer, task = assets.character_tokenizer(), SHORT.task
    seen = []
    for token, target in warm_start._batches(SHORT, tokenizer):
        assert token.numel() <= SHORT.batch_tokens
        trained = target != -100
        assert torch.equal(token[trained], target[trained])
        for row, mask in zip(token, trained, strict=True):
            prompt, _, response = tokenizer.decode(row[row != tokenizer.pad_token_id]).partition("=")
            assert tokenizer.decode(row[mask]) == response
            assert response.endswith("<eos>")
            seen.append(prompt + "=")
        if len(seen) >= warm_start.POOL:
            break
    assert sorted(seen) == sorted(task.prompt("train", row) for row in range(warm_start.POOL))


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
    with pytest.raises(FileNotFoundError, match="no asset 'asset:policy'; there are: policy_large, policy_small, reward_small"):
        assets.path("asset:policy")
    with pytest.raises(ValueError, match="no recipe for asset 'policy'; there are: policy_small, policy_large, reward_small"):
        assets.build("policy")


def test_shipped_checkpoints_are_intact_and_match_their_recipes():
    assert assets.verify() == ["policy_large", "policy_small", "reward_small"]
    for name, recipe in assets.RECIPES.items():
        folder = assets.path(f"asset:{name}")
        manifest = json.loads((folder / assets.MANIFEST).read_text())
        written = manifest["recipe"]  # which lacks the options that the task has got since
        assert written | {"task": Arithmetic(**written["task"])} == {**asdict(recipe), "task": recipe.task}
        assert sum(file.stat().st_size for file in folder.iterdir()) < (8_000_000 if name.startswith("reward") else 2_000_000)


def test_finding_and_verifying_checkpoints_needs_no_torch():
    code = "import sys; from nowait import assets; assets.path('policy_small'); assets.verify(); sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0


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


# The reward model


QUICK = replace(assets.RECIPES["reward_small"], layers=5, intermediate_size=320, steps=2, eval_prompts=16)


@pytest.mark.parametrize(
    ("response", "wrong"),
    [
        ("10;19;#19<eos>", ""),
        ("7+3=10;19;#19<eos>", ""),  # a step may have either style
        ("11;20;#20<eos>", "1"),  # 11 is wrong; what follows from it is right
        ("10;10+9=20;#20<eos>", "2"),
        ("10;19;#20<eos>", "2"),
        ("10;<eos>", "<"),  # stopped early
        ("10;#10<eos>", "#"),  # an operand was left out
        ("10;1", ""),  # cut off, right so far
        ("10;19;19;#19<eos>", "1"),  # one step too many
    ],
)
def test_labels_mark_the_first_wrong_character_of_each_step(response, wrong):
    labels = step_labels("7+3+9=", response)
    assert "".join(response[place] for place, right in labels if not right) == wrong
    assert sorted(labels) == labels


@given(st.integers(0, 10_000), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_written_pairs_put_right_before_wrong_and_tidy_before_sloppy(row, seed):
    task = QUICK.task
    pair = preferences.written_pair(task.operands("train", row), np.random.default_rng(seed))
    better, worse = (text.removesuffix("<eos>") for text in (pair.better, pair.worse))
    assert pair.prompt == task.prompt("train", row)
    assert task.reward("train", row, better) == 1 and pair.better.endswith("<eos>")
    assert all(right for _, right in step_labels(pair.prompt, pair.better))
    if pair.kind == "tidy > sloppy":
        assert task.reward("train", row, worse) == 1
        assert (preferences.tidiness(better), preferences.tidiness(worse)) == (1, 0)
    else:
        assert task.reward("train", row, worse) == 0
        if pair.kind != "right > cut short":
            assert not all(right for _, right in step_labels(pair.prompt, pair.worse))


def test_wrong_responses_have_both_styles_after_either():
    """Otherwise style would tell right from wrong."""
    task, rng = QUICK.task, np.random.default_rng(0)
    found = [preferences.written_pair(task.operands("train", row), rng) for row in range(400)]
    complete = [p for p in found if p.kind in ("right > corrupted", "right > wrong answer")]
    styles = [("=" in p.better, "=" in p.worse) for p in complete]
    assert min(styles.count((one, two)) for one in (False, True) for two in (False, True)) > 10


def test_sampled_pairs_rank_a_policys_own_responses():
    task, rows = QUICK.task, list(range(12))
    found = list(preferences.sampled_pairs(task, "policy_small", "eval", rows, np.random.default_rng(0)))
    prompts = {task.prompt("eval", row): row for row in rows}
    assert {p.kind for p in found} == {"sampled right > wrong", "sampled tidy > sloppy"}
    for pair in found:
        rewards = [task.reward("eval", prompts[pair.prompt], text.removesuffix("<eos>")) for text in (pair.better, pair.worse)]
        assert rewards == ([1, 0] if pair.kind.endswith("wrong") else [1, 1])
        if pair.kind.endswith("sloppy"):
            assert preferences.tidiness(pair.better) > preferences.tidiness(pair.worse)


def test_batches_hold_whole_pairs_within_the_budget():
    task, rng = QUICK.task, np.random.default_rng(0)
    found = [preferences.written_pair(task.operands("train", row), rng) for row in range(60)]
    tokenizer, seen = assets.character_tokenizer(), []
    for batch in preferences._packed(found, 512):
        texts = [tokenizer.decode(row[:length]) for row, length in zip(batch.token, batch.length, strict=True)]
        half = len(batch.pairs)
        assert batch.token.numel() <= 512 or half == 1
        assert texts == [p.prompt + p.better for p in batch.pairs] + [p.prompt + p.worse for p in batch.pairs]
        wrong = [(row, column) for (row, column), right in zip(batch.place.T.tolist(), batch.right.tolist(), strict=True) if not right]
        assert all(row >= half for row, _ in wrong)  # better responses have no wrong characters
        seen += batch.pairs
    assert sorted(map(repr, seen)) == sorted(map(repr, found))


def test_the_preference_loss_is_that_of_bradley_and_terry():
    """Two pairs with scores (2, 1) and (-1, 0), labels that a zero head gives probability 1/2 each."""

    class Fixed(torch.nn.Module):
        def model(self, input_ids, use_cache):
            return type("Output", (), {"last_hidden_state": input_ids[..., None].float()})

        score = torch.nn.Identity()

        def steps(self, hidden):
            return 0 * hidden

    token = torch.tensor([[9, 2, 9], [9, 9, -1], [9, 1, 9], [0, 9, 9]])
    places = torch.tensor([[0, 2, 3], [1, 1, 0]])
    batch = preferences.Batch([], token, torch.tensor([2, 3, 2, 1]), places, torch.tensor([1.0, 1.0, 0.0]))
    ranking = (np.log(1 + np.exp(-1)) + np.log(1 + np.exp(1))) / 2
    centred = 0.01 * (3**2 + 1**2) / 2
    assert preferences.preference_loss(Fixed(), batch).item() == pytest.approx(ranking + centred + 2 * np.log(2), rel=1e-5)


def test_a_model_that_grew_still_predicts_like_its_policy():
    """Its comparing layer is told to write nothing; what is left differs by the codes of the tokens only."""
    policy = Qwen2ForCausalLM.from_pretrained(assets.path("policy_large"))
    torch.manual_seed(0)
    grown, width = preferences.grow(policy, QUICK), policy.config.hidden_size
    task = QUICK.task
    text = "".join(task.prompt("eval", row) + task.demonstration("eval", row) for row in range(3))
    ids = torch.tensor([assets.character_tokenizer()(text)["input_ids"]])
    hidden = grown.model(input_ids=ids).last_hidden_state
    one, two = (h[..., :width] @ policy.get_output_embeddings().weight.T for h in (policy.model(input_ids=ids).last_hidden_state, hidden))
    assert (one.argmax(-1) == two.argmax(-1)).float().mean() > 0.95
    assert grown(input_ids=ids).logits.item() == 0


def test_building_a_reward_model_twice_gives_identical_weights_that_load_with_one_label(tmp_path, monkeypatch):
    monkeypatch.setattr(preferences, "POOL", 24)
    manifests = [preferences.train_reward(QUICK, tmp_path / name) for name in ("one", "two")]
    assert manifests[0]["sha256"] == manifests[1]["sha256"]
    model, found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert model.config.num_labels == 1 and not found["missing_keys"] and not found["unexpected_keys"]


def test_the_shipped_reward_model_ranks_held_out_pairs():
    evaluation = json.loads((assets.path("reward_small") / assets.MANIFEST).read_text())["evaluation"]
    assert all(result["accuracy"] > 0.85 and result["pairs"] > 100 for result in evaluation.values())
    for kind in ("right >", "tidy >"):
        results = [result for name, result in evaluation.items() if kind in name]
        assert np.average([r["accuracy"] for r in results], weights=[r["pairs"] for r in results]) > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(assets.path("reward_small"))
    pairs = [Pair("right", "7+3+9=", "10;19;#19<eos>", "11;20;#20<eos>"), Pair("tidy", "7+3+9=", "7+3=10;10+9=19;#19<eos>", "10;19;#19<eos>")]
    assert [result["accuracy"] for result in preferences.accuracy(model, pairs).values()] == [1, 1]
