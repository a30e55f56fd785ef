"""The policy as the learner sees it: loading, and a packed forward to token log-probs.

Shape suffixes: S samples, T packed tokens, R response tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dapo_async.errors import ConfigError
from learner.attention import Attention, packed_attention, select_rows
from learner.logprobs import Temperature, token_logprobs
from learner.packed import PackedBatch
from learner.sequence_parallel import SequenceParallel


class Policy(nn.Module):
    """A causal language model whose forward is packed log-probs of response tokens.

    `sequence_parallel`, set when the ranks have met, splits every forward over its group.
    """

    def __init__(self, model: nn.Module, *, chunk: int = 512) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.sequence_parallel: SequenceParallel | None = None

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def forward(
        self,
        batch: PackedBatch,
        temperature: Temperature,
        entropy: bool = False,
        alone: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [R] of the response tokens in packed order, and their entropies [R] (empty
        unless asked for, no gradient). With `alone` this rank computes everything itself."""
        if alone or self.sequence_parallel is None:
            hidden_TC = self._hidden(batch, batch.ids_T, batch.positions_T, None)
            picked_RC = select_rows(hidden_TC, batch.predictors_R)
            return self._logprobs(picked_RC, batch.targets_R, temperature, entropy)
        parallel = self.sequence_parallel
        part = parallel.slice_of(batch)
        hidden_LC = self._hidden(batch, part.ids_L, part.positions_L, parallel)
        mine, mine_entropy = self._logprobs(
            select_rows(hidden_LC, part.predictors),
            batch.targets_R[part.responses],
            temperature[part.responses] if isinstance(temperature, Tensor) else temperature,
            entropy,
        )
        logprobs_R = parallel.gather(mine, part.counts_N)
        return logprobs_R, parallel.gather(mine_entropy, part.counts_N) if entropy else mine_entropy

    def _hidden(
        self, batch: PackedBatch, ids: Tensor, positions: Tensor, parallel: SequenceParallel | None
    ) -> Tensor:
        output = cast(Any, self.model).base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            layout=batch.layout,
            sequence_parallel=parallel,
        )
        return output.last_hidden_state[0]

    def _logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: Temperature, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden,
            cast(Any, self.model).get_output_embeddings().weight,
            targets,
            temperature=temperature,
            chunk=self.chunk,
            entropy=entropy,
        )


def load_policy(
    path: str | Path,
    attention: Attention = "sdpa",
    dtype: torch.dtype = torch.float32,
    *,
    chunk: int = 512,
    checkpointing: bool = False,
) -> Policy:
    """Load a local Hugging Face causal language model for packed training, dropout forced to 0.

    Args:
        chunk: tokens whose logits exist at once.
        checkpointing: keep only the input of each layer and compute the rest again in the backward.

    Raises:
        ConfigError: no readable model in `path`, or one whose forward the packed path doesn't
            cover (logit softcapping or scaling, a head with a bias, sliding windows).
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`model.path: {path}` is not a folder with a config.json")
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _refuse_unsupported(config, folder)
    # With dropout, scoring the same tokens twice would give two answers and the ratio would not
    # start at 1.
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, int | float):
            setattr(config, name, type(value)(0))
    # Transformers looks for a kernel of its own where it reads "flash".
    name = f"dapo_packed_{attention}".replace("flash_attention_2", "varlen")
    # No mask function is registered under the name: transformers then makes no mask.
    AttentionInterface.register(name, packed_attention(attention))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=name,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model.path: {path}` can't be loaded: {error}") from error
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"`model.path: {path}`: an output head with a bias is not supported")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model, chunk=chunk)


def _refuse_unsupported(config: Any, folder: Path) -> None:
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None):
            raise ConfigError(f"`model.path: {folder}`: `{name}` is not supported")
    for name in ("logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"`model.path: {folder}`: `{name}` is not supported")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None)
    ):
        raise ConfigError(
            f"`model.path: {folder}`: only full attention is supported, not sliding windows"
        )
