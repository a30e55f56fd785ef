"""Configuration: what is refused, with field, value and rule, and what every shipped file says."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo_async import cli
from dapo_async import config as configs
from dapo_async.config import Config, Ramp, Stage, at
from dapo_async.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path
    for path in (ROOT / "configs").rglob("*.yaml")
    if path.parent.name not in ("profiles", "ablations", "cluster")
)

MINIMAL: dict[str, Any] = {
    "run": {"name": "x"},
    "model": {"path": "m"},
    "data": {"train": "a.jsonl"},
    "reward": {"function": "f"},
    "trainer": {"steps": 3},
}


def with_values(**values: Any) -> dict[str, Any]:
    """MINIMAL with `section__field=value` set."""
    tree = copy.deepcopy(MINIMAL)
    for key, value in values.items():
        section, field = key.split("__")
        tree.setdefault(section, {})[field] = value
    return tree


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_survives_its_own_dump(path: Path) -> None:
    config = configs.load(path)
    again = configs.validate(yaml.safe_load(configs.dump(config)))
    assert again == config


def test_the_minimal_config_has_the_papers_defaults() -> None:
    config = configs.validate(MINIMAL)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.aggregation == "token_mean"
    assert config.algorithm.advantage == "group_std"
    assert config.overlong_or_off.mode == "soft"
    assert config.filter.enabled and config.filter.metric == "acc"
    assert config.rollout.group_size == 16
    assert (config.learner.lr, config.learner.warmup_steps) == (1e-6, 20)
    assert (config.learner.weight_decay, config.learner.grad_clip) == (0.1, 1.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learner__lr": "1e-6"}, ["learner.lr", "'1e-6'", "YAML 1.1"]),
        ({"learner__lr": "abc"}, ["learner.lr", "'abc'", "number"]),
        ({"learner__lr": True}, ["learner.lr", "True"]),
        ({"learner__lr": None}, ["learner.lr", "None"]),
        ({"learner__lr": 0.0}, ["learner.lr", "greater than 0"]),
        ({"learner__lr": float("nan")}, ["learner.lr", "finite"]),
        ({"learner__typo": 1}, ["learner.typo", "unknown key"]),
        ({"nosuch__field": 1}, ["nosuch", "unknown section"]),
        ({"filter__enabled": "true"}, ["filter.enabled", "'true'", "must be true or false"]),
        ({"rollout__workers": 1.5}, ["rollout.workers", "1.5", "must be a whole number"]),
        ({"rollout__workers": "3"}, ["rollout.workers", "'3'", "without quotes it is a number"]),
        ({"rollout__workers": "four"}, ["rollout.workers: 'four': must be a whole number"]),
        ({"data__prompt_key": 3}, ["data.prompt_key: 3: must be text", "'data.prompt_key=\"3\"'"]),
        (
            {"rollout__engine_urls": "http://a:1"},
            ["must be a list", "'rollout.engine_urls=[a,b]'", '["a","b"]'],
        ),
        (
            {"rollout__group_size": "many"},
            ["'many': must be a number, a ramp {start, end, steps} or stages"],
        ),
        ({"rollout__group_size": 1}, ["rollout.group_size", "1", "≥ 2"]),
        ({"rollout__temperature": 0.0}, ["temperature", "0", "≥"]),
        ({"rollout__top_k": 0}, ["top_k", "0", "-1"]),
        ({"rollout__min_workers": 2}, ["min_workers", "workers"]),
        ({"rollout__max_workers": 9}, ["max_workers: 9", "ray.address: local"]),
        (
            {"rollout__max_workers": 9, "ray__address": "auto"},
            ["max_workers: 9", "weights.transport: shared_memory"],
        ),
        (
            {"rollout__max_workers": 1, "rollout__workers": 2},
            ["max_workers: 1", "workers: 2"],
        ),
        (
            {
                "rollout__max_workers": 2,
                "rollout__engine": "sglang",
                "rollout__engine_urls": ["http://a:1"],
            },
            ["max_workers: 2", "engine_urls"],
        ),
        ({"replay__max_staleness": -1}, ["replay.max_staleness", "-1"]),
        ({"replay__depth": 9.0}, ["depth", "9", "max_staleness + 1"]),
        ({"weights__broadcast_interval": 9}, ["broadcast_interval", "9", "max_staleness"]),
        ({"weights__delay": 3}, ["weights.delay", "3", "max_staleness"]),
        ({"learner__zero_stage": 0}, ["learner.zero_stage", "1, 2 or 3"]),
        ({"learner__zero_stage": 4}, ["learner.zero_stage", "1, 2 or 3"]),
        ({"learner__precision": "fp8"}, ["learner.precision", "'bf16'", "'fp16'"]),
        (
            {"learner__ranks": 6, "learner__sequence_parallel_size": 4},
            ["sequence_parallel_size: 4", "must divide `ranks: 6`"],
        ),
        (
            {"learner__zero_stage": 2, "learner__offload": "optimizer_and_parameters"},
            ["offload: optimizer_and_parameters", "needs `zero_stage: 3`", "stage 2"],
        ),
        (
            {"model__attention": "flash_attention_2"},
            ["attention: flash_attention_2", "learner.device: cuda"],
        ),
        (
            {"model__attention": "flash_attention_2", "learner__device": "cuda"},
            ["attention: flash_attention_2", "learner.precision: bf16"],
        ),
        (
            {"learner__minibatches": 2, "learner__logprob_tokens_per_microbatch": 2047},
            ["logprob_tokens_per_microbatch: 2047", "2048", "would not fit"],
        ),
        (
            {"learner__logprob_tokens_per_microbatch": 9999},
            ["logprob_tokens_per_microbatch: 9999", "would be ignored", "minibatches"],
        ),
        (
            {
                "learner__minibatches": 2,
                "learner__logprob_tokens_per_microbatch": 9999,
                "algorithm__proximal": "behavior",
            },
            ["logprob_tokens_per_microbatch: 9999", "would be ignored", "proximal: recompute"],
        ),
        (
            {"weights__transport": "nccl", "rollout__engine": "torch"},
            ["weights.transport", "nccl", "rollout.engine: sglang"],
        ),
        (
            {"weights__transport": "nccl", "rollout__engine": "sglang", "weights__delay": 1},
            ["weights.delay", "keeps versions", "nccl"],
        ),
        (
            {"weights__transport": "nccl", "rollout__engine": "sglang", "weights__dir": "/x"},
            ["dir", "transport: nccl"],
        ),
        (
            {
                "weights__transport": "nccl",
                "rollout__engine": "sglang",
                "rollout__weight_update": "keep_kv",
                "rollout__tensor_parallel_size": 2,
                "rollout__device": "cuda",
            },
            ["weights.transport", "keep_kv", "tensor_parallel_size: 1"],
        ),
        ({"weights__delay": 1, "weights__broadcast_interval": 2}, ["delay", "broadcast_interval"]),
        ({"overlong__buffer": 2000}, ["overlong.buffer", "2000", "max_response_length"]),
        ({"overlong__mode": "linear"}, ["buffer", "factor", "linear"]),
        ({"overlong__mode": "off", "overlong__buffer": 5}, ["buffer", "ignored", "off"]),
        ({"overlong__mode": "filter", "overlong__factor": 1.0}, ["factor", "ignored", "filter"]),
        ({"filter__enabled": False, "filter__metric": "acc"}, ["metric", "ignored"]),
        ({"filter__min_pass": 0.9, "filter__max_pass": 0.1}, ["min_pass", "max_pass"]),
        ({"off_policy__action": "none", "off_policy__cap": 2.0}, ["cap", "ignored"]),
        ({"off_policy__cap": 2.0, "off_policy__low": 0.1}, ["low", "ignored", "truncate"]),
        ({"algorithm__advantage": "gae"}, ["gae", "critic"]),
        ({"algorithm__kl_coef": 0.1}, ["kl_coef", "0.1", "reference"]),
        ({"algorithm__aggregation": "token_sum_norm"}, ["token_sum_norm", "needed"]),
        ({"algorithm__token_sum_norm": 5.0}, ["token_sum_norm", "ignored"]),
        ({"algorithm__dual_clip": 0.5}, ["algorithm.dual_clip", "0.5", "greater than 1"]),
        ({"data__system_prompt": "hi"}, ["system_prompt", "ignored", "chat_template"]),
        ({"reward__processes": 0, "reward__timeout_s": 3.0}, ["timeout_s", "ignored"]),
        ({"reward__retries": 3}, ["retries", "ignored"]),
        ({"learner__lr_min_share": 0.1}, ["lr_min_share", "ignored"]),
        ({"learner__max_tokens_per_microbatch": 100}, ["max_tokens_per_microbatch", "100"]),
        ({"learner__minibatches": 64}, ["minibatches", "64", "groups_per_step"]),
        ({"eval__every": 5}, ["every", "ignored", "data.eval"]),
        ({"run__name": "../../x"}, ["run.name", "'../../x'"]),
        ({"run__name": "a\nb"}, ["run.name"]),
        ({"run__name": "my run"}, ["run.name: 'my run'", "letters, digits, `.`, `_` and `-`"]),
        ({"trainer__groups_per_step": [{"from_step": 2, "value": 1.0}]}, ["groups_per_step", "0"]),
        ({"trainer__groups_per_step": 2.5}, ["groups_per_step", "2.5", "whole"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_values_are_refused_with_field_value_and_rule(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        configs.validate(with_values(**values))
    for word in words:
        assert word in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"learner__rank": 4}, "`learner.ranks`"),
        ({"rollout__tempratur": 1.0}, "`rollout.temperature`"),
        ({"learner__workers": 4}, "`rollout.workers`"),  # that very key, in another section
        ({"learner__every": 4}, "`eval.every` or `checkpoint.every`"),
        ({"rolout__workers": 4}, "`rollout`"),
        (
            {"rollout__temperature": [{"from_step": 0, "vlaue": 1.0}]},
            "`rollout.temperature.0.value`",
        ),
        (
            {"rollout__temperature": [{"fromstep": 0, "value": 1.0}]},
            "`rollout.temperature.0.from_step`",
        ),
        (
            {"rollout__temperature": {"strat": 1.0, "end": 0.8, "steps": 9}},
            "`rollout.temperature.start`",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_unknown_key_gets_the_one_that_is_likely_meant(
    values: dict[str, Any], meant: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        configs.validate(with_values(**values))
    assert f"did you mean {meant}?" in str(refused.value)


def test_a_key_of_no_likeness_gets_no_advice() -> None:
    with pytest.raises(ConfigError) as refused:
        configs.validate(with_values(learner__zzzz=1))
    assert "learner.zzzz: unknown key (value 1)" in str(refused.value)
    assert "did you mean" not in str(refused.value)


def test_of_a_schedule_only_what_is_wrong_in_it_is_told() -> None:
    stages = [{"from_step": 0, "valeu": 8}]
    with pytest.raises(ConfigError) as refused:
        configs.validate(with_values(rollout__group_size=stages))
    lines = str(refused.value).splitlines()[1:]
    assert lines == [
        "  rollout.group_size.0.value: is required",
        "  rollout.group_size.0.valeu: unknown key (value 8); did you mean "
        "`rollout.group_size.0.value`?",
    ]


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        configs.validate(with_values(learner__lr="x", rollout__workers=0, data__nope=1))
    message = str(refused.value)
    assert "learner.lr" in message and "rollout.workers" in message and "data.nope" in message


@pytest.mark.parametrize("overlong", [None, {"mode": "off"}])
def test_a_disabled_penalty_needs_no_parameters(overlong: dict[str, Any] | None) -> None:
    tree = copy.deepcopy(MINIMAL) | {"overlong": overlong}
    assert configs.validate(tree).overlong_or_off.mode == "off"


def test_depth_defaults_to_two_steps_within_the_bound() -> None:
    depths = [
        configs.validate(with_values(replay__max_staleness=eta)).replay.steps_deep
        for eta in (0, 1, 8)
    ]
    assert depths == [1, 2, 2]


def test_schedules_are_read_at_a_step() -> None:
    stages = [Stage(from_step=0, value=4.0), Stage(from_step=10, value=8.0)]
    assert [at(stages, step) for step in (0, 9, 10, 99)] == [4, 4, 8, 8]
    assert [at(Ramp(start=0.0, end=1.0, steps=4), step) for step in (0, 1, 4, 9)] == [0, 0.25, 1, 1]
    assert at(3.0, 7) == 3


def test_limits_are_checked_against_the_schedules_maximum() -> None:
    stages = [{"from_step": 0, "value": 100.0}, {"from_step": 5, "value": 9000.0}]
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch"):
        configs.validate(with_values(rollout__max_response_length=stages))


def test_legal_but_doubtful_settings_warn() -> None:
    quiet = configs.validate(MINIMAL)
    assert configs.warnings(quiet) == []
    loud = configs.validate(
        with_values(
            weights__broadcast_interval=3, filter__metric="seq_final_reward", rollout__top_p=0.9
        )
    )
    text = " ".join(configs.warnings(loud))
    assert "broadcast_interval" in text and "seq_final_reward" in text and "top_p" in text


@pytest.mark.parametrize(("staleness", "warned"), [(0, False), (2, True)])
def test_determinism_is_warned_of_where_no_run_can_repeat(staleness: int, warned: bool) -> None:
    config = configs.validate(
        with_values(rollout__deterministic=True, replay__max_staleness=staleness)
    )
    assert [w for w in configs.warnings(config) if "deterministic" in w] == configs.warnings(config)
    assert bool(configs.warnings(config)) == warned


# ---- files and overrides -----------------------------------------------------------------------


def write(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_overrides_set_nested_values_and_read_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", MINIMAL)
    config = configs.load(
        path,
        ["learner.lr=3e-4", "rollout.deterministic=true", "run.name=other", "data.eval=e.jsonl"],
    )
    assert config.learner.lr == 3e-4
    assert config.rollout.deterministic is True
    assert (config.run.name, config.data.eval) == ("other", "e.jsonl")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("rollout.engine_urls=[http://10.0.0.5:30000]", ["http://10.0.0.5:30000"]),
        ("rollout.engine_urls=[http://a:1, http://b:2]", ["http://a:1", "http://b:2"]),
        ('rollout.engine_urls=["http://a:1","http://b:2"]', ["http://a:1", "http://b:2"]),
        ("rollout.stop_strings=[</answer>]", ["</answer>"]),
        ("rollout.temperature={start: 1.0, end: 1.1, steps: 2}", Ramp(start=1, end=1.1, steps=2)),
        ('data.prompt_suffix="[/INST]"', "[/INST]"),
        ("data.answer_pattern=[0-9]+", "[0-9]+"),
    ],
)
def test_a_list_or_mapping_is_written_on_the_command_line_as_in_a_file(
    tmp_path: Path, override: str, value: object
) -> None:
    tree = with_values(rollout__engine="sglang")
    config = configs.load(write(tmp_path / "c.yaml", tree), [override])
    section, key = override.partition("=")[0].split(".")
    assert getattr(getattr(config, section), key) == value


def test_text_that_looks_like_a_list_is_told_its_quotes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"""'data\.prompt_suffix="\[/INST\]"'"""):
        configs.load(write(tmp_path / "c.yaml", MINIMAL), ["data.prompt_suffix=[/INST]"])


def test_a_dump_counts_whole_things_in_whole_numbers() -> None:
    stages = [{"from_step": 0, "value": 8.0}, {"from_step": 9, "value": 16.0}]
    tree = with_values(rollout__group_size=stages, rollout__temperature=1.0, overlong__buffer=64)
    text = configs.dump(configs.validate(tree))
    assert "max_response_length: 1024\n" in text and "groups_per_step: 32\n" in text
    assert "value: 16\n" in text and "buffer: 64\n" in text
    assert "temperature: 1.0\n" in text, "a share or a rate keeps its point"


@pytest.mark.parametrize("override", ["learner.lr", "=3", "learner..lr=3", "run.name.x=1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        configs.load(write(tmp_path / "c.yaml", MINIMAL), [override])


def test_a_config_inherits_from_one_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", with_values(learner__lr=0.5, learner__minibatches=2))
    child = {"base": "base.yaml", "learner": {"lr": 0.25}}
    config = configs.load(write(tmp_path / "child.yaml", child))
    assert (config.learner.lr, config.learner.minibatches) == (0.25, 2)


def test_a_base_may_have_a_base_each_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "a.yaml", with_values(learner__lr=0.5, learner__minibatches=2))
    write(tmp_path / "below" / "b.yaml", {"base": "../a.yaml", "learner": {"lr": 0.25}})
    top = {"base": "below/b.yaml", "trainer": {"steps": 7}}
    config = configs.load(write(tmp_path / "c.yaml", top))
    found = (config.learner.lr, config.learner.minibatches, config.trainer.steps)
    assert found == (0.25, 2, 7)


def test_bases_that_go_in_a_circle_are_refused_with_the_way_round(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", {"base": "b.yaml"})
    write(tmp_path / "b.yaml", {"base": "./a.yaml"})
    with pytest.raises(ConfigError, match=r"circle: \S*a.yaml → \S*b.yaml → \S*a.yaml"):
        configs.load(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"circle: \S*own.yaml → \S*own.yaml"):
        configs.load(write(tmp_path / "own.yaml", {"base": "own.yaml"}))


def test_a_base_that_is_missing_is_named_with_the_file_that_wants_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", {"base": "below/../b.yaml"})
    with pytest.raises(ConfigError) as caught:
        configs.load(path)
    assert f"cannot read the base {tmp_path.resolve() / 'b.yaml'} of {path}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[1, 2]", "mapping"),
        ("a: b: c", "YAML"),
        ("!!python/object/apply:os.system ['true']", "YAML"),
        ("", "mapping"),
        ("1: 2", "mapping"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        configs.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        configs.load(tmp_path / "nowhere.yaml")


def test_a_number_written_without_a_point_is_text_in_yaml_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + "learner:\n  lr: 1e-6\n")
    with pytest.raises(ConfigError, match=r"write 1\.0e-6"):
        configs.load(path)


def test_every_field_has_a_docstring() -> None:
    def undocumented(section: Any, where: str) -> list[str]:
        found: list[str] = []
        for name, field in section.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, configs.Section):
                found += undocumented(inner, f"{where}{name}.")
            elif not field.description and section is not Config:
                found.append(where + name)
        return found

    assert undocumented(Config, "") == []


def test_reading_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys; import dapo_async.cli;"
        "heavy = {'torch', 'ray', 'transformers', 'deepspeed', 'pandas', 'matplotlib'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"


def test_the_help_of_train_shows_how_a_list_is_written() -> None:
    done = CliRunner().invoke(cli.app, ["train", "--help"], env={"COLUMNS": "200"})
    assert "'rollout.engine_urls=[http://a:1, http://b:1]'" in " ".join(done.output.split())
