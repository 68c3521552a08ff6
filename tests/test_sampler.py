from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import EXACT, assert_named_when_not_finite, assert_plain, generate, plain_logp, requests, response, save_model, weights
from transformers import AutoModelForCausalLM

from nowait.batch import LENGTH, RUNNING, STOP, Request, Rollouts
from nowait.workers.sampler import HFSampler, pick, uniform

EOS, PAD = 15, 14


def sampler(folder: str, **options) -> HFSampler:
    return HFSampler(folder, **{"slots": 16, "capacity": 64, "seed": 1} | options)


def assert_same_responses(batch, expected) -> None:
    """Bit-equal but for log-probs, which rounding in other shapes moves a little."""
    for column in ("token", "length", "version", "finish"):
        np.testing.assert_array_equal(getattr(batch, column), getattr(expected, column))
    np.testing.assert_allclose(batch.logp_behav, expected.logp_behav, atol=EXACT)


@pytest.fixture(scope="module")
def another(tmp_path_factory) -> str:
    """A second model of the same shape."""
    return save_model(tmp_path_factory.mktemp("another"), seed=1)


@pytest.fixture(scope="module")
def sampled(tiny):
    """Eight requests of two samples, all at once."""
    return generate(sampler(tiny), requests(8))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_log_probs_are_those_of_a_plain_forward_pass_at_the_sampling_temperature(tiny, temperature):
    batch = generate(sampler(tiny, temperature=temperature), requests(8))
    assert_plain(tiny, batch, batch.logp_behav, temperature)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        ("mistral", {"sliding_window": 64}),  # as long as the cache
        ("gpt2", {"num_key_value_heads": 4}),  # learned positions
    ],
)
def test_other_architectures_sample_their_own_distribution(tmp_path, kind, settings):
    folder = save_model(tmp_path, kind=kind, **settings)
    batch = generate(sampler(folder), requests(4))
    assert_plain(folder, batch, batch.logp_behav, 1.0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_responses_do_not_depend_on_the_chunk(tiny, sampled, chunk):
    assert_same_responses(generate(sampler(tiny), requests(8), chunk), sampled)


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_responses_do_not_depend_on_the_slots(tiny, sampled, slots):
    assert_same_responses(generate(sampler(tiny, slots=slots), requests(8), 3), sampled)


def test_responses_do_not_depend_on_what_else_is_in_the_batch(tiny, sampled):
    alone = [generate(sampler(tiny), [request]) for request in requests(8)]
    for i in range(len(sampled)):
        batch, sample = alone[i // 2], i % 2
        np.testing.assert_array_equal(response(batch, sample), response(sampled, i))
        np.testing.assert_allclose(response(batch, sample, "logp_behav"), response(sampled, i, "logp_behav"), atol=EXACT)


def test_prefill_in_several_calls_gives_the_same_responses(tiny, sampled, monkeypatch):
    monkeypatch.setattr("nowait.batch.PREFILL_TOKENS", 10)
    assert_same_responses(generate(sampler(tiny), requests(8)), sampled)


def test_samples_of_a_request_differ_and_another_seed_gives_others(tiny, sampled):
    other = generate(sampler(tiny, seed=2), requests(8))
    long = [i for i in range(len(sampled)) if sampled.length[i] > 3]  # short ones may be equal by chance
    assert len({tuple(response(batch, i)) for batch in (sampled, other) for i in long}) == 2 * len(long) > 10


def test_eos_is_part_of_the_response_and_a_limit_is_not_eos(tiny):
    batch = generate(sampler(tiny), requests(8, limit=9))
    for i in range(len(batch)):
        token = response(batch, i)
        assert EOS not in token[:-1]
        assert batch.finish[i] == (STOP if token[-1] == EOS else LENGTH)
        assert len(token) == 9 if batch.finish[i] == LENGTH else len(token) <= 9
    assert {STOP, LENGTH} == set(batch.finish.tolist())
    assert (batch.logp_behav[batch.mask] < 0).all()


def test_eos_on_the_last_allowed_token_counts_as_stop(tiny, sampled):
    stopped = int(np.flatnonzero(sampled.finish == STOP)[0])
    request = requests(8, limit=int(sampled.length[stopped]))[stopped // 2]
    assert generate(sampler(tiny), [request]).finish[stopped % 2] == STOP


def test_every_request_has_its_own_limit(tiny, sampled):
    wanted = [Request(r.id, r.prompt, r.n, 1 + r.id % 3) for r in requests(8)]
    batch = generate(sampler(tiny), wanted, chunk=5)
    for i in range(len(batch)):
        np.testing.assert_array_equal(response(batch, i), response(sampled, i)[: 1 + i // 2 % 3])


def test_a_padding_token_that_is_sampled_does_not_end_a_response(tiny, sampled):
    inside = [PAD in response(sampled, i)[:-1] for i in range(len(sampled))]
    assert any(inside)


def test_a_model_that_pads_with_eos_finishes_like_one_that_does_not(tiny, sampled, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.pad_token_id = model.generation_config.pad_token_id = EOS
    model.save_pretrained(tmp_path)
    assert_same_responses(generate(sampler(str(tmp_path)), requests(8)), sampled)


def test_each_of_several_eos_ids_ends_a_response(tmp_path, sampled):
    batch = generate(sampler(save_model(tmp_path, eos_token_id=[EOS, 3, 7])), requests(8))
    for i in range(len(batch)):
        token = response(sampled, i)
        ends = np.flatnonzero(np.isin(token, [EOS, 3, 7]))
        np.testing.assert_array_equal(response(batch, i), token[: ends[0] + 1] if len(ends) else token)
        assert batch.finish[i] == (STOP if len(ends) else LENGTH)
    assert {3, 7, EOS} <= {int(response(batch, i)[-1]) for i in range(len(batch))}


def test_new_weights_reach_sequences_in_flight_from_their_next_token_on(tiny, another, sampled):
    worker, wanted, rollouts = sampler(tiny), requests(8), Rollouts(2)
    rollouts.admit(wanted)
    worker.admit(wanted)
    rollouts.add(worker.decode(5))
    refilled = worker.load(weights(another, 3))
    running = sampled.length > 5
    assert refilled == (sampled.prompt_length + 5)[running].sum()
    while not all(rollouts.complete(r.id) for r in wanted):
        rollouts.add(worker.decode(4))
    batch = rollouts.take([r.id for r in wanted], 3)
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny, another))
    assert running.any() and (batch.length > 5).any()
    for i in range(len(batch)):
        prompt, token, version = batch.prompt[i, : batch.prompt_length[i]], response(batch, i), response(batch, i, "version")
        assert version.tolist() == ([0] * 5 + [3] * (len(token) - 5) if running[i] else [0] * len(token))
        np.testing.assert_array_equal(token[:5], response(sampled, i)[:5])
        expected = np.where(version == 0, plain_logp(old, prompt, token, 1.0), plain_logp(new, prompt, token, 1.0))
        np.testing.assert_allclose(response(batch, i, "logp_behav"), expected, atol=EXACT)


def test_new_weights_are_copied_and_published_tensors_may_change_afterwards(tiny, another):
    published = weights(another, 1)
    worker = sampler(tiny)
    worker.load(published)
    with torch.no_grad():
        for tensor in published.payload.values():
            tensor.zero_()
    batch = generate(worker, requests(2))
    assert_plain(another, batch, batch.logp_behav, 1.0)


def test_a_freed_slot_goes_to_the_next_sequence_at_the_next_round(tiny):
    worker = sampler(tiny, slots=3)
    worker.admit(requests(4, limit=6))
    seen, running = [], set()
    while len(seen) < 8 or running:
        segments = worker.decode(2)
        started = [s for s in segments.sequence.tolist() if s not in seen]
        seen += started
        assert len(segments.sequence) == min(3, len(running) + 8 - len(seen) + len(started))
        running = set(segments.sequence[segments.finish == RUNNING].tolist())
    assert seen == list(range(8))


def test_a_round_without_sequences_is_empty(tiny):
    segments = sampler(tiny).decode(4)
    assert len(segments.sequence) == len(segments.token) == len(segments.finish) == 0 and segments.offset.tolist() == [0]


def test_dropped_requests_vanish_and_leave_the_others_alone(tiny, sampled):
    worker, wanted, rollouts = sampler(tiny, slots=5), requests(8), Rollouts(2)  # requests 0 and 1 run, half of 2, the rest waits
    rollouts.admit(wanted)
    worker.admit(wanted)
    rollouts.add(worker.decode(2))
    for gone in ([0, 5], [2]):
        worker.drop(gone)
        rollouts.drop(gone)
    while not all(rollouts.complete(r) for r in rollouts.requests):
        rollouts.add(worker.decode(3))  # raises on a token of a request that is gone
    kept = [1, 3, 4, 6, 7]
    batch = rollouts.take(kept, 0)
    for i, s in enumerate(batch.sequence.tolist()):
        np.testing.assert_array_equal(response(batch, i), response(sampled, s))
    assert not len(worker.decode(1).sequence)


def test_a_restored_sampler_continues_bit_for_bit_and_its_state_is_a_snapshot(tiny, another):
    """As at a checkpoint: new weights have just been loaded, so the cache is void."""
    original, restored = sampler(tiny, slots=5), sampler(tiny, slots=5)
    original.admit(requests(5))
    for _ in range(3):
        original.decode(3)
    original.load(weights(another, 2))
    state = original.get_state()
    expected = [original.decode(3) for _ in range(20)]
    restored.set_state(state)
    restored.load(weights(another, 2))
    for segments in expected:
        continued = restored.decode(3)
        assert continued.version == segments.version == 2
        for column in ("sequence", "offset", "token", "logp_behav", "finish"):
            np.testing.assert_array_equal(getattr(continued, column), getattr(segments, column))
    assert sum(len(s.token) for s in expected) > 20 and not len(expected[-1].token)


def test_a_sampler_without_sequences_has_a_state(tiny):
    worker = sampler(tiny)
    worker.set_state(sampler(tiny).get_state())
    assert not len(worker.decode(1).sequence)


def test_an_overlong_request_is_refused_by_name(tiny):
    with pytest.raises(ValueError, match=r"request 8: 9 prompt \+ 24 new tokens exceed the cache of 32"):
        sampler(tiny, capacity=32).admit(requests(9))


def test_a_response_may_fill_the_cache_to_the_last_place(tmp_path):
    folder = save_model(tmp_path)
    wanted = [Request(0, np.array([1, 2], np.int32), 8, 22)]
    batch, roomy = generate(sampler(folder, capacity=24), wanted, 5), generate(sampler(folder), wanted, 5)
    assert (batch.finish == LENGTH).any()
    np.testing.assert_array_equal(batch.token, roomy.token)
    assert_plain(folder, batch, batch.logp_behav, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "full attention in every layer.*sliding_attention"),
        ({"kind": "gemma3_text", "head_dim": 8, "sliding_window": 8}, "full attention in every layer.*sliding_attention"),
        ({"kind": "mistral", "sliding_window": 63}, "window of 63 .*capacity of 64"),
        ({"kind": "granite", "logits_scaling": 2.0}, "model.path.*transforms its logits"),
    ],
)
def test_models_that_would_be_sampled_wrongly_are_refused(tmp_path, settings, message):
    folder = save_model(tmp_path, **settings)
    with pytest.raises(ValueError, match=message):
        sampler(folder)


def test_a_model_without_eos_and_a_folder_without_model_are_refused(tmp_path):
    folder = save_model(tmp_path / "endless", eos_token_id=None)
    with pytest.raises(ValueError, match="no eos_token_id"):
        sampler(folder)
    with pytest.raises(ValueError, match="model.path: cannot load .*nothing"):
        sampler(str(tmp_path / "nothing"))


def test_weights_that_are_not_finite_raise_and_name_their_version(tiny, another):
    assert_named_when_not_finite(sampler(tiny), another)


def test_uniforms_have_their_golden_values():
    """By exact integer arithmetic; the first output of splitmix64 from 0 is 0xE220A8397B1DCDAF."""
    request, sample, t = (np.array([x]) for x in (5, 3, 7))
    assert uniform(1, 0, request, sample, t)[0] == 0.0839490449955379
    assert uniform(1, 1, request, sample, t)[0] == 0.24109869977703002
    assert uniform(1, 0, request + 1_000_000, sample, t)[0] == 0.5860836446109403


def test_uniforms_do_not_depend_on_the_shape_they_are_asked_in():
    request, sample, t = np.arange(4), np.arange(3), np.arange(5)
    table = uniform(9, 0, request[:, None, None], sample[:, None], t)
    assert table.shape == (4, 3, 5)
    assert uniform(9, 0, request[2:3], sample[1:2], t).tolist() == table[2, 1].tolist()


def test_uniforms_are_uniform_and_never_repeat_over_requests_samples_tokens_and_streams():
    """Running request ids go on over the epochs of a data set: rows may come again, ids do not."""
    request, sample, t = np.arange(200)[:, None, None], np.arange(8)[:, None], np.arange(32)
    streams = np.stack([uniform(7, stream, request, sample, t) for stream in (0, 1)])
    assert len(np.unique(streams)) == streams.size
    assert ((streams >= 0) & (streams < 1)).all()
    count, _ = np.histogram(streams, 64, (0, 1))
    expected = streams.size / 64
    assert ((count - expected) ** 2 / expected).sum() < 120  # chi-square with 63 degrees of freedom: 1e-5 of the mass lies above
    for axis in range(4):
        one, next_one = np.delete(streams, -1, axis).ravel(), np.delete(streams, 0, axis).ravel()
        assert abs(np.corrcoef(one, next_one)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("temperature", "counts"),
    [
        (1.0, [500, 0, 250, 125, 125, 0]),
        (0.5, [727, 0, 182, 45, 46, 0]),  # squares, 16 : 4 : 1 : 1
    ],
)
def test_pick_gives_each_token_its_share_of_a_grid_of_uniforms(temperature, counts):
    logits = torch.tensor([4.0, 0.0, 2.0, 1.0, 1.0, 0.0]).log().expand(1000, -1)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    token, logp = pick(logits, temperature, grid)
    found = torch.bincount(token, minlength=6)
    assert (found - torch.tensor(counts)).abs().max() <= (0 if temperature == 1 else 1)
    shares = torch.tensor([4.0, 0, 2, 1, 1, 0]) ** (1 / temperature)
    torch.testing.assert_close(logp, (shares / shares.sum()).log()[token])


def test_pick_never_takes_a_token_of_probability_zero():
    low, high = 0.0, 1 - 2**-53
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.3, -math.inf]])
    for u, expected in ((low, 1), (high, 3)):
        assert pick(logits, 1.0, torch.tensor([u], dtype=torch.float64))[0].item() == expected


def test_pick_is_exact_in_the_tail_of_a_large_vocabulary():
    """Float32 sums near 1 would be off by a half percent of these probabilities."""
    size, last = 150_000, torch.arange(149_950, 150_000)
    token, _ = pick(torch.zeros(len(last), size), 1.0, (last.double() + 0.001) / size)
    assert token.tolist() == last.tolist()
