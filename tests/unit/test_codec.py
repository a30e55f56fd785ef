"""The codec through its public face."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo_async.types as records
from dapo_async.codec import MalformedFrame, decode, decode_any, encode
from dapo_async.types import (
    Batch,
    Completion,
    Draw,
    DrawId,
    Group,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    LogprobMode,
    Minibatch,
    Prompt,
    Reward,
    SampleRef,
    SamplingParams,
    StepReport,
    TensorSpec,
    Trajectory,
    WeightVersion,
)

DRAW_ID = DrawId("run", 0, 17)
LEASE_ID = LeaseId(DRAW_ID, 2)


def completion(tokens: int = 3, **changes: Any) -> Completion:
    whole: dict[str, Any] = {
        "token_ids_T": np.arange(tokens, dtype=np.int32),
        "logprobs_T": -np.arange(tokens, dtype=np.float32) / 7,
        "versions_T": np.full(tokens, 4, np.int32),
        "finish_reason": "stop",
    }
    return Completion(**(whole | changes))


def group(*completions: Completion) -> Group:
    return Group(
        lease_id=LEASE_ID,
        prompt_token_ids=np.array([5, 9], np.int32),
        logprob_mode=LogprobMode(1.0, 0.9, -1),
        trajectories=tuple(
            Trajectory(
                completion=one,
                reward=Reward(score=1.5, acc=1.0, extra={"format": 1}),
                overlong_penalty=-0.25,
            )
            for one in completions
        ),
    )


def reward(**changes: Any) -> Reward:
    whole: dict[str, Any] = {"score": 1.0, "acc": 1.0}
    return Reward(**(whole | changes))


def meta(**changes: Any) -> GroupMeta:
    whole: dict[str, Any] = {
        "lease_id": LEASE_ID,
        "worker_id": "rollout-0",
        "prompt_tokens": 2,
        "response_tokens_G": (3, 0),
        "scores_G": (1.0, math.inf),
        "accs_G": (1.0, 0.0),
        "penalties_G": (0.0, -0.5),
        "statuses_G": ("ok", "timeout"),
        "finish_reasons_G": ("stop", "length"),
        "reward_sums": {"a": (1.0, 1.0)},
        "oldest_version": 3,
        "newest_version": 4,
        "generate_s": 0.5,
        "reward_s": 0.1,
    }
    return GroupMeta(**(whole | changes))


PROMPT = Prompt(row_id="train:17", text="2+2=é", token_ids=(5, 9), answer="4", extra={"k": [1, {}]})
SAMPLING = SamplingParams(max_response_tokens=8, stop_token_ids=frozenset({3, 1}), seed=2**63)
DRAW = Draw(draw_id=DRAW_ID, prompt=PROMPT, group_size=2, sampling=SAMPLING, overlong_buffer=0)
SAMPLE = SampleRef(DRAW_ID, 1, 40, -0.5)
EXAMPLES: list[Any] = [
    DRAW_ID,
    DRAW,
    Lease(lease_id=LEASE_ID, draw=DRAW),
    meta(),
    LeaseFailure(lease_id=LEASE_ID, reason="reward_error", retry=False),
    StepReport(version=3, metrics={"loss": 0.5}, trained_tokens=9, staleness={0: 7, 2: 1}),
    WeightVersion(
        version=3,
        location="/somewhere/v3",
        tensors=(
            TensorSpec(name="w", dtype="bfloat16", shape=(2, 3), offset=0, nbytes=12, xxh3=7),
        ),
        finite=True,
    ),
    Minibatch(micro_batches=(((SAMPLE,), ()), ((), (SAMPLE, SAMPLE))), denominator=80.0),
]


def same(left: Any, right: Any) -> bool:
    """Equality that looks into arrays and takes nan as equal to itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return left == right or (left != left and right != right)


def refused(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(record)


def malformed(data: bytes, kind: type[Any] = Prompt) -> str:
    with pytest.raises(MalformedFrame) as caught:
        decode(data, kind)
    return str(caught.value)


# ---- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_equal_and_of_the_same_types(record: Any) -> None:
    assert same(decode(encode(record), type(record)), record)
    assert same(decode_any(encode(record)), record)


def test_every_record_of_the_types_module_has_a_codec() -> None:
    for name, kind in vars(records).items():
        if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
            with pytest.raises(MalformedFrame, match=name):
                decode(msgpack.packb([name, "no record"]), kind)


def test_a_group_comes_back_with_its_arrays_and_an_empty_response() -> None:
    sent = group(completion(3), completion(0), completion(5, finish_reason="abort"))
    assert same(decode(encode(sent), Group), sent)


def test_received_arrays_can_not_be_written_to() -> None:
    received = decode(encode(completion()), Completion)
    with pytest.raises(ValueError, match="read-only"):
        received.token_ids_T[0] = 1


def test_a_frame_of_an_older_record_that_lacks_the_last_default_fields_is_read() -> None:
    name, fields = msgpack.unpackb(encode(meta()), strict_map_key=False)
    assert same(decode(msgpack.packb([name, fields[:-1]]), GroupMeta), meta())
    assert "GroupMeta" in malformed(msgpack.packb([name, fields[:-2]]), GroupMeta)
    assert "GroupMeta" in malformed(msgpack.packb([name, [*fields, 0]]), GroupMeta)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)
extras = st.dictionaries(st.text("abcé", max_size=4), json_values, max_size=4)
finite32 = st.floats(-(2.0**100), 0.0, width=32)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.integers(0, 9))

    def column(item: st.SearchStrategy[Any], dtype: Any) -> Any:
        return np.array(draw(st.lists(item, min_size=tokens, max_size=tokens)), dtype)

    return Completion(
        token_ids_T=column(st.integers(0, 2**31 - 1), np.int32),
        logprobs_T=column(finite32, np.float32),
        versions_T=column(st.integers(0, 2**31 - 1), np.int32),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
    )


rewards = st.builds(Reward, score=st.floats(), acc=st.floats(0, 1), extra=extras)
trajectories = st.builds(
    Trajectory, completion=completions(), reward=rewards, overlong_penalty=st.floats(max_value=0)
)
draw_ids = st.builds(
    DrawId, st.text("ab-_1"), st.integers(0, 2**31), st.integers(0, 2**40), st.integers(0, 9)
)
groups = st.builds(
    Group,
    lease_id=st.builds(LeaseId, draw_ids, st.integers(1, 9)),
    prompt_token_ids=st.lists(st.integers(0, 99)).map(lambda ids: np.array(ids, np.int32)),
    logprob_mode=st.builds(LogprobMode, st.floats(0.1, 2), st.floats(0.1, 1), st.just(-1)),
    trajectories=st.lists(trajectories, max_size=4).map(tuple),
)


@given(groups)
@settings(max_examples=100, deadline=None)
def test_any_group_comes_back_equal(sent: Group) -> None:
    assert same(decode(encode(sent), Group), sent)


@given(extras)
@settings(max_examples=200, deadline=None)
def test_any_json_like_map_comes_back_equal(sent: dict[str, Any]) -> None:
    assert same(decode_any(encode(sent)), sent)


@given(
    metrics=st.dictionaries(st.text("abc/"), st.floats()),
    staleness=st.dictionaries(st.integers(0, 9), st.integers(0, 99)),
)
@settings(max_examples=50, deadline=None)
def test_maps_keep_their_order_and_integer_keys_of_the_schema(
    metrics: dict[str, float], staleness: dict[int, int]
) -> None:
    sent = StepReport(version=1, metrics=metrics, trained_tokens=1, staleness=staleness)
    assert same(decode(encode(sent), StepReport), sent)


# ---- what a sender may hand over ---------------------------------------------------------------


def test_numpy_scalars_are_sent_as_the_python_numbers_they_stand_for() -> None:
    extra = {"r": np.float32(0.5), "n": np.int64(3), "ok": np.bool_(True), "d": np.float64(0.1)}
    sent = reward(score=np.float32(1), acc=np.int64(1), extra=extra)
    received = decode(encode(sent), Reward)
    expected = {"r": 0.5, "n": 3, "ok": True, "d": 0.1}
    assert same(received, Reward(score=1.0, acc=1.0, extra=expected))


def test_tuples_among_json_like_values_come_back_as_lists() -> None:
    assert decode_any(encode({"a": (1, (2,))})) == {"a": [1, [2]]}


def test_text_and_bytes_stay_what_they_are() -> None:
    sent = {"text": "é", "bytes": b"\xff\x00"}
    assert same(decode_any(encode(sent)), sent)


def test_a_lone_surrogate_is_sent_as_the_replacement_character() -> None:
    sent = dataclasses.replace(PROMPT, text="a\ud800b", extra={"k\udfff": "\ud83d"})
    received = decode(encode(sent), Prompt)
    assert received.text == "a\ufffdb"
    assert received.extra == {"k\ufffd": "\ufffd"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (reward(extra={1: [0.5]}), r"Reward\.extra: key 1 \(int\) must be text"),
        (reward(extra={"a": {b"x": 1}}), r"Reward\.extra\.a: key b'x'"),
        (reward(extra={"a": [1, np.zeros(2)]}), r"Reward\.extra\.a\.1: .*ndarray"),
        (reward(extra={"a": {1, 2}}), r"Reward\.extra\.a: .*\(set\) must be"),
        (reward(score=True), r"Reward\.score: True \(bool\) must be a float"),
        (reward(score="1"), r"Reward\.score: '1' \(str\) must be a float"),
        (reward(status="fine"), r"Reward\.status: 'fine' .* must be one of ok"),
        (reward(score=10**400), r"Reward\.score: an int too large"),
        (DrawId("run", 0, 2**64), r"DrawId\.position: an int must fit 64 bits"),
        (DrawId("run", False, 1), r"DrawId\.epoch: False \(bool\) must be an int"),
        (LeaseId(("run", 0, 1), 1), r"LeaseId\.draw_id: .* must be a DrawId"),
        ({"a": dict([("k\ud800", 1), ("k\ufffd", 2)])}, r"Mapping\.a: two keys are sent as"),
        (object(), "object is not a record that can be sent"),
        ([1], "list is not a record that can be sent"),
        (meta(accs_G=(1.0,)), "accs_G has 1 entries, response_tokens_G 2"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused_with_the_name_of_its_field(
    record: Any, message: str
) -> None:
    refused(record, message)


COMPLETION_FAULTS = {
    "one log-prob too few": ({"logprobs_T": np.zeros(2, np.float32)}, "must be equally many"),
    "one version too many": ({"versions_T": np.zeros(4, np.int32)}, "must be equally many"),
    "a log-prob of nan": ({"logprobs_T": np.array([0, np.nan, 0], np.float32)}, "finite and ≤ 0"),
    "a log-prob of -inf": ({"logprobs_T": np.array([0, -np.inf, 0], np.float32)}, "finite"),
    "a log-prob over 0": ({"logprobs_T": np.array([0, 0.01, 0], np.float32)}, "finite and ≤ 0"),
    "a negative token id": ({"token_ids_T": np.array([1, -1, 2], np.int32)}, "token_ids_T: -1"),
    "a negative version": ({"versions_T": np.array([1, -2, 2], np.int32)}, "versions_T: -2"),
}


@pytest.mark.parametrize(
    ("changes", "message"), COMPLETION_FAULTS.values(), ids=COMPLETION_FAULTS.keys()
)
def test_a_broken_completion_is_refused_by_sender_and_receiver(
    changes: dict[str, Any], message: str
) -> None:
    broken = completion(**changes)
    refused(broken, message)
    refused(group(completion(), broken), message)
    fields = [
        broken.token_ids_T.tobytes(), broken.logprobs_T.tobytes(),
        broken.versions_T.tobytes(), "stop",
    ]  # fmt: skip
    assert message in malformed(msgpack.packb(["Completion", fields]), Completion)
    name, (lease, prompt, mode, _) = msgpack.unpackb(encode(group(completion())))
    inside = [[[field] for field in fields], [[1.0], [1.0], ["ok"], [{}]], [0.0]]
    assert message in malformed(msgpack.packb([name, [lease, prompt, mode, inside]]), Group)


def test_a_log_prob_over_0_by_rounding_is_accepted() -> None:
    encode(completion(1, logprobs_T=np.array([1e-6], np.float32)))


@pytest.mark.parametrize(
    "array",
    [np.zeros(3, np.int64), np.zeros(3, np.float32), np.zeros((3, 1), np.int32), [0, 0, 0]],
    ids=["int64", "float32", "two dimensions", "list"],
)
def test_an_array_of_another_dtype_or_dimension_is_refused(array: Any) -> None:
    refused(completion(token_ids_T=array), r"Completion\.token_ids_T: .*one-dimensional int32")


def test_a_view_with_strides_is_sent_by_value() -> None:
    sent = completion(3, token_ids_T=np.arange(6, dtype=np.int32)[::2])
    assert decode(encode(sent), Completion).token_ids_T.tolist() == [0, 2, 4]


def test_values_nested_too_deep_are_refused_on_both_sides() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    refused({"a": deep}, "nested over 32 deep")
    assert "nested over 32 deep" in malformed(
        msgpack.packb(["Reward", [1.0, 1.0, "ok", {"a": deep}]]), Reward
    )


# ---- hostile bytes -----------------------------------------------------------------------------

BOMBS = {
    "empty": b"",
    "array of 2^31 items": b"\xdd\x7f\xff\xff\xff",
    "map of 2^31 items": b"\xdf\x7f\xff\xff\xff",
    "text of 2^31 bytes": b"\xdb\x7f\xff\xff\xff",
    "100,000 nested arrays": b"\x91" * 100_000,
    "100,000 nested maps": b"\x81\xa1a" * 100_000,
    "nested arrays that each claim all the bytes": b"\xdd\x00\x00\xff\xff" * 20_000,
    "trailing bytes": encode(PROMPT) + b"\x00",
    "cut off": encode(PROMPT)[:-1],
    "bad UTF-8": msgpack.packb(["Prompt", ["a", "b", [], "c", {}]]).replace(b"\xa1b", b"\xa1\xff"),
    "pickle": b"\x80\x04\x95\x19\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94.",
    "extension": msgpack.packb(["Prompt", msgpack.ExtType(5, b"x")]),
    "empty extension": msgpack.packb(["Prompt", msgpack.ExtType(5, b"")]),
    "empty extension among JSON-like values": msgpack.packb(
        ["Reward", [0.0, 0.0, "ok", {"a": msgpack.ExtType(5, b"")}]]
    ),
    "timestamp": msgpack.packb(["Prompt", msgpack.Timestamp(1)]),
    "unhashable key": b"\x92\xa6Prompt\x81\x90\x01",
    "integer key": b"\x92\xa6Prompt\x81\x01\x01",
    "duplicate key": b"\x92\xa6Reward\x94\xcb" + bytes(8) + b"\xcb" + bytes(8)
    + b"\xa2ok\x82\xa1a\x01\xa1a\x02",
    "no array": msgpack.packb("Prompt"),
    "another record": encode(DRAW_ID),
    "unknown record": msgpack.packb(["Popen", ["ls"]]),
    "a name that is no text": msgpack.packb([["Prompt"], []]),
    "a name that is a number": msgpack.packb([1, []]),
}  # fmt: skip


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_hostile_bytes_are_one_error_and_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        malformed(data)
        malformed(data, Reward)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_async.codec.MAX_FRAME_BYTES", 100)
    long = dataclasses.replace(PROMPT, text="x" * 100)
    refused(long, "is over 100")
    monkeypatch.undo()
    data = encode(long)
    monkeypatch.setattr("dapo_async.codec.MAX_FRAME_BYTES", 100)
    assert "is over 100" in malformed(data)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_never_anything_but_malformed(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_any(data)


@given(json_values, st.sampled_from(["Group", *sorted(type(e).__name__ for e in EXAMPLES)]))
@settings(max_examples=300, deadline=None)
def test_random_values_under_the_name_of_a_record_are_malformed_or_such_a_record(
    value: Any, name: str
) -> None:
    try:
        received = decode_any(msgpack.packb([name, value]))
    except MalformedFrame:
        return
    assert type(received).__name__ == name
    assert same(decode_any(encode(received)), received)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_frame_is_malformed_or_still_a_record_that_can_be_sent(data: Any) -> None:
    frame = bytearray(encode(group(completion(3), completion(2))))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        received = decode(bytes(frame), Group)
    except MalformedFrame:
        return
    assert same(decode(encode(received), Group), received)


def test_a_batch_plan_is_small_and_comes_back() -> None:
    refs = tuple(SampleRef(DrawId("run", 0, i // 16), i % 16, 300, 0.5) for i in range(512))
    half = Minibatch(micro_batches=((refs[:128], refs[128:256]),), denominator=1e4)
    rest = Minibatch(micro_batches=((refs[256:384], refs[384:]),), denominator=1e4)
    whole: dict[str, Any] = {
        "version": 3, "lease_ids": (LEASE_ID,), "minibatches": (half, rest),
        "clip_low": 0.2, "clip_high": 0.28, "lr": 1e-6,
    }  # fmt: skip
    batch = Batch(**whole)
    data = encode(batch)
    assert same(decode(data, Batch), batch)
    assert len(data) < 20_000


def test_columns_of_different_lengths_are_malformed() -> None:
    name, fields = msgpack.unpackb(encode(group(completion())))
    assert len(decode(msgpack.packb([name, fields]), Group).trajectories) == 1
    fields[3][2].append(0.0)
    assert "equally long" in malformed(msgpack.packb([name, fields]), Group)
