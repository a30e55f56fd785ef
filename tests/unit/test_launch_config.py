"""What `scripts/launch` makes of a config: what it adds, what it says, what it tells the doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_async.errors import ConfigError
from dapo_async.launch.__main__ import read_cluster_file
from dapo_async.launch.cluster import ClusterFile
from dapo_async.launch.run import prepare
from dapo_async.preflight.cluster import read_cluster
from tests.unit.launch_files import CONFIG, PATHS, ROOT, filled, written


def cluster(
    folder: Path, name: str = "aws", change: Callable[[Any], Any] | None = None
) -> ClusterFile:
    return read_cluster_file(written(name, folder, change))


def warned(found: ClusterFile, *overrides: str) -> str:
    prepared = prepare(found, CONFIG, [*PATHS, *overrides])
    return "\n".join(warning.as_text() for warning in prepared.warnings)


def refused(found: ClusterFile, *overrides: str, config: Path = CONFIG) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(found, config, [*PATHS, *overrides])
    return str(caught.value)


def test_what_launch_adds_to_a_config_is_said_and_nothing_else(tmp_path: Path) -> None:
    found = cluster(tmp_path)
    prepared = prepare(found, CONFIG, [*PATHS, "ray.placement_timeout_s=60"])
    assert prepared.added == {
        "run.dir": "/shared/runs",
        "ray.learner_resource": "learner_node",
        "ray.rollout_resource": "rollout_node",
    }
    assert prepared.config.ray.placement_timeout_s == 60
    assert prepared.warnings == ()
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(f"base: {CONFIG}\nray: {{address: local}}\n")
    assert prepare(found, elsewhere, PATHS).added["ray.address"] == "auto"


@pytest.mark.parametrize("section", ["ray: 5", "run: 5", "ray:", "weights: 5", "weights:"])
def test_a_section_that_is_none_is_refused_in_the_words_of_the_config(
    section: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"base: {CONFIG}\n{section}\n")
    assert section.partition(":")[0] in refused(cluster(tmp_path), config=config)


def test_the_doctor_is_told_which_machines_offer_what(tmp_path: Path) -> None:
    machine = "8xH100-80G:2000G:192c"
    assert cluster(tmp_path).shape == (
        f"cpu:32G:8c + {machine}@learner_node + 4x{machine}@rollout_node"
    )
    machine = "8xH100-80G:1000G:96c"
    assert cluster(tmp_path, "on_prem").shape == (
        f"cpu:32G:8c + {machine}@learner_node + {machine}@rollout_node"
    )


def test_what_ray_counts_by_itself_is_no_mark(tmp_path: Path) -> None:
    def more(tree: Any) -> None:
        kinds = tree["available_node_types"]
        kinds["learner"]["resources"] |= {"memory": 10**9, "accelerator_type:H100": 1, "none": 0}
        kinds["rollout"]["resources"]["fast"] = 2

    _, learner, rollout = cluster(tmp_path, change=more).node_types
    assert learner.marks == ["learner_node"]
    assert sorted(rollout.marks) == ["fast", "rollout_node"]


def test_the_doctor_is_told_what_shared_memory_pods_have(tmp_path: Path) -> None:
    found = cluster(tmp_path, "kuberay")
    path = tmp_path / "shape.yaml"
    path.write_text(found.shape_file or "")
    head, learner, rollout = read_cluster(str(path)).nodes
    assert (learner.shm_gb, rollout.shm_gb, rollout.count) == (500, 500, 4)
    assert head.shm_gb == pytest.approx(0.067)
    assert learner.marks == ["learner_node"] and rollout.marks == ["rollout_node"]
    assert cluster(tmp_path).shape_file is None


# ---- which nodes are for whom ------------------------------------------------------------------


def learner_offers(name: str | None) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        resources = tree["available_node_types"]["learner"]["resources"]
        del resources["learner_node"]
        if name is not None:
            resources[name] = 1

    return change


def test_a_misspelled_mark_is_refused_and_the_likely_one_named(tmp_path: Path) -> None:
    said = refused(cluster(tmp_path, change=learner_offers("learner_nod")))
    assert "no node type offers `learner_node`, so the learner might be placed on any" in said
    assert "is `learner_nod` meant to be it?" in said


def test_a_missing_mark_is_refused_unless_any_machine_will_do(tmp_path: Path) -> None:
    found = cluster(tmp_path, change=learner_offers(None))
    said = refused(found)
    assert "`ray.learner_resource=null`" in said and "meant" not in said
    config = prepare(found, CONFIG, [*PATHS, "ray.learner_resource=null"]).config
    assert config.ray.learner_resource is None
    assert config.ray.rollout_resource == "rollout_node"


def test_marks_of_ones_own_may_be_named_in_the_config(tmp_path: Path) -> None:
    found = cluster(tmp_path, change=learner_offers("fast"))
    config = prepare(found, CONFIG, [*PATHS, "ray.learner_resource=fast"]).config
    assert config.ray.learner_resource == "fast"


@pytest.mark.parametrize("name", ["gpu_single_node", "quickstart"])
def test_a_config_for_one_machine_is_refused_by_what_to_set(name: str, tmp_path: Path) -> None:
    said = refused(cluster(tmp_path), config=ROOT / "configs" / f"{name}.yaml")
    assert "separate nodes for learner and rollouts (learner_node, rollout_node)" in said
    assert "set `weights.transport=relay`" in said and "must then be equal" not in said


def test_too_few_gpus_name_what_to_raise(tmp_path: Path) -> None:
    for name, what in (
        ("aws", "raise `max_workers`"),
        ("on_prem", "add machines to `metadata.machines`"),
        ("kuberay", "raise `maxReplicas`"),
    ):
        assert what in refused(cluster(tmp_path, name), "rollout.workers=40")


# ---- what every node must have -----------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    ["model.path=/home/me/Qwen2.5-7B", "data.train=/data/t.jsonl", "learner.deepspeed=/etc/d.json"],
)
def test_a_path_outside_the_shared_folder_is_a_warning(override: str, tmp_path: Path) -> None:
    said = warned(cluster(tmp_path), override)
    assert f"`{override.replace('=', ': ')}` isn't below /shared" in said
    assert "every node must have it" in said


def test_weights_on_a_disk_of_one_node_are_a_warning(tmp_path: Path) -> None:
    said = warned(cluster(tmp_path), "weights.transport=disk", "weights.dir=/tmp/w")
    assert "`weights.dir: /tmp/w` isn't below /shared" in said


@pytest.mark.parametrize("name", ["aws", "kuberay"])
def test_a_reward_of_ones_own_that_isnt_carried_to_the_cluster_is_a_warning(
    name: str, tmp_path: Path
) -> None:
    said = warned(cluster(tmp_path, name), "reward.function=my_rewards:exact")
    assert "`reward.function: my_rewards:exact`: my_rewards may be missing" in said
    assert ("file_mounts" in said) == (name == "aws") and "launch.md" in said


def test_a_reward_that_is_carried_or_ours_is_none(tmp_path: Path) -> None:
    for mounted in ("my_rewards.py", "my_rewards"):

        def carry(tree: Any, name: str = mounted) -> None:
            tree["file_mounts"][f"~/dapo-async/{name}"] = f"/home/me/{name}"

        assert warned(cluster(tmp_path, change=carry), "reward.function=my_rewards.a:exact") == ""
    assert warned(cluster(tmp_path), "reward.function=dapo_async.rewards.math:numeric_match") == ""


def test_nodes_find_python_modules_beside_ours() -> None:
    for name in ("aws", "gcp", "azure", "on_prem"):
        (line,) = (c for c in yaml.safe_load(filled(name))["setup_commands"] if "bashrc" in c)
        assert 'PYTHONPATH="$HOME/dapo-async"' in line
