"""The shipped reward model: preferences about solutions of the embedded task, and its training on them (Bradley and Terry 1952).

What is preferred: a right answer before a wrong one, whatever the style; of two right ones the tidier. A solution is the tidier the larger the
share of its steps that restate their operands (`7+3=10;` instead of `10;`): a policy trained on this model grows longer, as in RLHF on human
preferences. Some responses are written (with wrong sums, with a wrong answer under right sums, or cut short), others are a policy's own samples.

A preference says little about where a solution went wrong, too little for minutes of training. So the model grows out of a policy that knows the
task, and while it learns, a second head that is not kept tells right tokens from wrong ones.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from nowait import assets
from nowait.assets import WIDEST, RewardRecipe, character_tokenizer
from nowait.batch import pad
from nowait.tasks import Split
from nowait.tasks.arithmetic import Arithmetic, solution
from nowait.tasks.prompts import make_request
from nowait.warm_start import fit, packed, reproducible, write

SAMPLES = 8  # of a policy, per prompt
SAMPLED_SHARE = 8  # one prompt in so many is answered by the policy
TIDY_SHARE = 0.25  # of the pairs in two styles, those of which both are right
POOL = 4096  # pairs sorted by length at a time
LONGEST = 240  # tokens of a response
CENTRED = 0.01  # weight of the squared sum of a pair's scores, which keeps their mean near 0: preferences leave it open
CODE, LOGIT, GAIN, FOCUS = 0.3, 0.02, 20.0, 8.0  # sizes at which what is added neither drowns nor disturbs
EOS = "<eos>"


@dataclass(frozen=True)
class Pair:
    """A prompt with two responses, the better one first; a response that was not cut short ends in `<eos>`."""

    kind: str
    prompt: str
    better: str
    worse: str


def tidiness(response: str) -> float:
    """Share of the steps before the answer that restate their operands."""
    steps = response.partition("#")[0].split(";")[:-1]
    return sum("=" in step for step in steps) / max(1, len(steps))


def step_labels(prompt: str, response: str) -> list[tuple[int, bool]]:
    """Places in a response, up to the first wrong one of each step, and whether a right solution could stand there, given the steps before."""
    operands, labels, place = list(map(int, prompt.rstrip("=").split("+"))), [], 0
    total = operands.pop(0)
    for step in re.findall("[^;]*;|[^;]+$", response.replace(EOS, ";")):
        if operands:
            operand = operands.pop(0)
            wanted = (f"{total + operand};", f"{total}+{operand}={total + operand};")
        else:
            wanted = (f"#{total};",)
        for i in range(len(step)):
            labels.append((place + i, any(text.startswith(step[: i + 1]) for text in wanted)))
            if not labels[-1][1]:
                break
        place += len(step)
        written = re.findall("[0-9]+", step)
        total = int(written[-1]) if written else -1
    return labels


def written_pair(operands: list[int], rng: np.random.Generator) -> Pair:
    """Two solutions of a chain. A wrong one keeps the right one's style half of the time, so that style tells nothing about rightness."""
    prompt = "+".join(map(str, operands)) + "="
    one, two = _styles(operands, rng)
    if rng.random() < TIDY_SHARE and one != two:
        return Pair("tidy > sloppy", prompt, solution(operands, True) + EOS, solution(operands, False) + EOS)
    kind, wrong = _wrong(operands, one if rng.random() < 0.5 else two, rng)
    return Pair(f"right > {kind}", prompt, solution(operands, one) + EOS, wrong)


def _styles(operands: list[int], rng: np.random.Generator) -> tuple[int, int]:
    """Whether each of two solutions restates; long chains do not, as among the demonstrations that policies know."""
    return tuple(rng.integers(2, size=2)) if len(operands) <= WIDEST.restate_cap else (0, 0)


def _wrong(operands: list[int], restate: bool, rng: np.random.Generator) -> tuple[str, str]:
    """Kind and text of a solution with a wrong answer."""
    right, kind = solution(operands, restate), rng.choice(["corrupted", "cut short", "wrong answer"], p=[0.6, 0.2, 0.2])
    if kind == "corrupted":
        wrong = rng.random(len(operands) - 1) < WIDEST.corrupted_share
        wrong[rng.integers(len(wrong))] = True
        return kind, solution(operands, restate, (rng.integers(1, 4, len(wrong)) * wrong).tolist()) + EOS
    steps, _, answer = right.partition("#")
    if kind == "wrong answer":
        near = [int(answer) + shift for shift in (-10, -3, -2, -1, 1, 2, 3, 10)]
        return kind, f"{steps}#{rng.choice([number for number in near if number > 0])}{EOS}"
    return kind, right[: rng.integers(1, len(right))] + EOS * int(rng.integers(2))


def sampled_pairs(task: Arithmetic, policy: str, split: Split, rows: list[int], rng: np.random.Generator) -> Iterator[Pair]:
    """Pairs among a policy's samples at temperature 1 for each of the rows: a right and a wrong one, a tidier and a less tidy right one."""
    for row, responses in zip(rows, _samples(task, policy, split, rows), strict=True):
        prompt = task.prompt(split, row)
        graded = {text: task.reward(split, row, text.removesuffix(EOS)) for text in dict.fromkeys(responses)}
        right, wrong = ([text for text, reward in graded.items() if reward == value] for value in (1.0, 0.0))
        if right and wrong:
            yield Pair("sampled right > wrong", prompt, str(rng.choice(right)), str(rng.choice(wrong)))
        less, more = min(right, key=tidiness, default=""), max(right, key=tidiness, default="")
        if tidiness(less) < tidiness(more):
            yield Pair("sampled tidy > sloppy", prompt, more, less)


def _samples(task: Arithmetic, policy: str, split: Split, rows: list[int]) -> list[list[str]]:
    from nowait.training import load_tokenizer
    from nowait.workers.sampler import HFSampler, generate

    encode, decode, _ = load_tokenizer(f"asset:{policy}")
    wanted = [make_request(task, encode, split, i, row, SAMPLES, 128, LONGEST) for i, row in enumerate(rows)]
    batch = generate(HFSampler(f"asset:{policy}", slots=128, capacity=128 + LONGEST, stream=2), wanted)
    texts = [decode(token[:length].tolist()) for token, length in zip(batch.token, batch.length, strict=True)]
    return [texts[i : i + SAMPLES] for i in range(0, len(texts), SAMPLES)]


def pairs(recipe: RewardRecipe, split: Split, first: int, count: int) -> list[Pair]:
    """Pairs for the rows first to first + count - 1 of a split; no two runs of rows share random numbers."""
    task, rng = recipe.task, np.random.default_rng([recipe.seed, split == "eval", first])
    rows = list(range(first, first + count))
    sampled, written = rows[::SAMPLED_SHARE], [row for row in rows if (row - first) % SAMPLED_SHARE]
    found = [written_pair(task.operands(split, row), rng) for row in written]
    return found + list(sampled_pairs(task, recipe.samples_of, split, sampled, rng))


def train_reward(recipe: RewardRecipe, out: Path) -> dict:
    """Train on preferences; writes model, tokenizer and manifest (with the accuracy on held-out pairs) to `out` and returns the manifest."""
    start = time.process_time()
    with reproducible(recipe.seed):
        model = grow(Qwen2ForCausalLM.from_pretrained(assets.path(recipe.start)), recipe)
        model.steps = torch.nn.Linear(recipe.hidden_size, 1)  # marks wrong steps while the model learns, and is then thrown away
        fit(model, recipe, _batches(recipe), partial(preference_loss, model))
        del model.steps
        seconds = time.process_time() - start
        results = accuracy(model, pairs(recipe, "eval", 0, recipe.eval_prompts))
    return write(recipe, model, out, seconds, results)


def grow(policy: Qwen2ForCausalLM, recipe: RewardRecipe) -> Qwen2ForSequenceClassification:
    """A reward model of the recipe's size that begins as the policy: the first units of its residual stream hold the policy's hidden states.

    Of the further units some hold a code of the token, which the policy's own stream soon drowns. Further MLP units, layers and the score write
    nothing at first, but for the first further layer (see `_compare`).
    """
    old, depth, width = policy.model.state_dict(), policy.config.num_hidden_layers, policy.config.hidden_size
    sizes = {"hidden_size": recipe.hidden_size, "intermediate_size": recipe.intermediate_size, "num_hidden_layers": recipe.layers}
    kept = {k: v for k, v in policy.config.to_dict().items() if k not in ("architectures", "id2label", "label2id", "layer_types")}
    model = Qwen2ForSequenceClassification(Qwen2Config(**kept | sizes | {"num_labels": 1, "head_dim": width // policy.config.num_attention_heads}))
    with torch.no_grad():
        for name, new in model.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                new.zero_()
            elif name.endswith("_proj.weight") and name in old:
                new[:, width:] = 0  # the policy's layers see its own units only
            if name in old:
                new[tuple(map(slice, old[name].shape))] = old[name]
            if "norm" in name:
                new[:width] *= (width / recipe.hidden_size) ** 0.5  # the mean square is now over more units, most of them empty
                new[width:] = GAIN if name not in old else float(name == "norm.weight")
        codes = model.model.embed_tokens.weight[:, width:]
        codes.copy_(CODE * torch.eye(*codes.shape))
        _compare(model.model.layers[depth], policy)
        model.score.weight.zero_()
    return model


def _compare(layer: torch.nn.Module, policy: Qwen2ForCausalLM) -> None:
    """Let a layer bring the policy's logits from one position before beside the code of the token, and its first MLP units multiply the two."""
    attention, mlp, embedding = layer.self_attn, layer.mlp, policy.model.embed_tokens.weight
    (tokens, width), half = embedding.shape, attention.head_dim // 2
    angle = 10_000.0 ** (-torch.arange(half) / half)  # of rotary positions, per step back
    here, before = torch.cat([torch.ones(half), torch.zeros(half)]), torch.cat([angle.cos(), angle.sin()])
    for projection, direction in ((attention.q_proj, here), (attention.k_proj, before)):
        projection.weight.zero_()
        projection.bias.copy_(FOCUS * direction.repeat(len(projection.bias) // len(direction)))
    layer.input_layernorm.weight[:width] = policy.model.norm.weight * (width / len(layer.input_layernorm.weight)) ** 0.5
    attention.v_proj.weight[:tokens, :width] = LOGIT * embedding
    attention.v_proj.weight[:tokens, width:] = 0
    code, logit = torch.arange(width, width + tokens), torch.arange(width + tokens, width + 2 * tokens)
    attention.o_proj.weight[logit, torch.arange(tokens)] = 1
    unit = torch.arange(tokens)
    for projection, source, gain in ((mlp.gate_proj, code, 4.0), (mlp.up_proj, logit, 1.0)):
        projection.weight[:tokens] = 0
        projection.weight[unit, source] = gain


@dataclass(frozen=True)
class Batch:
    """P pairs as tensors, the better halves first."""

    pairs: list[Pair]
    token: torch.Tensor  # int64 [2 P, T], right-padded
    length: torch.Tensor  # int64 [2 P]
    place: torch.Tensor  # int64 [2, N]: row and column of the labelled tokens
    right: torch.Tensor  # float32 [N]: their labels


def preference_loss(model: Qwen2ForSequenceClassification, batch: Batch) -> torch.Tensor:
    """Mean of -log sigmoid(better - worse) over the pairs of a batch, plus the balanced cross-entropy of the labels."""
    hidden, better, worse = _scores(model, batch)
    losses = binary_cross_entropy_with_logits(model.steps(hidden[*batch.place])[:, 0], batch.right, reduction="none")
    steps = sum((losses * side).sum() / side.sum().clamp(min=1) for side in (batch.right, 1 - batch.right))
    return -logsigmoid(better - worse).mean() + CENTRED * (better + worse).square().mean() + steps


def _scores(model: Qwen2ForSequenceClassification, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [2 P, T, hidden], and the scores [P] of the better and of the worse responses, at their last tokens."""
    hidden = model.model(input_ids=batch.token, use_cache=False).last_hidden_state
    return hidden, *model.score(hidden[torch.arange(len(hidden)), batch.length - 1])[:, 0].chunk(2)


def _batches(recipe: RewardRecipe) -> Iterator[Batch]:
    """Batches of pairs of similar length."""
    rng = np.random.default_rng([recipe.seed, 2])
    for first in range(0, recipe.task.size("train") - POOL, POOL):
        batches = list(_packed(pairs(recipe, "train", first, POOL), recipe.batch_tokens))
        for i in rng.permutation(len(batches)):
            yield batches[i]


def _packed(found: list[Pair], batch_tokens: int) -> Iterator[Batch]:
    """Pairs by length, in batches of at most so many padded tokens."""
    tokenizer = character_tokenizer()
    rows = [[np.array(row) for row in tokenizer([p.prompt + p.better, p.prompt + p.worse])["input_ids"]] for p in found]
    for chosen in packed([max(map(len, two)) for two in rows], batch_tokens // 2):  # the two halves of a pair
        several, flat = [found[i] for i in chosen], [rows[i][half] for half in (0, 1) for i in chosen]
        texts = [(p.prompt, p.better) for p in several] + [(p.prompt, p.worse) for p in several]
        labels = [(i, len(prompt) + t, right) for i, (prompt, text) in enumerate(texts) for t, right in step_labels(prompt, text)]
        row, column, right = zip(*labels, strict=True)
        token, length = torch.from_numpy(pad(flat, tokenizer.pad_token_id, np.int64)), torch.tensor([len(row) for row in flat])
        yield Batch(several, token, length, torch.tensor([row, column]), torch.tensor(right, dtype=torch.float32))


@torch.no_grad()
def accuracy(model: Qwen2ForSequenceClassification, found: list[Pair]) -> dict:
    """By kind of pair: their number, the share whose better response scores higher, and its standard error."""
    hits: dict[str, list[bool]] = {}
    for batch in _packed(found, 8192):
        _, better, worse = _scores(model, batch)
        for pair, hit in zip(batch.pairs, (better > worse).tolist(), strict=True):
            hits.setdefault(pair.kind, []).append(hit)
    rates = {kind: (len(h), float(np.mean(h))) for kind, h in sorted(hits.items())}
    return {k: {"pairs": n, "accuracy": round(p, 4), "standard_error": round((p * (1 - p) / n) ** 0.5, 4)} for k, (n, p) in rates.items()}
