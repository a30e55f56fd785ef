"""SGLang as an engine kind of the contract suite: one real server per model structure and run.

Every engine of the suite takes the server over as an external one: it starts by loading the
suite's model as version 0, which also empties the cache.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from actors.engines import check_version
from actors.sglang_engine import SGLangEngine
from actors.sglang_http import ServerClient
from actors.sglang_process import CONTEXT_MARGIN, CPU_ARGS, ServerDied, ServerProcess
from actors.weight_loading import expected_of
from dapo_async.types import WeightVersion
from dapo_async.weights import WeightStore

START_S = 300.0
SLOTS = 16


class Servers:
    """Real servers, started when they are first asked for and again when they have died."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, ServerProcess] = {}
        self._saved: dict[int, Path] = {}

    def saved(self, model: PreTrainedModel) -> Path:
        """The model as a folder."""
        if id(model) not in self._saved:
            path = self._folder / f"model{len(self._saved)}"
            model.save_pretrained(path)
            self._saved[id(model)] = path
        return self._saved[id(model)]

    async def of(self, model: PreTrainedModel) -> ServerProcess:
        """A server that can hold this model's weights. Not for a helper thread: the server dies
        with the thread that starts it."""
        path = self.saved(model)  # first: saving adds to the config
        structure = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
        server = self._running.get(structure)
        if server is not None:
            try:
                server.check()
            except ServerDied:
                await server.close()
            else:
                return server
        context = model.config.max_position_embeddings + CONTEXT_MARGIN
        args = CPU_ARGS | {
            "model_path": str(path),
            "device": "cpu",
            "dtype": "float32",
            "tp_size": 1,
            "context_length": context,
            "max_running_requests": SLOTS,
            "max_total_tokens": 4 * context,
            "host": "127.0.0.1",
            "weight_version": "0",
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "incremental_streaming_output": True,
            "log_level": "warning",
        }
        server = ServerProcess(args)
        await server.start(START_S)
        await server.client.close()  # its connections belong to this loop
        self._running[structure] = server
        return server

    def close(self) -> None:
        for server in self._running.values():
            asyncio.run(server.close())


class SGLangKind:
    """A real SGLang server over HTTP."""

    repeatable = False

    def __init__(self, folder: Path, servers: Servers) -> None:
        self._store = WeightStore.create(folder)
        self._servers = servers

    @asynccontextmanager
    async def engine(
        self, model: PreTrainedModel, slots: int = SLOTS, **options: Any
    ) -> AsyncIterator[SGLangEngine]:
        server = await self._servers.of(model)
        await asyncio.to_thread(_set_slots, server, slots)
        expected = expected_of(model)
        engine = SGLangEngine(
            ServerClient(server.client.url, server.token),
            model_path=str(self._servers.saved(model)),
            vocabulary=model.config.vocab_size,
            **{
                "max_context": model.config.max_position_embeddings,
                "check": lambda manifest: check_version(manifest, expected),
                **options,
            },
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    def publish(self, state: Mapping[str, Tensor], version: int) -> WeightVersion:
        return publish(self._store, state, version)

    def damaged(self, model: PreTrainedModel) -> dict[str, Any]:
        """Options of an engine whose updates pass every check and fail on their last tensor."""
        expected = expected_of(model)

        def check(manifest: WeightVersion) -> None:
            check_version(manifest, expected)
            path = Path(manifest.location) / "model.safetensors"
            tensors = load_file(path)
            tensors["model.norm.weight"] = torch.ones(7)
            path.chmod(0o600)
            save_file(tensors, path)

        return {"check": check}

    def close(self) -> None:
        self._store.close()


def publish(store: WeightStore, state: Mapping[str, Tensor], version: int) -> WeightVersion:
    """Write a version as the learner does and return its manifest."""
    shapes = [
        (name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in state.items()
    ]
    writer = store.begin(version, shapes)
    for name, value in state.items():
        writer.copy(name, value)
    return writer.commit()


def _set_slots(server: ServerProcess, slots: int) -> None:
    """Sequences decoded at once: SGLang can lower it while it runs."""
    request = urllib.request.Request(
        f"{server.client.url}/set_internal_state",
        data=json.dumps({"server_args": {"pp_max_micro_batch_size": slots}}).encode(),
        headers={
            "Authorization": f"Bearer {server.token}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        ranks = json.load(answer)
    assert all(ranks), f"SGLang didn't take the number of slots: {ranks}"
