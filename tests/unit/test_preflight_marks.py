"""Marked machines: ranks and workers are judged only by those that offer what they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from actors.reach import as_ray_counts
from dapo_async.doctor import doctor
from dapo_async.errors import ConfigError
from dapo_async.preflight.cluster import NodeKind, read_cluster
from dapo_async.preflight.findings import Finding, fails

CONFIGS = Path(__file__).parents[2] / "configs"
SEVEN_B = "dapo_7b_async.yaml"
"""Eight ranks of a GPU and four CPUs, eight workers of a GPU and four CPUs; a learner node."""
BIG = "presets/qwen2.5_32b_one_learner_node.yaml"
"""Eight ranks on one machine of large GPUs, eight workers of four GPUs."""
MARKS = ("ray.learner_resource=learner_node", "ray.rollout_resource=rollout_node")


def examine(shape: str, *overrides: str, name: str = SEVEN_B) -> dict[str, Finding]:
    """Finding by check; the worst where there are several."""
    rank = {"ok": 0, "warn": 1, "fail": 2}
    found = doctor(CONFIGS / name, [*MARKS, *overrides], shape)
    return {one.check: one for one in sorted(found, key=lambda one: rank[one.level])}


def placed(shape: str, *overrides: str, name: str = SEVEN_B) -> Finding:
    return examine(shape, *overrides, name=name)["placement"]


# ---- how marks are written ---------------------------------------------------------------------


def test_a_kind_carries_marks_in_words_and_says_them_again() -> None:
    found = read_cluster("8xH100-80G:2000G:192c@learner_node@fast + 4x8xH100-80G@rollout_node")
    assert [kind.marks for kind in found.nodes] == [["learner_node", "fast"], ["rollout_node"]]
    assert read_cluster(found.name) == found
    assert read_cluster("cpu:24G:2c@a").nodes[0].marks == ["a"]


def test_a_kind_carries_marks_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"nodes": [{"gpus": 8, "marks": ["a", "b"]}, {"count": 2}]}))
    found = read_cluster(str(path))
    assert [found.offers(kind, "a") for kind in found.nodes] == [True, False]


def test_where_no_kind_has_a_mark_any_may_offer_it_and_else_none_without_it() -> None:
    unknown = read_cluster("8xH100-80G + cpu")
    assert unknown.offering("x") == unknown.nodes
    known = read_cluster("8xH100-80G@y + cpu")
    assert known.offering("x") == [] and known.offering("y") == known.nodes[:1]
    assert known.offering(None) == known.nodes, "who asks for no mark goes anywhere"


@pytest.mark.parametrize("shape", ["8xH100-80G@", "8xH100-80G@a@", "8xH100-80G@@a"])
def test_a_mark_without_a_name_is_refused(shape: str) -> None:
    with pytest.raises(ConfigError, match="a mark is missing behind `@`"):
        read_cluster(shape)


# ---- the learner -------------------------------------------------------------------------------


def test_the_machines_that_are_meant_pass() -> None:
    found = placed("8xH100-80G:1000G:64c@learner_node + 8xH100-80G:1000G:64c@rollout_node")
    assert found.level == "ok", found.as_text()


def test_ranks_of_two_nodes_are_not_put_on_a_rollout_machine() -> None:
    shape = "8xH100-80G:1000G{} + 3x8xH100-80G:1000G{}"
    two = ("learner.nodes=2", "learner.ranks=16")
    assert placed(shape.format("", ""), *two).level == "ok"
    found = placed(shape.format("@learner_node", "@rollout_node"), *two)
    assert found.level == "fail"
    assert "only 1 of 2 nodes of 8xH100-80G:1000G@learner_node have 8 GPUs" in found.found
    assert "lower `learner.nodes: 2` to 1 and `learner.ranks: 16` to 8" in found.change
    assert "take 1 more of these nodes" in found.change
    better = "2x8xH100-80G:1000G@learner_node + 2x8xH100-80G:1000G@rollout_node"
    assert placed(better, *two).level == "ok"


def test_a_learner_machine_of_too_few_cpus_is_told_so_and_what_is_advised_passes() -> None:
    shape = "8xH100-80G:1000G:16c@learner_node + 8xH100-80G:1000G:64c@rollout_node"
    found = placed(shape)
    assert "no node of 8xH100-80G:1000G:16c@learner_node has 8 GPUs and 32 CPUs" in found.found
    assert "lower `learner.cpus_per_rank: 4` to 2" in found.change
    assert "rollout.workers" not in found.change
    assert placed(shape, "rollout.workers=4").level == "fail"
    assert placed(shape, "learner.cpus_per_rank=2").level == "ok"


def test_ranks_are_judged_by_the_gpus_of_learner_machines_and_workers_by_theirs() -> None:
    shape = "8xH200-141G:1800G{} + 4x8xH100-80G:1800G{}"
    marked = examine(shape.format("@learner_node", "@rollout_node"), name=BIG)
    assert [one.as_text() for one in fails(marked.values())] == []
    assert "its GPU has 141 GB (8xH200-141G:1800G@learner_node)" in marked["learner memory"].found
    assert "80 GB (8xH100-80G:1800G@rollout_node)" in marked["engine memory"].found
    assert examine(shape.format("", ""), name=BIG)["learner memory"].level == "fail"


def test_small_rollout_machines_do_not_refuse_a_learner_of_large_ones() -> None:
    small = ("rollout.max_response_length=4096", "overlong.buffer=1024")
    found = examine("8xH100-80G:1000G@learner_node + 8xA10-24G:500G@rollout_node", *small)
    assert [one.as_text() for one in fails(found.values())] == []
    turned = examine("8xA10-24G:500G@learner_node + 8xH100-80G:1000G@rollout_node", *small)
    assert turned["learner memory"].level == "fail"
    assert "24 GB (8xA10-24G:500G@learner_node)" in turned["learner memory"].found


def test_memory_is_judged_by_the_meant_machines_where_placement_fails_too() -> None:
    shape = "8xH200-141G:1800G@learner_node + 8xH100-80G:1800G@rollout_node"
    found = examine(shape, name=BIG)
    assert found["placement"].level == "fail"
    assert "its GPU has 141 GB" in found["learner memory"].found


# ---- the workers -------------------------------------------------------------------------------


def test_workers_are_not_put_on_what_the_learner_leaves_of_its_machine() -> None:
    found = placed("16xH100-80G:2000G@learner_node + 4xH100-80G:1000G@rollout_node")
    assert "4xH100-80G:1000G@rollout_node has 4 GPUs left, room for 4 of 8" in found.found
    assert "lower `rollout.workers: 8` to 4" in found.change
    assert "take more machines of 4xH100-80G:1000G@rollout_node" in found.change
    assert "learner.ranks" not in found.change, "fewer ranks make no room for a worker"


def test_rollout_machines_of_too_few_cpus_are_told_so_and_what_is_advised_passes() -> None:
    shape = "8xH100-80G:1000G:64c@learner_node + 8xH100-80G:1000G:24c@rollout_node"
    found = placed(shape)
    assert "has 8 GPUs and 24 CPUs left, room for 6 of 8 workers" in found.found
    assert "lower `rollout.cpus_per_worker: 4` to 3" in found.change
    assert placed(shape, "rollout.cpus_per_worker=3").level == "ok"
    assert placed(shape, "rollout.workers=6").level == "ok"


def test_a_mark_that_nobody_offers_is_named_with_those_that_are() -> None:
    found = placed("8xH100-80G@learner_nod + 8xH100-80G@rollout_node")
    assert found.level == "fail"
    assert "offers `ray.learner_resource: learner_node`" in found.found
    assert "they offer learner_nod, rollout_node" in found.found


# ---- workers that may join ---------------------------------------------------------------------


def test_workers_that_could_never_join_are_warned_of() -> None:
    shape = "8xH100-80G:1000G@learner_node + {}8xH100-80G:1000G@rollout_node"
    found = placed(shape.format(""), "rollout.max_workers=16")
    assert found.level == "warn"
    assert "room for 8 of `rollout.max_workers: 16`" in found.found
    assert "lower `rollout.max_workers` to 8" in found.change
    assert "more machines of 8xH100-80G:1000G@rollout_node" in found.change
    assert placed(shape.format("2x"), "rollout.max_workers=16").level == "ok"


# ---- a cluster that runs -----------------------------------------------------------------------


def test_a_node_of_a_living_cluster_has_the_marks_that_ray_tells_of() -> None:
    machine = NodeKind(gpus=4, cpus=64.0, memory_gb=100.0).model_dump()
    resources = {"CPU": 8.0, "GPU": 2.0, "memory": 1e9, "node:10.0.0.5": 1.0, "learner_node": 1.0}
    found = as_ray_counts(machine, resources, ["learner_node", "rollout_node"])
    assert (found.gpus, found.cpus, found.marks) == (2, 8.0, ["learner_node"])
    plain = as_ray_counts(machine, {"CPU": 8.0}, ["learner_node"])
    assert plain.marks == [], "none is known to be offered, which isn't the same as unknown"
