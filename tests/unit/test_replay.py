"""ReplayQueue and Ledger by example; the random worlds are in tests/integration."""

from __future__ import annotations

from collections import Counter
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_async.errors import GateError
from dapo_async.replay import Ledger, ReplayQueue, gate, publish_due
from dapo_async.types import DrawId, LeaseId


def queue(eta: int = 1, groups: int = 2, steps: int = 10, **options: float) -> ReplayQueue:
    depth = options.pop("depth", float(eta + 1))
    return ReplayQueue(eta, lambda step: groups, steps, depth=depth, **options)


def draw(position: int) -> DrawId:
    return DrawId("run", 0, position)


def admit(q: ReplayQueue, *positions: int, version: int = 0, now: float = 0.0) -> None:
    for position in positions:
        q.admit(draw(position), version, now)


def complete(q: ReplayQueue, *positions: int, version: int = 0) -> None:
    for position in positions:
        assert q.complete(LeaseId(draw(position), 0), version)


def positions(draw_ids: tuple[DrawId, ...] | list[DrawId]) -> list[int]:
    return [draw_id.position for draw_id in draw_ids]


# ---- admission ---------------------------------------------------------------------------------


def test_a_synchronous_queue_admits_one_steps_groups_and_no_more() -> None:
    q = queue(eta=0, groups=2)
    admit(q, 0, 1)
    assert not q.can_admit(0)
    with pytest.raises(GateError, match="contract"):
        admit(q, 2)


def test_a_synchronous_queue_admits_only_workers_that_have_the_version_just_trained() -> None:
    q = queue(eta=0, groups=2)
    admit(q, 0, 1)
    complete(q, 0, 1)
    assert q.form_batch() is not None
    assert not q.can_admit(0)
    q.trained()
    assert not q.can_admit(0) and q.can_admit(1)


def test_an_old_worker_may_start_only_what_can_still_be_trained_in_time() -> None:
    q = queue(eta=2, groups=1)
    for position in range(3):
        admit(q, position, version=position)
        complete(q, position, version=position)
        assert q.form_batch() is not None
        q.trained()
    assert q.version == 3
    assert not q.can_admit(0), "deadline 2 has passed"
    assert q.can_admit(1), "deadline 3 is the next step"
    admit(q, 3, version=1)
    assert not q.can_admit(1), "step 3 trains only one group"
    assert q.can_admit(2)


def test_a_group_in_training_keeps_its_step_so_an_old_worker_cannot_squeeze_in() -> None:
    """The batch that is in training uses up this step's capacity, whatever its deadlines."""
    q = ReplayQueue(2, lambda step: 1, 20, depth=3.0, version=5)
    admit(q, 0, version=5)  # deadline 7
    complete(q, 0, version=5)
    assert q.form_batch() is not None
    assert not q.can_admit(3), "deadline 5 is the step that is being trained"
    assert q.can_admit(4)


def test_depth_paces_below_the_guarantee() -> None:
    q = queue(eta=8, groups=2, depth=1.5)
    admit(q, 0, 1, 2)
    assert not q.can_admit(0)


def test_no_group_is_drawn_that_the_last_step_could_not_train() -> None:
    q = queue(eta=4, groups=2, steps=1)
    admit(q, 0, 1)
    assert not q.can_admit(0)


def test_filtered_groups_free_their_slot_at_once() -> None:
    q = queue(eta=0, groups=2)
    admit(q, 0, 1)
    q.filter(draw(0), "all_wrong")
    assert q.can_admit(0) and q.filtered_while_waiting == 1


# ---- batches -----------------------------------------------------------------------------------


def test_a_batch_takes_earliest_deadlines_first_and_lists_them_in_draw_order() -> None:
    q = ReplayQueue(2, lambda step: 2, 10, depth=3.0, version=2)
    admit(q, 0, version=2)
    admit(q, 1, version=1)
    admit(q, 2, version=1)
    complete(q, 0, version=2)
    complete(q, 2, 1, version=1)
    batch = q.form_batch()
    assert batch is not None and positions(batch.groups) == [1, 2]


def test_the_learner_waits_for_a_slow_group_that_is_due() -> None:
    q = queue(eta=1, groups=2, depth=2.0)
    admit(q, 0, 1, 2, 3)  # all due at step 1
    complete(q, 1, 2)
    first = q.form_batch()
    assert first is not None and positions(first.groups) == [1, 2]
    q.trained()
    admit(q, 4, 5, version=1)
    complete(q, 3)
    complete(q, 4, 5, version=1)
    assert q.form_batch() is None, "0 is due now: training others would make it too old"
    assert positions(q.blockers()) == [0]
    complete(q, 0)
    second = q.form_batch()
    assert second is not None and positions(second.groups) == [0, 3]


def test_a_short_batch_is_legal_only_if_all_others_stay_in_time() -> None:
    q = queue(eta=1, groups=2, depth=2.0)
    admit(q, 0, 1, 2, 3)
    complete(q, 0)
    assert q.form_batch() is None
    assert q.form_batch(short=True) is None, "three groups would be left for one step of two"
    q.filter(draw(1), "uniform")
    short = q.form_batch(short=True)
    assert short is not None and positions(short.groups) == [0]


def test_completed_groups_move_their_deadline_to_their_true_oldest_version() -> None:
    q = queue(eta=1, groups=1, depth=2.0)
    admit(q, 0)
    assert q.complete(LeaseId(draw(0), 0), oldest_version=0)
    admit(q, 1)
    assert not q.can_admit(0)
    q.form_batch()
    q.trained()
    assert q.complete(LeaseId(draw(1), 0), oldest_version=1), "it started after the update"
    assert dict(q.due) == {2: 1}


def test_surplus_groups_go_by_draw_order_and_never_by_completion_time() -> None:
    q = queue(eta=0, groups=2, oversample=2.0)
    admit(q, 0, 1, 2, 3)
    complete(q, 3, 2)
    assert q.form_batch() is None, "the earlier draws are waited for, though two are complete"
    assert positions(q.blockers()) == [0, 1]
    q.filter(draw(0), "all_wrong")
    complete(q, 1)
    batch = q.form_batch()
    assert batch is not None
    assert positions(batch.groups) == [1, 2] and positions(batch.surplus) == [3]
    assert q.ledger.dropped == Counter(surplus=1)


# ---- leases ------------------------------------------------------------------------------------


def test_a_late_or_duplicate_answer_is_refused_and_counted() -> None:
    q = queue()
    admit(q, 0)
    q.lose(draw(0))
    lease = q.reissue(draw(0), 0, now=1.0)
    assert not q.complete(LeaseId(draw(0), 0), 0), "the first attempt has expired"
    assert q.complete(lease, 0)
    assert not q.complete(lease, 0), "a duplicate"
    assert not q.complete(LeaseId(draw(99), 0), 0), "never drawn"
    assert q.ledger.late == 3
    assert q.ready == 1


def test_an_answer_with_tokens_older_than_its_lease_is_refused() -> None:
    q = queue(eta=2)
    q.version = 1
    admit(q, 0, version=1)
    assert not q.complete(LeaseId(draw(0), 0), oldest_version=0)
    assert q.ready == 0


def test_a_lost_group_goes_only_to_a_worker_of_at_least_its_version() -> None:
    q = ReplayQueue(2, lambda step: 1, 10, depth=3.0, version=2)
    admit(q, 0, version=1)
    q.lose(draw(0))
    assert q.unleased() == [(draw(0), 1)]
    with pytest.raises(GateError, match="reissued"):
        q.reissue(draw(0), 0, now=0.0)
    assert q.reissue(draw(0), 2, now=0.0) == LeaseId(draw(0), 1)
    assert dict(q.due) == {4: 1}, "its deadline follows the new worker"
    assert q.live == 1, "it kept its slot"


def test_only_blockers_that_are_old_enough_are_overdue() -> None:
    q = queue(eta=1, groups=2, depth=2.0)
    admit(q, 0, now=0.0)
    admit(q, 1, now=50.0)
    assert q.overdue(60.0, timeout=100.0) == ([], 100.0)
    assert q.overdue(100.0, timeout=100.0) == ([draw(0)], 150.0)
    complete(q, 0, 1)
    assert q.overdue(1e9, timeout=100.0) == ([], None), "nothing blocks a batch that can be formed"


def test_a_group_that_blocks_nothing_only_says_when_to_look_again() -> None:
    q = queue(eta=1, groups=2, depth=2.0)
    admit(q, 0, 1, now=0.0)
    complete(q, 0, 1)
    q.form_batch()
    admit(q, 2, now=10.0)
    assert q.overdue(20.0, timeout=100.0) == ([], 110.0)
    q.lose(draw(2))
    q.reissue(draw(2), 1, now=50.0)
    assert q.overdue(110.0, timeout=100.0) == ([], 150.0), "its new attempt counts"
    q.drop(draw(2), "test")
    assert q.overdue(110.0, timeout=100.0) == ([], None)


@given(
    eta=st.integers(0, 3),
    groups=st.integers(1, 3),
    acts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60),
)
def test_a_batch_is_formed_exactly_when_all_others_can_still_be_trained(
    eta: int, groups: int, acts: list[tuple[int, int]]
) -> None:
    q = queue(eta=eta, groups=groups, steps=12)
    oldest: dict[int, int] = {}
    done: set[int] = set()
    for act, number in acts:
        if act == 0 and q.can_admit(version := max(0, q.version - number % (eta + 1))):
            new = len(oldest)
            oldest[new] = version
            admit(q, new, version=version)
        elif act in (1, 2) and oldest:
            wanted = sorted(oldest)[number % len(oldest)]
            if q.is_current(LeaseId(draw(wanted), 0)):
                complete(q, wanted, version=oldest[wanted])
                done.add(wanted)
        elif act == 3 and q.step < 12:
            ready = sorted((oldest[n] + eta, n) for n in done)[:groups]
            left = Counter(q.due)
            left.subtract(deadline for deadline, _ in ready)
            legal = len(ready) == groups and q.feasible(q.step + 1, +left)
            formed = q.form_batch()
            assert (formed is not None) == legal
            if formed is not None:
                assert positions(formed.groups) == sorted(n for _, n in ready)
                done -= {n for _, n in ready}
                q.trained()


@given(
    due=st.dictionaries(st.integers(0, 14), st.integers(1, 12), max_size=8),
    step=st.integers(0, 12),
    sizes=st.lists(st.integers(1, 6), min_size=10, max_size=10),
    slack=st.sampled_from([1.0, 1.5, 2.0]),
)
def test_feasible_is_what_counting_every_deadline_by_itself_says(
    due: dict[int, int], step: int, sizes: list[int], slack: float
) -> None:
    q = queue(eta=4, steps=len(sizes))
    q.rebound(groups_per_step=lambda step: sizes[step])
    by_hand = all(
        sum(n for other, n in due.items() if other <= deadline)
        <= floor(slack * sum(sizes[step : deadline + 1]) + 1e-9)
        for deadline in due
    )
    assert q.feasible(step, due, slack) == by_hand


# ---- changes of the bounds ---------------------------------------------------------------------


def test_a_lower_bound_sends_the_latest_draws_back() -> None:
    q = queue(eta=3, groups=1, depth=4.0)
    admit(q, 0, 1, 2, 3)
    assert positions(q.rebound(max_staleness=1)) == [3, 2]
    assert q.ledger.dropped == Counter(resume_bound=2)
    assert q.feasible(q.step, q.due)


def test_a_smaller_batch_sends_the_latest_draws_back() -> None:
    q = queue(eta=0, groups=4)
    admit(q, 0, 1, 2, 3)
    assert positions(q.rebound(groups_per_step=lambda step: 2)) == [3, 2]


# ---- ledger, gate, publish rule ----------------------------------------------------------------


def test_a_draw_ends_exactly_once() -> None:
    ledger = Ledger()
    ledger.draw(draw(0))
    with pytest.raises(GateError, match="twice"):
        ledger.draw(draw(0))
    ledger.end(draw(0))
    with pytest.raises(GateError, match="isn't live"):
        ledger.end(draw(0))


def test_an_unbalanced_ledger_is_noticed() -> None:
    ledger = Ledger()
    ledger.draw(draw(0))
    ledger.check()
    ledger.end(draw(0))  # without saying how
    with pytest.raises(GateError, match="balance"):
        ledger.check()


@pytest.mark.parametrize(
    ("version", "oldest", "ok"), [(5, 5, True), (5, 3, True), (5, 2, False), (5, 6, False)]
)
def test_the_gate_passes_only_samples_within_the_bound(version: int, oldest: int, ok: bool) -> None:
    if ok:
        assert gate(version, oldest, 2, "sample") == version - oldest
    else:
        with pytest.raises(GateError, match="max_staleness: 2"):
            gate(version, oldest, 2, "sample")


def test_a_sample_resumed_over_many_versions_is_as_old_as_its_oldest_token() -> None:
    versions_T = [0, 1, 2, 3, 4]
    with pytest.raises(GateError):
        gate(5, min(versions_T), 2, "sample")


@given(interval=st.integers(1, 5), failures=st.lists(st.booleans(), min_size=20, max_size=60))
def test_the_published_version_never_falls_more_than_the_interval_behind_for_good(
    interval: int, failures: list[bool]
) -> None:
    """A failed publish is due again at the next version, whatever its number."""
    published = 0
    for version, failed in enumerate(failures, start=1):
        if publish_due(version, published, interval) and not failed:
            published = version
        if not failed:
            assert version - published < interval
