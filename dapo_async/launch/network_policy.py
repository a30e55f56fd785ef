"""NetworkPolicies: every pod of a run must have one, and none may let others in.

Policies add up, so a rule of any of them opens the pods that it chooses; and what a file holds
beside its RayJob is there for that run, so all rules are judged, whomever they choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from dapo_async.config_files import Tree, problems
from dapo_async.launch.cluster import Loose


class Expression(Loose):
    operator: str


class Selector(Loose):
    matchLabels: dict[str, str] = Field(default_factory=dict[str, str])
    matchExpressions: list[Expression] = Field(default_factory=list[Expression])

    @property
    def narrow(self) -> bool:
        """It names what it chooses: what isn't there, or is anything, chooses strangers."""
        return bool(self.matchLabels) or any(one.operator == "In" for one in self.matchExpressions)


class Peer(Loose):
    podSelector: Selector | None = None
    namespaceSelector: Selector | None = None
    ipBlock: dict[str, Any] | None = None


class Ingress(Loose):
    peers: list[Peer] = Field(default_factory=list[Peer], alias="from")


class PolicySpec(Loose):
    podSelector: Selector
    policyTypes: list[str] = Field(default_factory=lambda: ["Ingress"])
    ingress: list[Ingress] = Field(default_factory=list[Ingress])


class Named(Loose):
    name: str = ""


class Policy(Loose):
    metadata: Named = Named()
    spec: PolicySpec


def check_policies(items: Sequence[Tree], pods: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What is wrong.

    Args:
        items: of a List for kubectl.
        pods: the labels of every group's pods.
    """
    policies: list[Policy] = []
    said: list[str] = []
    for item in items:
        if item.get("kind") == "NetworkPolicy":
            try:
                policies.append(Policy.model_validate(item))
            except ValidationError as error:
                said += [f"NetworkPolicy: {line.strip()}" for line in problems(error)]
    for policy in policies:
        said += [f"NetworkPolicy {policy.metadata.name}: {line}" for line in _open(policy.spec)]
    said += [
        f"{name}: no NetworkPolicy chooses its pods: all others reach Ray's ports"
        for name, labels in pods.items()
        if not any(_chooses(policy.spec.podSelector, labels) for policy in policies)
    ]
    return said


def _open(spec: PolicySpec) -> list[str]:
    if "Ingress" not in spec.policyTypes:
        return [f"`policyTypes: {spec.policyTypes}` must have Ingress: it keeps nobody out else"]
    said: list[str] = []
    for rule in spec.ingress:
        if not rule.peers:
            said.append("an ingress rule without `from` lets everybody in")
        for peer in rule.peers:
            if peer.ipBlock is not None:
                said.append(
                    f"`ipBlock: {peer.ipBlock.get('cidr')}` lets in by address, whatever has it: "
                    "name pods or namespaces by their labels"
                )
            selectors = {
                "podSelector": peer.podSelector,
                "namespaceSelector": peer.namespaceSelector,
            }
            given = {key: one for key, one in selectors.items() if one is not None}
            said += [
                f"an empty `{key}` under `from` lets everybody in: name whom by `matchLabels`"
                for key, one in given.items()
                if not one.narrow
            ]
            if not given and peer.ipBlock is None:
                said.append("an empty item under `from` lets everybody in")
    return said


def _chooses(selector: Selector, labels: Mapping[str, str]) -> bool:
    """For certain: expressions aren't judged."""
    wanted = selector.matchLabels.items()
    return not selector.matchExpressions and all(labels.get(k) == v for k, v in wanted)
