# pyright: basic
"""TRL's GRPOTrainer step as a child process of `learner.py --trl`, in an environment of its own.

    python -P learner_trl.py MODEL    rounds as JSON lines on stdin, results as such on stdout

A round holds samples (prompt and response ids, advantages), how many of them a micro-batch has, and
whether every micro-batch is cut to its longest prompt and response. A result holds CPU seconds of
forward, backward and update, loss, gradient norm and trained tokens.

Everything after generation and rewards is TRL's own code: padding to the longest prompt and
response of the step, shuffling, splitting, loss, metrics; and so are the backward, clipping and
optimizer of accelerate and transformers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.utils import pad  # pyright: ignore[reportMissingImports]

GROUP_SIZE = 8  # only read when groups are scored


class Step(GRPOTrainer):
    """A trainer whose generated and scored completions are those of the round."""

    work: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        prompts = [torch.tensor(ids) for ids in self.work["prompts"]]
        completions = [torch.tensor(ids) for ids in self.work["responses"]]
        padded: dict[str, torch.Tensor] = {}
        for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
            padded[f"{name}_ids"] = pad(rows, padding_value=0, padding_side=side)
            ones = [torch.ones_like(row) for row in rows]
            padded[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side)
        return {
            **padded,
            "advantages": torch.tensor(self.work["advantages"]),
            "num_items_in_batch": padded["completion_mask"].sum(),
        }

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.work["cut"]:
            return inputs
        cut = dict(inputs)  # what TRL does not do: without the rows' common padding
        prompt = int(inputs["prompt_mask"].sum(1).max())
        completion = int(inputs["completion_mask"].sum(1).max())
        for kind in ("ids", "mask"):
            cut[f"prompt_{kind}"] = inputs[f"prompt_{kind}"][:, -prompt:]
            cut[f"completion_{kind}"] = inputs[f"completion_{kind}"][:, :completion]
        return cut

    def round(self, work: dict[str, Any]) -> dict[str, Any]:
        """One optimizer update on the samples of `work`."""
        self.work = work
        count = len(work["prompts"]) // work["micro"]
        assert count * work["micro"] == len(work["prompts"])
        self.args.gradient_accumulation_steps = self.args.steps_per_generation = count
        self.current_gradient_accumulation_steps = count
        self._step, self._buffered_inputs = 0, None
        started = time.process_time()
        loss = 0.0
        for _ in range(count):
            loss += float(self.training_step(self.model_wrapped, [], None))
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.model.zero_grad()
        cpu_s = time.process_time() - started
        trained = sum(len(ids) for ids in work["responses"])
        return {"cpu_s": cpu_s, "loss": loss, "grad_norm": float(norm), "trained": trained}


def make_trainer(folder: Path, scratch: str) -> Step:
    vocabulary = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = GRPOConfig(
        output_dir=scratch,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        num_iterations=1,
        mask_truncated_completions=False,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=GROUP_SIZE,
        max_completion_length=1024,
        learning_rate=1e-8,
        weight_decay=0.1,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )

    def no_reward(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = Step(
        model=Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=no_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "unused"}]),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(
        trainer.model, trainer.optimizer
    )
    return trainer


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print must not be taken for a reply
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(Path(sys.argv[1]), scratch)
        for line in sys.stdin:
            replies.write(json.dumps(trainer.round(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
