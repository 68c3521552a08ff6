from __future__ import annotations

import json
import logging
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EXACT, plain_logp, save_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Tokenizer

from nowait import checkpoint
from nowait.assets import character_tokenizer
from nowait.batch import LENGTH, RUNNING, STOP, Request, Segments, join
from nowait.workers.streamed import StreamedReference, StreamedReward, WholeReward, load_reward

EOS, N = 15, 2
CAPACITY, TEMPERATURE = 48, 0.7
TIGHT = 1e-5  # what chunking may change


def save_reward(folder, *, kind: str = "qwen2", tokenizer=None, **options) -> str:
    """A random reward model whose scores are far apart, beside a tokenizer; returns its folder."""
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 256, "initializer_range": 0.3, "num_labels": 1, "pad_token_id": 14, "eos_token_id": EOS, "bos_token_id": None}
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **sizes | more | options)).save_pretrained(folder)
    (tokenizer or character_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory) -> str:
    return save_reward(tmp_path_factory.mktemp("reward"))


def load(folder: str, policy: str, **options):
    return load_reward(folder, policy, **{"slots": 12, "capacity": CAPACITY, "n": N} | options)


def reference(folder: str, **options) -> StreamedReference:
    return StreamedReference(folder, **{"slots": 12, "capacity": CAPACITY, "temperature": TEMPERATURE, "n": N} | options)


def prompts(count: int, first: int = 0) -> list[Request]:
    """Prompts of 1 to 6 tokens; request `first + i` is the same in every call."""
    made = []
    for i in range(first, first + count):
        made.append(Request(i, np.random.default_rng(i).integers(0, 14, 1 + i % 6).astype(np.int32), N, 24))
    return made


def answers(requests: list[Request]) -> dict[int, np.ndarray]:
    """A response per sequence, of 1 to 24 tokens: even sequences end with EOS, odd ones are cut off; the padding token occurs inside."""
    made = {}
    for sequence in (s for r in requests for s in r.sequences):
        random = np.random.default_rng(1000 + sequence)
        made[sequence] = random.integers(0, 15, random.integers(1, 25)).astype(np.int32)
        if sequence % 2 == 0:
            made[sequence][-1] = EOS
    return made


def segments(pieces: dict[int, np.ndarray], finish: dict[int, int] | None = None) -> Segments:
    """A decode round."""
    token = np.concatenate([np.empty(0, np.int32), *pieces.values()])
    offset = np.concatenate([[0], np.cumsum([len(p) for p in pieces.values()])]).astype(np.int64)
    ends = np.array([(finish or {}).get(s, RUNNING) for s in pieces], np.uint8)
    return Segments(np.array([*pieces], np.int64), offset, token, np.zeros(len(token), np.float32), ends, 0)


def rounds(responses: dict[int, np.ndarray], chunk: int) -> list[Segments]:
    """What a sampler would hand over, `chunk` tokens of each unfinished sequence at a time."""
    made = []
    for start in range(0, max(map(len, responses.values())), chunk):
        pieces = {s: r[start : start + chunk] for s, r in responses.items() if len(r) > start}
        ended = {s: STOP if r[-1] == EOS else LENGTH for s, r in responses.items() if len(r) <= start + chunk}
        made.append(segments(pieces, ended))
    return made


def read(worker, requests: list[Request], chunk: int = 100) -> list:
    """All values, with every sequence read `chunk` tokens at a time."""
    worker.admit(requests)
    for part in rounds(answers(requests), chunk):
        worker.prefill(part)
    return worker.finish([r.id for r in requests])


@torch.no_grad()
def plain_scores(folder: str, requests: list[Request]) -> list[list[float]]:
    """Scores by ordinary forward passes over one whole sequence each."""
    model, responses = AutoModelForSequenceClassification.from_pretrained(folder), answers(requests)
    model.config.pad_token_id = None  # otherwise a last token that is the padding token would be passed over
    whole = [[np.concatenate([r.prompt, responses[s]]) for s in r.sequences] for r in requests]
    return [[model(input_ids=torch.tensor(ids, dtype=torch.int64)[None]).logits.item() for ids in two] for two in whole]


def assert_same_log_probs(found: list, expected: list, atol: float) -> None:
    for one, two in zip(sum(found, []), sum(expected, []), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, two, atol=atol)


ARCHITECTURES = [
    ("qwen2", {}),
    ("llama", {"num_key_value_heads": 1}),
    ("qwen3", {"head_dim": 16}),
    ("gpt2", {"num_key_value_heads": 4}),  # learned positions, another name of the backbone
]


@pytest.mark.parametrize(("kind", "options"), ARCHITECTURES)
@pytest.mark.parametrize("chunk", [3, 100])
def test_streamed_scores_are_the_models_own(tiny, tmp_path, kind, options, chunk):
    folder = save_reward(tmp_path, kind=kind, **options)
    worker, requests = load(folder, tiny), prompts(6)
    assert isinstance(worker, StreamedReward)
    expected = plain_scores(folder, requests)
    np.testing.assert_allclose(read(worker, requests, chunk), expected, atol=EXACT)
    assert np.std(expected) > 0.1


@pytest.mark.parametrize(("kind", "options"), ARCHITECTURES)
@pytest.mark.parametrize("chunk", [3, 100])
def test_streamed_log_probs_are_those_of_a_plain_forward_pass_at_the_training_temperature(tmp_path, kind, options, chunk):
    folder = save_model(tmp_path, kind=kind, **options)
    requests, model = prompts(6), AutoModelForCausalLM.from_pretrained(folder)
    responses = answers(requests)
    expected = [[plain_logp(model, r.prompt, responses[s], TEMPERATURE) for s in r.sequences] for r in requests]
    assert_same_log_probs(read(reference(folder), requests, chunk), expected, EXACT)


@pytest.mark.parametrize("chunk", [1, 2, 7, 23])
def test_values_do_not_depend_on_the_chunk(tiny, reward_folder, chunk):
    requests = prompts(6)
    np.testing.assert_allclose(read(load(reward_folder, tiny), requests, chunk), read(load(reward_folder, tiny), requests), atol=TIGHT)
    assert_same_log_probs(read(reference(tiny), requests, chunk), read(reference(tiny), requests), TIGHT)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_values_do_not_depend_on_cuts_order_company_or_deferral(tiny, reward_folder, seed):
    """Sequences are read in random pieces, some rounds joined; requests come, finish and go at any time, and their slots are taken again."""
    requests, worker, frozen = prompts(6), load(reward_folder, tiny, slots=6), reference(tiny, slots=6)
    responses, scores, logp, random = answers(requests), {}, {}, np.random.default_rng(seed)
    waiting, place = list(requests), {}
    while waiting or place:
        for _ in range(min(len(waiting), random.integers(0, 4 - len(place) // N))):
            request = waiting.pop(0)
            worker.admit([request])
            frozen.admit([request])
            place |= dict.fromkeys(request.sequences, 0)
        parts = []
        for _ in range(random.integers(1, 4)):
            pieces, ended = {}, {}
            for s in random.permutation([s for s in place if place[s] < len(responses[s])]).tolist():
                if width := random.integers(0, 12):
                    pieces[s] = responses[s][place[s] : place[s] + width]
                    place[s] += len(pieces[s])
                    ended[s] = LENGTH if place[s] == len(responses[s]) else RUNNING
            parts.append(segments(pieces, ended))
        assert worker.prefill(join(parts)) == frozen.prefill(join(parts))
        for r in {s // N for s in place}:
            if all(place[s] == len(responses[s]) for s in requests[r].sequences):
                scores[r], logp[r] = worker.finish([r])[0], frozen.finish([r])[0]
                for s in requests[r].sequences:
                    del place[s]
    np.testing.assert_allclose([scores[r.id] for r in requests], read(load(reward_folder, tiny), requests), atol=TIGHT)
    assert_same_log_probs([logp[r.id] for r in requests], read(reference(tiny), requests), TIGHT)


def test_values_do_not_depend_on_how_a_call_is_split_into_passes(tiny, reward_folder, monkeypatch):
    requests = prompts(6)
    expected = read(load(reward_folder, tiny), requests, 5), read(reference(tiny), requests, 5)
    monkeypatch.setattr("nowait.batch.PREFILL_TOKENS", 16)
    monkeypatch.setattr("nowait.workers.streamed.LOGIT_TOKENS", 3)
    np.testing.assert_allclose(read(load(reward_folder, tiny), requests, 5), expected[0], atol=TIGHT)
    assert_same_log_probs(read(reference(tiny), requests, 5), expected[1], TIGHT)


def test_each_token_is_read_once_and_the_prompt_with_the_first_piece(tiny, reward_folder):
    (request,) = prompts(1, first=3)  # 4 prompt tokens
    worker = load(reward_folder, tiny)
    worker.admit([request])
    one, two = request.sequences
    assert worker.prefill(segments({one: np.array([1, 2, 3], np.int32)})) == 4 + 3
    assert worker.prefill(segments({one: np.array([4], np.int32), two: np.array([1, 2], np.int32)})) == 1 + 4 + 2
    assert worker.prefill(segments({})) == 0


@pytest.mark.parametrize("padding", [EOS, 11, None])
def test_the_padding_token_of_a_streamed_model_does_not_matter(tiny, tmp_path, padding):
    folder = save_reward(tmp_path, pad_token_id=padding)
    worker, requests = load(folder, tiny), prompts(6)
    assert isinstance(worker, StreamedReward)
    np.testing.assert_allclose(read(worker, requests, 4), plain_scores(folder, requests), atol=EXACT)


def test_padding_reaches_no_position_that_the_model_lacks(tiny, tmp_path):
    """The second call reads the end of a sequence beside longer whole ones."""
    folder, (long, late) = save_reward(tmp_path, kind="gpt2", num_key_value_heads=4, max_position_embeddings=30), prompts(2, first=4)
    worker, token = load(folder, tiny, capacity=30), np.arange(24, dtype=np.int32) % 14
    worker.admit([long, late])
    one, two, three, four = (*long.sequences, *late.sequences)
    worker.prefill(segments({one: token[:8], three: token}, {three: LENGTH}))
    worker.prefill(segments({one: token[8:], two: token, four: token}, dict.fromkeys((one, two, four), LENGTH)))
    (first, second), (third, fourth) = worker.finish([long.id, late.id])
    assert (first, third) == pytest.approx((second, fourth), abs=TIGHT)


def test_a_response_may_fill_the_cache_to_the_last_place(tiny, reward_folder):
    requests = prompts(1, first=5)
    longest = len(requests[0].prompt) + 24
    tight, roomy = (read(load(reward_folder, tiny, slots=2, capacity=c), requests, 5) for c in (longest, 100))
    np.testing.assert_allclose(tight, roomy, atol=TIGHT)


@pytest.mark.parametrize("make", [lambda t, r: load(r, t), lambda t, r: reference(t)], ids=["reward", "reference"])
def test_a_restored_worker_continues_bit_for_bit(tiny, reward_folder, tmp_path, make):
    requests, worker = prompts(5), make(tiny, reward_folder)
    responses = answers(requests)
    first, *rest = rounds(responses, 6)
    worker.admit(requests)
    worker.prefill(first)
    worker.drop([1])  # a hole among the slots
    rest = [
        segments(
            {int(s): responses[s][6 * (i + 1) : 6 * (i + 2)] for s in part.sequence if s // N != 1},
            dict(zip(part.sequence, part.finish, strict=True)),
        )
        for i, part in enumerate(rest)
    ]
    checkpoint.save(tmp_path, 0, {"worker": worker.get_state()})
    restored = make(tiny, reward_folder)
    restored.admit(prompts(2, first=50))  # what it held before is gone
    restored.set_state(checkpoint.latest(tmp_path)[1]["worker"])
    for part in rest:
        assert worker.prefill(part) == restored.prefill(part)
    ids = [0, 2, 3, 4]
    for one, two in zip(sum(worker.finish(ids), []), sum(restored.finish(ids), []), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ValueError, match="requests 0 are not held"):
        restored.finish([0])


def test_bfloat16_caches_survive_a_checkpoint_too(tiny, reward_folder):
    requests, worker, restored = prompts(3), *(load(reward_folder, tiny, dtype="bfloat16") for _ in range(2))
    first, *rest = rounds(answers(requests), 6)
    worker.admit(requests)
    worker.prefill(first)
    restored.set_state(worker.get_state())
    for part in rest:
        worker.prefill(part)
        restored.prefill(part)
    assert worker.finish([0, 1, 2]) == restored.finish([0, 1, 2])


def test_an_incomplete_request_has_no_score_and_stays(tiny, reward_folder):
    requests, worker = prompts(2), load(reward_folder, tiny)
    worker.admit(requests)
    parts = rounds(answers(requests), 4)
    worker.prefill(parts[0])
    with pytest.raises(ValueError, match="requests 0, 1 are not complete"):
        worker.finish([0, 1])
    for part in parts[1:]:
        worker.prefill(part)
    assert len(worker.finish([1, 0])) == 2


def test_scores_come_in_the_order_asked_for(tiny, reward_folder):
    requests, worker = prompts(3), load(reward_folder, tiny)
    worker.admit(requests)
    for part in rounds(answers(requests), 100):
        worker.prefill(part)
    expected = plain_scores(reward_folder, requests)
    np.testing.assert_allclose(worker.finish([2, 0]), [expected[2], expected[0]], atol=EXACT)
    np.testing.assert_allclose(worker.finish([1]), [expected[1]], atol=EXACT)


def test_misuse_is_answered_by_name(tiny, reward_folder):
    worker = load(reward_folder, tiny, slots=4)
    with pytest.raises(ValueError, match="3 requests x 2 samples exceed the 4 free slots"):
        worker.admit(prompts(3))
    with pytest.raises(ValueError, match=r"request 7: 1 prompt \+ 99 new tokens exceed the cache of 48"):
        worker.admit([Request(7, np.array([1], np.int32), N, 99)])
    with pytest.raises(ValueError, match="request 7 has 3 samples, this worker was built for 2"):
        worker.admit([Request(7, np.array([1], np.int32), 3, 9)])
    worker.admit(prompts(2))
    with pytest.raises(ValueError, match="request 1 was admitted twice"):
        worker.admit(prompts(1, first=1))
    with pytest.raises(ValueError, match="sequence 9 was not admitted"):
        worker.prefill(segments({9: np.array([1], np.int32)}))
    worker.prefill(segments({0: np.array([1], np.int32)}, {0: STOP}))
    with pytest.raises(ValueError, match="sequence 0 had finished and got more tokens"):
        worker.prefill(segments({0: np.array([1], np.int32)}))


def test_a_score_that_is_not_a_number_raises(tiny, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(save_reward(tmp_path))
    model.score.weight.data[0, 0] = torch.nan
    worker = StreamedReward(model.eval(), slots=2, capacity=CAPACITY, n=N)
    with pytest.raises(FloatingPointError, match="request 0: the reward model's score is not finite"):
        read(worker, prompts(1))


# Models that cannot be streamed


def renumbered() -> Qwen2Tokenizer:
    """The characters of the task under other numbers, and padding by the end of sequence."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", *reversed("0123456789+=;#")])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token="<eos>", eos_token="<eos>", unk_token=None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "bert"}, "its attention looks ahead"),
        ({"kind": "mistral", "sliding_window": 47}, "window of 47 .*capacity of 48"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "full attention in every layer"),
        ({"tokenizer": renumbered()}, "its vocabulary is not the policy's"),
    ],
    ids=["bidirectional", "window", "windowed layers", "vocabulary"],
)
def test_what_cannot_be_streamed_is_scored_whole_with_a_warning(tiny, tmp_path, caplog, options, reason):
    with caplog.at_level(logging.WARNING):
        worker = load(save_reward(tmp_path, **options), tiny)
    assert isinstance(worker, WholeReward)
    assert caplog.records and all(word in caplog.text for word in ("reward.path", "whole"))
    assert re.search(reason, caplog.text)


@pytest.mark.parametrize("options", [{"kind": "bert"}, {"kind": "mistral", "sliding_window": 8, "pad_token_id": EOS}], ids=["bert", "window"])
def test_whole_scores_are_the_models_own(tiny, tmp_path, options):
    folder, requests = save_reward(tmp_path, **options), prompts(6)
    np.testing.assert_allclose(read(load(folder, tiny), requests, 5), plain_scores(folder, requests), atol=EXACT)


def test_another_vocabulary_reads_the_text_without_the_policys_special_tokens(tiny, tmp_path):
    folder, requests = save_reward(tmp_path, tokenizer=renumbered()), prompts(6)
    own, of_policy, responses = renumbered(), character_tokenizer(), answers(requests)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None

    def score(ids: np.ndarray) -> float:
        text = of_policy.decode([i for i in ids if i < 14])
        with torch.no_grad():
            return model(input_ids=torch.tensor([own(text)["input_ids"]])).logits.item()

    expected = [[score(np.concatenate([r.prompt, responses[s]])) for s in r.sequences] for r in requests]
    np.testing.assert_allclose(read(load(folder, tiny), requests, 5), expected, atol=EXACT)


def test_a_restored_whole_scorer_gives_the_same_scores(tiny, tmp_path):
    folder, requests = save_reward(tmp_path / "model", kind="bert"), prompts(3)
    worker, restored = load(folder, tiny), load(folder, tiny)
    first, *rest = rounds(answers(requests), 6)
    worker.admit(requests)
    assert worker.prefill(first) == 0
    checkpoint.save(tmp_path, 0, {"worker": worker.get_state()})
    restored.set_state(checkpoint.latest(tmp_path)[1]["worker"])
    for part in rest:
        worker.prefill(part)
        restored.prefill(part)
    assert worker.finish([0, 1, 2]) == restored.finish([0, 1, 2])


def test_a_text_longer_than_the_model_reads_is_refused(tiny, tmp_path):
    worker = load(save_reward(tmp_path, kind="bert", max_position_embeddings=16), tiny)
    with pytest.raises(ValueError, match=r"reward.path: .* the model reads 16: lower sampler.max_new_tokens"):
        read(worker, prompts(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_labels": 2}, "reward.path: .* has 2 labels"),
        ({"kind": "mistral", "sliding_window": 8, "pad_token_id": None}, None),  # the tokenizer names one
    ],
)
def test_only_models_with_one_label_are_rewards(tiny, tmp_path, options, message):
    folder = save_reward(tmp_path, **options)
    if message is None:
        assert isinstance(load(folder, tiny), WholeReward)
    else:
        with pytest.raises(ValueError, match=message):
            load(folder, tiny)


def test_a_whole_scorer_without_any_padding_token_is_refused(tiny, tmp_path):
    folder = save_reward(tmp_path, kind="mistral", sliding_window=8, pad_token_id=None)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "pad_token"}))
    with pytest.raises(ValueError, match=r"reward.path: .*no padding token: set pad_token_id"):
        load(folder, tiny)


def test_a_model_without_a_trained_head_and_a_folder_without_a_model_are_refused(tmp_path):
    policy = save_model(tmp_path / "policy", num_labels=1)
    with pytest.raises(ValueError, match=r"reward.path: .* lacks 1 trained weights, first score.weight"):
        load(policy, policy)
    with pytest.raises(ValueError, match="reward.path: cannot load .*nothing"):
        load(str(tmp_path / "nothing"), policy)


def test_a_reference_with_windowed_attention_is_refused(tmp_path):
    with pytest.raises(ValueError, match="slot cache needs full attention; this model's window of 47"):
        reference(save_model(tmp_path, kind="mistral", sliding_window=47))
