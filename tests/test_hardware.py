"""Seconds on a toy device whose numbers can be worked out by hand, and the shipped presets."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nowait import simulate
from nowait.config_files import ConfigError
from nowait.runtime.hardware import DoesNotFit, Group, Hardware, Shape

# Efficiencies applied: 1000 operations/s forward, 500 in training, 50 bytes/s of memory.
TOY = Hardware("toy", flops=2000, memory=1000, bandwidth=100, link=100, network=10, node=4, latency=0.5, forward_efficiency=0.5,
               train_efficiency=0.25, bandwidth_efficiency=0.5, decode_overhead=0.125, pass_overhead=0.25)  # fmt: skip
# 200 bytes of weights: 4 s. A token: 200 operations, 0.2 s. A (query, key) pair: 80 operations, 0.08 s. A cached token: 40 bytes, 0.8 s.
SHAPE = Shape(parameters=100, layers=2, hidden=10, heads=2, kv_heads=1, head_dim=5)
EXPERTS = replace(SHAPE, active=50)
PRESETS = Path(__file__).parents[1] / "paper_configs"


def group(devices: int = 1, tensor_parallel: int = 1, shape: Shape = SHAPE, **hardware) -> Group:
    return Group(replace(TOY, **hardware), shape, devices, tensor_parallel)


def decode(group: Group, live: list[int], context: list[int]) -> float:
    return group.decode(np.array(live), np.array(context))


# Decoding


def test_a_few_rows_wait_for_the_memory_and_many_for_the_arithmetic():
    assert decode(group(), [1], [5]) == pytest.approx(4 + 5 * 0.8 + 0.125)  # weights and cache; the arithmetic takes 0.6 s
    assert decode(group(), [100], [5]) == pytest.approx(100 * 0.2 + 5 * 0.08 + 0.125)


def test_a_decode_round_is_the_sum_of_its_steps():
    assert decode(group(), [100, 1, 1], [5, 5, 10]) == pytest.approx(20.4 + 8 + 12 + 3 * 0.125)
    assert decode(group(), [], []) == 0


def test_replicas_share_rows_and_cache_and_the_fullest_one_counts():
    assert decode(group(2), [3], [10]) == pytest.approx(4 + 5 * 0.8 + 0.125)
    assert decode(group(2), [201], [10]) == pytest.approx(101 * 0.2 + 5 * 0.08 + 0.125)


def test_tensor_parallel_devices_share_the_weights_and_add_two_all_reduces_per_layer():
    # a ring of 2 moves half of 1 row x 10 numbers x 2 bytes twice: 20 bytes, 0.2 s at 100 bytes/s
    assert decode(group(2, 2), [1], [5]) == pytest.approx((4 + 4) / 2 + 4 * (0.5 + 0.2) + 0.125)
    # a ring of 4 fills a node: 3/4 of 20 bytes, twice, 0.3 s
    assert decode(group(4, 4), [1], [5]) == pytest.approx((4 + 4) / 4 + 4 * (0.5 + 0.3) + 0.125)
    # a ring of 8 leaves the node of 4 at 10 bytes/s: 7/8 of 20 bytes, twice, 3.5 s
    assert decode(group(8, 8), [1], [5]) == pytest.approx((4 + 4) / 8 + 4 * (0.5 + 3.5) + 0.125)


def test_only_experts_that_some_row_hits_are_read():
    # half of the parameters per token: rows leave 1/2, 1/4, 1/8 of the experts unread
    assert [decode(group(shape=EXPERTS), [rows], [0]) for rows in (1, 2, 3)] == pytest.approx([2.125, 3.125, 3.625])
    assert decode(group(shape=EXPERTS), [100], [0]) == pytest.approx(100 * 0.1 + 0.125)  # arithmetic: of the active half only
    assert decode(group(shape=replace(SHAPE, active=100)), [1], [0]) == decode(group(), [1], [0])


# Forward passes


def test_a_forward_pass_reads_the_weights_once_or_computes_longer():
    assert group().forward(np.array([4])) == pytest.approx(4 + 0.25)  # the arithmetic takes 0.8 + 8 pairs x 0.08 = 1.44 s
    assert group().forward(np.array([10, 30])) == pytest.approx(40 * 0.2 + (10 * 5 + 30 * 15) * 0.08 + 0.25)
    assert group().forward(np.zeros(0)) == group().forward(np.zeros(3)) == 0


def test_tokens_look_at_what_was_cached_before_them():
    assert group().forward(np.array([10, 30]), np.array([20, 0])) == pytest.approx(40 * 0.2 + (500 + 10 * 20) * 0.08 + 0.25)
    whole, pieces = group(pass_overhead=0).forward(np.array([60])), [(20, 0), (40, 20)]
    assert whole == pytest.approx(sum(group(pass_overhead=0).forward(np.array([n]), before) for n, before in pieces))


def test_forward_passes_are_shared_by_all_devices():
    assert group(2).forward(np.array([10, 30])) == pytest.approx(48 / 2 + 0.25)
    # all-reduces of 40 rows: 800 bytes each
    assert group(2, 2).forward(np.array([10, 30])) == pytest.approx(48 / 2 + 4 * (0.5 + 8) + 0.25)
    assert group(2, 2).forward(np.array([4])) == pytest.approx(4 / 2 + 4 * (0.5 + 0.8) + 0.25)


# Training

TRAINED = np.array([10, 30])  # 8,000 operations of tokens, 40,000 of attention


def update(devices: int, **work) -> float:
    return group(devices).update(TRAINED, **{"steps": 2, "passes": 4} | work)


def test_an_update_costs_three_forward_passes_the_optimiser_and_an_overhead_per_pass():
    assert update(1) == pytest.approx(3 * 48000 / 500 + 2 * 28 * 100 / 50 + 4 * 0.25)
    assert update(1, recompute=True) == pytest.approx(4 * 48000 / 500 + 112 + 1)
    assert update(1, epochs=2) == pytest.approx(2 * 288 + 112 + 1)
    assert update(2) == pytest.approx(288 / 2 + 112 / 2 + 1)


def test_gathering_sharded_weights_hides_behind_arithmetic_until_there_are_too_many_passes():
    # each pass moves 3 x 200 bytes, of which a device has its own half: 3 s; 48 passes take as long as the arithmetic
    assert update(2, passes=48) == pytest.approx(144 + 56 + 12)
    assert update(2, passes=100) == pytest.approx(300 + 56 + 25)
    assert update(8) == pytest.approx(4 * 600 * 7 / 8 / 10 + 112 / 8 + 1)  # beyond a node, over the network


def test_weights_reach_the_replicas_in_parts_over_the_links_or_the_network():
    assert group().transfer() == pytest.approx(200 / 100 + 0.25)
    assert group(2, 2).transfer() == pytest.approx(200 / 2 / 100 + 0.25)
    assert group(8).transfer() == pytest.approx(200 / 10 + 0.25)


# Memory


def test_the_cache_holds_what_the_weights_leave():
    assert group().cache_tokens == 17  # (900 - 200) / 40
    assert group(2).cache_tokens == 35
    assert group(2, 2).cache_tokens == 40  # (1800 - 200) / 40


@pytest.mark.parametrize(("devices", "tensor_parallel"), [(6, 4), (2, 4), (6, 0), (0, 1)])
def test_a_layout_that_does_not_divide_the_devices_is_refused(devices, tensor_parallel):
    with pytest.raises(DoesNotFit, match=f"tensor_parallel {tensor_parallel} does not divide {devices} devices"):
        group(devices, tensor_parallel)


def test_the_layouts_that_would_divide_are_named():
    with pytest.raises(DoesNotFit, match=r"take one of 1, 2, 3, 6$"):
        group(6, 4)


BIG = replace(SHAPE, parameters=1000)  # 2,000 bytes of weights; 900 bytes of a device are usable


def test_weights_that_do_not_fit_name_a_tensor_parallelism_that_does():
    with pytest.raises(DoesNotFit, match=r"weights of 2 GB exceed the 2 x 1 GB of a replica on toy: take tensor_parallel 4 or more$"):
        group(8, 2, replace(BIG, parameters=1e9), memory=1e9)
    assert group(8, 4, BIG).replicas == 2


def test_weights_that_do_not_fit_on_all_devices_ask_for_more_devices():
    with pytest.raises(DoesNotFit, match="take tensor_parallel 4 or more, on as many devices$"):
        group(2, 2, BIG)


def test_training_state_that_does_not_fit_names_the_number_of_devices():
    with pytest.raises(DoesNotFit, match=r"weights, gradients and optimiser take 16 GB, more than 17 x 1 GB of toy: take 18 devices or more$"):
        Group(replace(TOY, memory=1e9), replace(BIG, parameters=1e9), 17, training=True)
    assert Group(TOY, BIG, 18, training=True).devices == 18


def test_sharded_training_needs_no_device_that_holds_all_weights():
    assert BIG.parameters * BIG.bytes > TOY.memory
    assert Group(TOY, BIG, 32, training=True).update(TRAINED, steps=1, passes=1) > 0


# Work


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.lists(st.integers(1, 3000), min_size=n, max_size=n)] * 2)), st.integers(0, 2),
       st.sampled_from([SHAPE, EXPERTS]), st.sampled_from([(1, 1), (2, 1), (2, 2), (8, 4)]))  # fmt: skip
def test_more_work_never_takes_less_time(lengths, more, shape, layout):
    few, many = np.array(lengths[0]), np.array(lengths[0]) + np.array(lengths[1])
    inference, training = group(*layout, shape=shape), Group(replace(TOY, memory=1e4), shape, layout[0], training=True)
    seconds = [inference.forward(few), inference.forward(many), inference.forward(np.append(many, more)), inference.forward(np.append(many, more), 5)]
    assert seconds == sorted(seconds)
    assert inference.decode(few, 2 * few) <= inference.decode(many, 2 * few) <= inference.decode(many, 2 * many)

    def update(lengths: np.ndarray, k: int = 0) -> float:
        return training.update(lengths, steps=1 + k, passes=2 + k, epochs=1 + k)

    assert update(few) <= update(many) <= min(update(np.append(many, 1)), update(many, more))


# Presets


@pytest.mark.parametrize("name", sorted(file.stem for file in (PRESETS / "hardware").glob("*.yaml")))
def test_every_shipped_device_has_possible_numbers(name):
    device = asdict(simulate.hardware(name))
    assert all(value > 0 for key, value in device.items() if key != "name") and device["node"] == int(device["node"])
    assert all(value <= 1 for key, value in device.items() if key.endswith("_efficiency"))
    assert device["network"] <= device["link"] <= device["bandwidth"]


@pytest.mark.parametrize("name", yaml.safe_load((PRESETS / "simulation" / "models.yaml").read_text()))
def test_every_shipped_model_has_a_shape_that_adds_up(name):
    shape = simulate.shape(name)
    attention = shape.layers * shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)  # weights of queries, outputs, keys and values
    assert shape.heads % shape.kv_heads == 0 and 0.05 < attention / shape.parameters < 0.5
    assert 0 < shape.used <= shape.parameters


def test_unknown_hardware_and_models_name_what_there_is():
    with pytest.raises(ConfigError, match="did you mean hardware/h200"):
        simulate.hardware("h100")
    with pytest.raises(ConfigError, match=r"is not in this file; there are qwen2\.5-1\.5b, .*qwen3-8b"):
        simulate.shape("qwen4")


def test_a_large_model_is_trained_where_it_is_sharded_enough():
    h200, model = simulate.hardware("h200"), simulate.shape("qwen2.5-72b")  # 145 GB of weights, 1,163 GB in training, 127 GB per device
    assert Group(h200, model, 16, training=True).replicas == 16
    with pytest.raises(DoesNotFit, match="take 10 devices or more"):
        Group(h200, model, 8, training=True)
