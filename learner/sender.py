"""Weights straight from the learner's memory into SGLang's engines, without files.

    publish   a copy of the weights in host memory, as `Publisher` takes one; the newest stays
    offer     one worker asks for a version; at its first time it is told where to meet
    send      the version is broadcast to that worker's engine, bucket by bucket, by a thread
    drop      what connects to that engine is torn down

Every engine has a process group of its own: this process as rank 0 and the engine's ranks. So an
engine that dies breaks its own group only, its successor meets us in a new one, and engines update
in turn while the others generate; the price is that the weights leave this process once for each
engine. The groups are made beside torch.distributed's own: training's groups are never used, and
neither is the thread that trains.

Every wait ends: a broadcast that isn't through within `timeout_s` fails, whatever the engine does.

The copy is in host memory also when the model is on a GPU (then page-locked, and each bucket is
brought back to the GPU for its broadcast): a second copy beside the optimizer would not fit there.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from dapo_async.errors import ConfigError
from dapo_async.tensor_file import plan
from dapo_async.types import Canary, TensorSpec, WeightVersion
from dapo_async.weight_buckets import BUCKET_BYTES, cut, nbytes
from dapo_async.weights import NonFiniteWeights
from learner.canary import canary_of
from learner.publisher import go_along, weight_shapes, whole_weights

T = TypeVar("T")
distributed: Any = torch.distributed
"""Its classes for groups are public in the documentation only."""
Backend = Literal["gloo", "nccl"]
LOCATION = "learner"
"""What the manifests of these versions say of their place."""
_DEVICE_KEY: dict[Backend, str] = {"gloo": "cpu", "nccl": "cuda"}
"""The device under which torch files the first backend of a group: part of the meeting point."""
END_S = 1.0
"""Longest wait for the end of the groups when the sender is closed."""
_POLL_S = 0.002
_LOOK_S = 0.05
_CHECK_ELEMENTS = 1 << 20
"""Values that are checked at once."""


class LinkBroken(Exception):
    """A version didn't reach its engine, or nobody knows whether it did."""


class VersionReplaced(Exception):
    """The version asked for isn't the newest any more (or isn't published yet)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version in host memory."""

    version: int
    buckets: tuple[Tensor, ...]
    """Bytes, as `weight_buckets.cut` cuts the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a worker needs for receiving a version."""

    address: str
    port: int
    backend: Backend
    bucket_bytes: int


class WeightSender:
    """The newest version of one model, for engines to fetch. In learner rank 0.

    Args:
        address: of this node, as engines reach it; nothing listens elsewhere.
        backend: gloo for engines on CPUs, nccl for those on GPUs.
        device: of the model.
        timeout_s: longest meeting with an engine, and longest broadcast of a version to one.

    Raises:
        ConfigError: nccl without a GPU.
    """

    def __init__(
        self,
        address: str,
        backend: Backend,
        device: torch.device,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ConfigError(
                "`weights.transport: nccl` with `rollout.device: cuda` needs a learner on a GPU"
            )
        self._address = address
        self._backend: Backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._lock = threading.Lock()
        self._taken = -1
        self._newest: Snapshot | None = None
        self._links: dict[str, Link] = {}
        self._ending: set[Future[None]] = set()
        """Groups that threads are freeing: a process that ends meanwhile would crash in gloo."""

    # ---- publishing --------------------------------------------------------------------------

    def publish(self, version: int, model: nn.Module) -> Future[WeightVersion]:
        """As `Publisher.publish`: copies now, checks in the background.

        Raises:
            ValueError: the version isn't newer than the latest.
            OSError: not enough memory.
        """
        canary = canary_of(model)
        weights = whole_weights(model)
        try:
            if version <= self._taken:
                raise ValueError(f"version {version} must be newer than the latest, {self._taken}")
            specs, _ = plan(weight_shapes(model))
            buckets = cut(specs.values(), self._bucket_bytes)
            memory = tuple(_allocate(nbytes(bucket)) for bucket in buckets)
            places = {
                spec.name: place
                for bucket, bytes_ in zip(buckets, memory, strict=True)
                for spec, place in _places(bucket, bytes_)
            }
            for name, weight in weights:
                places[name].copy_(weight, non_blocking=True)
        finally:
            go_along(weights)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._taken = version
        return self._thread.submit(
            self._commit, Snapshot(version, memory), tuple(specs.values()), canary
        )

    def _commit(
        self, snapshot: Snapshot, specs: tuple[TensorSpec, ...], canary: Canary
    ) -> WeightVersion:
        _check_finite(snapshot, specs, canary, self._bucket_bytes)
        with self._lock:
            self._newest = snapshot  # an older one lives as long as it is being sent
        return WeightVersion(
            version=snapshot.version, location=LOCATION, tensors=specs, finite=True, canary=canary
        )

    # ---- sending -----------------------------------------------------------------------------

    def offer(self, worker: str, group: str, version: int, ranks: int) -> Offer:
        """Hold a version for one worker's engine, and where to meet. A new group of a worker ends
        its old one.

        Args:
            group: names the worker and its incarnation.
            ranks: of the engine; it has 1 … `ranks` in the group. 0: they have met before.

        Raises:
            VersionReplaced: only the newest version can be had.
            LinkBroken: they are said to have met before, but the group is gone.
        """
        with self._lock:
            newest = self._newest
            if newest is None or newest.version != version:
                has = "none" if newest is None else str(newest.version)
                raise VersionReplaced(f"version {version} can't be had: the newest is {has}")
            link = self._links.get(worker)
            if link is None or link.group != group:
                if ranks == 0:
                    raise LinkBroken(f"there is no group {group}")
                if link is not None:
                    self._end(link)
                link = Link(group, ranks, self._address, self._join, self._timeout_s)
                self._links[worker] = link
            link.held = newest
        return Offer(
            address=self._address,
            port=link.port,
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
        )

    def send(self, group: str) -> Future[None]:
        """Broadcast the version that was offered to this group; done when the engine has it.

        The future fails with LinkBroken; then the group can't be used any more.
        """
        with self._lock:
            link = self._link_of(group)
            snapshot, link.held = link.held, None
        if snapshot is None:
            raise LinkBroken(f"nothing was offered to {group}")
        return in_thread(lambda: self._broadcast(link, snapshot), f"send {group}")

    def _broadcast(self, link: Link, snapshot: Snapshot) -> None:
        try:
            link.broadcast(snapshot.buckets)
        except LinkBroken:
            self.drop(link.group)
            raise

    def drop(self, group: str) -> None:
        """End a group, a broadcast under way too. Unknown ones are ignored."""
        with self._lock:
            for worker, link in list(self._links.items()):
                if link.group == group:
                    del self._links[worker]
                    self._end(link)

    def close(self) -> None:
        """End every group and finish the publication under way."""
        with self._lock:
            for link in self._links.values():
                self._end(link)
            self._links.clear()
            ending = list(self._ending)
        self._thread.shutdown(wait=True)
        wait(ending, END_S)

    def _end(self, link: Link) -> None:
        ending = link.close()
        if ending is not None:
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _link_of(self, group: str) -> Link:
        for link in self._links.values():
            if link.group == group:
                return link
        raise LinkBroken(f"there is no group {group}")

    def _join(self, store: Any, ranks: int) -> Backing:
        timeout_s = self._timeout_s
        if self._backend == "gloo":
            return Gloo(store, ranks, self._address, timeout_s)
        return Nccl(store, ranks, self._device, timeout_s)


class Link:
    """One group: this process and the ranks of one engine.

    Args:
        group: its name.
        ranks: of the engine.
        address: to listen on for the meeting.
        join: makes the backend when all have met; waits for them.
        timeout_s: longest meeting, longest broadcast.
    """

    def __init__(
        self,
        group: str,
        ranks: int,
        address: str,
        join: Callable[[Any, int], Backing],
        timeout_s: float,
    ) -> None:
        self.group = group
        self.held: Snapshot | None = None
        """What the next broadcast sends, from its offer on."""
        self._timeout_s = timeout_s
        self._gone = threading.Event()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self.port: int = listener.getsockname()[1]

        def meet() -> Backing:
            self._await_engine(listener)
            return join(self._store(address, listener, ranks), ranks)

        self._joined: Future[Backing] | None = in_thread(meet, f"join {group}")

    def _await_engine(self, listener: socket.socket) -> None:
        """Torch's own wait for the others can't be ended: it begins when they come."""
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not selector.select(_LOOK_S):
                if self._gone.is_set() or time.monotonic() > deadline:
                    listener.close()
                    why = "it was closed" if self._gone.is_set() else "the engine didn't come"
                    raise LinkBroken(f"{self.group}: {why}")

    def _store(self, address: str, listener: socket.socket, ranks: int) -> Any:
        """The meeting point, under the names that torch gives it on the engine's side: one prefix
        for the group by `init_process_group`, one by the group itself. The last, for the device, is
        the backing's."""
        store = distributed.TCPStore(
            address,
            self.port,
            1 + ranks,
            is_master=True,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        group = self.group
        return distributed.PrefixStore(f"{group}/", distributed.PrefixStore(group, store))

    def broadcast(self, buckets: Sequence[Tensor]) -> None:
        """Send the buckets one after another.

        Raises:
            LinkBroken: the engine isn't there, is gone, or takes too long.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            joined = self._joined
            if joined is None:
                raise LinkBroken("it was closed")
            backing = joined.result(self._timeout_s)
            for bucket in buckets:
                self._finish(backing.broadcast(bucket), deadline)
        except (RuntimeError, OSError, TimeoutError) as error:  # torch's errors are RuntimeErrors
            raise LinkBroken(f"{self.group}: {type(error).__name__}: {error}") from error

    def _finish(self, work: Any, deadline: float) -> None:
        # Not `work.wait`: on NCCL it doesn't block and on gloo nothing but the peer would end it.
        while not work.is_completed():
            if self._gone.wait(_POLL_S):
                raise LinkBroken(f"{self.group}: it was closed")
            if time.monotonic() > deadline:
                raise LinkBroken(f"{self.group}: not through within {self._timeout_s:g} s")
        work.wait()

    def close(self) -> Future[None] | None:
        """End it now. What is left behind is freed by a thread, since gloo's end waits for what
        its peer hasn't taken yet; it is done when that is."""
        joined, self._joined, self.held = self._joined, None, None
        self._gone.set()
        if joined is None:
            return None
        return in_thread(lambda: _free(joined), f"end {self.group}")


class Gloo:
    """The backend for engines on CPUs, as rank 0."""

    def __init__(self, store: Any, ranks: int, address: str, timeout_s: float) -> None:
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        # By itself gloo listens on the address of the host's name, which others may reach.
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(_filed(store, "gloo"), 0, 1 + ranks, options)

    def broadcast(self, bucket: Tensor) -> Any:
        return self._group.broadcast([bucket], _from_rank_0())

    def end(self) -> None:
        self._group.abort()
        del self._group


class Nccl:
    """The backend for engines on GPUs, as rank 0."""

    def __init__(self, store: Any, ranks: int, device: torch.device, timeout_s: float) -> None:
        nccl = distributed.ProcessGroupNCCL
        options = nccl.Options()
        # Torch's watchdog ends the process that waits too long: our own deadline comes long before.
        options._timeout = timedelta(seconds=10 * timeout_s)
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            # An engine that dies must not end the learner.
            self._group = nccl(_filed(store, "nccl"), 0, 1 + ranks, options)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # training's kernels aren't waited for

    def broadcast(self, bucket: Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            self._staged = bucket.to(self._device, non_blocking=True)  # kept until the next one
            return self._group.broadcast([self._staged], _from_rank_0())

    def end(self) -> None:
        self._group.abort()
        del self._group


Backing = Gloo | Nccl


def nccl_environment() -> None:
    """What NCCL reads when it is first used in a process: SGLang sets the same in its own, and
    ranks of one group must agree."""
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run it in a thread of its own, which keeps no process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _free(joined: Future[Backing]) -> None:
    with contextlib.suppress(RuntimeError, OSError, LinkBroken):
        joined.result().end()


def _filed(store: Any, backend: Backend) -> Any:
    return distributed.PrefixStore(f"{_DEVICE_KEY[backend]}/", store)


def _from_rank_0() -> Any:
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


@contextlib.contextmanager
def _environment(name: str, value: str) -> Generator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _allocate(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    except RuntimeError as error:  # what torch raises when there is no memory left
        raise OSError(errno.ENOMEM, f"{size} bytes for a snapshot: {error}") from error


def _places(bucket: Sequence[TensorSpec], memory: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Every tensor of a bucket, as a view of its memory."""
    for spec in bucket:
        start = spec.offset - bucket[0].offset
        dtype: torch.dtype = getattr(torch, spec.dtype)
        yield spec, memory[start : start + spec.nbytes].view(dtype).view(spec.shape)


def _check_finite(
    snapshot: Snapshot, specs: Sequence[TensorSpec], canary: Canary, bucket_bytes: int
) -> None:
    """Raises:
    NonFiniteWeights: inf or nan in a tensor, or in what the model says with finite ones.
    """
    buckets = zip(cut(specs, bucket_bytes), snapshot.buckets, strict=True)
    broken = [
        spec.name
        for bucket, memory in buckets
        for spec, values in _places(bucket, memory)
        if not _finite(values)
    ]
    if broken:
        more = "" if len(broken) <= 3 else f" and {len(broken) - 3} more"
        raise NonFiniteWeights(
            f"version {snapshot.version} holds inf or nan in {', '.join(broken[:3])}{more}"
        )
    if not all(map(math.isfinite, canary.logprobs)):
        raise NonFiniteWeights(
            f"version {snapshot.version}: the weights are finite, but the model's log-probs of "
            "the canary are not"
        )


def _finite(values: Tensor) -> bool:
    if not values.is_floating_point():
        return True
    # No mask as large as the tensor is made: nan carries through min and max.
    flat = values.flatten()
    parts = (flat[i : i + _CHECK_ELEMENTS] for i in range(0, flat.numel(), _CHECK_ELEMENTS))
    return all(math.isfinite(bound) for part in parts for bound in torch.aminmax(part))
