from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.batch import LENGTH, RUNNING, STOP, Request, Rollouts, Segments, length_groups, pack_requests, unpack_requests


def request(number: int, prompt: list[int] | None = None, n: int = 2) -> Request:
    return Request(number, np.array(prompt or [1], np.int32), n, 8, row=100 + number)


def segments(version: int, **sequences: tuple[list[int], int]) -> Segments:
    """One round: s4=([11, 12], STOP) says that sequence 4 got two tokens and stopped; the log-prob of token 12 is -0.12."""
    tokens = [t for t, _ in sequences.values()]
    return Segments(
        sequence=np.array([int(name[1:]) for name in sequences], np.int64),
        offset=np.cumsum([0, *map(len, tokens)]),
        token=np.array(sum(tokens, []), np.int32),
        logp_behav=np.array(sum(tokens, []), np.float32) / -100,
        finish=np.array([f for _, f in sequences.values()], np.uint8),
        version=version,
    )


@pytest.fixture
def rollouts() -> Rollouts:
    """Requests 3 (sequences 6, 7; complete, tokens of versions 0, 2 and 1), 4 (8, 9; half done) and 5 (10, 11; no token yet)."""
    out = Rollouts(2)
    out.admit([request(3, [5, 6, 7]), request(4, [8]), request(5)])
    out.add(segments(0, s6=([61, 62], RUNNING)))
    out.add(segments(1, s7=([71, 72], STOP), s6=([], RUNNING)))
    assert out.add(segments(2, s6=([63, 64], LENGTH), s8=([81], STOP), s9=([91], RUNNING))) == [3]
    return out


def test_rounds_are_joined_by_sequence_with_the_version_of_every_token(rollouts):
    batch = rollouts.take([3], step=2)
    assert batch.step == 2
    assert batch.sequence.tolist() == [6, 7] and batch.group.tolist() == [3, 3]
    assert batch.prompt.tolist() == [[5, 6, 7]] * 2 and batch.prompt_length.tolist() == [3, 3]
    assert batch.token.tolist() == [[61, 62, 63, 64], [71, 72, 0, 0]]
    assert batch.version.tolist() == [[0, 0, 2, 2], [1, 1, -1, -1]]
    assert batch.logp_behav.tolist() == np.float32([[-0.61, -0.62, -0.63, -0.64], [-0.71, -0.72, 0, 0]]).tolist()
    assert batch.length.tolist() == [4, 2] and batch.finish.tolist() == [LENGTH, STOP]


def test_take_pads_over_the_requests_it_takes_and_keeps_their_order():
    rollouts = Rollouts(1)
    rollouts.admit([request(0, [9], 1), request(1, [8, 8], 1), request(2, [7], 1)])
    rollouts.add(segments(0, s2=([1, 2, 3], STOP), s0=([4], STOP), s1=([5], RUNNING)))
    batch = rollouts.take([2, 0], step=0)
    assert batch.group.tolist() == [2, 0] and batch.prompt.tolist() == [[7], [9]]
    assert batch.token.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert list(rollouts.requests) == [1] and rollouts.tokens == 1


def test_the_oldest_version_of_a_request_is_that_of_its_first_token(rollouts):
    rollouts.add(segments(2, s10=([], RUNNING)))  # it has begun, without a token
    assert rollouts.oldest == {3: 0, 4: 2}
    rollouts.add(segments(3, s9=([92], RUNNING), s10=([101], RUNNING)))
    assert rollouts.oldest == {3: 0, 4: 2, 5: 3}
    rollouts.take([3], step=3)
    rollouts.drop([4])
    assert rollouts.oldest == {5: 3}


def test_completed_requests_come_in_submission_order_whatever_the_order_of_rows():
    rollouts = Rollouts(1)
    rollouts.admit([request(i, n=1) for i in range(12)])
    assert rollouts.add(segments(0, s8=([1], STOP), s11=([1], STOP), s10=([1], RUNNING), s1=([1], LENGTH))) == [1, 8, 11]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda r: r.admit([request(4)]), "request 4 was admitted twice"),
        (lambda r: r.add(segments(3, s8=([82], STOP))), "sequence 8 had finished and got more tokens"),
        (lambda r: r.take([3, 4], 3), "requests 4 are not complete"),
        (lambda r: r.take([5], 3), "requests 5 are not complete"),
    ],
)
def test_misuse_is_an_error_and_leaves_the_tokens_alone(rollouts, act, message):
    before = rollouts.tokens
    with pytest.raises(ValueError, match=message):
        act(rollouts)
    assert rollouts.tokens == before == 8


def test_dropped_requests_leave_nothing_behind(rollouts):
    rollouts.drop([3, 5])
    assert len(rollouts) == 1 and rollouts.tokens == 2
    rollouts.add(segments(3, s9=([92], STOP)))
    assert rollouts.take([4], 3).token.tolist() == [[81, 0], [91, 92]]


def test_restored_rollouts_go_on_as_if_nothing_had_happened(rollouts):
    restored = Rollouts(2)
    restored.admit([request(77)])
    restored.set_state(pickle.loads(pickle.dumps(rollouts.get_state())))
    assert restored.oldest == rollouts.oldest and restored.tokens == 8 and list(restored.requests) == [3, 4, 5]
    last = segments(5, s9=([92], STOP), s10=([101], STOP), s11=([111], STOP))
    assert restored.add(last) == rollouts.add(last) == [4, 5]
    ours, theirs = restored.take([3, 4, 5], 5), rollouts.take([3, 4, 5], 5)
    for name in ours.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name, strict=name != "step")


def test_a_state_is_a_snapshot(rollouts):
    state = rollouts.get_state()
    before = pickle.dumps(state)
    rollouts.add(segments(3, s9=([92], STOP)))
    rollouts.take([3, 4], 3)
    assert pickle.dumps(state) == before


def test_nothing_in_flight_is_a_state_too():
    rollouts = Rollouts(2)
    rollouts.set_state(Rollouts(2).get_state())
    assert len(rollouts) == rollouts.tokens == 0


def test_packed_requests_come_back_equal():
    requests = [Request(7, np.array([1, 2, 3], np.int32), 4, 99, 5), Request(2**40, np.array([4], np.int32), 1, 1, 0)]
    for before, after in zip(requests, unpack_requests(pack_requests(requests)), strict=True):
        assert (after.id, after.n, after.max_new_tokens, after.row) == (before.id, before.n, before.max_new_tokens, before.row)
        assert after.prompt.dtype == np.int32 and after.prompt.tolist() == before.prompt.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_token_is_held_dropped_or_taken_once(data):
    n = data.draw(st.integers(1, 3))
    rollouts, version, admitted = Rollouts(n), 0, 0
    lengths, running, left, taken = {}, set(), 0, []  # of each sequence; unfinished; tokens that left; sequences that left in a batch

    def some(of, least=0):
        return data.draw(st.lists(st.sampled_from(sorted(of)), unique=True, min_size=least)) if of else []

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["admit", "round", "round", "take", "drop", "restore"]))
        if action == "admit":
            rollouts.admit([request(admitted, n=n)])
            running.update(range(admitted * n, (admitted + 1) * n))
            admitted += 1
        elif action == "round":
            version += data.draw(st.integers(0, 2))
            made = {s: (data.draw(st.integers(1, 4)), data.draw(st.sampled_from([RUNNING, STOP]))) for s in some(running, 1)}
            rollouts.add(segments(version, **{f"s{s}": ([1] * new, finish) for s, (new, finish) in made.items()}))
            lengths |= {s: lengths.get(s, 0) + new for s, (new, _) in made.items()}
            running -= {s for s, (_, finish) in made.items() if finish == STOP}
        elif action == "take" and (requests := some([r for r in rollouts.requests if rollouts.complete(r)])):
            batch = rollouts.take(requests, version)
            assert batch.length.tolist() == [lengths[s] for s in batch.sequence.tolist()]
            left += int(batch.mask.sum())
            taken += batch.sequence.tolist()
        elif action == "drop" and (requests := some(rollouts.requests)):
            rollouts.drop(requests)
            gone = {s for r in requests for s in range(r * n, (r + 1) * n)}
            left += sum(lengths.get(s, 0) for s in gone)
            running -= gone
        elif action == "restore":
            state, rollouts = rollouts.get_state(), Rollouts(n)
            rollouts.set_state(state)
        assert sum(lengths.values()) == left + rollouts.tokens
    assert len(taken) == len(set(taken))


def test_rows_selects_sequences_and_trims_padding_to_them():
    rollouts = Rollouts(1)
    rollouts.admit([request(0, [1, 2, 3], 1), request(1, [4], 1), request(2, [5, 6], 1)])
    rollouts.add(segments(1, s0=([1, 2, 3, 4, 5], STOP), s1=([6, 7, 8], LENGTH), s2=([9], STOP)))
    part = rollouts.take([0, 1, 2], step=4).rows(np.array([2, 1]))
    assert part.step == 4 and len(part) == 2
    assert part.group.tolist() == [2, 1] and part.finish.tolist() == [STOP, LENGTH]
    assert part.token.tolist() == [[9, 0, 0], [6, 7, 8]] and part.version.tolist() == [[1, -1, -1], [1, 1, 1]]
    assert part.logp_behav.shape == (2, 3) and part.prompt.tolist() == [[5, 6], [4, 0]]


def test_mask_covers_the_response_tokens_of_kept_sequences():
    rollouts = Rollouts(1)
    rollouts.admit([request(i, n=1) for i in range(3)])
    rollouts.add(segments(0, s0=([0, 0], STOP), s1=([1, 1, 1], STOP), s2=([0], STOP)))  # token 0 is also the padding
    batch = rollouts.take([0, 1, 2], step=0)
    batch.keep[1] = False
    assert batch.mask.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert batch.rows(np.array([1])).mask.tolist() == [[False] * 3]


def test_sequences_are_read_and_trained_beside_others_of_similar_length():
    def groups(lengths, most=None):
        return [group.tolist() for group in length_groups(lengths, most)]

    assert groups([300, 1000, 400, 500]) == [[1, 3], [2, 0]]  # 400 beside 1000 would be padded to more than twice its length
    assert groups([3, 10, 4, 5]) == [[1, 3, 2, 0]]  # here that costs 12 tokens, less than another pass
    assert groups([400, 144]) == [[0, 1]] and groups([400, 143]) == [[0], [1]]  # 256 tokens are worth a pass
    assert groups([200, 72, 72]) == [[0, 1, 2]] and groups([200, 71, 71]) == [[0], [1, 2]]  # of all that follow: 2 * 128, 2 * 129
    assert groups([3, 10, 4, 5], most=19) == [[1], [3, 2, 0]]
    assert groups([3, 10, 4, 5], most=1) == [[1], [3], [2], [0]]  # one sequence at least
    assert groups([]) == []
