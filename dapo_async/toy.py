"""The toy task: sort the digits of a string. Small enough that two CPU cores learn it in minutes.

`make_toy` writes all that a run needs: a character tokenizer, a 100 k-parameter Qwen2 that a
sloppy teacher has warmed up, and training and held-out problems. `sort_digits` is the reward.

A prompt is `3142=`; the response is one or more drafts separated by `;`, of which the last one
counts: `1234` or `124;1234`. The teacher drops and doubles digits and rambles on into further
drafts, and so does the warm model: sampled at temperature 1 it is right about three times in
ten, and reinforcement learning has accuracy and length to gain.

Problems are held out *by multiset of digits*: no reordering of an evaluation problem is ever seen
by the teacher or in training.

Shape suffixes: N problems of a minibatch, S token positions (prompt, response, right padding).

Nothing heavy is imported before a model is built: workers import the reward from here.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_async.errors import ConfigError
from dapo_async.types import Prompt, Reward

if TYPE_CHECKING:
    import torch

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY = (*SPECIAL_TOKENS, *"0123456789", "=", ";")
"""Token texts by id."""
TOKEN_IDS = {text: token_id for token_id, text in enumerate(VOCABULARY)}

Progress = Callable[[int, int], None]
"""Called with (warm-start steps done, steps in all)."""


# ---- the task ----------------------------------------------------------------------------------


def sort_digits(prompt: Prompt, response: str, truncated: bool) -> Reward:
    """The reward: +1 if the last draft is exactly the answer, else -1.

    A truncated response is wrong whatever it says, and so is one that ends in `;`: its last
    draft is empty. `extra` counts the drafts.
    """
    drafts = response.removesuffix(SPECIAL_TOKENS[EOS]).split(";")
    right = not truncated and drafts[-1] == prompt.answer
    return Reward(
        score=1.0 if right else -1.0,
        acc=1.0 if right else 0.0,
        extra={"drafts": float(len(drafts))},
    )


def answer_of(digits: str) -> str:
    return "".join(sorted(digits))


def is_held_out(digits: str) -> bool:
    """Whether a problem belongs to the evaluation split: a property of its multiset of digits."""
    return zlib.crc32(answer_of(digits).encode()) % 8 == 0


def problems(
    rng: random.Random, held_out: bool, min_digits: int = 3, max_digits: int = 10
) -> Iterator[str]:
    """Endless problems of one split, all lengths equally often. Short ones repeat."""
    while True:
        length = rng.randint(min_digits, max_digits)
        digits = "".join(rng.choices("0123456789", k=length))
        while is_held_out(digits) != held_out:
            digits = "".join(rng.choices("0123456789", k=length))
        yield digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Answers problems the way the warm model shall: knows how to sort, but is sloppy."""

    p_err: float = 0.12
    """Per digit: dropped with half of it, doubled with the other half."""
    p_loop: float = 0.4
    """One more draft with this probability, again and again."""

    def draft(self, digits: str, rng: random.Random) -> str:
        written: list[str] = []
        for digit in answer_of(digits):
            luck = rng.random()
            if luck >= self.p_err:
                written.append(digit)
            elif luck >= self.p_err / 2:
                written.append(digit * 2)
        return "".join(written)

    def respond(self, digits: str, rng: random.Random) -> str:
        drafts = [self.draft(digits, rng)]
        while rng.random() < self.p_loop:
            drafts.append(self.draft(digits, rng))
        return ";".join(drafts)


# ---- the folder --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyRecipe:
    """All that decides the contents of the folder, besides the seed."""

    min_digits: int = 3
    max_digits: int = 10
    train_rows: int = 8_000
    eval_rows: int = 500
    p_err: float = 0.12
    p_loop: float = 0.4
    hidden_size: int = 64
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    max_positions: int = 256
    initializer_range: float = 0.1
    steps: int = 1200
    """Optimizer updates of the warm start."""
    batch: int = 32
    lr: float = 4e-3
    lr_min_share: float = 0.1
    warmup_steps: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    layout: int = 1
    """Raised when the code changes what equal numbers produce."""

    def digest(self, seed: int) -> str:
        text = json.dumps({"seed": seed, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyPaths:
    """Where everything lies, and what making it took."""

    model: Path
    """Folder in Hugging Face format: weights, config, tokenizer."""
    train: Path
    eval: Path
    reused: bool
    """True: the folder already held exactly this toy."""
    warm_start_cpu_s: float
    """CPU seconds the warm start took when it was made."""
    warm_start_nll: float
    """Mean negative log-likelihood per response token, over the last tenth of its updates."""


_RECORD = "toy.json"
_PIECES = ("model", "train.jsonl", "eval.jsonl")


def make_toy(
    out: Path,
    seed: int,
    force: bool = False,
    progress: Progress | None = None,
    recipe: ToyRecipe | None = None,
) -> ToyPaths:
    """Write the toy into folder `out`: `model/`, `train.jsonl`, `eval.jsonl`, `toy.json`.

    A folder that holds the same toy already is reused, an older toy is replaced; `force` makes
    it again anyway. Equal seeds give equal files on one machine (float rounding may differ
    elsewhere). Everything is made aside and moved into place, the record `toy.json` last, so an
    interrupted call leaves nothing that passes for a toy.

    Raises:
        ConfigError: `out` holds files but no toy (they might be someone's), or can't be written.
    """
    recipe = recipe or ToyRecipe()
    digest = recipe.digest(seed)
    try:
        record = _read_record(out)
        complete = all((out / piece).exists() for piece in _PIECES)
        if record.get("digest") == digest and complete and not force:
            return _paths(out, record, reused=True)
        return _paths(out, _build(out, seed, recipe, digest, progress), reused=False)
    except OSError as error:
        raise ConfigError(f"cannot make the toy in {out}: {error}") from error


def _read_record(out: Path) -> dict[str, Any]:
    """What `toy.json` says: empty where there is no folder or the toy is unfinished."""
    if not out.exists() or not any(out.iterdir()):
        return {}
    refused = f"{out} is not empty and holds no toy; name another folder for it"
    try:
        record = json.loads((out / _RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(refused) from None
    except ValueError:
        raise ConfigError(f"{refused} ({_RECORD} is not JSON)") from None
    if not isinstance(record, dict) or "digest" not in record:
        raise ConfigError(f"{refused} ({_RECORD} has no digest)")
    return record  # pyright: ignore[reportUnknownVariableType]


def _build(
    out: Path, seed: int, recipe: ToyRecipe, digest: str, progress: Progress | None
) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    # A record without a digest claims the folder and marks what lies there as unfinished.
    (out / _RECORD).write_text(json.dumps({"digest": None}), encoding="utf-8")
    aside = Path(tempfile.mkdtemp(prefix=".making-", dir=out))
    try:
        _write_rows(aside / "train.jsonl", _sample(recipe, seed, held_out=False))
        _write_rows(aside / "eval.jsonl", _sample(recipe, seed, held_out=True))
        record = {"digest": digest, "seed": seed, "recipe": asdict(recipe)}
        record |= _warm_start(aside / "model", seed, recipe, progress)
        for piece in _PIECES:
            if (out / piece).exists():
                os.replace(out / piece, aside / f"old-{piece}")
            os.replace(aside / piece, out / piece)
        (aside / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(aside / _RECORD, out / _RECORD)
        return record
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _paths(out: Path, record: dict[str, Any], reused: bool) -> ToyPaths:
    return ToyPaths(
        model=out / "model",
        train=out / "train.jsonl",
        eval=out / "eval.jsonl",
        reused=reused,
        warm_start_cpu_s=float(record["warm_start_cpu_s"]),
        warm_start_nll=float(record["warm_start_nll"]),
    )


def _sample(recipe: ToyRecipe, seed: int, held_out: bool) -> list[str]:
    """The rows of a split; held-out problems are all different."""
    rng = random.Random(f"toy/{seed}/{'eval' if held_out else 'train'}")
    source = problems(rng, held_out, recipe.min_digits, recipe.max_digits)
    if not held_out:
        return [next(source) for _ in range(recipe.train_rows)]
    found: dict[str, None] = {}
    while len(found) < recipe.eval_rows:
        found.setdefault(next(source))
    return list(found)


def _write_rows(path: Path, rows: list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for digits in rows:
            row = {"prompt": f"{digits}=", "answer": answer_of(digits)}
            file.write(json.dumps(row) + "\n")


# ---- tokenizer, model, warm start --------------------------------------------------------------


def make_tokenizer() -> Any:
    """One token per character: a `PreTrainedTokenizerFast`. Adds no special tokens by itself.

    transformers 5 loads every tokenizer beside a Qwen2 model as Qwen2's own class, which takes
    the vocabulary only. On the characters of the toy both agree; others are `<unk>` here and
    left out there.
    """
    import tokenizers as untyped
    from transformers import PreTrainedTokenizerFast

    library: Any = untyped
    pad, bos, eos, unk = SPECIAL_TOKENS
    tokenizer = library.Tokenizer(library.models.WordLevel(TOKEN_IDS, unk_token=unk))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = library.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_model(recipe: ToyRecipe) -> Any:
    """A `Qwen2ForCausalLM` with fresh weights from torch's global generator."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.max_positions,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen2ForCausalLM(config)


def _lr_share(recipe: ToyRecipe, step: int) -> float:
    """Linear warm-up, then linear to `lr_min_share` at the last update."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 1 - (1 - recipe.lr_min_share) * done


def _minibatch(
    source: Iterator[str], teacher: Teacher, rng: random.Random, recipe: ToyRecipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids_NS, labels_NS): prompt + response + <eos>, right-padded; labels cover the response."""
    import torch

    ids_N: list[list[int]] = []
    labels_N: list[list[int]] = []
    for _ in range(recipe.batch):
        digits = next(source)
        response = teacher.respond(digits, rng)
        prompt_ids = [TOKEN_IDS[char] for char in f"{digits}="]
        response_ids = [*(TOKEN_IDS[char] for char in response), EOS]
        room = recipe.max_positions - len(prompt_ids)
        ids_N.append((prompt_ids + response_ids)[: recipe.max_positions])
        labels_N.append([_IGNORED] * len(prompt_ids) + response_ids[:room])
    width = max(map(len, ids_N))
    ids_NS = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in ids_N])
    labels_NS = torch.tensor([ids + [_IGNORED] * (width - len(ids)) for ids in labels_N])
    return ids_NS, labels_NS


_IGNORED = -100


def _warm_start(
    folder: Path, seed: int, recipe: ToyRecipe, progress: Progress | None
) -> dict[str, float]:
    """Train a fresh model on the teacher's answers and save it with its tokenizer."""
    import torch
    from torch.nn.functional import cross_entropy

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of float sums, so the weights, depends on it
    started = time.process_time()
    rng = random.Random(f"toy/{seed}/teacher")
    source = problems(rng, False, recipe.min_digits, recipe.max_digits)
    teacher = Teacher(p_err=recipe.p_err, p_loop=recipe.p_loop)
    losses: list[float] = []
    try:
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            model = make_model(recipe)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.lr,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        for step in range(recipe.steps):
            for options in optimizer.param_groups:
                options["lr"] = recipe.lr * _lr_share(recipe, step)
            ids_NS, labels_NS = _minibatch(source, teacher, rng, recipe)
            # No attention mask: causal attention never looks right, where the padding is.
            logits_NSV = model(input_ids=ids_NS, use_cache=False).logits
            loss = cross_entropy(
                logits_NSV[:, :-1].flatten(0, 1), labels_NS[:, 1:].flatten(), ignore_index=_IGNORED
            )
            optimizer.zero_grad()
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            losses.append(loss.item())
            if progress is not None:
                progress(step + 1, recipe.steps)
    finally:
        torch.set_num_threads(threads)
    cpu_s = time.process_time() - started
    _save(model, folder)
    last = losses[-max(1, recipe.steps // 10) :]
    return {
        "warm_start_cpu_s": round(cpu_s, 2),
        "warm_start_nll": round(sum(last) / max(1, len(last)), 5),
    }


def _save(model: Any, folder: Path) -> None:
    from transformers.utils import logging

    noisy = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a bar per saved file says nothing here
    try:
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    finally:
        if noisy:
            logging.enable_progress_bar()
