"""The weight store through its public face: what a reader may and may not ever see."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_async.tensor_file import ALIGNMENT, ITEM_BYTES
from dapo_async.types import Canary, WeightVersion
from dapo_async.weights import (
    NonFiniteWeights,
    VersionGone,
    WeightsRefused,
    WeightStore,
)

TENSORS = {
    "embed.weight": torch.randn(7, 5),
    "layers.0.weight": torch.randn(3, 4, 2).bfloat16(),
    "layers.0.half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "layers.0.bias": torch.arange(11),
    "scale": torch.tensor(0.25),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore.create(tmp_path) as made:
        yield made


def shapes_of(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]


def publish(
    store: WeightStore, version: int, tensors: dict[str, torch.Tensor] = TENSORS
) -> WeightVersion:
    writer = store.begin(version, shapes_of(tensors))
    for name, tensor in tensors.items():
        writer.copy(name, tensor)
    return writer.commit()


def assert_equal(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def run_and_kill(code: str) -> None:
    """Run code in a process that then dies without a chance to clean up."""
    code = f"import os\nfrom dapo_async.weights import WeightStore\n{code}\nos.kill(os.getpid(), 9)"
    result = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL


def with_first(manifest: WeightVersion, **changes: object) -> WeightVersion:
    first = dataclasses.replace(manifest.tensors[0], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(manifest, tensors=(first, *manifest.tensors[1:]))


# ---- round trip --------------------------------------------------------------------------------


def test_every_dtype_comes_back_bit_for_bit_in_the_order_of_the_manifest(
    store: WeightStore,
) -> None:
    committed = publish(store, 3)
    assert store.latest() == 3
    assert store.manifest(3) == committed
    assert_equal(store.open_version(committed), TENSORS)


def test_another_process_reads_the_version_by_its_folder_alone(store: WeightStore) -> None:
    publish(store, 3)
    code = (
        "import sys\n"
        "from dapo_async.weights import WeightStore\n"
        "assert 'torch' not in sys.modules, 'the import alone must stay light'\n"
        "store = WeightStore(sys.argv[1])\n"
        "print(float(store.open_version(store.manifest(store.latest()))['scale']))\n"
        "store.close()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(store.root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.strip() == "0.25", result.stderr
    assert store.latest() == 3, "a reader that closes must not remove the owner's folder"


def test_tensors_that_are_transposed_or_need_grad_are_copied_by_value(store: WeightStore) -> None:
    weight = torch.randn(4, 6, requires_grad=True)
    manifest = publish(store, 1, {"w": weight.t()})
    assert torch.equal(store.open_version(manifest)["w"], weight.detach().t())


def test_a_snapshot_is_not_changed_by_training_that_goes_on(store: WeightStore) -> None:
    weight = torch.ones(8)
    writer = store.begin(1, shapes_of({"w": weight}))
    writer.copy("w", weight)
    weight.add_(1)
    manifest = writer.commit()
    assert torch.equal(store.open_version(manifest)["w"], torch.ones(8))


def test_float32_masters_are_converted_to_bfloat16_on_the_way(store: WeightStore) -> None:
    master = torch.randn(9)
    writer = store.begin(1, [("w", "bfloat16", (9,))])
    writer.copy("w", master)
    assert torch.equal(store.open_version(writer.commit())["w"], master.bfloat16())


def test_what_a_reader_writes_to_its_tensors_reaches_nobody_else(store: WeightStore) -> None:
    manifest = publish(store, 1)
    store.open_version(manifest)["embed.weight"].zero_()
    assert_equal(store.open_version(manifest), TENSORS)


def test_every_tensor_is_aligned_to_its_items_and_the_first_to_64_bytes(
    store: WeightStore,
) -> None:
    specs = publish(store, 1).tensors
    assert min(spec.offset for spec in specs) % ALIGNMENT == 0
    assert all(spec.offset % ITEM_BYTES[spec.dtype] == 0 for spec in specs)


SETS = {
    "every dtype, a scalar, an empty tensor": TENSORS,
    "odd bytes before large items": {
        "odd": torch.arange(3, dtype=torch.uint8),
        "none": torch.empty(0, dtype=torch.bool),
        "double": torch.tensor([1.0, -2.0], dtype=torch.float64),
        "short": torch.tensor([[-3, 4, 5]], dtype=torch.int16),
        "no shape at all": torch.tensor(7, dtype=torch.int8),
        'ünïcode "quoted" \\ name': torch.tensor([1, 2, 3], dtype=torch.int32),
        "no rows": torch.empty(0, 3, dtype=torch.float64),
    },
    "tensors longer than one pass": {
        "large": torch.randn(1000, 333),
        "larger": torch.randn(700_001).bfloat16(),
    },
    "empty tensors only": {"a": torch.empty(0), "b": torch.empty(2, 0).bfloat16()},
    "no tensor": {},
}


@pytest.mark.parametrize("tensors", SETS.values(), ids=SETS.keys())
def test_the_safetensors_library_reads_what_our_own_reader_reads(
    store: WeightStore, tensors: dict[str, torch.Tensor]
) -> None:
    manifest = publish(store, 1, tensors)
    assert_equal(store.open_version(manifest), tensors)
    path = Path(manifest.location) / "model.safetensors"
    loaded = load_file(path)
    with safe_open(path, framework="pt") as file:
        opened = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for found in (loaded, opened):
        assert_equal({name: found[name] for name in tensors}, tensors)
        assert len(found) == len(tensors)


def test_transformers_loads_a_version_as_its_own_checkpoint(store: WeightStore) -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    model = LlamaForCausalLM(config)
    manifest = publish(store, 1, dict(model.named_parameters()))
    config.save_pretrained(manifest.location)
    loaded = LlamaForCausalLM.from_pretrained(manifest.location)
    assert_equal(loaded.state_dict(), model.state_dict())


def test_a_canary_travels_with_its_version(store: WeightStore) -> None:
    canary = Canary(token_ids=(3, 1, 2), logprobs=(-0.5, -2.0))
    writer = store.begin(4, [])
    committed = writer.commit(canary)
    assert committed.canary == canary
    assert store.manifest(4) == committed


def test_a_version_whose_canary_is_nan_never_becomes_visible(store: WeightStore) -> None:
    canary = Canary(token_ids=(3, 1, 2), logprobs=(-0.5, float("nan")))
    with pytest.raises(NonFiniteWeights, match="version 4: the weights are finite, but"):
        store.begin(4, []).commit(canary)
    assert os.listdir(store.root) == []


# ---- complete or invisible ---------------------------------------------------------------------


def test_a_version_is_invisible_until_it_is_committed(store: WeightStore) -> None:
    publish(store, 1)
    writer = store.begin(2, shapes_of(TENSORS))
    for name, tensor in TENSORS.items():
        writer.copy(name, tensor)
        assert store.versions() == [1]
    with pytest.raises(VersionGone):
        store.manifest(2)
    writer.commit()
    assert store.versions() == [1, 2]


def test_a_version_with_a_tensor_missing_can_not_be_committed(store: WeightStore) -> None:
    writer = store.begin(1, shapes_of(TENSORS))
    writer.copy("scale", TENSORS["scale"])
    with pytest.raises(ValueError, match=r"lacks 6 tensors, among them `embed\.weight`"):
        writer.commit()
    assert store.latest() is None


def test_a_commit_may_run_in_another_thread(store: WeightStore) -> None:
    writer = store.begin(1, shapes_of(TENSORS))
    for name, tensor in TENSORS.items():
        writer.copy(name, tensor)
    thread = threading.Thread(target=writer.commit)
    thread.start()
    thread.join(timeout=30)
    assert_equal(store.open_version(store.manifest(1)), TENSORS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 57, 70_000, -1])
def test_a_snapshot_with_a_value_that_is_not_finite_never_becomes_visible(
    store: WeightStore, dtype: torch.dtype, bad: float, place: int
) -> None:
    publish(store, 1)
    broken = torch.ones(300_001, dtype=dtype)  # longer than one pass looks at
    broken[place] = bad
    with pytest.raises(NonFiniteWeights, match="version 2 holds inf or nan in w"):
        publish(store, 2, {"fine": torch.ones(3), "w": broken})
    assert store.versions() == [1]
    assert os.listdir(store.root) == ["v1"], "the snapshot must leave nothing behind"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_the_largest_and_the_smallest_finite_values_are_published(
    store: WeightStore, dtype: torch.dtype
) -> None:
    limits = torch.finfo(dtype)
    edges = [limits.max, limits.min, limits.tiny, limits.tiny / 4, -0.0]
    tensors = {"w": torch.tensor(edges, dtype=torch.float64).to(dtype)}
    assert_equal(store.open_version(publish(store, 1, tensors)), tensors)


def test_bits_that_would_be_nan_as_floats_are_fine_as_integers(store: WeightStore) -> None:
    tensors = {name: torch.full((9,), -1, dtype=getattr(torch, name)) for name in
               ("int8", "int16", "int32", "int64")}  # fmt: skip
    assert_equal(store.open_version(publish(store, 1, tensors)), tensors)


def test_an_aborted_version_leaves_nothing_and_may_be_written_again(store: WeightStore) -> None:
    with pytest.raises(KeyError), store.begin(1, shapes_of(TENSORS)) as writer:
        writer.copy("scale", TENSORS["scale"])
        raise KeyError("training failed")
    assert os.listdir(store.root) == []
    with pytest.raises(ValueError, match="already committed or aborted"):
        writer.copy("scale", TENSORS["scale"])
    publish(store, 1)
    assert store.latest() == 1


def test_what_a_killed_writer_left_is_removed_but_a_running_one_is_spared(
    store: WeightStore,
) -> None:
    run_and_kill(f"writer = WeightStore({str(store.root)!r}).begin(1, [('w', 'float32', (1,))])")
    assert len(os.listdir(store.root)) == 1
    running = store.begin(1, shapes_of(TENSORS))
    assert len(os.listdir(store.root)) == 1, "the dead writer's folder is gone"
    publish(store, 2)
    for name, tensor in TENSORS.items():
        running.copy(name, tensor)
    running.commit()
    assert store.versions() == [1, 2]


@pytest.mark.parametrize("version", [5, 4, -1])
def test_versions_only_go_up(store: WeightStore, version: int) -> None:
    publish(store, 5)
    with pytest.raises(ValueError, match="must be newer than the latest, 5"):
        store.begin(version, [])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([("w", "float32", (1,)), ("w", "float32", (1,))], "`w` is named twice"),
        ([("w", "complex64", (1,))], "`w`: dtype 'complex64' must be one of"),
        ([("w", "float32", (2, -1))], r"`w`: shape \(2, -1\)"),
        ([("__metadata__", "float32", (2,))], "`__metadata__`: not a name"),
        ([("\ud800", "float32", (2,))], "not a name"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_name_of_the_tensor(
    store: WeightStore, shapes: list[tuple[str, str, tuple[int, ...]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        store.begin(1, shapes)
    assert os.listdir(store.root) == []


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("other", torch.ones(2), "`other` is not in the layout"),
        ("w", torch.ones(3), r"`w` has shape \(3,\), not \(2,\)"),
        ("w", torch.ones(2, dtype=torch.int64), r"`w` has dtype torch\.int64"),
    ],
)
def test_a_tensor_that_does_not_fit_its_place_is_refused(
    store: WeightStore, name: str, tensor: torch.Tensor, message: str
) -> None:
    writer = store.begin(1, [("w", "float32", (2,))])
    with pytest.raises(ValueError, match=message):
        writer.copy(name, tensor)
    writer.abort()


# ---- damage and hostile manifests --------------------------------------------------------------


def damage(manifest: WeightVersion, offset: int) -> None:
    path = Path(manifest.location) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_one_flipped_bit_is_refused_before_anything_is_handed_out(store: WeightStore) -> None:
    manifest = publish(store, 1)
    spec = next(spec for spec in manifest.tensors if spec.name == "layers.0.weight")
    damage(manifest, spec.offset + spec.nbytes - 1)
    for refuse in (store.open_version, store.verify):
        with pytest.raises(WeightsRefused, match=r"`layers\.0\.weight` don't match"):
            refuse(manifest)
    assert set(store.open_version(manifest, check=False)) == set(TENSORS)


def test_a_file_of_another_length_is_refused_even_without_checksums(store: WeightStore) -> None:
    manifest = publish(store, 1)
    path = Path(manifest.location) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-ALIGNMENT])
    with pytest.raises(WeightsRefused, match="end at byte"):
        store.open_version(manifest, check=False)
    publish(store, 2, {"w": torch.ones(3)})
    longer = store.root / "v2" / "model.safetensors"
    longer.write_bytes(longer.read_bytes() + b"\0" * 8)
    with pytest.raises(WeightsRefused, match="end at byte"):
        store.open_version(store.manifest(2), check=False)
    for rest in (b"", b"\x08\x00"):
        path.write_bytes(rest)
        with pytest.raises(WeightsRefused):
            store.open_version(manifest, check=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"scale"', b'"scAle"'),  # another name for the same bytes
        (b'"shape":[7,5]', b'"shape":[5,7]'),
        (b'"F16"', b'"I16"'),
        (b"[0,88]", b"[8,96]"),
        (b"  ", b" {"),
    ],
)
def test_a_header_that_disagrees_with_the_manifest_is_refused(
    store: WeightStore, old: bytes, new: bytes
) -> None:
    # A loader that goes by the header would load something else than what was checked.
    manifest = publish(store, 1)
    path = Path(manifest.location) / "model.safetensors"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    for refuse in (store.open_version, store.verify):
        with pytest.raises(WeightsRefused, match="own header says something else"):
            refuse(manifest)


def test_a_header_longer_than_its_file_is_refused(store: WeightStore) -> None:
    manifest = publish(store, 1)
    path = Path(manifest.location) / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(WeightsRefused):
        store.verify(manifest)


HOSTILE = {
    "offset beyond the file": {"offset": 1 << 40},
    "negative offset": {"offset": -64},
    "unaligned offset": {"offset": 1},
    "negative sizes whose product is right": {"shape": (-7, -5)},
    "shape larger than the bytes": {"shape": (7, 6)},
    "bytes larger than the shape": {"nbytes": 200},
    "negative bytes": {"nbytes": -4, "shape": (-1,)},
    "shape and bytes beyond the file": {"nbytes": 4 << 40, "shape": (1 << 40,)},
    "unknown dtype": {"dtype": "complex128"},
    "attribute of torch that is no dtype": {"dtype": "load"},
    "too many dimensions": {"shape": (7, 5) + (1,) * 40},
    "duplicate name": {"name": "scale"},
    "another name": {"name": "embed.other"},
    "name that is no text": {"name": "\ud800"},
    "the bytes of another tensor": {"offset": 448},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_refused_even_without_checksums(
    store: WeightStore, changes: dict[str, object]
) -> None:
    manifest = with_first(publish(store, 1), **changes)
    with pytest.raises(WeightsRefused):
        store.open_version(manifest, check=False)


@pytest.mark.parametrize("location", ["/etc", "../v1", ""])
def test_a_manifest_can_not_lead_out_of_the_store(store: WeightStore, location: str) -> None:
    manifest = dataclasses.replace(publish(store, 1), location=location)
    with pytest.raises(WeightsRefused, match="is said to be at"):
        store.open_version(manifest)


def test_a_link_in_place_of_the_bytes_is_not_followed(store: WeightStore, tmp_path: Path) -> None:
    manifest = publish(store, 1)
    path = Path(manifest.location) / "model.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsRefused, match="can't be opened"):
        store.open_version(manifest)


def test_a_version_marked_as_not_finite_is_refused(store: WeightStore) -> None:
    manifest = dataclasses.replace(publish(store, 1), finite=False)
    with pytest.raises(WeightsRefused, match="inf or nan"):
        store.open_version(manifest)


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"\xdd\x7f\xff\xff\xff", b"\x91" * 10_000])
def test_a_manifest_file_that_is_not_ours_is_refused(store: WeightStore, data: bytes) -> None:
    manifest = publish(store, 1)
    (Path(manifest.location) / "manifest").write_bytes(data)
    with pytest.raises(WeightsRefused):
        store.manifest(1)


def test_the_manifest_of_another_version_is_refused(store: WeightStore) -> None:
    first, second = publish(store, 1), publish(store, 2)
    data = (Path(first.location) / "manifest").read_bytes()
    (Path(second.location) / "manifest").write_bytes(data)
    with pytest.raises(WeightsRefused, match="is the manifest of version 1"):
        store.manifest(2)


# ---- retention ---------------------------------------------------------------------------------


def test_pruning_keeps_the_newest_and_the_pinned_versions(store: WeightStore) -> None:
    for version in (1, 2, 9, 10, 11):
        publish(store, version, {"w": torch.full((4,), float(version))})
    assert store.prune(newest=2, keep={2}) == (1, 9)
    assert store.versions() == [2, 10, 11]
    assert sorted(os.listdir(store.root)) == ["v10", "v11", "v2"]


def test_pruning_removes_nothing_while_there_are_fewer_than_it_shall_keep(
    store: WeightStore,
) -> None:
    for version in (1, 2, 3, 4):
        publish(store, version)
        assert store.prune(newest=6) == ()
    assert store.versions() == [1, 2, 3, 4]


@pytest.mark.parametrize("newest", [0, -3])
def test_pruning_never_removes_the_latest_version(store: WeightStore, newest: int) -> None:
    publish(store, 1)
    publish(store, 2)
    assert store.prune(newest=newest) == (1,)
    assert store.latest() == 2


def test_ten_is_newer_than_nine(store: WeightStore) -> None:
    publish(store, 9)
    publish(store, 10)
    assert store.versions() == [9, 10]
    assert store.latest() == 10


def test_a_reader_keeps_an_open_version_after_it_is_removed(store: WeightStore) -> None:
    first = publish(store, 1)
    tensors = store.open_version(first)
    publish(store, 2, {"w": torch.zeros(3)})
    store.prune(newest=1)
    with pytest.raises(VersionGone):
        store.open_version(first)
    with pytest.raises(VersionGone):
        store.manifest(1)
    assert_equal(tensors, TENSORS)


def test_foreign_files_in_the_folder_are_no_versions(store: WeightStore) -> None:
    for name in ("v", "v01", "v-1", "vx", "v1.tmp", "tmp-1", "manifest"):
        (store.root / name).mkdir()
    assert store.latest() is None


# ---- waiting, closing --------------------------------------------------------------------------


def test_waiting_returns_the_newest_version_and_skips_those_between(store: WeightStore) -> None:
    async def scene() -> int:
        waiting = asyncio.create_task(store.wait(newer_than=1, timeout=30))
        await asyncio.sleep(0)
        for version in (2, 3, 4):
            publish(store, version)
        return await waiting

    publish(store, 1)
    assert asyncio.run(scene()) == 4


def test_waiting_ends_at_its_deadline(store: WeightStore) -> None:
    publish(store, 1)
    with pytest.raises(TimeoutError, match="no version newer than 1"):
        asyncio.run(store.wait(newer_than=1, timeout=0.05))


def test_closing_removes_the_folder_and_open_versions_live_on(tmp_path: Path) -> None:
    store = WeightStore.create(tmp_path)
    tensors = store.open_version(publish(store, 1))
    store.begin(2, shapes_of(TENSORS))
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert_equal(tensors, TENSORS)
    assert store.latest() is None


def test_a_store_is_readable_by_its_user_only(store: WeightStore) -> None:
    assert store.root.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_the_default_place_is_shared_memory_and_nothing_stays_there() -> None:
    store = WeightStore.create()
    publish(store, 1)
    assert store.root.parent == Path("/dev/shm")
    store.close()
    assert not store.root.exists()


def test_the_store_of_a_killed_owner_is_removed_by_the_next_but_a_living_one_is_spared(
    tmp_path: Path,
) -> None:
    with WeightStore.create(tmp_path) as living:
        publish(living, 1)
        run_and_kill(f"store = WeightStore.create({str(tmp_path)!r})")
        assert len(list(tmp_path.iterdir())) == 2
        with WeightStore.create(tmp_path) as another:
            assert set(tmp_path.iterdir()) == {living.root, another.root}
        assert living.latest() == 1


# ---- on any file system ------------------------------------------------------------------------


def test_a_store_on_disk_makes_its_folder_and_leaves_nothing_but_it(tmp_path: Path) -> None:
    parent = tmp_path / "runs" / "weights"
    with WeightStore.create(parent) as store:
        assert_equal(store.open_version(publish(store, 1)), TENSORS)
        assert store.root.parent == parent
    assert list(parent.iterdir()) == []


def test_a_store_of_another_node_is_never_removed_even_if_its_lock_can_not_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    far = WeightStore.create(tmp_path)
    os.close(far._lock)  # as a node sees it that knows its own locks only
    far._lock = None
    monkeypatch.setattr("socket.gethostname", lambda: "node2")
    with WeightStore.create(tmp_path):
        assert far.root.exists()
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    with WeightStore.create(tmp_path):
        assert not far.root.exists()


def test_a_file_system_that_can_not_reserve_room_still_holds_versions(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert_equal(store.open_version(publish(store, 1)), TENSORS)


def test_no_room_is_found_before_the_copy_and_leaves_nothing(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        store.begin(1, shapes_of(TENSORS))
    assert os.listdir(store.root) == []


def test_a_file_system_without_locks_still_holds_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with WeightStore.create(tmp_path) as store, WeightStore.create(tmp_path) as other:
        assert_equal(store.open_version(publish(store, 1)), TENSORS)
        assert_equal(other.open_version(publish(other, 1)), TENSORS)
    assert list(tmp_path.iterdir()) == []


# ---- receiving what another store has ---------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore.create(tmp_path / "other") as made:
        yield made


def bytes_of(manifest: WeightVersion) -> bytes:
    return Path(manifest.location, "model.safetensors").read_bytes()


@pytest.mark.parametrize("piece", [1, 7, 64, 1000, 10**9])
def test_a_version_that_arrives_in_pieces_of_any_size_is_the_same(
    store: WeightStore, other: WeightStore, piece: int
) -> None:
    tensors = {
        "wide": torch.randn(40, 3), "empty": torch.zeros(0, 5), "half": torch.randn(9).bfloat16(),
        "scalar": torch.tensor(3), "last": torch.zeros(0),
    }  # fmt: skip
    source = publish(store, 4, tensors)
    data = bytes_of(source)
    with other.receive(source) as receiver:
        for start in range(0, len(data), piece):
            assert other.latest() is None
            receiver.write(data[start : start + piece])
        manifest = receiver.commit()
    assert manifest == other.manifest(4)
    assert manifest == dataclasses.replace(source, location=str(other.root / "v4"))
    assert_equal(other.open_version(manifest), tensors)


def test_a_version_that_arrives_damaged_short_or_long_never_becomes_visible(
    store: WeightStore, other: WeightStore
) -> None:
    source = publish(store, 1, {"a": torch.randn(50), "b": torch.randn(50)})
    data = bytes_of(source)
    flipped = bytearray(data)
    flipped[-1] ^= 1
    header = bytearray(data)
    header[20] ^= 1
    for arriving in (flipped, header, data[:-1], data[:3], data + b"\0", b""):
        with pytest.raises(WeightsRefused), other.receive(source) as receiver:
            receiver.write(bytes(arriving))
            receiver.commit()
    receiver = other.receive(dataclasses.replace(source, finite=False))
    receiver.write(data)
    with receiver, pytest.raises(WeightsRefused, match="inf or nan"):
        receiver.commit()
    assert list(other.root.iterdir()) == []


def test_a_version_for_which_there_is_no_room_leaves_nothing(
    store: WeightStore, other: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = publish(store, 1, {"a": torch.randn(50)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        other.receive(source)
    assert list(other.root.iterdir()) == []
