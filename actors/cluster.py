"""Ray for one run: started privately on this machine, checked against what the run asks for."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil

from dapo_async.config import Config
from dapo_async.errors import ConfigError
from dapo_async.owned_folders import make_owned

OBJECT_STORE_BYTES = 256 * 2**20

CHILD_ENV = {
    # One thread per process: OpenMP pools on shared cores spin and slow everything down.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_BUILD_OPS": "0",
}


def check_demand(config: Config, cpus: float) -> None:
    """Refuse a run that asks for more CPUs than there are: Ray would wait for ever.

    Raises:
        ConfigError: names what is asked and what there is.
    """
    rollout, learner = config.rollout, config.learner
    asked = rollout.workers * rollout.cpus_per_worker + learner.ranks * learner.cpus_per_rank
    if asked > cpus:
        raise ConfigError(
            f"the run asks for {asked:g} CPUs: `rollout.workers: {rollout.workers}` × "
            f"`rollout.cpus_per_worker: {rollout.cpus_per_worker:g}` + `learner.ranks: "
            f"{learner.ranks}` × `learner.cpus_per_rank: {learner.cpus_per_rank:g}`; "
            f"there are {cpus:g}. Lower one of them"
        )


class LocalRay:
    """A Ray instance of our own, on loopback, with a token of its own; ended by `close`.

    It replaces the process's SIGTERM handler. Files of instances whose driver was killed are
    removed on the way.

    Args:
        cpus: how many it may hand out.
    """

    def __init__(self, cpus: float) -> None:
        # Unix socket paths are limited to 107 bytes, so Ray's files can't live in the run folder.
        self._temp, self._lock = make_owned("dapo-ray-run-", tempfile.gettempdir())
        self._ray: Any = None
        try:
            self._start(cpus)
        except BaseException:
            self.close()
            raise

    def _start(self, cpus: float) -> None:
        token = self._temp / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
            RAY_USAGE_STATS_ENABLED="0",
            # Every process here is an actor: no idle workers for tasks that never come.
            RAY_prestart_worker_first_driver="0",
            RAY_enable_worker_prestart="0",
            # Nobody looks at a private cluster's task events and metrics.
            RAY_task_events_report_interval_ms="0",
            RAY_event_stats="0",
            RAY_enable_timeline="0",
            RAY_enable_metrics_collection="0",
        )
        import ray  # reads the environment above when it is imported

        self._ray = ray
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        ray.init(
            address="local",
            num_cpus=int(cpus),  # what `check_demand` was told: Ray may count fewer
            _temp_dir=str(self._temp),
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            runtime_env={"env_vars": CHILD_ENV | {"PYTHONPATH": path}},
        )

    def actor_options(self, cpus: float) -> dict[str, Any]:
        return {"num_cpus": cpus}

    def other_cpu_s(self, known_pids: set[int]) -> float:
        """CPU seconds of Ray's own processes: our descendants without the named ones."""
        total = 0.0
        for process in psutil.Process().children(recursive=True):
            try:
                if process.pid not in known_pids:
                    times = process.cpu_times()
                    total += times.user + times.system
            except psutil.Error:
                continue  # it ended meanwhile
        return total

    def close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()
        shutil.rmtree(self._temp, ignore_errors=True)
        os.close(self._lock)
