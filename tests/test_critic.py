from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import EXACT, assert_plain, response, save_model
from tiny_ppo import BOTH_CRITICS, at, awake, gradients, ppo, scored_responses, trained
from transformers import AutoModel, AutoModelForSequenceClassification

from nowait.batch import STOP, Batch


@pytest.fixture(scope="module")
def fresh(tiny) -> Batch:
    return scored_responses(tiny)


# Values


@BOTH_CRITICS
def test_values_are_a_linear_function_of_the_backbones_state_before_each_token(tiny, fresh, shared):
    worker = awake(ppo(tiny, critic={"shared": shared}, micro_batch_tokens=100))
    values, last = worker.values(fresh)
    model, head = AutoModel.from_pretrained(tiny), worker._value_head.weight.detach()[0]
    for i in range(len(fresh)):
        n, ids = fresh.prompt_length[i], np.concatenate([fresh.prompt[i, : fresh.prompt_length[i]], response(fresh, i)])
        with torch.no_grad():
            states = model(input_ids=torch.tensor(ids, dtype=torch.int64)[None]).last_hidden_state[0] @ head
        np.testing.assert_allclose([*response(dataclasses.replace(fresh, token=values), i), last[i]], states[n - 1 :], atol=EXACT)
    assert (values[~fresh.mask] == 0).all()


@BOTH_CRITICS
def test_a_token_changes_the_values_after_it_and_not_its_own(tiny, fresh, shared):
    worker, i, t = awake(ppo(tiny, critic={"shared": shared})), int(fresh.length.argmax()), 4
    token = fresh.token.copy()
    token[i, t] = (token[i, t] + 1) % 10
    (before, last), (after, end) = worker.values(fresh), worker.values(dataclasses.replace(fresh, token=token))
    np.testing.assert_array_equal(after[i, : t + 1], before[i, : t + 1])
    assert (after[i, t + 1 : fresh.length[i]] != before[i, t + 1 : fresh.length[i]]).all() and end[i] != last[i]
    token[i, fresh.length[i] - 1] += 1  # the last token changes the value of the whole response alone
    moved, whole = worker.values(dataclasses.replace(fresh, token=token))
    np.testing.assert_array_equal(moved[i], after[i])
    assert whole[i] != end[i]


@BOTH_CRITICS
def test_values_are_0_before_training(tiny, fresh, shared):
    values, last = ppo(tiny, critic={"shared": shared}).values(fresh)
    assert values.dtype == last.dtype == np.float32 and not values.any() and not last.any()


def test_a_critic_learns_to_tell_prompts_of_different_scores_apart(tiny, fresh):
    stop = np.full(len(fresh), STOP, np.uint8)  # a response cut off would chase its own value
    scored = dataclasses.replace(fresh, reward=(fresh.group % 2).astype(np.float32), finish=stop)
    worker = ppo(tiny, algorithm={"lam": 1.0, "value_clip": None}, lr=3e-3, minibatches=1, epochs=2)
    stats = [worker.update(at(scored, worker)) for _ in range(15)]
    assert stats[0]["explained_variance"] == pytest.approx(0, abs=1e-6) and stats[-1]["explained_variance"] > 0.8
    assert stats[-1]["value_loss"] < stats[0]["value_loss"] / 4


# What the two losses reach


def test_a_separate_critic_gets_the_value_loss_alone_and_the_policy_none_of_it(tiny, fresh):
    (policy, critic), (policy_alone, nothing) = (
        gradients(awake(ppo(tiny, algorithm={"value_coef": coef}, minibatches=1)), fresh) for coef in (1.0, 0.0)
    )
    np.testing.assert_array_equal(policy, policy_alone)
    assert critic[:-33].any() and critic[-33:].any() and policy.any() and not nothing.any()


def test_a_shared_backbone_gets_both_losses(tiny, fresh):
    shared = {"shared": True}
    (both, head), (policy_alone, nothing) = (
        gradients(awake(ppo(tiny, critic=shared, algorithm={"value_coef": coef}, minibatches=1)), fresh) for coef in (1.0, 0.0)
    )
    assert len(head) == 33 and head.any() and not nothing.any() and policy_alone.any()
    assert np.abs(both - policy_alone).max() > 1e-3


@BOTH_CRITICS
def test_the_norm_that_is_clipped_is_that_of_policy_and_critic_together(tiny, fresh, shared):
    worker = awake(ppo(tiny, critic={"shared": shared}, minibatches=1, grad_clip=1e-3))
    assert worker.update(fresh)["grad_norm"] > 0.1
    assert torch.cat([p.grad.flatten() for p in worker._parameters]).norm().item() == pytest.approx(1e-3, rel=1e-3)


@BOTH_CRITICS
def test_gradient_checkpointing_gives_the_same_gradient(tiny, fresh, shared):
    plain, saving = (
        np.concatenate(gradients(awake(ppo(tiny, critic={"shared": shared}, minibatches=1, options={"gradient_checkpointing": on})), fresh))
        for on in (False, True)
    )
    np.testing.assert_allclose(saving, plain, atol=1e-6)


# Saving and loading


@BOTH_CRITICS
def test_the_saved_policy_is_the_trained_one_and_the_critic_lies_below_it(tiny, fresh, tmp_path, shared):
    worker = trained(ppo(tiny, critic={"shared": shared}, lr=0.01), fresh, 2)
    worker.save(str(tmp_path))
    assert_plain(str(tmp_path), fresh, worker.logp(fresh), 1.0)
    found = ppo(str(tmp_path), critic={"shared": True} if shared else {"path": str(tmp_path / "critic")})
    found._value_head.load_state_dict(load_file(tmp_path / "critic" / "value_head.safetensors"))
    np.testing.assert_allclose(found.values(fresh)[0], worker.values(fresh)[0], atol=EXACT)
    assert (tmp_path / "critic" / "config.json").exists() is not shared


def reward_model(folder: Path, **settings) -> str:
    source = save_model(folder / "source", seed=3, **settings)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(folder / "reward")
    return str(folder / "reward")


def test_a_critic_may_start_from_a_reward_model_of_another_width(tiny, fresh, tmp_path):
    path = reward_model(tmp_path, hidden_size=48)
    worker = ppo(tiny, critic={"path": path}, minibatches=1)
    backbone = AutoModelForSequenceClassification.from_pretrained(path).base_model
    for mine, theirs in zip(worker._backbone.parameters(), backbone.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not worker.values(fresh)[0].any() and worker.update(fresh)["value_loss"] > 0 and worker.values(fresh)[0].any()


def test_a_critic_that_cannot_be_loaded_whole_is_refused(tiny, tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(ValueError, match="critic.path: cannot load .*missing"):
        ppo(tiny, critic={"path": missing})
    with pytest.raises(ValueError, match="critic.path: .* embeds 12 token ids, the policy 16"):
        ppo(tiny, critic={"path": reward_model(tmp_path, vocab_size=12, eos_token_id=1, pad_token_id=0)})
    whole = AutoModel.from_pretrained(tiny)
    lacking = {name: tensor for name, tensor in whole.state_dict().items() if name != "norm.weight"}
    whole.save_pretrained(tmp_path / "lacking", state_dict=lacking)
    with pytest.raises(ValueError, match="critic.path: .* lacks 1 trained weights, first norm.weight"):
        ppo(tiny, critic={"path": str(tmp_path / "lacking")})
