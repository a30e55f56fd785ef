"""What a run asks of a cluster, and how it is refused. Real clusters: tests/system/test_cluster."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from actors.cluster import JoinedRay
from actors.placement import bundles, check_demand, marked_bundles
from dapo_async.config import Config, validate
from dapo_async.errors import ConfigError


def config(**sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "x"},
        "model": {"path": "none"},
        "data": {"train": "none", "max_prompt_tokens": 8},
        "reward": {"function": "none"},
        "trainer": {"steps": 1},
    }
    return validate(tree | sections)


SGLANG = {"engine": "sglang", "device": "cuda", "tensor_parallel_size": 2, "workers": 3}


def test_every_worker_reserves_the_gpus_of_its_engine() -> None:
    _, workers = bundles(config(rollout=SGLANG | {"cpus_per_worker": 4}))
    assert workers == [{"CPU": 4, "GPU": 2}] * 3


def test_every_rank_on_gpus_reserves_one() -> None:
    asked = config(learner={"ranks": 2, "device": "cuda"}, rollout=SGLANG)
    assert bundles(asked)[0] == [{"CPU": 1, "GPU": 1}] * 2
    with pytest.raises(ConfigError, match=r"8 GPUs: .*workers: 3.* \+ `learner.ranks: 2`; .* 7\."):
        check_demand(asked, 8, 7)


def test_workers_of_servers_that_run_already_and_of_embedded_engines_reserve_no_gpu() -> None:
    urls = {"engine_urls": ["http://a:1", "http://b:1"], "engine": "sglang", "device": "cuda"}
    for rollout in (urls, {"engine": "torch", "workers": 2}):
        ranks, workers = bundles(config(rollout=rollout, learner={"ranks": 2}))
        assert workers == ranks == [{"CPU": 1}] * 2


def test_an_actor_that_asks_for_nothing_can_still_be_placed() -> None:
    ranks, workers = bundles(config(rollout={"cpus_per_worker": 0}, learner={"cpus_per_rank": 0}))
    assert all(0 < bundle["CPU"] < 0.01 for bundle in [*ranks, *workers])


def test_a_demand_over_what_there_is_names_both() -> None:
    asked = config(rollout=SGLANG)
    check_demand(asked, 4, 6)
    check_demand(asked, 4)
    with pytest.raises(ConfigError, match=r"asks for 4 CPUs: .*ranks: 1.*; there are 3\."):
        check_demand(asked, 3, 6)
    with pytest.raises(ConfigError, match=r"asks for 6 GPUs: .*workers: 3.* × .*: 2.*are 5\."):
        check_demand(asked, 4, 5)


def test_marks_of_nodes_are_asked_for_beside_what_is_reserved_and_hardly_used_up() -> None:
    marks = {"address": "auto", "learner_resource": "big", "rollout_resource": "cheap"}
    asked = config(ray=marks, weights={"transport": "relay"}, learner={"ranks": 2})
    ranks, workers = marked_bundles(asked)
    assert [rank.keys() for rank in ranks] == [{"CPU", "big"}] * 2
    assert [worker.keys() for worker in workers] == [{"CPU", "cheap"}]
    assert 0 < 100 * ranks[0]["big"] < 1
    assert bundles(asked)[0] == [{"CPU": 1}] * 2, "machines are judged without marks"
    assert marked_bundles(config()) == bundles(config())


TWO_NODES = {"ranks": 4, "nodes": 2}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"ray": {"learner_resource": "big"}}, "learner_resource: big` would be ignored"),
        ({"ray": {"address": "auto", "rollout_resource": "GPU"}}, "must be a resource of your own"),
        ({"ray": {"address": "auto", "rollout_resource": "x"}}, "keeps all of a run on one node"),
        ({"learner": {"ranks": 4, "nodes": 3}}, "`nodes: 3` must divide `ranks: 4`"),
        ({"learner": TWO_NODES}, "`learner.nodes: 2` needs a cluster, `ray.address`"),
        ({"learner": TWO_NODES, "ray": {"address": "auto"}}, "needs another `weights.transport`"),
    ],
)
def test_a_placement_that_cant_be_is_refused_when_the_config_is_read(
    sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert reason in str(caught.value)


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "head:6379", "[::1]:6379"])
def test_addresses_of_clusters(address: str) -> None:
    assert config(ray={"address": address}).ray.address == address


@pytest.mark.parametrize("address", ["head", "ray://head:10001", ":6379", "a:b", "http://a:1", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"must be local, auto or host:port"):
        config(ray={"address": address})


def test_a_cluster_that_nobody_answers_for_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"`ray.address: {address}`: no Ray answers at "):
        JoinedRay(address)


def test_a_cluster_of_this_machine_that_has_ended_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f"`ray.address: auto`: no Ray answers at .*:{port}: .*"):
        JoinedRay("auto")


def test_what_listens_and_is_no_ray_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.cluster.ANSWER_TIMEOUT_S", 2.0)
    with socket.create_server(("", 0)) as silent:  # Ray goes by an address that others reach, too
        port = silent.getsockname()[1]
        with pytest.raises(ConfigError, match=f"no Ray answers at .*:{port}: nothing within 2 s"):
            JoinedRay(f"127.0.0.1:{port}")
