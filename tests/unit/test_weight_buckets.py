"""Cutting a version into buckets."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_async.tensor_file import ITEM_BYTES, plan
from dapo_async.weight_buckets import cut, nbytes

SHAPES = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=12,
)


@given(SHAPES, st.integers(1, 200))
def test_every_tensor_is_in_one_bucket_aligned_and_no_bucket_is_larger_than_it_must_be(
    shapes: list[tuple[str, tuple[int, ...]]], limit: int
) -> None:
    specs, _ = plan((f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(shapes))
    buckets = cut(specs.values(), limit)
    assert sorted(spec.name for bucket in buckets for spec in bucket) == sorted(specs)
    for bucket in buckets:
        place = 0
        for spec in bucket:
            # As a receiver finds it that knows the shapes only.
            assert spec.offset - bucket[0].offset == place
            assert place % ITEM_BYTES[spec.dtype] == 0
            place += spec.nbytes
        filled = [spec for spec in bucket if spec.nbytes]
        assert nbytes(bucket) <= limit or len(filled) == 1
    for bucket, following in pairwise(buckets):
        assert nbytes(bucket) + following[0].nbytes > limit


def test_tensors_with_a_gap_between_them_are_refused() -> None:
    specs, _ = plan([("a", "float32", (4,)), ("b", "float32", (4,))])
    moved = dataclasses.replace(specs["b"], offset=specs["b"].offset + 4)
    with pytest.raises(ValueError, match="`b` starts at byte"):
        cut([specs["a"], moved])
