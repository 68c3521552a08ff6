from __future__ import annotations

import json
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from rows import ROWS, right, write
from tiny import EvenDigits, experiment, train

from nowait import identity
from nowait.config import ConfigError, TaskConfig
from nowait.config import load as load_config
from nowait.tasks import load
from nowait.tasks.prompts import LEFT_OUT, Prompts

GRADED = ["gsm8k", "math500", "aime24", "dapo_math", "opencoder"]


def task(name: str, **options):
    return load(TaskConfig(name=name, options=options))


def whole(name: str) -> str:
    """A file of the complete data sets, which are not part of the repository."""
    if not (folder := os.environ.get("NOWAIT_TEST_DATA")):
        pytest.skip("NOWAIT_TEST_DATA does not name a folder with the data sets")
    return str(Path(folder) / f"{name}.jsonl")


def shout(prompts, completions, word, **columns) -> list[float]:
    """A reward function as TRL would call it on a conversation."""
    assert prompts[0][-1]["role"] == "user"
    return [float(completion[0]["content"].count(w)) for completion, w in zip(completions, word, strict=True)]


def even_digits(completions, **columns) -> list[float]:
    return [sum(character in "02468" for character in text) / max(1, len(text)) for text in completions]


def undecided(completions, **columns) -> list[None]:
    return [None] * len(completions)


async def later(completions, **columns) -> list[float]:
    return [0.0]


# Rows


@pytest.mark.parametrize("name", GRADED)
def test_ten_rows_of_each_data_set_are_read_and_graded(name, tmp_path):
    read, rows = task(name, eval_path=write(tmp_path, name)), ROWS[name]
    assert read.size("eval") == 10
    for i, row in enumerate(rows):
        (message,) = read.prompt("eval", i)
        assert (
            message["role"] == "user" and (row.get("question") or row.get("problem") or row.get("prompt") or row["instruction"]) in message["content"]
        )
        assert read.reward("eval", i, right(name, row)) == 1.0
        assert read.reward("eval", i, right(name, rows[i - 1])) == 0.0
        assert read.reward("eval", i, "I do not know") == 0.0


def test_how_to_answer_is_part_of_the_prompt(tmp_path):
    assert "in \\boxed{}" in task("gsm8k", eval_path=write(tmp_path, "gsm8k")).prompt("eval", 0)[0]["content"]
    assert "named `twice`" in task("opencoder", eval_path=write(tmp_path, "opencoder")).prompt("eval", 0)[0]["content"]
    changed = task("gsm8k", eval_path=write(tmp_path, "gsm8k"), prompt_template="Q: {question}\nA:", chat=False)
    assert changed.prompt("eval", 4) == "Q: A ticket is $9. What do 2 cost?\nA:"


def test_stack_exchange_has_prompts_and_no_rule(tmp_path):
    read = task("stack_exchange", eval_path=write(tmp_path, "stack_exchange"))
    assert read.prompt("eval", 0) == "Question: How do I write 2+3?\n\nAnswer: "
    with pytest.raises(ValueError, match="has no reward_function"):
        read.reward("eval", 0, "5")
    with pytest.raises(ConfigError, match=r"no rule that could score or evaluate .*set reward_function; or a reward.path"):
        load_config("a3po/setup1", overrides=["task={name: stack_exchange, options: {}}"])
    assert load_config("oppo/stackexchange_7b", "paper").task.name == "stack_exchange"  # which has a reward model


def test_a_file_is_cut_into_rows_for_training_and_the_last_ones_for_evaluation(tmp_path):
    read = task("gsm8k", path=write(tmp_path, "gsm8k"), held_out=3)
    assert (read.size("train"), read.size("eval")) == (7, 3)
    assert "7 sweets" in read.prompt("eval", 2)[0]["content"] and "12 pages" in read.prompt("train", 5)[0]["content"]
    both = task("gsm8k", path=write(tmp_path, "gsm8k"), eval_path=write(tmp_path, "other", ROWS["gsm8k"][:4]))
    assert (both.size("train"), both.size("eval")) == (10, 4)
    with pytest.raises(ValueError, match="10 rows, of which held_out=512 are for evaluation: lower it, or name an eval_path"):
        task("gsm8k", path=write(tmp_path, "gsm8k")).size("train")


def test_a_folder_holds_both_splits(tmp_path):
    write(tmp_path, "train", ROWS["gsm8k"])
    write(tmp_path, "test", ROWS["gsm8k"][:2])
    read = task("gsm8k", path=str(tmp_path))
    assert (read.size("train"), read.size("eval")) == (10, 2)


def test_sets_for_evaluation_are_not_trained_on(tmp_path):
    with pytest.raises(ValueError, match="for evaluation only: train on another task"):
        task("math500", path=write(tmp_path, "math500")).size("train")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no column answer, question; it has prompt, solution: change prompt_template"):
        task("gsm8k", eval_path=write(tmp_path, "dataset")).size("eval")
    with pytest.raises(ValueError, match="has no column word; it has prompt, solution"):
        task("dataset", path=write(tmp_path, "dataset"), held_out=2, reward_function="test_tasks:shout").size("train")
    with pytest.raises(ValueError, match="has no column solution; it has question, answer"):
        task("dapo_math", eval_path=write(tmp_path, "gsm8k"), prompt_template="{question}").size("eval")
    with pytest.raises(ValueError, match="'no_module:f' cannot be imported"):
        task("dataset", path=write(tmp_path, "dataset"), held_out=2, reward_function="no_module:f").size("train")
    with pytest.raises(ValueError, match="is async, which is not supported"):
        task("dataset", path=write(tmp_path, "dataset"), held_out=2, reward_function="test_tasks:later").size("train")
    (tmp_path / "broken.jsonl").write_text('{"question": "a"}\n{"question": \n')
    with pytest.raises(ValueError, match="cannot load.*broken.jsonl.*one JSON object a line"):
        task("gsm8k", eval_path=str(tmp_path / "broken.jsonl")).size("eval")


def test_without_a_network_the_error_says_what_works(monkeypatch, tmp_path):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="cannot load the data set 'openai/gsm8k', split 'test'.*option path.*HF_HUB_OFFLINE=1"):
        task("gsm8k").size("eval")


# Reward functions


def test_a_trl_reward_function_gets_what_trl_gives_it(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "Say it"}], "word": "hey"}, {"prompt": [{"role": "user", "content": "Again"}], "word": "ho"}]
    read = task("dataset", path=write(tmp_path, "shout", rows), held_out=1, reward_function="test_tasks:shout")
    assert read.prompt("train", 0) == [{"role": "user", "content": "Say it"}]
    assert read.reward("train", 0, "hey hey") == 2.0 and read.reward("eval", 0, "hey hey") == 0.0


def test_a_text_prompt_stays_text_and_so_does_the_completion(tmp_path):
    read = task("dataset", path=write(tmp_path, "plain", [{"prompt": "1="}, {"prompt": "2="}]), held_out=1, reward_function="test_tasks:even_digits")
    assert read.prompt("eval", 0) == "2=" and read.reward("eval", 0, "1234") == 0.5


def test_no_decision_is_a_failed_grade(tmp_path):
    read = task("dataset", path=write(tmp_path, "dataset"), held_out=2, reward_function="test_tasks:undecided")
    with pytest.raises(ValueError, match="returned None"):
        read.reward("train", 0, "5")


def test_a_run_trains_on_a_local_file_with_a_reward_function(tiny, tmp_path):
    file = write(tmp_path, "digits", [{"prompt": f"{i}="} for i in range(30)])
    chosen = TaskConfig(name="dataset", options={"path": file, "held_out": 6, "reward_function": "test_tasks:even_digits"})
    x = experiment(tiny, "loglinear", f"task={json.dumps(chosen.model_dump())}", "schedule.steps=2", "schedule.eval_every=2")
    records, _ = train(x, tmp_path / "policy")
    assert [record.step for record in records] == [0, 1, 2] and 0 < records[1].metrics["rollout/reward_mean"] < 1
    assert records[-1].rewards["eval"].shape == (6, 2)


def test_a_run_is_another_one_when_its_file_or_reward_function_changes(tiny, tmp_path):
    file = write(tmp_path, "digits", [{"prompt": f"{i}="} for i in range(30)])
    options = {"path": file, "held_out": 6, "reward_function": "tiny:fingerprint"}
    x = experiment(tiny, "loglinear", f"task={json.dumps({'name': 'dataset', 'options': options})}")
    before = identity.run_hash(x, 1)
    assert identity.run_hash(x, 1) == before
    write(tmp_path, "digits", [{"prompt": f"{i}="} for i in range(31)])
    os.utime(file, ns=(0, 0))
    assert identity.run_hash(x, 1) != before


@pytest.mark.parametrize("key", ["model.path", "reward.path", "critic.path"])
def test_a_run_is_another_one_when_the_weights_of_a_model_change(tmp_path, key):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    x = load_config("oppo/stackexchange_7b", "smoke", [f"{key}={tmp_path}", f"critic.shared={json.dumps(key != 'critic.path')}"])
    before = identity.run_hash(x, 1)
    weights.write_bytes(b"other")
    os.utime(weights, ns=(0, 0))
    assert identity.run_hash(x, 1) != before


# Long prompts, benchmarks


def test_rows_with_long_prompts_give_way_to_the_next(recwarn):
    class Mixed(EvenDigits):
        def prompt(self, split: str, row: int) -> str:
            return "1" * (row + 1)

    def first(task, **limits) -> list[int]:
        prompts = Prompts(task, lambda text: [1] * len(text), seed=1, n=1, max_new_tokens=4, **limits)
        return [request.row for request in prompts.next(30)]

    order = first(Mixed(), max_prompt_tokens=40)
    assert sorted(order) != order and len(set(order)) == 30 and not recwarn.list
    with pytest.warns(UserWarning, match=LEFT_OUT):
        short = first(Mixed(), max_prompt_tokens=20)
    assert max(short) < 20 and [b for a, b in zip(order, short, strict=True) if a < 20] == [a for a in order if a < 20]
    with warnings.catch_warnings(), pytest.raises(ValueError, match="the prompt has .* tokens, sampler.max_prompt_tokens is 0"):
        warnings.simplefilter("ignore")
        first(Mixed(), max_prompt_tokens=0)


def test_a_benchmark_smaller_than_the_evaluation_is_taken_whole(tiny, tmp_path):
    digits = {"path": write(tmp_path, "few", [{"prompt": f"{i}="} for i in range(5)]), "held_out": 3, "reward_function": "test_tasks:even_digits"}
    benchmarks = json.dumps({"few": {"name": "dataset", "options": digits}})
    x = experiment(tiny, "loglinear", f"evaluation.benchmarks={benchmarks}", "schedule.steps=1", "schedule.eval_every=1")
    records, _ = train(x, tmp_path / "policy")
    assert records[0].rewards["few"].shape == (3, 1) and records[0].rewards["eval"].shape == (6, 2)


# reasoning-gym

gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: pip install 'nowait-rl[data]'")


@gym
def test_a_reasoning_gym_task_is_made_and_graded_by_the_package():
    read = task("reasoning_gym:chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    prompts = [read.prompt("train", row)[0]["content"] for row in range(20)]
    assert read.prompt("train", 3)[0]["content"] == prompts[3] and len(set(prompts)) > 10
    assert read.size("train") == 100_000 and prompts != [read.prompt("eval", row)[0]["content"] for row in range(20)]
    for row, prompt in enumerate(prompts):
        terms = prompt.partition("problem: ")[2].partition(" =")[0].split()
        answer = int(terms[0]) + (1 if terms[1] == "+" else -1) * int(terms[2])
        assert read.reward("train", row, f"I think <answer>0</answer>, no, <answer>{answer}</answer>") == 1.0
        assert read.reward("train", row, f"<answer>{answer + 1}</answer>") < 1.0
        assert read.reward("train", row, str(answer)) == 0.0


@gym
def test_reasoning_gym_errors_name_the_remedy():
    with pytest.raises(ConfigError, match="no task 'chain_sums'; did you mean chain_sum?"):
        load_config("a3po/setup1", overrides=["task={name: 'reasoning_gym:chain_sums'}"])
    with pytest.raises(ValueError, match="chain_sum: .*unexpected keyword argument 'min_term'"):
        task("reasoning_gym:chain_sum", min_term=2)


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match=r"pip install 'nowait-rl\[data\]'"):
        task("reasoning_gym:leg_counting")


# All rows


@pytest.mark.parametrize(("file", "rows"), [("gsm8k_test", 1319), ("gsm8k_train", 7473), ("aime24", 30), ("math500", 500)])
def test_each_answer_of_a_whole_set_is_right_for_its_own_problem_and_wrong_for_the_one_before(file, rows):
    name, path = file.partition("_")[0], whole(file)
    read, answers = task(name, eval_path=path), [json.loads(line)["answer"] for line in Path(path).read_text().splitlines()]
    responses = answers if name == "gsm8k" else [rf"So it is \boxed{{{answer}}}." for answer in answers]
    finals = [answer.rpartition("####")[2].strip().replace(",", "") for answer in answers]
    assert read.size("eval") == len(answers) == rows
    assert [i for i, response in enumerate(responses) if read.reward("eval", i, response) != 1.0] == []
    same = {(finals[i], finals[i + 1]) for i in range(rows - 1) if read.reward("eval", i, responses[i + 1]) == 1.0}
    assert {(a, b) for a, b in same if a != b} <= {("5", "x=5")}  # which do say the same


def test_published_solutions_to_gsm8k_get_their_published_grades():
    solutions = [json.loads(line) for line in Path(whole("gsm8k_model_solutions")).read_text().splitlines()]
    read = task("gsm8k", eval_path=whole("gsm8k_test"))
    models = [key for key in solutions[0] if key not in ("question", "ground_truth")]
    responses = [(i, row[model]["solution"].replace("A:", "####"), row[model]["is_correct"]) for i, row in enumerate(solutions) for model in models]
    assert len(responses) == 4 * 1319 and sum(correct for *_, correct in responses) == 2001
    assert [response for i, response, correct in responses if read.reward("eval", i, response) != correct] == []
