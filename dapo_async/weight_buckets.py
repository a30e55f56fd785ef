"""Cutting a version into the parts in which it travels from the learner into an engine.

Sender and receiver cut the same manifest and so agree on every part without further words. Within
a part the tensors lie without a gap, as SGLang's flattened buckets do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapo_async.types import TensorSpec

BUCKET_BYTES = 512 * 2**20
"""What an engine needs beside its weights while it receives them. Larger parts are no faster."""

Bucket = tuple[TensorSpec, ...]


def cut(tensors: Iterable[TensorSpec], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """The tensors in the order of their offsets, as many to a bucket as fit.

    A tensor larger than `bucket_bytes` has a bucket to itself. Offsets as `tensor_file.plan` gives
    them come with the largest items first, so every tensor of a bucket is aligned to its items.

    Raises:
        ValueError: the tensors don't lie one behind the other.
    """
    buckets: list[list[TensorSpec]] = []
    size, end = 0, None
    # An empty tensor starts where the next one does, and comes before it.
    for spec in sorted(tensors, key=lambda spec: (spec.offset, spec.nbytes)):
        if end is not None and spec.offset != end:
            raise ValueError(
                f"`{spec.name}` starts at byte {spec.offset}, the tensor before it ends at {end}"
            )
        end = spec.offset + spec.nbytes
        if not buckets or (size and size + spec.nbytes > bucket_bytes):
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.nbytes
    return [tuple(bucket) for bucket in buckets]


def nbytes(bucket: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in bucket)
