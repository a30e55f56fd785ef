"""`dapo-async doctor`: gathers the facts that `preflight` judges, and puts the checks in order.

Like `app` it knows both sides: what actors reserve, which ports engines take, how ranks meet.
`train` does the cheap checks by itself (`check_quickly`), by the same functions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from dapo_async import config as configs
from dapo_async.config import Config
from dapo_async.errors import ConfigError, last_line
from dapo_async.preflight import fit
from dapo_async.preflight.cluster import Cluster, NodeKind, read_cluster, this_machine
from dapo_async.preflight.findings import Finding, require
from dapo_async.preflight.model import ModelShape, published_shape, read_shape
from dapo_async.preflight.pace import check_pace
from dapo_async.preflight.placement import check_placement, seat
from dapo_async.preflight.reading import check_inputs
from dapo_async.preflight.versions import check_versions, installed
from dapo_async.rewards.child import die_with_parent

GLOO_S = 30.0
"""Longest meeting of two processes on this machine."""
PORTS_PER_ENGINE = 3
CONNECT_S = 3.0


def doctor(path: Path, overrides: Sequence[str] = (), shape: str | None = None) -> list[Finding]:
    """All checks of a config; what can't be judged after a failure is left out.

    Args:
        shape: machines that aren't here (see `preflight.cluster`): then nothing is asked of this
            one, and a model that isn't here is taken for the published one of its name.
    """
    try:
        cluster = None if shape is None else read_cluster(shape)
        config = configs.load(path, overrides)
    except ConfigError as error:
        return [Finding.from_error("config", error)]
    if cluster is not None:
        return judge(config, cluster, here=False)
    with _meeting(config) as meeting:
        findings: list[Finding] = []
        if config.ray.address == "local":
            findings += judge(config, _only_this(config), here=True)
        else:
            findings += _joined(config)
        findings += check_inputs(config)
        findings += _ports(config) + _servers(config) + meeting()
    return findings


def check_quickly(config: Config) -> None:
    """What costs next to nothing, before a run reads or starts anything.

    Raises:
        ConfigError: a check fails; says what `doctor` would.
    """
    here = config.ray.address == "local"
    cluster = _only_this(config) if here else None
    require(judge(config, cluster, here=True))


def judge(config: Config, cluster: Cluster | None, here: bool) -> list[Finding]:
    """The checks that only compute.

    Args:
        cluster: None where it isn't known: placement and what fits are left out.
        here: packages of this machine are those of the run, and its model is on this machine.
    """
    from actors.placement import marked_bundles

    # Machines of a cluster may have what this one lacks.
    local = here and config.ray.address == "local"
    findings = check_versions(config, installed(), local)
    model, said = _model(config, here)
    findings += said + check_pace(config)
    if model is not None:
        findings += fit.check_heads(config, model)
    if cluster is None:
        return findings
    ranks, workers = marked_bundles(config)
    # A cluster that runs may grow.
    findings.append(check_placement(config, ranks, workers, cluster, grows=here))
    if model is None:
        return findings
    seats = seat(config, ranks, workers, cluster)
    if not seats:  # memory is judged all the same: both may be wrong
        homes = cluster.offering(config.ray.learner_resource)
        serving = cluster.offering(config.ray.rollout_resource)
        return [
            *findings,
            *fit.check_learner(config, model, _smallest_gpu(homes)),
            *fit.check_engine(config, model, _smallest_gpu(serving)),
        ]
    best = seats[0]
    # Of equal rights to Ray: it may take any of them.
    homes = [node for one in seats for node in (one.home, *one.learners)]
    serving = [node for one in seats for node in one.serving]
    findings += fit.check_learner(config, model, _smallest_gpu(homes))
    findings += fit.check_engine(config, model, _smallest_gpu(serving))
    findings += fit.check_host(config, model, best)
    findings += [fit.check_shared_memory(config, model, best)]
    findings += [fit.check_disk(config, model, best.home)]
    return findings


def _model(config: Config, here: bool) -> tuple[ModelShape | None, list[Finding]]:
    """Its shape; a folder that is missing here is for `check_inputs` to tell."""
    try:
        found = read_shape(config.model.path)
    except ConfigError as error:
        rule = "memory and heads are judged by shapes of the Llama kind only"
        return None, [Finding("warn", "model", str(error), rule)]
    if found is not None or here:
        return found, []
    found = published_shape(config.model.path)
    said = f"`model.path: {config.model.path}` isn't here"
    if found is None:
        rule = "memory and heads can't be judged without its config.json"
        return None, [Finding("warn", "model", said, rule, "copy its config.json here")]
    return found, [Finding("ok", "model", f"{said}; judged by {found.source}")]


def _smallest_gpu(nodes: Sequence[NodeKind]) -> NodeKind | None:
    """The one with the smallest GPUs, of those whose size is known."""
    known = [node for node in nodes if node.gpus and node.gpu_memory_gb]
    return min(known, key=lambda node: node.gpu_memory_gb or 0.0, default=None)


def _only_this(config: Config) -> Cluster:
    return Cluster(nodes=[this_machine(config.run, config.weights.dir)])


# ---- what this machine and the network must have -------------------------------------------------


def _joined(config: Config) -> list[Finding]:
    """Join the cluster for as long as it takes to look at it."""
    from actors.cluster import JoinedRay

    try:
        ray = JoinedRay(config.ray.address)
    except ConfigError as error:
        change = "`ray start --head`, or `--cluster SHAPE` to judge machines that aren't here"
        return [*judge(config, None, here=True), Finding.from_error("cluster", error, change)]
    try:
        from actors.reach import survey

        cluster, findings = survey(config)
    finally:
        ray.close()
    return judge(config, cluster, here=True) + findings


def _ports(config: Config) -> list[Finding]:
    """Every SGLang server of ours on this machine takes three."""
    rollout = config.rollout
    if rollout.engine != "sglang" or rollout.engine_urls is not None:
        return []
    from actors import ports

    count = PORTS_PER_ENGINE * (rollout.workers if config.ray.address == "local" else 1)
    rule = f"each engine takes {PORTS_PER_ENGINE} ports of 127.0.0.1 from {ports.LOW} up"
    try:
        ports.Ports(count).close()
    except OSError as error:
        change = f"end what listens between {ports.LOW} and {ports.HIGH}"
        return [Finding("fail", "ports", str(error), rule, change)]
    return [Finding("ok", "ports", f"{count} free ports found")]


def _servers(config: Config) -> list[Finding]:
    """SGLang servers that run already must listen."""
    found: list[Finding] = []
    for url in config.rollout.engine_urls or ():
        place = urlsplit(url)
        port = place.port or (443 if place.scheme == "https" else 80)
        try:
            socket.create_connection((place.hostname or "", port), CONNECT_S).close()
        except OSError as error:
            said = f"`rollout.engine_urls`: {url}: {error}"
            found.append(Finding("fail", "engines", said, "every server must run already"))
    urls = config.rollout.engine_urls
    return found or ([Finding("ok", "engines", f"{len(urls)} servers listen")] if urls else [])


@contextlib.contextmanager
def _meeting(config: Config) -> Generator[Callable[[], list[Finding]]]:
    """Two processes that meet through gloo, beside the other checks: they take seconds to start.
    Yields what waits for them."""
    if config.learner.ranks == 1:
        yield lambda: list[Finding]()
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "learner.reach"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent.parent,
        preexec_fn=die_with_parent,
    )

    def wait() -> list[Finding]:
        change = "look at the firewall of the loopback interface and at GLOO_SOCKET_IFNAME"
        rule = f"{config.learner.ranks} learner ranks on one machine meet so"
        try:
            said = process.communicate(timeout=GLOO_S)[1]
        except subprocess.TimeoutExpired:
            why = f"nothing after {GLOO_S:g} s"
            return [Finding("fail", "gloo", why, rule, change)]
        if process.returncode:
            return [Finding("fail", "gloo", last_line(said), rule, change)]
        return [Finding("ok", "gloo", "two processes of this machine meet and sum")]

    try:
        yield wait
    finally:
        process.kill()
        process.wait()
