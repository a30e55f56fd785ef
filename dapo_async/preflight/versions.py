"""Whether the installed packages go together."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from dapo_async.config import Config
from dapo_async.preflight.findings import Finding

SHOWN = ("torch", "ray", "sglang", "deepspeed", "transformers")
LOOKED_AT = (*SHOWN, "torchvision", "sentencepiece", "flash-attn")
CPU_TORCHVISION = "0.16.2"
"""The one that SGLang can import beside a torch without CUDA (requirements-sglang-cpu.txt)."""


def installed() -> dict[str, str]:
    """Versions of what is here: Python, and the packages that matter."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    names = {Requirement(line).name for line in requirements()} | set(LOOKED_AT)
    for name in sorted(names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def requirements() -> list[str]:
    """What the project itself declares (setup.py); nothing in a checkout that isn't installed."""
    try:
        return importlib.metadata.requires("dapo-async") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_versions(config: Config, found: Mapping[str, str], here: bool = True) -> list[Finding]:
    """Compare versions with what the project declares and with pairs that are known to fail.

    Args:
        here: the run would be on this machine; else what its devices need isn't asked of it.
    """
    shown = ", ".join(f"{name} {found[name]}" for name in ("python", *SHOWN) if name in found)
    bad = [*_undeclared(config, found, here), *(_known(config, found) if here else [])]
    whose = "" if here else "this machine's, others may have other ones: "
    return bad or [Finding("ok", "versions", f"{whose}{shown}")]


def _undeclared(config: Config, found: Mapping[str, str], here: bool) -> list[Finding]:
    bad: list[Finding] = []
    serves = config.rollout.engine == "sglang" and config.rollout.engine_urls is None
    for line in requirements():
        wanted = Requirement(line)
        if wanted.marker is not None and not (
            wanted.name == "sglang" and serves and here and wanted.marker.evaluate(_EXTRA)
        ):
            continue
        have = found.get(wanted.name)
        rule = f"the project needs {wanted.name}{wanted.specifier}"
        change = f'pip install "{wanted.name}{wanted.specifier}"; scripts/setup installs all of it'
        if have is None:
            bad.append(Finding("fail", "versions", f"{wanted.name} isn't installed", rule, change))
        elif not wanted.specifier.contains(_version(have), prereleases=True):
            bad.append(Finding("fail", "versions", f"{wanted.name} {have}", rule, change))
    return bad


_EXTRA = {"extra": "sglang"}


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _known(config: Config, found: Mapping[str, str]) -> list[Finding]:
    """Pairs that install and then fail."""
    bad: list[Finding] = []
    torch = found.get("torch", "")
    if torch.endswith("+cpu") and config.learner.device == "cuda":
        bad.append(
            Finding(
                "fail",
                "versions",
                f"torch {torch}",
                "`learner.device: cuda` needs a torch with CUDA",
                "scripts/setup gpu",
            )
        )
    own = config.rollout.engine == "sglang" and config.rollout.engine_urls is None
    vision = found.get("torchvision", CPU_TORCHVISION)
    if own and config.rollout.device == "cpu" and torch.endswith("+cpu"):
        if vision.split("+")[0] != CPU_TORCHVISION:
            bad.append(
                Finding(
                    "fail",
                    "versions",
                    f"torchvision {vision} beside torch {torch}",
                    f"beside a torch without CUDA SGLang can import torchvision {CPU_TORCHVISION} "
                    "only",
                    "scripts/setup sglang",
                )
            )
        if not found["python"].startswith("3.11."):
            bad.append(
                Finding(
                    "fail",
                    "versions",
                    f"python {found['python']}",
                    f"SGLang on a CPU needs torchvision {CPU_TORCHVISION}, which exists for "
                    "Python 3.11",
                    "use Python 3.11, or `rollout.engine: torch`",
                )
            )
    if found.get("sentencepiece") == "0.2.1":
        bad.append(
            Finding(
                "warn",
                "versions",
                "sentencepiece 0.2.1",
                "it crashes the interpreter at its end",
                'pip install "sentencepiece==0.2.0"',
            )
        )
    if config.model.attention == "flash_attention_2" and "flash-attn" not in found:
        bad.append(
            Finding(
                "fail",
                "versions",
                "flash-attn isn't installed",
                "`model.attention: flash_attention_2` needs it",
                "install flash-attn for this torch, or `model.attention: sdpa`",
            )
        )
    return bad
