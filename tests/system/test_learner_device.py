"""The learner computes where `learner.device` says, whatever else torch sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.system

START = """
import sys, torch
torch.cuda.is_available = lambda: True
from dapo_async import config
from learner.trainer import Trainer
override = [f"model.path={sys.argv[1]}", "learner.device=cpu"]
trainer = Trainer(config.load("configs/quickstart.yaml", override))
print("started on", trainer.device, torch.distributed.get_backend())
trainer.close()
"""


def test_a_learner_on_the_cpu_stays_there_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    tiny = Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    Qwen2ForCausalLM(tiny).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "started on cpu gloo" in done.stdout, done.stderr
