from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from tiny import EXACT, digest, response, train_in_ranks
from tiny_ppo import BOTH_CRITICS, at, awake, blank, gradients, parameters, ppo, scored_responses, trained
from transformers import AutoModelForCausalLM

from nowait import checkpoint
from nowait.batch import LENGTH, STOP, Batch
from nowait.workers.ppo_learner import PPOLearner


@pytest.fixture(scope="module")
def fresh(tiny) -> Batch:
    return scored_responses(tiny)


def two_tokens(**columns) -> Batch:
    """One response of two tokens after a prompt of three, sampled at probability 1/16 each, scored 1."""
    uniform = np.full((1, 2), -math.log(16), np.float32)
    batch = Batch(
        step=0,
        sequence=np.array([4]),
        group=np.array([4]),
        prompt=np.array([[3, 1, 2]], np.int32),
        prompt_length=np.array([3], np.int32),
        token=np.array([[7, 9]], np.int32),
        length=np.array([2], np.int32),
        logp_behav=uniform,
        version=np.zeros((1, 2), np.int32),
        finish=np.array([STOP], np.uint8),
        reward=np.ones(1, np.float32),
        keep=np.ones(1, bool),
    )
    return dataclasses.replace(batch, **columns)


# One step by hand


@BOTH_CRITICS
def test_one_step_on_two_tokens_gives_the_numbers_worked_out_by_hand(tiny, shared):
    # the reference is 0.5 nats below and 0.25 above: KL 0.5, -0.25; beta 0.2: token rewards -0.1, 1.05; values 0, lam 1/2:
    # A1 = R1 = 1.05, A0 = R0 = -0.1 + 0.525 = 0.425; policy loss -(0.425 + 1.05)/2, value loss (0.425² + 1.05²)/4
    batch = two_tokens(logp_ref=np.array([[-math.log(16) - 0.5, -math.log(16) + 0.25]], np.float32))
    settings = {"lam": 0.5, "advantage_whiten": False, "kl_coef": 0.2, "kl_target": 0.5, "kl_horizon": 10, "value_coef": 0.1}
    worker = blank(ppo(tiny, critic={"shared": shared}, algorithm=settings, minibatches=1, lr=0.25))
    stats = worker.update(batch)
    expected = {
        "policy_loss": -0.7375,
        "value_loss": 0.32078125,
        "value_mean": 0,
        "return_mean": 0.7375,
        "explained_variance": 0,
        "value_clip_frac": 0,
        "kl": 0.25,
        "kl_coef": 0.2,
        "kl_clamped": 0,
        "ratio_mean": 1,
        "entropy": math.log(16),
        "grad_norm": 0.07375,  # of the bias alone: value_coef * mean(V - R)
    }
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
    values, last = worker.values(batch)  # Adam's first step is lr, towards the returns
    np.testing.assert_allclose([*values[0], *last], 0.25, rtol=1e-5)
    assert worker.kl_coef == pytest.approx(0.196)  # half the target: 0.2 (1 - 0.2 * 1/10)
    assert worker.update(at(batch, worker))["kl_coef"] == worker.kl_coef / 0.98 == pytest.approx(0.196)


# V = 1/2, gamma 1/2, lam 1. Stopped: R1 = 1, R0 = 1/2. Cut off: R1 = 1 + 1/4, R0 = 5/8
@pytest.mark.parametrize(("finish", "mean"), [(STOP, 0.75), (LENGTH, 0.9375)])
@pytest.mark.parametrize("padding", [0, 3])  # a response is cut off where its finish says so, whatever the width
def test_only_a_response_that_was_cut_off_goes_on_with_the_value_of_the_whole(tiny, finish, mean, padding):
    batch, wide = two_tokens(finish=np.array([finish], np.uint8)), ((0, 0), (0, padding))
    batch = dataclasses.replace(batch, **{name: np.pad(getattr(batch, name), wide) for name in ("token", "logp_behav", "version")})
    stats = blank(ppo(tiny, algorithm={"gamma": 0.5, "lam": 1.0}, minibatches=1), 0.5).update(batch)
    assert stats["return_mean"] == pytest.approx(mean) and stats["value_mean"] == pytest.approx(0.5) and "kl" not in stats


@pytest.mark.parametrize(("anchor", "kl"), [("behave", 0.75), ("recompute", 0.25), ("ppo", 0.25)])
def test_the_kl_is_that_of_the_policy_before_the_update_where_the_anchor_knows_it(tiny, anchor, kl):
    uniform = np.full((1, 2), -math.log(16), np.float32)
    batch = two_tokens(logp_behav=uniform + 0.25, logp_ref=uniform - 0.125)  # two tokens: 2 (0.25 + 0.125), 2 * 0.125
    worker = blank(ppo(tiny, algorithm={"anchor": anchor}, minibatches=1))
    assert worker.update(batch, None if anchor == "behave" else worker.logp(batch))["kl"] == pytest.approx(kl, rel=1e-5)


@BOTH_CRITICS
def test_the_gradient_is_that_of_policy_and_value_loss_by_an_ordinary_forward_pass(tiny, fresh, shared):
    """At ratio 1, lam = gamma = 1 and V = 0 both are worked out from the score alone: -R grad log pi / N and -value_coef R h / N."""
    settings = {"lam": 1.0, "advantage_whiten": False, "value_coef": 0.3}
    batch = fresh.rows(np.array([0, 1, 5]))
    model, losses, head, bias, tokens = AutoModelForCausalLM.from_pretrained(tiny), [], 0, 0, batch.length.sum()
    for i in range(3):
        prompt, token, score = batch.prompt[i, : batch.prompt_length[i]], response(batch, i), float(batch.reward[i])
        ids = torch.tensor(np.concatenate([prompt, token]), dtype=torch.int64)
        out, places = model(input_ids=ids[None], output_hidden_states=True), range(len(prompt) - 1, len(ids) - 1)
        logp = torch.log_softmax(out.logits[0, places], -1).gather(-1, ids[len(prompt) :, None])
        losses.append(-score * logp.sum() / tokens)
        head, bias = head - 0.3 * score * out.hidden_states[-1][0, places].sum(0) / tokens, bias - 0.3 * score * len(token) / tokens
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(sum(losses), model.parameters(), retain_graph=True)])
    policy, critic = gradients(ppo(tiny, critic={"shared": shared}, algorithm=settings, minibatches=1), batch)
    np.testing.assert_allclose(policy, expected, atol=2e-5)
    np.testing.assert_allclose(critic[-33:], [*head.tolist(), bias], atol=2e-5)
    assert not critic[:-33].any()  # a value head of 0 passes nothing to the critic's backbone


# Anchors and epochs


@pytest.mark.parametrize("anchor", ["ppo", "recompute", "behave"])
def test_the_first_of_several_minibatches_starts_at_the_anchor_with_unclipped_values(tiny, fresh, anchor):
    worker = awake(ppo(tiny, algorithm={"anchor": anchor, "value_clip": 1e-3}, minibatches=1, epochs=3, lr=0.01))
    worker.update(fresh, None if anchor == "behave" else worker.logp(fresh))  # the tokens are stale now
    batch = at(fresh, worker)
    now = worker.logp(batch)
    assert worker.prepare(batch, None if anchor == "behave" else now) == 3
    start = 1.0 if anchor != "behave" else np.exp(now - batch.logp_behav)[batch.mask]
    share = worker.gradient(0)
    assert float(share[1]["ratio_min"]) == pytest.approx(np.min(start), abs=EXACT)
    assert float(share[1]["ratio_max"]) == pytest.approx(np.max(start), abs=EXACT)
    assert np.max(start) > 1.05 or anchor != "behave"
    assert not share[1]["value_clipped_tokens_sum"]
    worker.apply([share])
    later = worker.gradient(1)[1]
    assert float(later["value_clipped_tokens_sum"]) > 0 and float(later["ratio_max"]) > 1.01


def test_returns_and_advantages_are_those_before_the_first_optimiser_step(tiny, fresh):
    """Values that move between the epochs change neither the targets nor what they are clipped around."""
    worker = awake(ppo(tiny, minibatches=1, epochs=3, lr=0.01))
    worker.prepare(fresh)
    sums = []
    for m in range(3):
        share = worker.gradient(m)
        sums.append([float(share[1][name]) for name in ("return_sum", "value_error_sum")])
        worker.apply([share])
    np.testing.assert_allclose(sums, [sums[0]] * 3, rtol=1e-12)


@BOTH_CRITICS
def test_without_a_learning_rate_nothing_moves_but_the_adaptive_coefficient(tiny, fresh, shared):
    settings = {"kl_coef": 0.1, "kl_target": 1e6, "kl_horizon": 160}  # far below the target: beta (1 - 0.2 * 16/160) in every step
    worker = awake(ppo(tiny, critic={"shared": shared}, algorithm=settings, lr=0.0, weight_decay=0.1, epochs=2))
    before = digest(worker)
    coefs = [worker.update(at(fresh, worker))["kl_coef"] for _ in range(3)]
    assert digest(worker) == before and coefs == pytest.approx([0.1, 0.098, 0.09604])


@BOTH_CRITICS
@pytest.mark.parametrize(("warmup", "share"), [(0, 1.0), (4, 0.25)])
def test_the_critics_own_weights_move_at_a_rate_of_their_own(tiny, fresh, shared, warmup, share):
    """Adam's first step is the rate. Warm-up starts at 0 and reaches a quarter of it in the second step, with the same gradient."""
    worker = awake(ppo(tiny, critic={"shared": shared, "lr": 0.02}, lr=1e-3, minibatches=1, warmup_steps=warmup))
    before = {name: [p.detach().clone() for p in module.parameters()] for name, module in worker._trained.items()}
    stats = trained(worker, fresh, 1 if warmup else 0).update(at(fresh, worker))
    after = {name: [p.detach() for p in module.parameters()] for name, module in worker._trained.items()}
    moved = {name: max(float((p - q).abs().max()) for p, q in zip(after[name], before[name], strict=True)) for name in before}
    rates = {"model": 1e-3, "value_head": 0.02} | ({} if shared else {"critic": 0.02})
    assert moved == pytest.approx({name: share * rate for name, rate in rates.items()}, rel=2e-3) and stats["lr"] == pytest.approx(share * 1e-3)


# What must not matter


@BOTH_CRITICS
def test_padding_has_no_influence_whatever_stands_there(tiny, fresh, shared):
    eos = AutoModelForCausalLM.from_pretrained(tiny).config.eos_token_id
    outcomes = []
    for garbage in ({}, {"token": eos}, {"token": 9999, "logp_behav": math.nan, "logp_ref": math.nan, "version": -1}):
        columns = {}
        for name in ("token", "logp_behav", "logp_ref", "version"):
            column = np.pad(getattr(fresh, name), ((0, 0), (0, 3 if garbage else 0)))
            inside = np.arange(column.shape[1]) < fresh.length[:, None]
            columns[name] = np.where(inside, column, np.array(garbage.get(name, 0), column.dtype))
        worker = awake(ppo(tiny, critic={"shared": shared}, algorithm={"kl_coef": 0.1}))
        stats = worker.update(dataclasses.replace(fresh, **columns))
        outcomes.append((digest(worker), stats))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_sequences_without_a_grade_have_no_influence(tiny, fresh):
    kept = fresh.group != 2
    algorithm = {"kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 100}
    reward, behav, ref = (np.where(kept if x.ndim == 1 else kept[:, None], x, np.nan) for x in (fresh.reward, fresh.logp_behav, fresh.logp_ref))
    broken = dataclasses.replace(fresh, keep=kept, reward=reward, logp_behav=behav, logp_ref=ref)
    with_them, without = (awake(ppo(tiny, algorithm=algorithm, minibatches=1, eps=1e-4)) for _ in range(2))
    stats = with_them.update(broken), without.update(fresh.rows(np.flatnonzero(kept)))
    assert stats[0] == pytest.approx(stats[1], rel=1e-4, abs=1e-6) and stats[0]["tokens"] == fresh.length[kept].sum()
    assert with_them.kl_coef == pytest.approx(without.kl_coef, rel=1e-9) != 0.1
    torch.testing.assert_close(parameters(with_them), parameters(without), atol=1e-6, rtol=0)


def test_a_batch_without_any_grade_changes_nothing(tiny, fresh):
    worker = awake(ppo(tiny, algorithm={"kl_coef": 0.1, "kl_target": 1.0}))
    before = digest(worker)
    stats = worker.update(dataclasses.replace(fresh, keep=np.zeros(len(fresh), bool)))
    assert digest(worker) == before and worker.kl_coef == 0.1 and stats["tokens"] == stats["grad_norm"] == 0 and math.isnan(stats["kl"])


@BOTH_CRITICS
def test_micro_batches_of_one_sequence_train_like_one_of_all(tiny, fresh, shared):
    whole, cut = (
        trained(awake(ppo(tiny, critic={"shared": shared}, algorithm={"kl_coef": 0.1}, micro_batch_tokens=size, eps=1e-4)), fresh, 1)
        for size in (10_000, 1)
    )
    torch.testing.assert_close(parameters(cut), parameters(whole), atol=2e-6, rtol=0)


@BOTH_CRITICS
@pytest.mark.parametrize("minibatches", [2, 16])  # 16: every rank but the first has nothing to do
def test_two_ranks_train_like_one(tiny, fresh, shared, minibatches):
    options = {"minibatches": minibatches, "epochs": 2, "eps": 1e-6, "algorithm": {"kl_coef": 0.1, "kl_target": 1.0}, "critic": {"shared": shared}}
    one, ranks = awake(ppo(tiny, **options)), [awake(ppo(tiny, **options)) for _ in range(2)]
    expected = one.update(fresh)
    _, stats = train_in_ranks(ranks, fresh)
    assert digest(ranks[0]) == digest(ranks[1]) and stats[0] == stats[1]
    torch.testing.assert_close(parameters(ranks[0]), parameters(one), atol=2e-6, rtol=0)
    assert stats[0] == pytest.approx(expected, rel=1e-3, abs=2e-5) and ranks[0].kl_coef == one.kl_coef != 0.1


# State, checkpoints, errors


@BOTH_CRITICS
def test_a_learner_restored_from_a_checkpoint_continues_bit_for_bit(tiny, fresh, tmp_path, shared):
    def make() -> PPOLearner:
        algorithm = {"kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 100}
        return ppo(tiny, critic={"shared": shared}, algorithm=algorithm, epochs=2, weight_decay=0.1)

    original = trained(make(), fresh, 2)
    checkpoint.save(tmp_path, 2, original.get_state())
    (_, state), expected = checkpoint.latest(tmp_path), original.update(at(fresh, original))
    restored = make()
    restored.set_state(state)
    assert restored.update(at(fresh, restored)) == expected
    assert digest(restored) == digest(original) and restored.kl_coef == original.kl_coef != 0.1
    for damage in ({"kl_coef": 0.1}, {"adam": {}}, {"value_head": make().get_state()["value_head"]}):
        other = make()
        other.set_state(state | damage)
        assert digest(trained(other, fresh, 1)) != digest(original)  # each is part of it


def test_only_the_policy_is_published(tiny, fresh):
    worker = trained(ppo(tiny), fresh, 1)
    assert set(worker.publish().payload) == {name for name, _ in AutoModelForCausalLM.from_pretrained(tiny).named_parameters()}


def test_what_is_not_finite_or_missing_stops_the_step_and_is_named(tiny, fresh):
    worker = ppo(tiny, algorithm={"kl_coef": 0.1})
    before = digest(worker)
    broken = fresh.logp_ref.copy()
    broken[2, 0] = math.nan
    for batch, error, message in (
        (dataclasses.replace(fresh, logp_ref=broken), FloatingPointError, r"step 0: kl is nan at \(2, 0\)"),
        (dataclasses.replace(fresh, reward=np.full(16, np.inf, np.float32)), FloatingPointError, "step 0: reward is inf"),
        (dataclasses.replace(fresh, logp_ref=None), ValueError, "step 0: algorithm.kl_coef is 0.1 and the batch has no logp_ref"),
    ):
        with pytest.raises(error, match=message):
            worker.update(batch)
    with torch.no_grad():
        worker._value_head.bias.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="step 0: values is nan"):
        worker.update(fresh)
    worker._value_head.bias.data.zero_()
    assert digest(worker) == before and worker.version == 0
