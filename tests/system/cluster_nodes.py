"""A cluster of several Ray nodes on this machine, as a process of its own: commands come in on
stdin, one JSON answer a line goes out. It ends, nodes and all, when stdin does.

    add <cpus> [mark]   start a node, with a custom resource that marks it; answers its id
    remove <node id>    kill a node's raylet, without a warning
    actors              every living actor: class, node, pid
    nodes               ids of the living nodes

Ray reads its token's place when it is imported, so this can't happen inside of pytest.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

HEAD_CPUS = 2
HEAD_MARK = "learner_node"
STORE_BYTES = 80 * 2**20
QUICK_LOSS = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""So that a dead node is noticed within seconds."""


def main(folder: Path) -> None:
    # Ray tells of nodes on stdout, also in the middle of a line of ours.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers)

    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_enable_metrics_collection="0",
        RAY_prestart_worker_first_driver="0",
        RAY_enable_worker_prestart="0",
    )
    import ray
    from ray._private import state
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args=common
        | {
            "num_cpus": HEAD_CPUS,
            "resources": {HEAD_MARK: 1},
            "_system_config": QUICK_LOSS,
            "temp_dir": str(folder),
        },
    )
    nodes: dict[str, Any] = {}
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray's own waits for minutes
    try:
        say({"address": cluster.address, "token": str(token), "head": cluster.head_node.node_id})
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "add":
                marks = dict.fromkeys(arguments[1:], 1)
                node = cluster.add_node(num_cpus=int(arguments[0]), resources=marks, **common)
                nodes[node.node_id] = node
                say(node.node_id)
            elif command == "remove":
                cluster.remove_node(nodes.pop(arguments[0]), allow_graceful=False)
                say(sorted(nodes))
            elif command == "actors":
                say(
                    [
                        {
                            "class": actor["ActorClassName"],
                            "node": actor["Address"]["NodeID"],
                            "pid": actor["Pid"],
                        }
                        for actor in state.actors().values()
                        if actor["State"] == "ALIVE"
                    ]
                )
            elif command == "nodes":
                say([node["NodeID"] for node in ray.nodes() if node["Alive"]])
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
