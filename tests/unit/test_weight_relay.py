"""Weights on their way to another node. Real stores and real bytes; Ray's object store and actors
are scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError

from actors import weight_relay
from actors.placement import Placement, Seat
from actors.weight_relay import RelayFailed, Relays, WeightRelay, WeightSource, open_weights
from dapo_async.codec import decode, encode
from dapo_async.config import validate
from dapo_async.errors import ConfigError
from dapo_async.types import WeightVersion
from dapo_async.weights import VersionGone, WeightsRefused, WeightStore

SHAPE = (100, 7)
BYTES = 4 * 700


class ObjectStore:
    """Ray's object store: what was put, and how often."""

    def __init__(self) -> None:
        self.puts: list[int] = []
        self.damage: Callable[[np.ndarray], np.ndarray] = lambda data: data
        self.loop: asyncio.AbstractEventLoop

    def put(self, data: np.ndarray) -> Any:
        self.puts.append(data.nbytes)
        future: asyncio.Future[np.ndarray] = self.loop.create_future()
        self.loop.call_soon_threadsafe(future.set_result, self.damage(data))
        return future


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    made = ObjectStore()
    monkeypatch.setattr(weight_relay, "ray", made)
    monkeypatch.setattr(weight_relay, "CHUNK_BYTES", 1000)
    return made


class Handle:
    """An actor's handle: `handle.method.remote(…)` runs the method of a real object."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Awaitable[Any]:
            self.calls.append((name, *args))
            return asyncio.ensure_future(getattr(self._actor, name)(*args))

        return SimpleNamespace(remote=remote)


class World:
    """A learner's store and relays on other nodes."""

    def __init__(self, nodes: int) -> None:
        self.source = WeightSource()
        self.handle = Handle(self.source)
        self.relays = [WeightRelay(self.handle) for _ in range(nodes)]
        self.learner: WeightStore

    async def __aenter__(self) -> World:
        self.learner = WeightStore(await self.source.root())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.source.close()
        for relay in self.relays:
            await relay.close()

    def publish(self, version: int) -> bytes:
        """The frame of the learner's manifest."""
        with self.learner.begin(version, [("w", "float32", SHAPE)]) as writer:
            writer.copy("w", values(version))
            return encode(writer.commit())


def values(version: int) -> torch.Tensor:
    return torch.arange(700, dtype=torch.float32).reshape(SHAPE) + 1000 * version


async def fetch(relay: WeightRelay, frame: bytes, *loading: int) -> WeightVersion:
    async with asyncio.timeout(20):
        return decode(await relay.fetch(frame, list(loading)), WeightVersion)


def held(relay: WeightRelay) -> list[int]:
    return relay._store.versions()


def copied(world: World) -> list[int]:
    """Versions that set out for another node, in order."""
    return [call[1] for call in world.handle.calls if call[0] == "size"]


def simulate(
    objects: ObjectStore, work: Callable[[World], Awaitable[None]], nodes: int = 1
) -> None:
    async def main() -> None:
        objects.loop = asyncio.get_running_loop()
        async with World(nodes) as world:
            await work(world)

    asyncio.run(main())


# ---- one version on its way ----------------------------------------------------------------------


def test_a_version_arrives_in_chunks_and_is_the_learners_byte_for_byte(
    objects: ObjectStore,
) -> None:
    async def work(world: World) -> None:
        (relay,) = world.relays
        manifest = await fetch(relay, world.publish(7))
        assert manifest.location == str(relay._store.root / "v7")
        assert manifest.location != str(world.learner.root / "v7")
        assert torch.equal(relay._store.open_version(manifest)["w"], values(7))
        learners = (world.learner.root / "v7" / "model.safetensors").read_bytes()
        assert (Path(manifest.location) / "model.safetensors").read_bytes() == learners
        assert len(objects.puts) >= 3 and max(objects.puts) == 1000
        assert sum(objects.puts) == len(learners)

    simulate(objects, work)


def test_nodes_that_ask_at_the_same_time_share_each_chunk(objects: ObjectStore) -> None:
    async def work(world: World) -> None:
        frame = world.publish(1)
        found = await asyncio.gather(*(fetch(relay, frame) for relay in world.relays))
        assert len({manifest.location for manifest in found}) == 3
        assert sum(objects.puts) == (world.learner.root / "v1/model.safetensors").stat().st_size

    simulate(objects, work, nodes=3)


def test_the_workers_of_a_node_get_one_copy_together(objects: ObjectStore) -> None:
    async def work(world: World) -> None:
        (relay,) = world.relays
        frame = world.publish(1)
        found = await asyncio.gather(*(fetch(relay, frame) for _ in range(4)))
        assert len(set(found)) == 1 and copied(world) == [1]
        await fetch(relay, frame)
        assert copied(world) == [1], "it is here already"

    simulate(objects, work)


def test_damage_on_the_way_is_noticed_before_anybody_sees_the_version(
    objects: ObjectStore,
) -> None:
    def flip(data: np.ndarray) -> np.ndarray:
        broken = data.copy()
        broken[-1] ^= 1
        return broken

    async def work(world: World) -> None:
        (relay,) = world.relays
        frame = world.publish(1)
        objects.damage = flip
        with pytest.raises(WeightsRefused):
            await fetch(relay, frame)
        assert held(relay) == []
        assert [path.name for path in relay._store.root.iterdir()] == []
        objects.damage = lambda data: data
        manifest = await fetch(relay, world.publish(2))
        assert torch.equal(relay._store.open_version(manifest)["w"], values(2))

    simulate(objects, work)


def test_a_manifest_with_other_checksums_than_the_bytes_is_refused(objects: ObjectStore) -> None:
    async def work(world: World) -> None:
        manifest = decode(world.publish(1), WeightVersion)
        (spec,) = manifest.tensors
        forged = replace(manifest, tensors=(replace(spec, xxh3=spec.xxh3 ^ 1),))
        with pytest.raises(WeightsRefused, match="checksum"):
            await fetch(world.relays[0], encode(forged))
        assert held(world.relays[0]) == []

    simulate(objects, work)


# ---- many versions -------------------------------------------------------------------------------


def test_of_the_versions_wanted_while_one_travels_only_the_newest_follows(
    objects: ObjectStore,
) -> None:
    async def work(world: World) -> None:
        (relay,) = world.relays
        frames = [world.publish(version) for version in (1, 2, 3, 4)]
        results = await asyncio.gather(
            *(fetch(relay, frame) for frame in frames), return_exceptions=True
        )
        assert [type(result).__name__ for result in results] == [
            "WeightVersion", "WeightsRefused", "WeightsRefused", "WeightVersion",
        ]  # fmt: skip
        assert "version 4 is wanted by now" in str(results[1])
        assert copied(world) == [1, 4] and held(relay) == [1, 4]

    simulate(objects, work)


def test_a_relay_keeps_two_versions_and_those_that_are_being_loaded(objects: ObjectStore) -> None:
    async def work(world: World) -> None:
        (relay,) = world.relays
        for version in (1, 2):
            await fetch(relay, world.publish(version))
        for version in (3, 4):
            await fetch(relay, world.publish(version), 1, version)
        assert held(relay) == [1, 3, 4]
        await fetch(relay, world.publish(5), 5)
        assert held(relay) == [4, 5]

    simulate(objects, work)


def test_retention_on_the_learners_node_takes_no_version_from_under_a_copy(
    objects: ObjectStore,
) -> None:
    async def work(world: World) -> None:
        (relay,) = world.relays
        frame = world.publish(1)
        coming = asyncio.create_task(fetch(relay, frame))
        while not objects.puts:
            await asyncio.sleep(0)
        world.publish(2)
        world.learner.prune(newest=1)
        manifest = await coming
        assert torch.equal(relay._store.open_version(manifest)["w"], values(1))

    simulate(objects, work)


def test_a_version_that_is_gone_before_it_sets_out_is_refused(objects: ObjectStore) -> None:
    async def work(world: World) -> None:
        frame = world.publish(1)
        world.publish(2)
        world.learner.prune(newest=1)
        with pytest.raises(VersionGone, match="version 1 isn't on the learner's node"):
            await fetch(world.relays[0], frame)
        assert held(world.relays[0]) == []

    simulate(objects, work)


# ---- the driver's side ---------------------------------------------------------------------------

A, B = "a" * 56, "b" * 56
"""Ids of nodes."""
MANIFEST = WeightVersion(version=3, location="/learner/v3", tensors=(), finite=True)


def at(place: str) -> bytes:
    return encode(replace(MANIFEST, location=place))


class ScriptedRay:
    """Every relay that is made gives the next of these answers, and its last one from then on."""

    def __init__(self, *lives: list[Any]) -> None:
        self.lives = [list(life) for life in lives]
        self.made: list[str] = []
        self.killed: list[Any] = []
        self.asked: list[tuple[bytes, list[int]]] = []
        self.closed = 0

    def remote(self, kind: type) -> ScriptedRay:
        assert kind is WeightRelay
        return self

    def options(self, **options: Any) -> Any:
        node = options["scheduling_strategy"].node_id
        assert options["num_cpus"] == 0 and not options["scheduling_strategy"].soft

        def make(_: Any) -> Any:
            life = self.lives[min(len(self.made), len(self.lives) - 1)]
            self.made.append(node)

            async def fetch(frame: bytes, loading: list[int]) -> bytes:
                self.asked.append((frame, loading))
                answer = life.pop(0) if len(life) > 1 else life[0]
                if isinstance(answer, Exception):
                    raise answer
                return await answer() if callable(answer) else answer

            async def close() -> None:
                self.closed += 1

            return SimpleNamespace(
                fetch=SimpleNamespace(remote=fetch), close=SimpleNamespace(remote=close)
            )

        return SimpleNamespace(remote=make)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Relays]:
    def made(ray: ScriptedRay, timeout_s: float = 20.0) -> Relays:
        monkeypatch.setattr(weight_relay, "ray", ray)
        return Relays("home", None, timeout_s)

    return made


async def place(relays: Relays, node: str) -> str:
    async with relays.nearby(MANIFEST, node) as manifest:
        return manifest.location


def test_workers_on_the_learners_node_read_the_learners_store(
    relays: Callable[..., Relays],
) -> None:
    ray = ScriptedRay([at("/there/v3")])
    assert asyncio.run(place(relays(ray), "home")) == "/learner/v3"
    assert ray.made == []


def test_every_other_node_has_one_relay_and_its_workers_get_their_nodes_manifest(
    relays: Callable[..., Relays],
) -> None:
    async def main() -> None:
        ray = ScriptedRay([at("/a/v3")], [at("/b/v3")])
        driver = relays(ray)
        driver.open(A)
        assert ray.made == [A]
        found = [await place(driver, node) for node in (A, B, A)]
        assert found == ["/a/v3", "/b/v3", "/a/v3"] and ray.made == [A, B]
        await driver.close()
        assert ray.closed == 2 and len(ray.killed) == 2

    asyncio.run(main())


def test_a_relay_that_died_is_made_anew_for_the_next_that_asks(
    relays: Callable[..., Relays],
) -> None:
    async def main() -> None:
        ray = ScriptedRay([ActorDiedError()], [at("/new/v3")])
        driver = relays(ray)
        with pytest.raises(RelayFailed, match=r"version 3 didn't reach node aaaaaaaa: .*actor"):
            await place(driver, A)
        assert await place(driver, A) == "/new/v3" and ray.made == [A, A]

    asyncio.run(main())


def test_a_relay_that_does_not_answer_in_time_is_ended_and_made_anew(
    relays: Callable[..., Relays],
) -> None:
    async def hang() -> bytes:
        await asyncio.sleep(60)
        return b""

    async def main() -> None:
        ray = ScriptedRay([hang], [at("/new/v3")])
        driver = relays(ray, timeout_s=0.05)
        with pytest.raises(RelayFailed, match=r"no answer within 0\.05 s"):
            await place(driver, A)
        assert len(ray.killed) == 1
        assert await place(driver, A) == "/new/v3"

    asyncio.run(main())


def test_a_relay_that_refuses_a_version_lives_on(relays: Callable[..., Relays]) -> None:
    refused = RayTaskError("f", "traceback", WeightsRefused("no"), proctitle="p", pid=1, ip="x")

    async def main() -> None:
        ray = ScriptedRay([refused.as_instanceof_cause(), at("/a/v3")])
        driver = relays(ray)
        with pytest.raises(RelayFailed, match="node aaaaaaaa: no"):
            await place(driver, A)
        assert await place(driver, A) == "/a/v3"
        assert ray.made == [A] and ray.killed == []

    asyncio.run(main())


def test_a_relay_is_told_what_its_workers_are_loading(relays: Callable[..., Relays]) -> None:
    async def main() -> None:
        ray = ScriptedRay([at("/a/v3")])
        driver = relays(ray)
        newer = replace(MANIFEST, version=4)
        async with driver.nearby(MANIFEST, A), driver.nearby(MANIFEST, A):
            async with driver.nearby(newer, A):
                pass
            async with driver.nearby(newer, B):
                pass
        async with driver.nearby(newer, A):
            pass
        assert [loading for _, loading in ray.asked] == [[3], [3], [3, 4], [4], [4]]

    asyncio.run(main())


# ---- where the learner writes --------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[Placement]:
    yield Placement(ranks=[{}], workers=[Seat({})], beside_learner={}, learner_node=None)


def config(**weights: Any) -> Any:
    return validate(
        {
            "run": {"name": "x"},
            "model": {"path": "none"},
            "data": {"train": "none", "max_prompt_tokens": 8},
            "reward": {"function": "none"},
            "trainer": {"steps": 1},
            "weights": weights,
        }
    )


async def root(config: Any, placement: Placement) -> str:
    async with open_weights(config, placement) as (root, relays):
        assert relays is None and Path(root).is_dir()
    assert not Path(root).exists()
    return root


def test_one_machine_needs_no_relay(alone: Placement) -> None:
    for transport in ("shared_memory", "relay"):
        found = asyncio.run(root(config(transport=transport), alone))
        assert Path(found).parent in (Path("/dev/shm"), Path("/tmp"))


def test_weights_on_disk_lie_in_the_folder_of_the_configuration(
    alone: Placement, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    spread = replace(alone, learner_node="a")
    for placement in (alone, spread):
        found = asyncio.run(root(config(transport="disk", dir=str(folder)), placement))
        assert Path(found).parent == folder


def test_a_folder_for_weights_that_can_not_be_made_is_a_config_error(
    alone: Placement, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "weights")
    with pytest.raises(ConfigError, match=r"weights\.dir: .*file/weights. can't be used"):
        asyncio.run(root(config(transport="disk", dir=folder), alone))
