"""Machines that are there already: their addresses beside what `metadata` says of them.

Ray knows no types for them. What a machine offers is decided by a command that runs on it; the
shipped file's is a `case` over the machine's addresses, and is read here.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_async.config_files import Tree
from dapo_async.launch.cluster import NodeType, items_of

_COUNTED = re.compile(r"(?:(\d+)x(?=\d+x|cpu))?(.*)", re.DOTALL)
"""Words for a machine after how many there are."""
_GPUS = re.compile(r"(\d+)x")
_OFFER = re.compile(r'\{\s*"[^{}]*\}')
"""Custom resources as `ray start` takes them, somewhere in a command."""
_ARM = re.compile(r"""((?:\*"[^"]*"\*\s*\|?\s*)+|\*)\)\s*\w+='(\{[^']*\})'""")
"""`*" ADDRESS "*|*" ADDRESS "*) NAME='{…}'`, or `*) NAME='{…}'` for all others."""
_QUOTED = re.compile(r'"\s*([^"\s]+)\s*"')


def machines_there(
    machines: Mapping[str, str], resources: Mapping[str, Mapping[str, int]]
) -> list[NodeType]:
    """`metadata` says all."""
    found: list[NodeType] = []
    for name, words in machines.items():
        count, machine = _COUNTED.fullmatch(words).groups()  # pyright: ignore[reportOptionalMemberAccess]
        offered = dict[str, float](resources.get(name, {}))
        if gpus := _GPUS.match(machine):
            offered["GPU"] = float(gpus[1])
        found.append(NodeType(name=name, machine=machine, most=int(count or 1), resources=offered))
    return found


def check_own_machines(
    provider: Tree,
    kinds: Sequence[NodeType],
    resources: Mapping[str, Mapping[str, int]],
    setup: Sequence[str],
    start: Sequence[str],
) -> list[str]:
    """What is wrong.

    Args:
        kinds: what `machines_there` found.
        setup: commands that run on every machine before Ray.
        start: commands that start Ray on all but the head.
    """
    workers = [str(one) for one in items_of(provider.get("worker_ips"))]
    addresses = [str(provider.get("head_ip")), *workers]
    said = [
        f"`metadata.resources.{name}` has no line `{name}: …` in `metadata.machines`, which says "
        "what machine that is"
        for name in resources
        if name not in {kind.name for kind in kinds}
    ]
    said += [
        f"`provider`: {address} is a public address: Ray's ports would be, too"
        for address in addresses
        if _is_public(address)
    ]
    said += [
        f"`provider`: {address} stands there twice"
        for address in sorted(set(addresses))
        if addresses.count(address) > 1
    ]
    there = sum(kind.most for kind in kinds)
    if there != len(addresses):
        each = ", ".join(f"{kind.name} {kind.most}" for kind in kinds)
        said.append(
            f"`metadata.machines` describes {there} machines ({each}), `provider` has "
            f"{len(addresses)} addresses (`head_ip` and {len(workers)} `worker_ips`): they must be "
            'equally many, and "3x8xH100-80G:1000G" are three'
        )
    return said + _check_marks(workers, kinds, resources, setup, start)


def _check_marks(
    workers: Sequence[str],
    kinds: Sequence[NodeType],
    resources: Mapping[str, Mapping[str, int]],
    setup: Sequence[str],
    start: Sequence[str],
) -> list[str]:
    """What the machines will offer must be what `metadata.resources` says."""
    declared = {name for offered in resources.values() for name in offered}
    commands = [*setup, *start]
    offers = [hit for command in commands for hit in _OFFER.findall(command)]
    said = [f"`{text}` in a command isn't JSON" for text in offers if _json(text) is None]
    offered = {name for text in offers for name in _json(text) or {}}
    if declared != offered:
        said.append(
            f"`metadata.resources` says that machines offer {_names(declared)}; by `setup_commands`"
            f" and `worker_start_ray_commands` they offer {_names(offered)}"
        )
    elif declared and not any("--resources" in command for command in start):
        said.append("`worker_start_ray_commands` must have --resources: nothing is offered else")
    if said:
        return said
    if any("hostname -I" in command for command in setup):
        said += [
            f"`provider.worker_ips`: {name} must be an address: the marks compare addresses"
            for name in workers
            if not _is_address(name)
        ]
    return said + _check_arms(workers, kinds, resources, " ".join(setup))


def _check_arms(
    workers: Sequence[str],
    kinds: Sequence[NodeType],
    resources: Mapping[str, Mapping[str, int]],
    setup: str,
) -> list[str]:
    """Who offers what, where the commands decide by address as in the shipped file."""
    arms = [(_QUOTED.findall(where), _json(offer)) for where, offer in _ARM.findall(setup)]
    if not arms:
        return []
    strangers = sorted({one for where, _ in arms for one in where} - set(workers))
    if strangers:
        return [
            f"the marks in `setup_commands` name {', '.join(strangers)}, not among "
            f"`provider.worker_ips: {', '.join(workers)}`"
        ]
    offers = [
        next((offer for where, offer in arms if not where or worker in where), None)
        for worker in workers
    ]
    said: list[str] = []
    for kind in kinds:
        wanted = dict(resources.get(kind.name, {}))
        if wanted and (count := offers.count(wanted)) != kind.most:
            said.append(
                f"by the marks in `setup_commands` {count} of `provider.worker_ips` offer "
                f"{_names(set(wanted))}, by `metadata.machines.{kind.name}` {kind.most}"
            )
    return said


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _json(text: str) -> dict[str, Any] | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_public(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_global
