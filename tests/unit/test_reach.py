"""What is told of nodes that don't reach each other, or differ."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from actors.reach import Probe, differences, network


def test_a_probe_tells_who_does_not_answer() -> None:
    here, there = Probe("127.0.0.1"), Probe("127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but nobody listens
        closed = int(free.getsockname()[1])
        failed = here.reach([("127.0.0.1", there.port()), ("127.0.0.1", closed)])
    assert len(failed) == 1 and "refused" in failed[0]


def test_blocked_ways_between_nodes_are_counted_and_named() -> None:
    assert network(["10.0.0.1", "10.0.0.2"], [[], []]).level == "ok"
    found = network(["10.0.0.1", "10.0.0.2"], [["10.0.0.2: timed out"], []])
    assert found.level == "fail"
    assert "1 ways are blocked: 10.0.0.1 → 10.0.0.2: timed out" in found.found


def test_nodes_with_other_versions_or_another_tokenizer_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    fact = Probe("127.0.0.1").facts({"name": "probed"}, None, str(tmp_path))
    other: dict[str, Any] = {**fact, "versions": {**fact["versions"], "ray": "2.50.0"}}
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    changed = Probe("127.0.0.1").facts({"name": "probed"}, None, str(tmp_path))
    assert differences(["a", "b"], [fact, fact]) == []
    (version,) = differences(["a", "b"], [fact, other])
    assert "2.50.0 on b" in version.found
    (model,) = differences(["a", "b"], [fact, changed])
    assert model.check == "model" and "between a and b" in model.found
