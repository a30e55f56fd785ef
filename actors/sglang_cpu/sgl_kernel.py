"""A stand-in for SGLang's compiled kernels, so that SGLang runs on a machine without a GPU.

On a CPU (`SGLANG_USE_CPU_ENGINE=1`) SGLang 0.5.23 imports eight names from `sgl_kernel`, of which
there is no build for CPUs on PyPI, and with `attention_backend: torch_native` it calls none of
them. `actors.sglang_process` puts this folder on the path of the servers that it starts on a CPU,
where the real package is not installed; no other process ever sees it.
"""

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

_HERE = Path(__file__).resolve().parent

if PathFinder.find_spec("sgl_kernel", [p for p in sys.path if Path(p).resolve() != _HERE]):
    raise ImportError(f"the real sgl_kernel is installed: take {_HERE} off the path")


def _missing(name: str) -> Callable[..., NoReturn]:
    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a compiled kernel of SGLang, and on this machine there is only "
            "a stand-in for it: serve with attention_backend torch_native, sampling_backend "
            "pytorch and without speculative decoding, or on a GPU"
        )

    kernel.__name__ = name
    return kernel


assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _missing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
