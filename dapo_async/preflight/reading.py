"""Model folder, tokenizer, chat template, data and reward: read as a run would, a few rows of it.

Tokenizers and reward functions are other people's code. They run in child processes with a
deadline, and what comes back is JSON. `python -m dapo_async.preflight.reading read|reward` is such
a child: a config on standard input, findings on what was standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from dapo_async import config as configs
from dapo_async.chat import Renderer, RenderError, Tokenizer
from dapo_async.codec import decode, encode
from dapo_async.config import Config
from dapo_async.errors import ConfigError, last_line
from dapo_async.inputs import check_quickly, hide_torch, load_tokenizer, stop_ids
from dapo_async.preflight.findings import Finding, fails
from dapo_async.prompts import load_prompts
from dapo_async.rewards.child import die_with_parent
from dapo_async.rewards.pool import RewardPool
from dapo_async.types import Prompt

ROWS = 32
"""Rows of a data file that are looked at."""
READ_S = 60.0
"""Longest reading; a tokenizer of 150 k tokens takes some seconds."""
REWARD_S = 30.0
"""Longest start and judgement of the reward function, beside `reward.timeout_s`."""


def check_inputs(config: Config) -> list[Finding]:
    """Read a few rows in one child, and judge the first of them in another."""
    answer = _ask("read", config, None, READ_S)
    findings = _findings(answer)
    frame = answer.get("prompt")
    if frame is None:
        return findings
    answer = _ask("reward", config, frame, REWARD_S + config.reward.timeout_s)
    return findings + _findings(answer)


def _findings(answer: dict[str, Any]) -> list[Finding]:
    return [Finding(**fields) for fields in answer["findings"]]


def _ask(kind: str, config: Config, prompt: str | None, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, kind]
    request = {"config": config.model_dump(mode="json", exclude_unset=True), "prompt": prompt}
    check = "inputs" if kind == "read" else "reward"
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired:
        found = Finding("fail", check, f"nothing after {timeout_s:g} s")
        return {"findings": [asdict(found)]}
    if done.returncode:
        words = last_line(done.stderr.decode("utf-8", "replace"))
        found = Finding(
            "fail", check, f"its process ended with exit code {done.returncode}: {words}"
        )
        return {"findings": [asdict(found)]}
    return cast(dict[str, Any], json.loads(done.stdout))


# ---- in the child ------------------------------------------------------------------------------


def read(config: Config) -> tuple[list[Finding], Prompt | None]:
    """Everything but the reward; stops where the next check needs what has failed."""
    try:
        model = check_quickly(config)
    except ConfigError as error:
        return [Finding.from_error("model and data", error)], None
    findings = [_weights(config)]
    try:
        tokenizer = load_tokenizer(config.model.path)
    except Exception as error:  # noqa: BLE001
        # transformers raises whatever a broken file happens to lead to.
        said = f"`model.path: {config.model.path}`: {type(error).__name__}: {error}"
        return [*findings, Finding("fail", "tokenizer", said, "it must load without a hub")], None
    findings += check_tokenizer(config, model, tokenizer)
    if config.data.chat_template:
        findings.append(check_template(tokenizer))
    if fails(findings):
        return findings, None
    prompt: Prompt | None = None
    for name in ("train", "eval"):
        path = getattr(config.data, name)
        if path is None:
            continue
        try:
            loaded = load_prompts(path, config.data, tokenizer, limit=ROWS)
        except ConfigError as error:
            findings.append(Finding.from_error("data", error, _data_change(config)))
            continue
        prompt = prompt or loaded.prompts[0]
        said = (
            f"{path}: the first {loaded.read} rows can be used, {len(loaded.dropped)} of them are "
            f"too long, the longest prompt has {loaded.longest} tokens"
        )
        findings.append(Finding("ok", "data", said))
    return findings, None if fails(findings) else prompt


def _data_change(config: Config) -> str:
    return (
        f"`data.prompt_key: {config.data.prompt_key}` and `data.answer_key: "
        f"{config.data.answer_key}` name the columns"
    )


def _weights(config: Config) -> Finding:
    folder = Path(config.model.path)
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    named: set[str] = set()
    if index.is_file():
        try:
            tree: Any = json.loads(index.read_text(encoding="utf-8"))
            named = {str(name) for name in tree["weight_map"].values()}
        except (ValueError, KeyError, AttributeError) as error:
            return Finding("fail", "model", f"{index} can't be read: {error!r}")
    missing = sorted(named - {path.name for path in files})
    if not files or missing:
        what = f"lacks {', '.join(missing[:3])}" if missing else "holds no *.safetensors"
        return Finding(
            "fail",
            "model",
            f"`model.path: {folder}` {what}",
            "weights are read from safetensors files",
            "copy the model's folder whole",
        )
    return Finding("ok", "model", f"{folder}: {len(files)} file(s) of weights")


def check_tokenizer(config: Config, model: dict[str, Any], tokenizer: Tokenizer) -> list[Finding]:
    """Tokenizer and model belong together: every id has an embedding, and both end alike."""
    size = model.get("vocab_size")
    tokens: dict[str, int] = cast(Any, tokenizer).get_vocab()
    top = max(tokens.values(), default=-1)
    found = f"the tokenizer's highest id is {top}, the model's vocabulary has {size}"
    change = "take tokenizer and config.json from the same model"
    if isinstance(size, int) and top >= size:
        rule = "every id needs an embedding: this is another model's tokenizer"
        return [Finding("fail", "tokenizer", found, rule, change)]
    named = model.get("eos_token_id")
    own: Any = tokenizer.eos_token_id
    ends = cast(list[int], named) if isinstance(named, list) else [named]
    unknown = [token for token in ends if isinstance(token, int) and token > top]
    if unknown:
        said = f"config.json ends responses with id {unknown[0]}; {found}"
        return [Finding("fail", "tokenizer", said, "the tokenizer must know it", change)]
    extra = config.rollout.stop_token_ids or []
    stops = stop_ids(Path(config.model.path), model, tokenizer, extra)
    if not stops:
        rule = "without an end every response runs to `rollout.max_response_length`"
        fix = "set `rollout.stop_token_ids`"
        return [Finding("warn", "tokenizer", f"{found}; no id ends a response", rule, fix)]
    if own is not None and named is not None and own not in ends:
        said = f"config.json ends with {ends}, the tokenizer with {own}"
        rule = "both end a response; of one model they are mostly equal"
        return [Finding("warn", "tokenizer", said, rule)]
    return [Finding("ok", "tokenizer", f"{found}; {sorted(stops)} end a response")]


def check_template(tokenizer: Tokenizer) -> Finding:
    """The chat template is there and renders a question."""
    try:
        text, ids = Renderer(tokenizer, chat=True).chat([{"role": "user", "content": "1 + 1?"}])
    except RenderError as error:
        rule = "`data.chat_template: true` needs one that renders a user's message"
        change = "`data.chat_template: false` for a base model, or add chat_template.jinja"
        return Finding("fail", "chat template", str(error), rule, change)
    return Finding("ok", "chat template", f"renders to {len(ids)} tokens: {text!r:.80}")


def judge(config: Config, prompt: Prompt) -> Finding:
    """Judge one row's own answer, as a worker would."""

    async def run() -> tuple[Any, str]:
        async with RewardPool.from_config(config.reward) as pool:
            await pool.check_gold([prompt])
            return await pool.judge(prompt, prompt.answer, truncated=False), pool.last_failure

    name = f"`reward.function: {config.reward.function}`"
    try:
        reward, why = asyncio.run(run())
    except ConfigError as error:
        return Finding.from_error("reward", error)
    if reward.status != "ok":
        said = f"{name} on row {prompt.row_id}: {why or reward.status}"
        rule = "it must judge any response; a share of failures over `reward.max_failure_share` "
        return Finding("fail", "reward", said, rule + "ends a run", "mend the function")
    said = (
        f"{name} gives row {prompt.row_id}'s own answer score {reward.score:g}, acc {reward.acc:g}"
    )
    return Finding("ok", "reward", said)


def main(kind: str) -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what other people's code prints is no answer
    request: dict[str, Any] = json.load(sys.stdin)
    config = configs.validate(request["config"])
    answer: dict[str, Any]
    if kind == "read":
        hide_torch()
        findings, prompt = read(config)
        answer = {"prompt": None if prompt is None else encode(prompt).hex()}
    else:
        findings = [judge(config, decode(bytes.fromhex(request["prompt"]), Prompt))]
        answer = {}
    answer["findings"] = [asdict(finding) for finding in findings]
    with open(out, "w", encoding="utf-8") as reply:
        json.dump(answer, reply)


if __name__ == "__main__":
    main(sys.argv[1])
