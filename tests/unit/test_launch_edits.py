"""Every line of every shipped cluster file, deleted or emptied: accepted, or refused in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dapo_async.errors import ConfigError
from dapo_async.launch.__main__ import read_cluster_file
from dapo_async.launch.ray_file import ray_says
from tests.unit.launch_files import PROVIDERS, filled

FILES = (*PROVIDERS, "kuberay")


def edits(text: str) -> Iterator[tuple[str, str]]:
    """A line, and the text without it or without what stands behind its key or dash."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        before, after = lines[:number], lines[number + 1 :]
        yield line, "\n".join([*before, *after])
        emptied = re.sub(r"^(\s*(?:- )?(?:[^\s:#]+:|-)) .*", r"\1", line)
        if emptied != line:
            yield line, "\n".join([*before, emptied, *after])


def tried(name: str, folder: Path) -> dict[str, str]:
    """What happened to each edit, by its text: `accepted`, or the reason."""
    path, found = folder / f"{name}.yaml", dict[str, str]()
    others = {line for other in PROVIDERS[: FILES.index(name)] for line in lines_of(other)}
    for line, text in edits(filled(name)):
        if line in others:
            continue  # files for `ray up` are alike: once is enough
        path.write_text(text)
        try:
            read_cluster_file(path)
            found[text] = "accepted"
        except ConfigError as error:
            found[text] = str(error)
    return found


def lines_of(name: str) -> set[str]:
    return set(filled(name).splitlines())


@pytest.mark.parametrize("name", FILES)
def test_no_line_that_is_deleted_or_emptied_ends_in_anything_but_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray's own check takes most of the time; what it makes of such files has a test below.
    monkeypatch.setattr("dapo_async.launch.ray_file.ray_says", lambda tree: [])
    found = tried(name, tmp_path)
    assert len(found) > 30
    assert "accepted" in found.values() and len(set(found.values())) > 10


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("aws", "\n  - ~/dapo-async/.venv/bin/pip install --quiet boto3==1.44.8", "", "`head_setu"),
        ("on_prem", "head_setup_commands: []", "head_setup_commands:", "`head_setup_commands` is "),
        ("gcp", "        - subnetwork: *subnetwork\n", "", "networkInterfaces` is empty: give it"),
        ("gcp", "- subnetwork: *subnetwork", "-", "networkInterfaces[0]` is empty"),
        ("gcp", "- subnetwork: *subnetwork\n          acc", "- acc", "must name a subnetwork of"),
        ("gcp", "networkInterfaces:\n        - subnetwork: *subnetwork\n      disks",
         "networkInterfaces: [x]\n      disks", "must name a subnetwork of yours"),
        ("on_prem", "worker_ips: [*learner, *rollout]", "worker_ips:", "`provider.worker_ips` is "),
        ("kuberay", "podSelector: {matchLabels: {app: dapo-async}}\n", "podSelector:\n", "is empt"),
        ("kuberay", "items:\n", "things:\n", "`items` must hold one RayJob, not 0"),
        ("kuberay", "  - apiVersion: networking.k8s.io/v1\n    kind: NetworkPolicy", "  - x: y",
         "no NetworkPolicy chooses its pods"),
    ],
)  # fmt: skip
def test_lines_on_which_the_check_once_broke(
    name: str, old: str, new: str, reason: str, tmp_path: Path
) -> None:
    text = filled(name)
    assert old in text
    path = tmp_path / "edited.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(path)
    assert reason in str(caught.value)


def test_what_rays_own_check_breaks_on_is_said() -> None:
    tree = yaml.safe_load(filled("aws")) | {"head_setup_commands": None}
    (said,) = ray_says(tree)
    assert said.startswith("Ray's own check broke on it: TypeError: ")
