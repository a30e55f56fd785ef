"""The toy task: its reward, its split, and the folder that `make_toy` writes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo_async import config, toy
from dapo_async.errors import ConfigError
from dapo_async.toy import Teacher, ToyRecipe, answer_of, is_held_out, make_toy, sort_digits
from dapo_async.types import Prompt

REPO = Path(__file__).resolve().parents[2]
TINY = ToyRecipe(train_rows=300, eval_rows=40, steps=4, batch=4, warmup_steps=2)


def prompt(digits: str) -> Prompt:
    return Prompt(row_id="t:0", text=f"{digits}=", token_ids=(), answer=answer_of(digits))


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- reward ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "truncated", "right", "drafts"),
    [
        ("1134", False, True, 1),
        ("1134<eos>", False, True, 1),
        ("114;1134", False, True, 2),
        ("1134;1134", False, True, 2),
        ("1134;114", False, False, 2),
        ("114;;1134", False, True, 3),
        (";1134", False, True, 2),
        ("1134;", False, False, 2),
        ("1134", True, False, 1),
        ("114;1134", True, False, 2),
        ("", False, False, 1),
        ("", True, False, 1),
        (";", False, False, 2),
        ("134", False, False, 1),
        ("11344", False, False, 1),
        ("1143", False, False, 1),
        (" 1134", False, False, 1),
        ("1134=", False, False, 1),
        ("<eos>1134", False, False, 1),
    ],
)
def test_only_the_last_draft_of_a_finished_response_counts(
    response: str, truncated: bool, right: bool, drafts: int
) -> None:
    reward = sort_digits(prompt("3141"), response, truncated)
    assert reward.acc == (1.0 if right else 0.0)
    assert reward.score == (1.0 if right else -1.0)
    assert reward.extra == {"drafts": drafts}
    assert reward.status == "ok"


def test_importing_the_reward_loads_no_heavy_library() -> None:
    code = (
        "import sys, dapo_async.toy; "
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(
        command, check=False, cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "[]", answer.stderr


# ---- problems and teacher --------------------------------------------------------------------


def test_the_split_is_a_property_of_the_multiset() -> None:
    rng = random.Random(0)
    for _ in range(200):
        digits = rng.choices("0123456789", k=rng.randint(3, 10))
        shuffled = rng.sample(digits, k=len(digits))
        assert is_held_out("".join(digits)) == is_held_out("".join(shuffled))


def test_problems_have_all_lengths_equally_often_and_stay_in_their_split() -> None:
    for held_out in (False, True):
        source = toy.problems(random.Random(1), held_out)
        found = [next(source) for _ in range(1600)]
        lengths = [len(digits) for digits in found]
        assert all(150 < lengths.count(length) < 250 for length in range(3, 11))
        assert set(map(is_held_out, found)) == {held_out}


def test_a_teacher_without_faults_answers_rightly() -> None:
    teacher = Teacher(p_err=0.0, p_loop=0.0)
    assert teacher.respond("90213", random.Random(0)) == "01239"


def test_the_teacher_errs_and_rambles_as_often_as_it_should() -> None:
    rng = random.Random(2)
    teacher = Teacher(p_err=0.12, p_loop=0.4)
    answers = [teacher.respond("5738261049", rng).split(";") for _ in range(4000)]
    drafts = [draft for answer in answers for draft in answer]
    assert len(drafts) / len(answers) == pytest.approx(1 / 0.6, abs=0.06)
    right = sum(draft == "0123456789" for draft in drafts) / len(drafts)
    assert right == pytest.approx(0.88**10, abs=0.03)
    # As many digits dropped as doubled, and never out of order.
    assert sum(map(len, drafts)) / len(drafts) == pytest.approx(10, abs=0.06)
    assert all(list(draft) == sorted(draft) for draft in drafts)


# ---- the folder ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> toy.ToyPaths:
    return make_toy(tmp_path_factory.mktemp("toy") / "new", seed=3, recipe=TINY)


def test_no_evaluation_multiset_occurs_in_training(made: toy.ToyPaths) -> None:
    train, held_out = rows(made.train), rows(made.eval)
    assert (len(train), len(held_out)) == (300, 40)
    assert not {row["answer"] for row in train} & {row["answer"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) == 40


def test_no_evaluation_multiset_is_taught_in_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[str] = []
    respond: Callable[[Teacher, str, random.Random], str] = Teacher.respond

    def spy(self: Teacher, digits: str, rng: random.Random) -> str:
        taught.append(digits)
        return respond(self, digits, rng)

    monkeypatch.setattr(Teacher, "respond", spy)
    make_toy(tmp_path / "toy", seed=3, recipe=TINY)
    assert len(taught) == TINY.steps * TINY.batch
    assert not any(map(is_held_out, taught))


def test_every_row_is_a_problem_with_its_sorted_digits(made: toy.ToyPaths) -> None:
    for row in rows(made.train) + rows(made.eval):
        assert row["prompt"].endswith("=")
        digits = row["prompt"][:-1]
        assert 3 <= len(digits) <= 10
        assert digits.isdecimal()
        assert row["answer"] == "".join(sorted(digits))


def test_model_and_tokenizer_load_as_hugging_face_folders(made: toy.ToyPaths) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made.model)
    assert sum(p.numel() for p in model.parameters()) == 99_904
    assert model.config.model_type == "qwen2"
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


@pytest.mark.parametrize("loader", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_the_tokenizer_is_one_token_per_character(made: toy.ToyPaths, loader: str) -> None:
    import transformers

    tokenizer = getattr(transformers, loader).from_pretrained(made.model)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1)
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (2, 3)
    assert tokenizer.padding_side == "left"
    rng = random.Random(0)
    for text in ["".join(rng.choices("0123456789=;", k=rng.randint(1, 40))) for _ in range(100)]:
        ids = [4 + "0123456789=;".index(char) for char in text]
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, 2]) == f"{text}<eos>"
        assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == text


def test_equal_seeds_give_equal_files_and_other_seeds_others(
    made: toy.ToyPaths, tmp_path: Path
) -> None:
    again = make_toy(tmp_path / "again", seed=3, recipe=TINY)
    other = make_toy(tmp_path / "other", seed=4, recipe=TINY)
    for name in ("train.jsonl", "eval.jsonl", "model/model.safetensors", "model/tokenizer.json"):
        first = (made.train.parent / name).read_bytes()
        assert (again.train.parent / name).read_bytes() == first, name
        if name != "model/tokenizer.json":
            assert (other.train.parent / name).read_bytes() != first, name


def test_making_a_toy_leaves_the_callers_random_numbers_and_threads_alone(tmp_path: Path) -> None:
    import torch

    threads = torch.get_num_threads()
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.rand(3).tolist(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    make_toy(tmp_path / "toy", seed=0, recipe=TINY)
    assert (torch.rand(3).tolist(), random.random()) == expected
    assert torch.get_num_threads() == threads


def test_the_warm_start_learns(tmp_path: Path) -> None:
    short = make_toy(tmp_path / "short", seed=0, recipe=TINY)
    longer = ToyRecipe(train_rows=10, eval_rows=10, steps=60, batch=16, warmup_steps=5)
    learned = make_toy(tmp_path / "longer", seed=0, recipe=longer)
    assert learned.warm_start_nll < short.warm_start_nll - 0.5


# ---- cache -----------------------------------------------------------------------------------


def make(folder: Path, seed: int = 0, force: bool = False) -> toy.ToyPaths:
    return make_toy(folder, seed=seed, force=force, recipe=TINY)


def test_a_matching_folder_is_reused(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = make_toy(tmp_path, 0, recipe=TINY, progress=lambda done, of: calls.append((done, of)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    before = first.model.stat().st_ino
    second = make(tmp_path)
    assert (first.reused, second.reused) == (False, True)
    assert second.model.stat().st_ino == before
    assert second.warm_start_cpu_s == first.warm_start_cpu_s > 0


def test_another_seed_recipe_or_force_makes_it_again(tmp_path: Path) -> None:
    make(tmp_path)
    assert not make(tmp_path, seed=1).reused
    assert not make(tmp_path, seed=1, force=True).reused
    other = ToyRecipe(train_rows=10, eval_rows=5, steps=1, batch=2)
    made = make_toy(tmp_path, 1, recipe=other)
    assert not made.reused
    assert len(rows(made.train)) == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "eval.jsonl",
        "model",
        "toy.json",
        "train.jsonl",
    ]


@pytest.mark.parametrize("missing", ["train.jsonl", "eval.jsonl", "model"])
def test_a_toy_with_a_piece_missing_is_made_again(tmp_path: Path, missing: str) -> None:
    make(tmp_path)
    (tmp_path / missing).rename(tmp_path.parent / f"{tmp_path.name}-away")
    assert not make(tmp_path).reused
    assert (tmp_path / missing).exists()


def test_an_interrupted_toy_is_never_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    make(tmp_path, seed=0)
    with pytest.raises(KeyboardInterrupt):
        make_toy(tmp_path, 0, force=True, recipe=TINY, progress=interrupt)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".making")]
    assert not make(tmp_path, seed=0).reused
    assert make(tmp_path, seed=0).reused


@pytest.mark.parametrize("content", [None, "not json", "[]", "{}"])
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_other_files_is_refused_and_left_alone(
    tmp_path: Path, content: str | None, force: bool
) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    if content is not None:
        (tmp_path / "toy.json").write_text(content)
    with pytest.raises(ConfigError, match="holds no toy"):
        make(tmp_path, force=force)
    assert (tmp_path / "train.jsonl").read_text() == "mine"
    assert not (tmp_path / "model").exists()


def test_strange_files_beside_a_toy_survive_making_it_again(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    make(tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_is_no_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the toy in"):
        make(tmp_path / "file" / "toy")


# ---- the shipped configuration ---------------------------------------------------------------


def test_the_quickstart_config_holds_the_measured_recipe() -> None:
    loaded = config.load(REPO / "configs" / "quickstart.yaml")
    assert config.warnings(loaded) == []
    learner, algorithm = loaded.learner, loaded.algorithm
    assert (loaded.trainer.groups_per_step, loaded.rollout.group_size) == (16, 16)
    assert (learner.lr, learner.lr_schedule, learner.lr_min_share) == (4e-4, "cosine", 0.05)
    assert (learner.betas, learner.weight_decay, learner.warmup_steps) == ([0.9, 0.99], 0.0, 5)
    assert (learner.minibatches, loaded.trainer.steps) == (2, 300)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert loaded.overlong_or_off.buffer == 12
    assert (loaded.replay.max_staleness, loaded.off_policy.truncate_cap) == (2, 2.0)
    assert loaded.rollout.max_response_length == 40


def test_the_quickstart_config_fits_what_make_toy_writes(made: toy.ToyPaths) -> None:
    loaded = config.load(REPO / "configs" / "quickstart.yaml")
    root = Path(loaded.model.path).parent
    assert (loaded.data.train, loaded.data.eval) == (
        str(root / made.train.name),
        str(root / made.eval.name),
    )
    assert Path(loaded.model.path).name == made.model.name
    longest = max(len(row["prompt"]) for row in rows(made.train) + rows(made.eval))
    assert longest <= loaded.data.max_prompt_tokens
    module, _, function = loaded.reward.function.partition(":")
    assert (module, getattr(toy, function)) == (toy.__name__, sort_digits)
    scores = {sort_digits(prompt("312"), text, False).score for text in ("123", "")}
    assert (loaded.reward.min_score, loaded.reward.max_score) == (min(scores), max(scores))
