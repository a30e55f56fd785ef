"""A RayJob: its commands, its names, what is there already, and what its file must not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_async.launch.__main__ import main, read_cluster_file
from tests.unit.launch_files import (
    CONFIG,
    PATHS,
    ROOT,
    SPEC,
    Programs,
    filled,
    launch,
    refused,
    set_in,
    without,
)


@pytest.fixture(autouse=True)
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubectl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def documents(ran: list[str]) -> list[Any]:
    """What is applied and created, in order."""
    lines = [line for line in ran if "--filename" in line]
    return [yaml.safe_load(Path(line.split()[-1]).read_text()) for line in lines]


def verbs(ran: list[str]) -> list[str]:
    known = ("apply", "create", "wait", "logs", "get", "delete")
    return [next(word for word in line.split() if word in known) for line in ran]


def test_a_rayjob_is_created_followed_and_deleted(tmp_path: Path) -> None:
    programs = Programs("SUCCEEDED")
    arguments = [str(CONFIG), *PATHS, "--down", "--resume", "auto"]
    code, ran = launch(tmp_path, *arguments, name="kuberay", programs=programs)
    assert code == 0
    assert verbs(ran[1:]) == ["get", "apply", "apply", "create", "wait", "logs", "get", "delete"]
    others, config, job = documents(ran)
    assert [item["kind"] for item in others["items"]] == ["NetworkPolicy"]
    assert config["metadata"] == {"name": "dapo-async-run"}
    assert yaml.safe_load(config["data"]["run.yaml"])["ray"]["learner_resource"] == "learner_node"
    assert job["kind"] == "RayJob"
    assert job["spec"]["entrypoint"] == "dapo-async train /run-config/run.yaml --resume auto"
    volumes = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    assert {"name": "run-config", "configMap": {"name": "dapo-async-run"}} in volumes


def test_another_name_and_a_namespace_reach_everything_that_must_know_them(tmp_path: Path) -> None:
    tree = yaml.safe_load(filled("kuberay"))
    tree["items"][0]["metadata"] |= {"name": "mine", "namespace": "rl"}
    path = tmp_path / "kuberay.yaml"
    path.write_text(yaml.safe_dump(tree))
    programs = Programs("SUCCEEDED")
    assert main([str(path), str(CONFIG), *PATHS, "--down"], programs, tmp_path / "launch") == 0
    assert all(line.startswith("kubectl --namespace=rl ") for line in programs.ran[1:])
    assert all("mine" in line for line in programs.ran[1:] if "--filename" not in line)
    _, config, job = documents(programs.ran)
    assert config["metadata"] == {"name": "mine-run", "namespace": "rl"}
    volumes = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    assert {"name": "run-config", "configMap": {"name": "mine-run"}} in volumes


def test_an_ended_job_of_the_same_name_is_deleted_first(tmp_path: Path) -> None:
    for earlier in ("dapo-async: FAILED Complete", "dapo-async:  Failed"):
        programs = Programs("SUCCEEDED", earlier=earlier)
        code, ran = launch(tmp_path, str(CONFIG), *PATHS, name="kuberay", programs=programs)
        assert code == 0 and verbs(ran[1:])[:3] == ["get", "delete", "apply"]


def test_a_job_of_the_same_name_that_runs_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for earlier in ("dapo-async: RUNNING Running", "dapo-async:  Initializing", "dapo-async:  "):
        programs = Programs("SUCCEEDED", earlier=earlier)
        code, ran = launch(tmp_path, str(CONFIG), *PATHS, name="kuberay", programs=programs)
        assert code == 2 and verbs(ran[1:]) == ["get"]
        said = capsys.readouterr().err
        assert "a run of this name is there already" in said and "kubectl delete" in said


def test_a_cluster_that_doesnt_answer_gets_nothing(tmp_path: Path) -> None:
    programs = Programs(failing="kubectl get")
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, name="kuberay", programs=programs)
    assert code == 1 and verbs(ran[1:]) == ["get"]


def test_a_dry_run_shows_what_becomes_of_an_ended_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, str(CONFIG), *PATHS, "--dry-run", name="kuberay")[0] == 0
    said = capsys.readouterr().out
    assert "\n# if it has ended: kubectl delete --ignore-not-found rayjob dapo-async\n" in said


def test_the_doctor_gets_the_shared_memory_of_the_pods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kuberay.yaml"
    for size, code in (("500G", 0), ("1G", 2)):
        path.write_text(filled("kuberay").replace("sizeLimit: 500G", f"sizeLimit: {size}"))
        arguments = [str(path), str(CONFIG), *PATHS, "--dry-run"]
        assert main(arguments, folder=tmp_path / "launch") == code
        capsys.readouterr()


def test_pods_without_shared_memory_of_their_own_are_a_warning_and_have_64_mb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(filled("kuberay"))
    for group in tree["items"][0]["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        mounts[:] = [one for one in mounts if one["mountPath"] != "/dev/shm"]
    path = tmp_path / "kuberay.yaml"
    path.write_text(yaml.safe_dump(tree))
    arguments = [str(path), str(CONFIG), *PATHS, "--dry-run"]
    assert main(arguments, Programs(), tmp_path / "launch") == 0
    assert "rollout: nothing is mounted at /dev/shm: a container has 64 MB" in (
        capsys.readouterr().out
    )


# ---- what is refused ---------------------------------------------------------------------------

HEAD = (*SPEC, "headGroupSpec", "template", "spec")
WORKER = (*SPEC, "workerGroupSpecs", 1, "template")
PEERS = ("items", 1, "spec", "ingress", 0, "from")
SHM = (*WORKER, "spec", "volumes", 1, "emptyDir")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_in(*PEERS, to=[{"ipBlock": {"cidr": "0.0.0.0/0"}}]), "`ipBlock: 0.0.0.0/0` lets in"),
        (set_in(*PEERS, to=[{"ipBlock": {"cidr": "10.0.0.0/8"}}]), "`ipBlock: 10.0.0.0/8` lets in"),
        (set_in(*PEERS, 1, to={"namespaceSelector": {}}), "empty `namespaceSelector` under `from`"),
        (set_in(*PEERS, 0, to={"podSelector": {}}), "an empty `podSelector` under `from` lets"),
        (
            set_in(*PEERS, 0, "namespaceSelector", to={"matchExpressions": [
                {"key": "x", "operator": "DoesNotExist"}]}),
            "an empty `namespaceSelector` under `from` lets everybody in",
        ),
        (set_in(*PEERS, to=[{}]), "an empty item under `from` lets everybody in"),
        (set_in(*PEERS, to=[]), "an ingress rule without `from` lets everybody in"),
        (set_in("items", 1, "spec", "policyTypes", to=["Egress"]), "`policyTypes: ['Egress']` mus"),
        (without("items", 1, "spec"), "NetworkPolicy: spec: is required"),
        (set_in("items", 1, "metadata", "namespace", to="x"), "`namespace: x` must be the RayJob'"),
        (without(*WORKER, "metadata", "annotations"), "rollout: its `template` must have the anno"),
        (set_in(*SPEC, "rayVersion", to="2.9.0"), "`rayVersion: 2.9.0` must be 2."),
        (set_in(*SHM, "sizeLimit", to="much"), "rollout: `much` must be an amount of memory"),
        (set_in(*HEAD, "containers", 0, "volumeMounts", 0, "mountPath", to="/data"),
         "head: no `volumeMounts` has `mountPath: /shared`"),
        (without(*WORKER, "spec", "containers", 0, "volumeMounts", 0), "rollout: no `volumeMounts"),
        (without(*HEAD, "containers", 0, "volumeMounts", 1), "head: a volume with a `configMap`"),
        (set_in("items", 0, "metadata", "name", to=""), "`metadata.name` is missing"),
    ],
)  # fmt: skip
def test_a_rayjob_is_refused(change: Any, reason: str, tmp_path: Path) -> None:
    assert reason in refused("kuberay", tmp_path, change)


def test_peers_are_named_by_labels_or_by_expressions_that_choose(tmp_path: Path) -> None:
    tree = yaml.safe_load(filled("kuberay"))
    tree["items"][1]["spec"]["ingress"][0]["from"].append(
        {"podSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}}
    )
    path = tmp_path / "kuberay.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert main([str(path), str(CONFIG), *PATHS, "--dry-run"], Programs(), tmp_path / "l") == 0


@pytest.mark.parametrize(
    ("size", "gigabytes"),
    [("500G", 500), ("1Gi", 2**30 / 1e9), ("64Mi", 0.067), (5e11, 500), ("2000G", 1800)],
)
def test_shared_memory_is_read_as_kubernetes_does_and_no_more_than_the_container_has(
    size: Any, gigabytes: float, tmp_path: Path
) -> None:
    tree = yaml.safe_load(filled("kuberay"))
    set_in(*SHM, "sizeLimit", to=size)(tree)
    path = tmp_path / "kuberay.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert read_cluster_file(path).node_types[2].shm_gb == pytest.approx(gigabytes, rel=1e-2)


def test_the_ray_version_of_the_shipped_file_is_the_one_that_is_installed_on_gpus() -> None:
    (pinned,) = (
        line.strip()
        for line in (ROOT / "requirements-gpu.txt").read_text().splitlines()
        if line.startswith("ray==")
    )
    job = yaml.safe_load(filled("kuberay"))["items"][0]
    assert pinned.startswith(f"ray=={job['spec']['rayClusterSpec']['rayVersion']}")
