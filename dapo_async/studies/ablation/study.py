"""A study: a grid of configurations × seeds, read and validated as a whole before anything runs.

A study file names a config, what all its runs change in it, and `arms`: grids of values. Every
combination of an arm is a *setting*; a setting with one seed is a *cell*, one run.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, ValidationError, model_validator

from dapo_async import config as configs
from dapo_async.config import Config, Count, Positive, Section
from dapo_async.config_files import Tree, apply_override, problems, read_tree
from dapo_async.errors import ConfigError

Keys = dict[str, Any]
"""Dotted config key → value."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$"


class Arm(Section):
    """One grid."""

    name: Annotated[str, Field(pattern=NAME)]
    """Begins the names of its cells; letters, digits, `.`, `_` and `-`."""
    common: Keys = Field(default_factory=Keys)
    """What the runs of this arm change, over the study's `common`."""
    grid: dict[str, list[Any] | dict[str, Keys]]
    """Axis → its points, the reference first. A list holds values of the config key that the axis
    is named after. A mapping holds labelled points that set any keys together: `age: {"0":
    {weights.delay: 0, replay.max_staleness: 0}, …}`."""

    @model_validator(mode="after")
    def _rules(self) -> Arm:
        if not self.grid:
            raise ValueError(f"arm `{self.name}`: `grid` has no axis")
        for axis, points in self.grid.items():
            if len(points) < 2:
                raise ValueError(
                    f"arm `{self.name}`: the axis `{axis}` has {len(points)} point: an axis needs "
                    "two, else it changes nothing (a fixed key belongs into `common`)"
                )
            if len(set(labels(points))) < len(points):
                raise ValueError(f"arm `{self.name}`: the axis `{axis}` has one point twice")
        return self


class Study(Section):
    """An ablation study."""

    name: Annotated[str, Field(pattern=NAME)]
    """Names the folder of the results."""
    config: str
    """The config file of all runs, relative to the study's own file."""
    unset: list[str] = Field(default_factory=list[str])
    """Keys of that file to leave out, so that their defaults hold."""
    common: Keys = Field(default_factory=Keys)
    """Dotted key → value, set in every run."""
    arms: Annotated[list[Arm], Field(min_length=1)]
    """The grids."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Every setting runs once with each. The same seed means the same start and the same order of
    data in every setting, and settings are compared seed by seed."""
    toy: str | None = None
    """Folder of the toy task, `{seed}` in it standing for the seed: its data and its warm-started
    model are made there once (`make-toy`) and used by every run of that seed. Null: what the
    config says."""
    compare_at: list[Count] = Field(default_factory=list[Count])
    """Learner steps, besides the last, at which accuracies are compared; evaluated ones."""
    jobs: Count = 1
    """Runs at a time, simulations likewise."""
    deadline_s: Positive = 1800.0
    """Longest run of a cell, in real seconds; then it is ended and counts as failed."""
    max_cpu_s: Positive | None = None
    """CPU seconds that learner and workers of a cell may take; what took more is reported. Null:
    any number. Simulations have none."""

    @model_validator(mode="before")
    @classmethod
    def _grid_has_an_arm(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and "grid" in tree:
            raise ValueError(
                "`grid` belongs to an arm: did you mean `arms: [{name: any, grid: {…}}]`?"
            )
        return cast(Any, tree)

    @model_validator(mode="after")
    def _rules(self) -> Study:
        for what, found in (("seeds", self.seeds), ("arms", [arm.name for arm in self.arms])):
            if len(set(found)) != len(found):
                raise ValueError(f"`{what}: {found}` names one twice")
        if self.toy is not None and "{seed}" not in self.toy and len(self.seeds) > 1:
            raise ValueError(f"`toy: {self.toy}` must have {{seed}} in it: there are several")
        return self

    def toy_folder(self, seed: int) -> Path | None:
        """Where the warm start of a seed is."""
        return None if self.toy is None else Path(self.toy.replace("{seed}", str(seed)))


Point = tuple[tuple[str, str], ...]
"""(axis, label) of every axis of an arm: a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    name: str
    """Example: `controlled-age_4-action_none-lr_0.0008-seed2`."""
    arm: str
    point: Point
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.config.run.dir) / self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A study with all its cells."""

    study: Study
    out: Path
    cells: Sequence[Cell]
    """By seed first, so that a study that is cut short has whole seeds."""

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.study.arms if arm.name == name)


def load_plan(path: Path, out: Path | None = None, simulated: bool = False) -> Plan:
    """Read a study and resolve every cell of it.

    Args:
        out: folder of the results; default `runs/ablations/<name>`, or `<name>-simulated`.

    Raises:
        ConfigError: unreadable file, unknown key, broken rule, a cell whose configuration is
            refused, two cells that are the same run.
    """
    try:
        study = Study.model_validate(read_tree(path))
    except ValidationError as error:
        lines = [f"the study {path} is refused:", *problems(error, Study)]
        raise ConfigError("\n".join(lines)) from None
    if out is None:
        out = Path("runs") / "ablations" / (study.name + ("-simulated" if simulated else ""))
    base = path.parent / study.config
    cells = [
        _cell(study, arm, point, seed, base, out, simulated)
        for seed in study.seeds
        for arm in study.arms
        for point in points(arm)
    ]
    _refuse_equal(cells)
    _check_steps(study, cells, simulated)
    return Plan(study=study, out=out, cells=cells)


def points(arm: Arm) -> Iterator[Point]:
    """Every combination of an arm, the last axis fastest; the first is the reference."""
    axes = [[(axis, label) for label in labels(found)] for axis, found in arm.grid.items()]
    yield from itertools.product(*axes)


def labels(axis: list[Any] | dict[str, Keys]) -> list[str]:
    """What the points of an axis are called."""
    return [_text(value) for value in axis]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def keys_of(arm: Arm, point: Point) -> Keys:
    """What a setting changes, besides what is common."""
    keys: Keys = {}
    for axis, label in point:
        found = arm.grid[axis]
        if isinstance(found, dict):
            keys |= found[label]
        else:
            keys[axis] = found[labels(found).index(label)]
    return keys


def _cell(
    study: Study, arm: Arm, point: Point, seed: int, base: Path, out: Path, simulated: bool
) -> Cell:
    short = [f"{axis.rpartition('.')[2]}_{label}" for axis, label in point]
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([arm.name, *short, f"seed{seed}"]))
    tree = read_tree(base)
    for key in study.unset:
        _unset(tree, key, base)
    keys: Keys = {"run.name": name, "run.dir": str(out / "runs"), "run.seed": seed}
    keys["run.overwrite"] = True
    toy = study.toy_folder(seed)
    if toy is not None:
        keys |= {"model.path": str(toy / "model"), "data.train": str(toy / "train.jsonl")}
        keys["data.eval"] = str(toy / "eval.jsonl")
    chosen = {**study.common, **arm.common, **keys_of(arm, point)}
    for key in chosen.keys() & keys.keys():
        raise ConfigError(f"study `{study.name}`: `{key}` is set by the study itself; remove it")
    try:
        for key, value in {**chosen, **keys}.items():
            apply_override(tree, f"{key}={json.dumps(value)}")
        config = configs.validate(tree)
        if simulated:
            config = _without_evaluation(config)
    except TypeError as error:
        raise ConfigError(f"cell `{name}`: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"cell `{name}`: {error}") from None
    return Cell(name=name, arm=arm.name, point=point, seed=seed, config=config)


def _without_evaluation(config: Config) -> Config:
    """A simulation evaluates nothing, and its folder shall say so."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree.pop("eval", None)
    tree["data"].pop("eval", None)
    return configs.validate(tree)


def _unset(tree: Tree, key: str, base: Path) -> None:
    section, _, field = key.rpartition(".")
    node: Any = tree
    for part in section.split(".") if section else ():
        node = cast(Tree, node).get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or field not in node:
        raise ConfigError(f"`unset: {key}`: {base} doesn't set it")
    del cast(Tree, node)[field]


def _refuse_equal(cells: Sequence[Cell]) -> None:
    """Two cells that are the same run: an axis between them changes nothing."""
    known: dict[str, Cell] = {}
    names: set[str] = set()
    for cell in cells:
        if cell.name in names:
            raise ConfigError(f"two cells are called `{cell.name}`; rename an axis or a label")
        names.add(cell.name)
        text = identity(cell.config)
        twin = known.setdefault(text, cell)
        if twin is not cell:
            axes = [a for (a, x), (_, y) in zip(cell.point, twin.point, strict=False) if x != y]
            where = f": `{'`, `'.join(axes)}` changes nothing" if cell.arm == twin.arm else ""
            raise ConfigError(f"`{twin.name}` and `{cell.name}` are the same run{where}")


def _check_steps(study: Study, cells: Sequence[Cell], simulated: bool) -> None:
    for cell in cells if not simulated else ():
        steps, every = cell.config.trainer.steps, cell.config.eval.every
        delay = cell.config.weights.delay  # a version reaches the workers so many steps later
        for step in study.compare_at:
            if step + delay >= steps or not every or step % every:
                raise ConfigError(
                    f"`compare_at: {step}` must be an evaluated step before the last: cell "
                    f"`{cell.name}` has `trainer.steps: {steps}`, `eval.every: {every}` and "
                    f"`weights.delay: {delay}`"
                )


def identity(config: Config) -> str:
    """Equal for configs that ask for the same run, wherever it is kept."""
    tree: Mapping[str, Any] = config.model_dump(mode="json")
    run = {"seed": tree["run"]["seed"]}
    return json.dumps({**tree, "run": run}, sort_keys=True)
