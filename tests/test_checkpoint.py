from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nowait.batch import Request, Rollouts, Segments
from nowait.checkpoint import latest, prune, save

STATE = {"version": 3, "model": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}}


def assert_same(a, b):
    """Equal in value and in type, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    else:
        assert repr(a) == repr(b)


def round_trip(folder, state):
    save(folder, 1, state)
    return latest(folder)[1]


arrays = hnp.arrays(
    st.one_of(hnp.boolean_dtypes(), *(f(endianness="=") for f in (hnp.integer_dtypes, hnp.unsigned_integer_dtypes, hnp.floating_dtypes))).filter(
        lambda dtype: dtype.itemsize <= 8
    ),
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3),
)
leaves = st.one_of(arrays, st.none(), st.booleans(), st.integers(), st.floats(), st.text())
states = st.dictionaries(st.text(), st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)))


@settings(max_examples=25, deadline=None)
@given(states)
def test_a_state_comes_back_with_every_type_dtype_and_shape(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("checkpoints")
    assert_same(state, round_trip(folder, state))


def test_keys_that_look_like_paths_stay_apart(tmp_path):
    one, two, three, four = (np.array(i) for i in range(4))
    state = {"a/b": one, "a": {"b": two}, "a~1b": three, "": {"": four}, "__metadata__": np.zeros(0), "none": None}
    assert_same(state, round_trip(tmp_path, state))


def test_views_are_saved_by_value_and_come_back_writable(tmp_path):
    grid = np.arange(6).reshape(2, 3)
    loaded = round_trip(tmp_path, {"transposed": grid.T, "every second": grid[0, ::2], "reversed": grid[0, ::-1]})
    assert loaded["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (loaded["every second"].tolist(), loaded["reversed"].tolist()) == ([0, 2], [2, 1, 0])
    loaded["transposed"][:] = 0


def test_numpy_scalars_become_python_numbers(tmp_path):
    loaded = round_trip(tmp_path, {"i": np.int64(7), "f": np.float32(0.1), "b": np.bool_(True)})
    assert_same(loaded, {"i": 7, "f": 0.10000000149011612, "b": True})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {3: 1}}, r"/a has the key 3"),
        ({"a": [1, (2, 3)]}, r"/a/1 is a tuple"),
        ({"a": {"b": np.array(["x"])}}, r"/a/b is an array of <U1"),
        ({"a": {1, 2}}, r"/a is a set"),
        ({"a": [{"$array": "arr_0"}]}, r"/a/0 has the key '\$array'"),
    ],
)
def test_what_would_not_come_back_is_refused_by_name_before_anything_is_written(tmp_path, state, message):
    with pytest.raises(TypeError, match=message):
        save(tmp_path, 1, state)
    assert list(tmp_path.iterdir()) == []


def test_rollouts_in_flight_go_on_after_a_checkpoint(tmp_path):
    first = Segments(np.array([8, 9]), np.array([0, 1, 2]), np.array([20, 21]), np.array([-0.5, -1.0], np.float32), np.array([0, 1]), 5)
    rest = Segments(np.array([8]), np.array([0, 1]), np.array([30]), np.array([-2.0], np.float32), np.array([2]), 6)
    before = Rollouts(2)
    before.admit([Request(4, np.array([7, 8], np.int32), 2, 10, row=1)])
    before.add(first)
    after = Rollouts(2)
    after.set_state(round_trip(tmp_path, {"rollouts": before.get_state()})["rollouts"])
    assert after.add(rest) == before.add(rest) == [4]
    batch, restored = before.take([4], 6), after.take([4], 6)
    assert batch.token.tolist() == [[20, 30], [21, 0]]
    for column in ("prompt", "token", "logp_behav", "version", "finish"):
        assert_same(getattr(batch, column), getattr(restored, column))


def test_the_newest_step_wins_whatever_the_number_of_digits(tmp_path):
    for step in (999_999, 20, 1_000_000):
        save(tmp_path, step, {"step": step})
    assert latest(tmp_path) == (1_000_000, {"step": 1_000_000})


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1, {"x": np.zeros(2), "y": 1})
    save(tmp_path, 1, {"z": 2})
    assert latest(tmp_path) == (1, {"z": 2})


def test_prune_keeps_the_newest(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, STATE)
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010.npz", "step-000015.npz"]
    prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000015.npz"]


# Damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def flip_a_bit_of_an_array(path):
    flip(path, np.arange(6, dtype=np.float32).tobytes())


def flip_a_bit_of_the_rest(path):
    flip(path, b"123.25")  # 023.25


def flip(path, where: bytes):
    data = bytearray(path.read_bytes())
    data[data.index(where)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit_of_an_array, flip_a_bit_of_the_rest])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, damage):
    save(tmp_path, 10, STATE)
    damage(save(tmp_path, 20, STATE | {"version": 4, "elapsed": 123.25}))
    with pytest.warns(UserWarning, match=r"step-000020.npz cannot be read \(.+\); going on from step-000010.npz"):
        step, state = latest(tmp_path)
    assert step == 10
    assert_same(state, STATE)


def test_an_error_names_every_checkpoint_where_none_can_be_read(tmp_path):
    for step in (10, 20):
        truncate(save(tmp_path, step, STATE))
    with pytest.raises(RuntimeError, match=r"step-000020.npz cannot be read .*step-000010.npz cannot be read .*delete them all to start"):
        latest(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from nowait.checkpoint import save

def deadly(call):
    def wrapper(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapper

left = int(sys.argv[2])
os.fsync, os.rename = deadly(os.fsync), deadly(os.rename)
save(Path(sys.argv[1]), 2, {"step": 2, "w": np.full(1000, 2.0)})
"""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("call", "step"), list(enumerate([1, 1, 2], 1)))  # fsync, rename, fsync of the folder
def test_killed_at_any_moment_of_a_save_the_old_or_the_new_checkpoint_is_whole(tmp_path, call, step):
    save(tmp_path, 1, {"step": 1, "w": np.full(1000, 1.0)})
    child = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(call)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert child.returncode == -signal.SIGKILL
    found, state = latest(tmp_path)
    assert found == state["step"] == step
    assert_same(state["w"], np.full(1000, float(step)))
    save(tmp_path, 3, {"step": 3})
    assert latest(tmp_path) == (3, {"step": 3})
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())


# Disks that refuse


def test_a_disk_that_fills_up_gives_one_message_and_costs_no_checkpoint(tmp_path):
    save(tmp_path, 10, STATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RuntimeError) as caught:
            save(tmp_path, 20, {"w": np.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for part in (str(tmp_path), "step 20", "File too large", "resume"):
        assert part in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010.npz"]
    assert latest(tmp_path)[0] == 10


def test_a_folder_that_may_not_be_written_is_named_with_the_remedy(tmp_path):
    tmp_path.chmod(0o555)
    privileged = os.geteuid() == 0
    if privileged:
        os.seteuid(65534)  # permissions do not bind root
    try:
        with pytest.raises(RuntimeError, match=rf"run {tmp_path}: .*step 20: .*Permission denied.* make the folder writable"):
            save(tmp_path, 20, STATE)
    finally:
        if privileged:
            os.seteuid(0)
        tmp_path.chmod(0o755)
