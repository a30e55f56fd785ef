"""PayloadStore: keeps group payloads beside the learner until they are trained or dropped."""

from __future__ import annotations

import os

from dapo_async.codec import decode
from dapo_async.types import LeaseId


class PayloadStore:
    """Frames by the frame of their lease id. A Ray actor on the learner's node; it never looks into
    a payload."""

    def __init__(self) -> None:
        self._frames: dict[bytes, bytes] = {}
        self._bytes = 0
        self._timeline = 0
        self._expired: set[bytes] = set()
        """Leases that were discarded before their payload came: those of lost workers. Such a
        worker may live on beyond reach and deliver late, when nobody would release it."""

    def put(self, lease_id: bytes, frame: bytes) -> None:
        """Keep a payload; a repeated delivery replaces the same bytes. One whose lease has expired,
        or belongs to a timeline that was left, is thrown away."""
        timeline = decode(lease_id, LeaseId).draw_id.timeline
        if timeline < self._timeline or lease_id in self._expired:
            return
        self._drop(lease_id)
        self._frames[lease_id] = frame
        self._bytes += len(frame)

    def get(self, lease_ids: list[bytes]) -> list[bytes]:
        """Payloads in the order asked for. Raises KeyError for one that isn't there."""
        return [self._frames[lease_id] for lease_id in lease_ids]

    def discard(self, lease_ids: list[bytes]) -> None:
        for lease_id in lease_ids:
            if lease_id not in self._frames:
                self._expired.add(lease_id)
            self._drop(lease_id)

    def clear(self, timeline: int) -> None:
        """The learner has gone back: what is here, or still comes, of earlier timelines goes."""
        self._timeline = timeline
        self._frames.clear()
        self._expired.clear()
        self._bytes = 0

    def _drop(self, lease_id: bytes) -> None:
        self._bytes -= len(self._frames.pop(lease_id, b""))

    def health(self) -> dict[str, float]:
        return {
            "pid": float(os.getpid()),
            "cpu_s": sum(os.times()[:4]),
            "groups": float(len(self._frames)),
            "bytes": float(self._bytes),
        }
