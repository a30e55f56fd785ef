"""What a config means as SGLang arguments, and the environment its servers get."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.sglang_process import CPU_STUB, check_arguments, server_arguments, server_environment
from dapo_async.config import OWNED_ENGINE_ARGS, Config, validate
from dapo_async.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "r", "seed": 7},
        "model": {"path": "some/model"},
        "data": {"train": "t.jsonl", "max_prompt_tokens": 100},
        "rollout": {"engine": "sglang", "device": "cpu", "max_response_length": 50, "slots": 32},
        "reward": {"function": "math"},
        "overlong": {"mode": "off"},
        "trainer": {"steps": 1},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return validate(tree)


CUDA = {"device": "cuda"}
NEVER = object()
"""Stands for an argument that isn't given at all."""


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"model_path": "some/model", "device": "cpu", "dtype": "float32", "tp_size": 1}),
        ({}, {"host": "127.0.0.1", "trust_remote_code": False, "weight_version": "0"}),
        ({}, {"max_running_requests": 32, "random_seed": 7, "incremental_streaming_output": True}),
        # 8 more than what can be needed: SGLang keeps some of it for itself.
        ({}, {"context_length": 158, "max_total_tokens": 32 * 158}),
        ({"rollout": {"context_length": 400}}, {"context_length": 408}),
        (
            {"rollout": {"max_response_length": [{"from_step": 0, "value": 20},
                                                 {"from_step": 5, "value": 60}]}},
            {"context_length": 168},
        ),
        ({}, {"attention_backend": "torch_native", "sampling_backend": "pytorch",
              "grammar_backend": "none", "disable_cuda_graph": True, "sleep_on_idle": True}),
        ({"rollout": CUDA}, {"device": "cuda", "attention_backend": NEVER}),
        ({"rollout": CUDA}, {"max_total_tokens": NEVER, "mem_fraction_static": NEVER}),
        ({"rollout": {**CUDA, "memory_fraction": 0.8}}, {"mem_fraction_static": 0.8}),
        ({"rollout": {**CUDA, "tensor_parallel_size": 4}}, {"tp_size": 4}),
        ({"learner": {"precision": "bf16"}}, {"dtype": "bfloat16"}),
        # Only stop strings need the server's own tokenizer.
        ({}, {"skip_tokenizer_init": True}),
        ({"rollout": {"stop_strings": ["</a>"]}}, {"skip_tokenizer_init": False}),
        ({"rollout": {"engine_args": {"max_total_tokens": 999, "page_size": 4}}},
         {"max_total_tokens": 999, "page_size": 4}),
        ({"rollout": {"engine_args": {"attention_backend": "triton"}}},
         {"attention_backend": "triton", "sampling_backend": "pytorch"}),
    ],
)  # fmt: skip
def test_a_config_means_these_arguments(sections: dict[str, Any], expected: dict[str, Any]) -> None:
    args = server_arguments(config(**sections))
    assert {name: args.get(name, NEVER) for name in expected} == expected


def test_the_arguments_hold_no_token_and_no_port() -> None:
    assert not {"api_key", "admin_api_key", "port", "nccl_port"} & set(server_arguments(config()))


@pytest.mark.parametrize("name", sorted(OWNED_ENGINE_ARGS))
def test_engine_args_may_not_set_what_follows_from_another_key(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(rollout={"engine_args": {name: 1}})
    message = str(refused.value)
    assert f"`engine_args` must not set `{name}`" in message
    assert OWNED_ENGINE_ARGS[name] in message


def test_a_refused_engine_arg_says_which_key_to_set_instead() -> None:
    with pytest.raises(ConfigError, match=r"`tp_size`: it follows from `rollout\.tensor_par"):
        config(rollout={"engine_args": {"tp_size": 2}})


def test_the_arguments_we_set_are_ours_or_may_be_replaced_knowingly() -> None:
    # Whoever adds an argument decides whether `engine_args` may replace it.
    replaceable = {
        "attention_backend", "sampling_backend", "grammar_backend", "disable_cuda_graph",
        "sleep_on_idle", "max_total_tokens", "skip_server_warmup", "log_level",
    }  # fmt: skip
    found = set(server_arguments(config(rollout={**CUDA, "memory_fraction": 0.5})))
    found |= set(server_arguments(config()))
    assert found - set(OWNED_ENGINE_ARGS) == replaceable


# ---- environment -------------------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that stands for SGLang's real kernels."""
    package = tmp_path / "site" / "sgl_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    importlib.invalidate_caches()
    return package.parent


def _paths(env: dict[str, str]) -> list[str]:
    return env["PYTHONPATH"].split(os.pathsep)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sgl_kernel" else real(name)
    )


@pytest.mark.usefixtures("no_kernels")
def test_the_stand_in_is_on_the_path_of_a_cpu_server_where_the_kernels_are_absent() -> None:
    env = server_environment(on_cpu=True)
    assert _paths(env)[0] == str(CPU_STUB)
    code = "import sgl_kernel; print(sgl_kernel.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(CPU_STUB)


@pytest.mark.usefixtures("kernels")
def test_the_stand_in_is_never_beside_the_real_kernels() -> None:
    assert str(CPU_STUB) not in _paths(server_environment(on_cpu=True))


@pytest.mark.usefixtures("no_kernels")
def test_a_gpu_server_never_gets_the_stand_in() -> None:
    env = server_environment(on_cpu=False)
    assert str(CPU_STUB) not in _paths(env)
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_a_cpu_server_sees_no_gpu_and_uses_one_thread() -> None:
    env = server_environment(on_cpu=True)
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == "1"


def test_the_path_we_have_is_kept_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/one:/two")
    paths = _paths(server_environment(on_cpu=False))
    assert paths == [str(ROOT), "/one", "/two"]


def test_the_processes_of_a_server_meet_in_its_folder_and_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    env = server_environment(True, tmp_path)
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{tmp_path}/rendezvous"
    assert env["TMPDIR"] == str(tmp_path)


# ---- checking ----------------------------------------------------------------------------------


def test_without_the_package_the_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package sglang is not installed"):
        check_arguments(config())
