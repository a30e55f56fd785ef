"""The driver's side of rollout workers on Ray. `RayWorker`, a WorkerPort, starts and calls one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from actors.weight_relay import RelayFailed, Relays
from actors.worker import RolloutWorker
from dapo_async.codec import MalformedFrame, decode, decode_any, encode
from dapo_async.errors import ConfigError, last_line
from dapo_async.fleet import Updated, WorkerLost
from dapo_async.pipeline import UpdateRefusedByWorker
from dapo_async.types import (
    EvalOutcomes,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    WeightVersion,
)

T = TypeVar("T")
log = logging.getLogger("dapo_async")
CALL_TIMEOUT_S = 60.0
"""Longest answer to a call that only queues something."""


class RayWorker:
    """One rollout worker; a restart makes a new actor, and the old one is killed first.

    Args:
        name: of the worker.
        config: the resolved configuration as plain data.
        stop_ids: every token id that ends a response.
        store: handle of the payload store.
        options: Ray options of the actor (`num_cpus`, `scheduling_strategy` …).
        relays: the weights' way to the worker's node; None where every node sees the same folder.
        sender: handle of learner rank 0, where it sends the weights itself.
        index: of the worker among all.
        room: waits until the cluster has room for it, and says on which node; None where nobody
            waits for that.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        stop_ids: Sequence[int],
        store: Any,
        options: dict[str, Any],
        relays: Relays | None = None,
        sender: Any = None,
        index: int = 0,
        room: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self.name = name
        self._make: Callable[[], Any] = lambda: (
            ray.remote(RolloutWorker)
            .options(max_restarts=0, **options)
            .remote(name, config, list(stop_ids), store, sender=sender, index=index)
        )
        self._actor: Any = None
        self._relays = relays
        self._room = room
        self._home = ""
        self._node = ""
        self._rewound = False
        self._begun: Any = None
        """The answer of its first start, which began before anybody waited for it."""

    def begin(self) -> None:
        """Let the first start go on while others start; `start` waits for what becomes of it."""
        self._actor = self._make()
        self._begun = self._actor.start.remote()

    async def find_room(self) -> bool:
        """As `WorkerPort.find_room`."""
        if self._room is None:
            return False
        try:
            before, self._home = self._home, await self._room()
        except RayError as error:
            raise WorkerLost(f"nobody knows of its room: {_reason(error)}") from error
        if self._home != before:
            log.info("%s has room on node %s", self.name, self._home)
        return before not in ("", self._home)

    async def start(self) -> int:
        """As `WorkerPort.start`.

        Raises:
            ConfigError: the worker can't serve this config; a restart would not help.
        """
        if self._rewound and self._actor is not None:
            self._rewound = False
            return 0  # whatever it has must be replaced before it generates
        if self._begun is None:
            self.kill()
            self.begin()
        begun, self._begun = self._begun, None
        version = _version(await self._call(begun))
        if self._relays is not None:  # an earlier life may have been on another node
            node = self._live.__ray_call__.remote(_node_id)
            self._node = await self._call(node, CALL_TIMEOUT_S)
            self._relays.open(self._node)
        return version

    async def submit(self, leases: Sequence[Lease]) -> None:
        frames = [encode(lease) for lease in leases]
        await self._call(self._live.submit.remote(frames), CALL_TIMEOUT_S)

    async def collect(self, gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
        frames: list[bytes] = await self._call(self._live.collect.remote(gather_s), CALL_TIMEOUT_S)
        return [_decoded(decode_any, frame) for frame in frames]

    async def abort(self, lease_ids: Sequence[LeaseId]) -> None:
        frames = [encode(lease_id) for lease_id in lease_ids]
        await self._call(self._live.abort.remote(frames), CALL_TIMEOUT_S)

    async def prepare(self, manifest: WeightVersion) -> None:
        """As `WorkerPort.prepare`: the version is brought to the worker's node."""
        if self._relays is None:
            return
        try:
            async with self._relays.nearby(manifest, self._node):
                pass
        except RelayFailed as error:
            log.info("%s: %s; tried again with the update", self.name, error)

    async def update(self, manifest: WeightVersion) -> Updated:
        if self._relays is None:
            return await self._update(manifest)
        try:
            async with self._relays.nearby(manifest, self._node) as local:
                return await self._update(local)
        except RelayFailed as error:
            raise UpdateRefusedByWorker(str(error)) from error

    async def _update(self, manifest: WeightVersion) -> Updated:
        answer: dict[str, Any] = await self._call(self._live.update.remote(encode(manifest)))
        if "refused" in answer:
            raise UpdateRefusedByWorker(answer["refused"])
        return Updated(**answer | {"version": _version(answer["version"])})

    async def rewind(self) -> None:
        """As `WorkerPort.rewind`."""
        if self._actor is None:
            return
        try:
            await self._call(self._actor.rewind.remote(), CALL_TIMEOUT_S)
            self._rewound = True
        except WorkerLost as error:
            log.warning("%s can't go on with the learner: %s", self.name, error)
            self.kill()

    async def evaluate(self, prompts: Sequence[Prompt], step: int) -> EvalOutcomes:
        frames = [encode(prompt) for prompt in prompts]
        answer = await self._call(self._live.evaluate.remote(frames, step))
        return _decoded(lambda frame: decode(frame, EvalOutcomes), answer)

    async def health(self) -> dict[str, float | str]:
        return await self._call(self._live.health.remote(), CALL_TIMEOUT_S)

    async def close(self) -> None:
        """End the actor; a dead one is no error."""
        if self._actor is None:
            return
        if self._begun is None:  # else it is still starting: nobody waits for an answer
            with contextlib.suppress(WorkerLost):
                await self._call(self._live.close.remote(), 10.0)
        self.kill()

    def kill(self) -> None:
        """End the actor at once, whatever it is doing; nothing to do when there is none."""
        actor, self._actor, self._rewound, self._begun = self._actor, None, False, None
        if actor is not None:
            ray.kill(actor)

    @property
    def _live(self) -> Any:
        if self._actor is None:
            raise WorkerLost("it isn't running")
        return self._actor

    async def _call(self, reference: Awaitable[T], timeout_s: float | None = None) -> T:
        """Await an answer; whatever Ray says of a dead or broken actor is a WorkerLost, but a
        config that the actor refuses stays a ConfigError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except RayError as error:  # first: a TimeoutError inside the actor is of both kinds here
            cause = getattr(error, "cause", None)
            if isinstance(cause, ConfigError):
                raise cause from error
            raise WorkerLost(_reason(error)) from error
        except TimeoutError as error:
            raise WorkerLost(f"no answer within {timeout_s:g} s") from error


def _node_id(_: Any) -> str:
    """Run within an actor: Ray's id of its node."""
    return ray.get_runtime_context().get_node_id()


def _version(reported: Any) -> int:
    """A version that may be compared with others. Anything else, a path, text or -1 for "unknown",
    must not be mistaken for one: the worker gets no work."""
    if type(reported) is not int or reported < 0:
        raise WorkerLost(f"reports version {reported!r}, which is no whole number ≥ 0")
    return reported


def _decoded(read: Callable[[bytes], T], frame: bytes) -> T:
    try:
        return read(frame)
    except MalformedFrame as error:
        raise WorkerLost(f"sent a malformed frame: {error}") from error


def _reason(error: RayError) -> str:
    """What the exception within the actor says, else the last line of what Ray says."""
    cause = getattr(error, "cause", None)
    if cause is not None and str(cause).strip():
        return str(cause).strip()
    return last_line(str(error) or type(error).__name__)
