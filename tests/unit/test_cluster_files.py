"""The shipped cluster files: accepted by Ray's own offline check once filled in, closed to others,
and refused by ours when they are changed to what must not be."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from dapo_async.errors import ConfigError
from dapo_async.launch.__main__ import read_cluster_file
from dapo_async.launch.ray_file import EVERYWHERE, ray_says
from tests.unit.launch_files import (
    CLUSTERS,
    PROVIDERS,
    ROOT,
    SPEC,
    filled,
    refused,
    set_in,
    without,
    written,
)

RENTED = ("aws", "gcp", "azure")


@pytest.mark.parametrize("name", PROVIDERS)
def test_rays_own_check_accepts_a_shipped_file(name: str) -> None:
    prepared = prepare_config(copy.deepcopy(yaml.safe_load(filled(name))))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    assert ray_says(yaml.safe_load(filled(name))) == []


@pytest.mark.parametrize("name", [*PROVIDERS, "kuberay"])
def test_a_shipped_file_is_accepted_when_filled_in_and_names_its_placeholders_before(
    name: str, tmp_path: Path
) -> None:
    cluster = read_cluster_file(written(name, tmp_path))
    assert cluster.shared_dir == "/shared"
    assert cluster.most("GPU", "learner_node") == 8
    assert cluster.most("GPU", "rollout_node") == (8 if name == "on_prem" else 32)
    assert "8xH100-80G" in cluster.shape
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(CLUSTERS / f"{name}.yaml")
    text = (CLUSTERS / f"{name}.yaml").read_text()
    assert all(one in str(caught.value) for one in re.findall(r"YOUR_[A-Z_]*[A-Z]", text))


@pytest.mark.parametrize("name", [*PROVIDERS, "kuberay"])
def test_placeholders_stand_in_one_place_before_everything_else(name: str) -> None:
    lines = (CLUSTERS / f"{name}.yaml").read_text().splitlines()
    places = [number for number, line in enumerate(lines) if "YOUR_" in line]
    assert places[-1] - places[0] < 20
    first = next(n for n, line in enumerate(lines) if re.match(r"cluster_name|    spec", line))
    assert places[-1] < first


def test_all_files_for_ray_up_set_nodes_up_alike() -> None:
    trees = [yaml.safe_load(filled(name)) for name in PROVIDERS]
    for key in ("file_mounts", "head_start_ray_commands", "rsync_exclude"):
        assert len({str(tree[key]) for tree in trees}) == 1, key
    for tree in trees:
        here = [local for there, local in tree["file_mounts"].items() if "dapo-async" in there]
        assert all((ROOT / local).exists() for local in here)
        assert "cd ~/dapo-async && scripts/setup gpu" in tree["setup_commands"]
        assert {"requirements-gpu.txt", "setup.py", "scripts"} <= set(here)
        # Ray kills a stopped job after three seconds, before its weights are saved.
        assert "RAY_JOB_STOP_WAIT_TIME_S=600" in tree["head_start_ray_commands"][-1]


@pytest.mark.parametrize("name", RENTED)
def test_rollouts_are_on_spot_machines_and_head_and_learner_are_not(name: str) -> None:
    types = yaml.safe_load(filled(name))["available_node_types"]
    spot = {kind: re.search("spot", str(one), re.IGNORECASE) for kind, one in types.items()}
    assert spot["rollout"] and not spot["learner"] and not spot["head"]
    assert types["learner"]["resources"]["learner_node"] == 1
    assert types["rollout"]["resources"]["rollout_node"] == 1


@pytest.mark.parametrize("name", [*PROVIDERS, "kuberay"])
def test_nothing_in_a_shipped_file_lets_everybody_in(name: str) -> None:
    assert not any(network in filled(name) for network in EVERYWHERE)


# ---- what is refused ---------------------------------------------------------------------------


TYPES = "available_node_types"
OPEN = {
    "GroupName": "x",
    "IpPermissions": [
        {"FromPort": 22, "ToPort": 22, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ],
}
OPEN_START = ["RAY_AUTH_MODE=token ray start --head --dashboard-host=0.0.0.0"]
TWO_HOSTS = [
    "RAY_AUTH_MODE=token ray start --head --dashboard-host=127.0.0.1 --dashboard-host=0.0.0.0"
]
TWO_WORDS = [
    "RAY_AUTH_MODE=token ray start --head --dashboard-host=127.0.0.1 --dashboard-host 0.0.0.0"
]
TWO_MODES = ["RAY_AUTH_MODE=token RAY_AUTH_MODE=disabled ray start --address=x"]
NO_TOKEN = ["ray start --head --dashboard-host=127.0.0.1"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("aws", set_in("provider", "security_group", to=OPEN), "`0.0.0.0/0` lets everybody in"),
        ("aws", without(TYPES, "rollout", "node_config", "SecurityGroupIds"), "rollout: `Secur"),
        ("gcp", without(TYPES, "head", "node_config", "networkInterfaces"), "head: `networkInt"),
        ("azure", without("provider", "use_internal_ips"), "`provider.use_internal_ips: true`"),
        ("azure", set_in("provider", "use_external_head_ip", to=True), "without `use_external_he"),
        ("on_prem", set_in("provider", "worker_ips", to=["8.8.8.8"]), "8.8.8.8 is a public add"),
        ("aws", set_in("head_start_ray_commands", to=OPEN_START), "--dashboard-host=127.0.0.1"),
        ("aws", without("head_start_ray_commands"), "`head_start_ray_commands` must be given"),
        ("gcp", set_in("head_start_ray_commands", to=NO_TOKEN), "must set RAY_AUTH_MODE=token"),
        ("gcp", without("file_mounts", "~/.ray/auth_token"), "every node needs Ray's token"),
        ("aws", set_in("head_node_type", to="boss"), "`head_node_type: boss` is no node type"),
        ("aws", set_in("metadata", "machines", "big", to="cpu"), "big is no node type: head, lea"),
        ("aws", without("metadata", "machines", "head"), "doesn't say what machine head is"),
        ("azure", set_in(TYPES, "rollout", "min_workers", to=9), "`min_workers: 9` is over `max"),
        ("aws", set_in("max_workers", to=1), "Ray: The specified global `max_workers` is smaller"),
        ("aws", set_in("colour", to="red"), "Ray: Additional properties are not allowed"),
        ("on_prem", set_in(TYPES, to={"x": {}}), "available_node_types is not supported for on-"),
        ("gcp", set_in(TYPES, "learner", "resources", "GPU", to=4), "has 8 GPUs, but `GPU: 4`"),
        ("aws", set_in("provider", "type", to="vsphere"), "`provider.type: vsphere` must be one"),
        ("aws", without("metadata"), "metadata: is required"),
        ("aws", set_in("head_start_ray_commands", to=TWO_HOSTS), "--dashboard-host=127.0.0.1, onc"),
        ("aws", set_in("head_start_ray_commands", to=TWO_WORDS), "--dashboard-host=127.0.0.1, onc"),
        ("aws", set_in("worker_start_ray_commands", to=TWO_MODES), "RAY_AUTH_MODE=token, and noth"),
        ("gcp", set_in("setup_commands", 3, to="true"), "RAY_AUTH_MODE=token into ~/.bashrc"),
        ("aws", set_in("provider", "availability_zone", to="us-east-2a,eu-west-1a"), "`provider.a"),
        ("gcp", set_in("provider", "availability_zone", to="eu-west-1a"), "is not in `region: us-"),
        ("aws", set_in(TYPES, "head", "node_config", "ImageId", to="ubuntu-24"), "like ami-012345"),
        ("aws", set_in(TYPES, "head", "node_config", "SubnetIds", to=["x"]), "look like subnet-01"),
        ("aws", set_in(TYPES, "rollout", "node_config", "SecurityGroupIds", to=["default"]),
         "rollout: `SecurityGroupIds: default` must look like sg-0123456789abcdef0"),
        ("azure", set_in("metadata", "shared_dir", to="/mnt/nfs"), "isn't what `setup_commands` m"),
        ("azure", set_in("metadata", "shared_dir", to="shared"), "must be the absolute path of a "),
        ("aws", set_in("head_setup_commands", to=None), "`head_setup_commands` is empty: give it "),
        ("aws", set_in("setup_commands", 1, to=None), "`setup_commands[1]` is empty"),
        ("aws", set_in("metadata", "machines", "head", to="cpu:32G:8c@a"), "must not hold @"),
    ],
)  # fmt: skip
def test_a_file_for_ray_up_is_refused(
    name: str, change: Callable[[Any], Any], reason: str, tmp_path: Path
) -> None:
    assert reason in refused(name, tmp_path, change)


def change_marks(old: str, new: str) -> Callable[[Any], None]:
    """In the command that runs, not in the placeholder that it was made from."""

    def change(tree: Any) -> None:
        commands = tree["setup_commands"]
        assert old in commands[-1]
        commands[-1] = commands[-1].replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_in("metadata", "machines", "rollout", to="5x8xH100-80G:1000G:96c"),
         "describes 7 machines (head 1, learner 1, rollout 5), `provider` has 3 addresses"),
        (set_in("provider", "worker_ips", to=["10.0.0.2", "10.0.0.3", "10.0.0.4"]),
         "`metadata.machines` describes 3 machines"),
        (without("metadata", "machines", "rollout"),
         "`metadata.resources.rollout` has no line `rollout: …` in `metadata.machines`"),
        (set_in("provider", "worker_ips", to=["10.0.0.2", "10.0.0.2"]), "10.0.0.2 stands there tw"),
        (set_in("provider", "worker_ips", to=["10.0.0.2", "10.0.0.1"]), "10.0.0.1 stands there tw"),
        (set_in("provider", "worker_ips", to=["10.0.0.9", "10.0.0.3"]),
         "name 10.0.0.2, not among `provider.worker_ips: 10.0.0.9, 10.0.0.3`"),
        (set_in("provider", "worker_ips", to=["gpu-1", "10.0.0.2"]), "gpu-1 must be an address"),
        (set_in("metadata", "resources", "rollout", to={"rolout_node": 1}),
         "machines offer learner_node, rolout_node; by `setup_commands`"),
        (change_marks("rollout_node", "rolout_node"), "they offer learner_node, rolout_node"),
        (without("setup_commands", -1), "they offer nothing"),
        (change_marks('{"learner_node": 1}', '{"learner_node" 1}'), "in a command isn't JSON"),
        (change_marks('*" 10.0.0.2 "*)', '*" 10.0.0.2 "*|*" 10.0.0.3 "*)'),
         "2 of `provider.worker_ips` offer learner_node, by `metadata.machines.learner` 1"),
        (set_in("worker_start_ray_commands", to=["RAY_AUTH_MODE=token ray start"]),
         "`worker_start_ray_commands` must have --resources"),
    ],
)  # fmt: skip
def test_machines_of_ones_own_that_dont_go_together_are_refused(
    change: Callable[[Any], Any], reason: str, tmp_path: Path
) -> None:
    assert reason in refused("on_prem", tmp_path, change)


def test_several_learner_machines_are_named_in_one_arm_of_the_marks(tmp_path: Path) -> None:
    def two(tree: Any) -> None:
        change_marks('*" 10.0.0.2 "*)', '*" 10.0.0.2 "*|*" 10.0.0.4 "*)')(tree)
        tree["provider"]["worker_ips"].append("10.0.0.4")
        tree["metadata"]["machines"]["learner"] = "2x8xH100-80G:1000G:96c"

    cluster = read_cluster_file(written("on_prem", tmp_path, two))
    assert cluster.most("GPU", "learner_node") == 16


def test_marks_that_come_about_otherwise_are_not_judged_by_address(tmp_path: Path) -> None:
    def own(tree: Any) -> None:
        tree["setup_commands"][-1] = """~/marks {"learner_node": 1} {"rollout_node": 1}"""

    assert read_cluster_file(written("on_prem", tmp_path, own)).warnings == ()


def test_a_shared_folder_that_nothing_mounts_is_a_warning(tmp_path: Path) -> None:
    cluster = read_cluster_file(written("azure", tmp_path, without("setup_commands", 1)))
    (warning,) = cluster.warnings
    assert "no command mounts `metadata.shared_dir: /shared`" in warning.as_text()


def test_a_shared_folder_may_be_within_what_is_mounted(tmp_path: Path) -> None:
    below = set_in("metadata", "shared_dir", to="/shared/team/")
    cluster = read_cluster_file(written("azure", tmp_path, below))
    assert (cluster.shared_dir, cluster.warnings) == ("/shared/team", ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without(*SPEC, "authOptions"), "`authOptions.mode: disabled` must be token"),
        (set_in(*SPEC, "headGroupSpec", "serviceType", to="LoadBalancer"), "must be ClusterIP"),
        (set_in(*SPEC, "headGroupSpec", "enableIngress", to=True), "`enableIngress` must be false"),
        (set_in("items", 1, "kind", to="Service"), "head: no NetworkPolicy chooses its pods"),
        (set_in("items", 1, "spec", "ingress", to=[{}]), "without `from` lets everybody in"),
        (set_in(*SPEC, "workerGroupSpecs", 1, "minReplicas", to=9), "rollout: `minReplicas: 9` is"),
        (set_in("items", 0, "spec", "entrypoint", to="sleep 1"), "`entrypoint: sleep 1` must"),
        (set_in(*SPEC, "workerGroupSpecs", 0, "rayStartParams", to={"resources": "{}"}), "JSON in"),
        (set_in(*SPEC, "workerGroupSpecs", 0, "template", "spec", "hostNetwork", to=True), "learn"),
        (set_in("items", to=[]), "must hold one RayJob, not 0"),
        (without(*SPEC, "workerGroupSpecs"), "workerGroupSpecs: is required"),
    ],
)
def test_a_rayjob_is_refused(change: Callable[[Any], Any], reason: str, tmp_path: Path) -> None:
    assert reason in refused("kuberay", tmp_path, change)


@pytest.mark.parametrize("text", ["[1]", "a: [", "\tx"])
def test_what_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_cluster_file(tmp_path / "c.yaml")
