"""How the bytes of a version get into an SGLang server that is paused.

`FromFolder` makes the server read the version's folder. `FromLearner` makes it receive the version
from learner rank 0 over a process group of these two alone (see `learner.sender`); the first time
they meet, later the group is there. Both leave the server with the version's label.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Literal, Protocol, TypeVar

from actors.engine import UpdateRefused
from actors.sglang_http import BadRequest, ServerClient, ServerFailure, WrongToken
from dapo_async.errors import ConfigError
from dapo_async.types import WeightVersion
from dapo_async.weight_buckets import cut

T = TypeVar("T")
CALL_S = 60.0
OFFER_S = 60.0
"""Longest that the learner may take to say whether it has a version."""
DROP_S = 10.0
LEAVE_S = 3.0


class SenderFailure(Exception):
    """The learner failed to send a version, or can't be asked."""


class WeightPath(Protocol):
    """What an engine does to have a version's bytes loaded."""

    async def prepare(self, manifest: WeightVersion) -> None:
        """Everything that needs no pause.

        Raises:
            UpdateRefused: the version can't be had this way; the server is as it was.
        """
        ...

    async def load(self, manifest: WeightVersion, flush: bool) -> None:
        """Load it into the paused server and label it. An exception leaves a server of which
        nobody knows what it holds.

        Args:
            flush: the KV cache of the old weights goes.
        """
        ...

    async def close(self) -> None: ...


class FromFolder:
    """The version is a folder that the server can read."""

    def __init__(self, client: ServerClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def prepare(self, manifest: WeightVersion) -> None:
        pass

    async def load(self, manifest: WeightVersion, flush: bool) -> None:
        await self._client.post(
            "/update_weights_from_disk",
            {
                "model_path": manifest.location,
                "load_format": "safetensors",
                "weight_version": str(manifest.version),
                "flush_cache": flush,
            },
            self._timeout_s,
        )

    async def close(self) -> None:
        pass


class Sender(Protocol):
    """Learner rank 0 as one worker sees it. All calls may raise SenderFailure."""

    @property
    def worker(self) -> str: ...

    async def offer(self, group: str, version: int, ranks: int) -> dict[str, Any]:
        """{"refused": why}, or {"address", "port", "backend", "bucket_bytes"}."""
        ...

    async def send(self, group: str) -> None:
        """Returns when the engine has taken the version that was offered to the group."""
        ...

    async def drop(self, group: str) -> None: ...


class RaySender:
    """A `Sender` around the handle of a `learner.worker.LearnerRank`."""

    def __init__(self, rank0: Any, worker: str) -> None:
        self.worker = worker
        self._rank0 = rank0

    async def offer(self, group: str, version: int, ranks: int) -> dict[str, Any]:
        return await _answer(self._rank0.offer_weights.remote(self.worker, group, version, ranks))

    async def send(self, group: str) -> None:
        await _answer(self._rank0.send_weights.remote(group))

    async def drop(self, group: str) -> None:
        await _answer(self._rank0.drop_weights.remote(group))


async def _answer(reference: Awaitable[T]) -> T:
    from ray.exceptions import RayError

    try:
        return await reference
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise SenderFailure(f"the learner: {cause}") from error


class FromLearner:
    """The version comes from learner rank 0.

    Args:
        client: the server.
        sender: learner rank 0. The group is named after the worker and, since a server or worker
            that starts again has lost its group, after this object.
        timeout_s: longest update.
    """

    def __init__(self, client: ServerClient, sender: Sender, timeout_s: float) -> None:
        self._client = client
        self._sender = sender
        self._timeout_s = timeout_s
        self._group = f"{sender.worker}-{secrets.token_hex(4)}"
        self._bucket_bytes = 0
        self._state: Literal["apart", "met", "used", "broken"] = "apart"

    async def prepare(self, manifest: WeightVersion) -> None:
        """Ask for the version; the first time also meet. Generation stands still for the meeting.

        Raises:
            UpdateRefused: the learner has another version, or gives no answer.
            ConfigError: this server can't be in a group.
            ServerFailure, BadRequest, WrongToken, SenderFailure: the meeting failed.
        """
        if self._state == "broken":
            raise ServerFailure(f"{self._client.url} has left the group {self._group}")
        ranks = await self._ranks() if self._state == "apart" else 0
        offer = await self._offer(manifest.version, ranks)
        self._bucket_bytes = int(offer["bucket_bytes"])
        if self._state != "apart":
            return
        body = {
            "master_address": offer["address"],
            "master_port": offer["port"],
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": self._group,
            "backend": offer["backend"],
        }
        async with self._dropping_at_failure():
            await self._client.post("/init_weights_update_group", body, self._timeout_s)
        self._state = "met"

    async def load(self, manifest: WeightVersion, flush: bool) -> None:
        async with self._dropping_at_failure(), asyncio.timeout(self._timeout_s):
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._sender.send(self._group))
                    both.create_task(self._receive(manifest, flush))
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from failures
        self._state = "used"

    async def close(self) -> None:
        """Leave the group on both sides: a server that isn't ours lives on."""
        if self._state in ("met", "used"):
            with contextlib.suppress(ServerFailure, BadRequest, WrongToken):
                body = {"group_name": self._group}
                await self._client.post("/destroy_weights_update_group", body, LEAVE_S)
        if self._state != "apart":
            await self._drop()

    async def _ranks(self) -> int:
        """Processes of the server that will be in the group."""
        info: Any = await self._client.get("/server_info", CALL_S)
        for name in ("pp_size", "dp_size"):
            if int(info.get(name) or 1) != 1:
                raise ConfigError(
                    f"`weights.transport: nccl`: {self._client.url} has {name} {info[name]}; only "
                    "tensor parallelism is possible with it"
                )
        return int(info.get("tp_size") or 1)

    async def _offer(self, version: int, ranks: int) -> dict[str, Any]:
        try:
            async with asyncio.timeout(OFFER_S):
                offer = await self._sender.offer(self._group, version, ranks)
        except SenderFailure as error:
            if self._state != "apart":  # the group is lost, and this server is in no other
                raise
            raise UpdateRefused(str(error)) from error
        except TimeoutError:
            raise UpdateRefused(f"the learner gave no answer within {OFFER_S:g} s") from None
        if "refused" in offer:
            raise UpdateRefused(offer["refused"])
        return offer

    async def _receive(self, manifest: WeightVersion, flush: bool) -> None:
        """The server's side of `Sender.send`."""
        if self._state == "met":
            # A server that isn't ours may have been left in the middle of an update.
            with contextlib.suppress(BadRequest):
                await self._post("/end_weight_update")
        await self._post("/begin_weight_update")
        buckets = cut(manifest.tensors, self._bucket_bytes)
        for number, bucket in enumerate(buckets, 1):
            last = number == len(buckets)
            await self._post(
                "/update_weights_from_distributed",
                names=[spec.name for spec in bucket],
                dtypes=[spec.dtype for spec in bucket],
                shapes=[list(spec.shape) for spec in bucket],
                group_name=self._group,
                load_format="flattened_bucket",
                flush_cache=flush and last,
                weight_version=str(manifest.version) if last else None,
            )
        await self._post("/end_weight_update")

    async def _post(self, path: str, **body: Any) -> None:
        await self._client.post(path, body, self._timeout_s)

    @contextlib.asynccontextmanager
    async def _dropping_at_failure(self) -> AsyncGenerator[None]:
        """So that the learner doesn't wait for an engine that nobody will use again."""
        try:
            yield
        except BaseException:
            self._state = "broken"
            await self._drop()
            raise

    async def _drop(self) -> None:
        with contextlib.suppress(SenderFailure, TimeoutError):
            async with asyncio.timeout(DROP_S):
                await self._sender.drop(self._group)
