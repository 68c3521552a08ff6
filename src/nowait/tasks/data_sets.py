"""Tasks whose rows are a data set: of the Hugging Face hub, or local JSON lines with the same columns. Options replace what a name below stands for.

Names, configs and columns are those of the hub at the time of writing; `revision` pins a commit.
"""

from __future__ import annotations

import inspect
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nowait.config import Model
from nowait.runtime.device import resolve
from nowait.tasks import Split

if TYPE_CHECKING:
    from datasets import Dataset

COLUMN = re.compile(r"\{([A-Za-z_]\w*)\}")  # in a template
NO_COLUMNS = {"prompt", "completion", "completion_ids"}  # which TRL keeps from reward functions, as it has arguments of its own for them

LOCAL = "What is expected is one JSON object a line, with the same columns in each"
REMOTE = "Set the task's option path to a local folder or JSON lines file; HF_HUB_OFFLINE=1 finds what was loaded before without asking the hub"


class DataSet(Model):
    """Options of the task, and the task itself. Its rows are loaded when they are first asked for."""

    path: str  # hub name, or a local folder or JSON lines file
    config: str = ""  # of the hub's data set
    data_dir: str = ""  # a folder in it
    revision: str = ""  # commit or tag of it
    train_split: str = "train"  # may be a slice, such as train[:1000]; empty: for evaluation only
    eval_split: str = ""  # empty, or `path` a file: the last `held_out` rows of the training split, which are not trained on
    eval_path: str = ""  # where the rows for evaluation are, all of them, if not at `path`
    held_out: Annotated[int, Field(ge=1)] = 512
    prompt_template: str = ""  # text with {column} in it; empty: the column `prompt` as it is, text or messages
    chat: bool = True  # the template makes a user's message, for the tokenizer's chat template; false: plain text
    reward_function: str = ""  # module:function, called as TRL calls it, with one response at a time; empty: a reward model scores

    def size(self, split: Split) -> int:
        """Number of rows. Loads them; raises ValueError where they, a column, or the reward function cannot be had, with a remedy."""
        return len(_rows(self, split))

    def prompt(self, split: Split, row: int) -> str | list[dict[str, str]]:
        """Text, or messages."""
        return self._prompt(_rows(self, split)[row])

    def reward(self, split: Split, row: int, response: str) -> float:
        """What the reward function gives. Raises ValueError where there is none, or where it gives None."""
        if not self.reward_function:
            raise ValueError(f"{self.path} has no reward_function: a reward model scores it (reward.path)")
        record = _rows(self, split)[row]
        prompt = self._prompt(record)
        completion = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
        columns = {name: [value] for name, value in record.items() if name not in NO_COLUMNS}
        (score,) = resolve(self.reward_function)(prompts=[prompt], completions=[completion], **columns)
        if score is None:
            raise ValueError(f"{self.reward_function} returned None, which is no reward")
        return float(score)

    def _prompt(self, record: dict) -> str | list[dict[str, str]]:
        if not self.prompt_template:
            return record["prompt"]
        words = COLUMN.sub(lambda column: str(record[column[1]]), self.prompt_template)
        return [{"role": "user", "content": words}] if self.chat else words


@lru_cache(maxsize=8)
def _rows(task: DataSet, split: Split) -> Dataset:
    elsewhere = split == "eval" and bool(task.eval_path)
    path = str(Path(task.eval_path if elsewhere else task.path).expanduser())
    name = task.eval_split if split == "eval" else task.train_split
    if split == "train" and not name:
        raise ValueError(f"{task.path} is for evaluation only: train on another task, or name its task.options.train_split")
    divided = bool(task.train_split) and not task.eval_path and (not task.eval_split or Path(path).is_file())
    rows = _load(path, task.config, task.data_dir, task.revision, name or task.train_split)
    if divided:
        kept = len(rows) - task.held_out
        if kept < 1:
            raise ValueError(f"{path} has {len(rows)} rows, of which held_out={task.held_out} are for evaluation: lower it, or name an eval_path")
        rows = rows.select(range(kept) if split == "train" else range(kept, len(rows)))
    _check_columns(task, path, rows.column_names)
    return rows


@lru_cache(maxsize=8)
def _load(path: str, config: str, data_dir: str, revision: str, split: str) -> Dataset:
    from datasets import load_dataset

    local = Path(path).exists()
    if not local and Path(path).suffix in (".json", ".jsonl"):
        raise ValueError(f"no such file: {path}")
    try:
        if Path(path).is_file():
            return load_dataset("json", data_files=path, split="train")
        of_hub = {} if local else {"name": config or None, "data_dir": data_dir or None, "revision": revision or None}
        return load_dataset(path, split=split, **of_hub)
    except Exception as error:  # of many kinds
        remedy = LOCAL if local else REMOTE
        raise ValueError(f"cannot load the data set {path!r}, split {split!r}: {error.__cause__ or error}. {remedy}") from error


def _check_columns(task: DataSet, path: str, columns: list[str]) -> None:
    """Raise ValueError for a column that the prompt or the reward function needs and there is not."""
    needed = set(COLUMN.findall(task.prompt_template) or ["prompt"])
    if task.reward_function:
        function = resolve(task.reward_function)
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"reward_function {task.reward_function} is async, which is not supported: make it a plain function")
        kinds = inspect.signature(function).parameters.values()
        needed |= {p.name for p in kinds if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"prompts", "completions"}
    if missing := sorted(needed - set(columns)):
        raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(columns)}: change prompt_template or reward_function")


ASK = "\nReason step by step, and give the final answer in \\boxed{}."
RULES, MATH = "nowait.tasks.graders:", "nowait.tasks.mathematics:by_"
dataset = DataSet
gsm8k = partial(DataSet, path="openai/gsm8k", config="main", eval_split="test", prompt_template="{question}" + ASK, reward_function=RULES + "gsm8k")
dapo_math = partial(  # the original repeats its rows about a hundred times; this one has each once, `en` those in English
    DataSet, path="open-r1/DAPO-Math-17k-Processed", config="en", prompt_template="{prompt}" + ASK, reward_function=MATH + "solution"
)
_mathematics = partial(DataSet, train_split="", prompt_template="{problem}" + ASK, reward_function=MATH + "answer")
math500 = partial(_mathematics, path="HuggingFaceH4/MATH-500", eval_split="test")
aime24 = partial(_mathematics, path="HuggingFaceH4/aime_2024", eval_split="train")
stack_exchange = partial(  # prompts as in TRL's example on these data; a reward model scores
    DataSet, path="lvwerra/stack-exchange-paired", data_dir="data/rl", prompt_template="Question: {question}\n\nAnswer: ", chat=False
)
opencoder = partial(  # of Stage 2 the part that has tests
    DataSet,
    path="OpenCoder-LLM/opc-sft-stage2",
    config="educational_instruct",
    prompt_template="{instruction}\nWrite a Python function named `{entry_point}`, in one code block.",
    reward_function=RULES + "program",
)
