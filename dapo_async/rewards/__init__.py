"""Reward functions: the protocol, the registry, and the rule that makes any result a `Reward`.

A reward function is called as `function(prompt, response, truncated, **args)` and returns a
number, a bool, a mapping `{"score": …, "acc": …, …}` or a `Reward`. It is named in the config by
its registered name or as `module:function`. Whatever it does, its caller gets a `Reward`: a
function that raises or returns nonsense yields a status, never a score that could enter a mean.

This module is imported by every reward process and stays light.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import inf, isfinite  # not the module: `dapo_async.rewards.math` shadows it here
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from dapo_async.errors import ConfigError
from dapo_async.types import Extra, Prompt, Reward, RewardStatus

RewardResult = Reward | float | bool | Mapping[str, Any]


class RewardFunction(Protocol):
    """Judges one response. Must be a plain function of its arguments (a random one is allowed:
    rewards are recorded and never computed again).
    """

    def __call__(
        self, prompt: Prompt, response: str, truncated: bool, **args: Any
    ) -> RewardResult: ...


Isolation = Literal["none", "process", "fresh"]
"""none: may run in the worker itself. process: needs `reward.processes` ≥ 1. fresh: also, every
judgement gets a process state that no earlier response has touched."""

GoldCheck = Callable[[Prompt], None]
"""Raises ValueError if no response to this prompt could ever be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward function with what its caller must know about it."""

    name: str
    function: Callable[..., RewardResult]
    isolation: Isolation = "none"
    check_gold: GoldCheck | None = None
    warm_up: Callable[[], None] | None = None
    """Run once by every reward process when it starts: imports that must not cost time later."""


_REGISTRY: dict[str, RewardSpec] = {}
_BUILT_IN = "dapo_async.rewards.math"
_F = TypeVar("_F", bound=Callable[..., RewardResult])


def register(
    name: str,
    *,
    isolation: Isolation = "none",
    check_gold: GoldCheck | None = None,
    warm_up: Callable[[], None] | None = None,
) -> Callable[[_F], _F]:
    """Decorator: make a function known under `name`.

    Raises:
        ValueError: another function has the name.
    """

    def add(function: _F) -> _F:
        known = _REGISTRY.get(name)
        if known is not None and known.function.__qualname__ != function.__qualname__:
            raise ValueError(f"two reward functions are called {name!r}")
        _REGISTRY[name] = RewardSpec(
            name=name,
            function=function,
            isolation=isolation,
            check_gold=check_gold,
            warm_up=warm_up,
        )
        return function

    return add


def find(name: str, args: Mapping[str, Any] | None = None) -> RewardSpec:
    """The reward function called `name`, a registered name or `module:function`.

    Raises:
        ConfigError: there is none, it can't be imported, or it doesn't take `args`.
    """
    import_module(_BUILT_IN)
    spec = _imported(name) if ":" in name else _REGISTRY.get(name)
    if spec is None:
        known = ", ".join(sorted(_REGISTRY))
        raise ConfigError(
            f"`reward.function: {name}` is unknown; use module:function or one of: {known}"
        )
    if inspect.iscoroutinefunction(spec.function):
        raise ConfigError(f"`reward.function: {name}` must not be `async def`")
    try:
        inspect.signature(spec.function).bind(None, "", False, **(args or {}))
    except TypeError as error:
        raise ConfigError(
            f"`reward.function: {name}` can't be called as (prompt, response, truncated, "
            f"**reward.args) with `reward.args: {dict(args or {})}`: {error}"
        ) from None
    except ValueError:
        pass  # a built-in without a signature: the first call will tell
    return spec


def resolve(name: str) -> Callable[..., RewardResult]:
    """The function behind a name; raises ConfigError like `find`."""
    return find(name).function


def _imported(name: str) -> RewardSpec:
    module_name, _, attribute = name.partition(":")
    try:
        function: Any = getattr(import_module(module_name), attribute)
    except Exception as error:  # noqa: BLE001
        # The module is the user's: importing it may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"`reward.function: {name}` can't be imported: {reason}") from None
    if not callable(function):
        raise ConfigError(f"`reward.function: {name}` is not callable")
    for spec in _REGISTRY.values():
        if spec.function is function:
            return spec
    return RewardSpec(name=name, function=cast(Callable[..., RewardResult], function))


# ---- results -----------------------------------------------------------------------------------


class Judged(NamedTuple):
    """A reward, and for a failure the reason in words (empty otherwise)."""

    reward: Reward
    detail: str = ""


def failed(status: RewardStatus) -> Reward:
    """The reward of a failed judgement. Its zeros are placeholders and enter no mean."""
    return Reward(score=0.0, acc=0.0, status=status)


def judge(
    spec: RewardSpec,
    args: Mapping[str, Any],
    prompt: Prompt,
    response: str,
    truncated: bool,
    low: float,
    high: float,
) -> Judged:
    """Call a reward function; whatever it raises or returns becomes a `Judged`."""
    try:
        value = spec.function(prompt, response, truncated, **args)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # Any failure of user code is an error of this one judgement; SystemExit too, or a
        # function that calls exit() would end the worker.
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return Judged(failed("error"), detail[:1000])
    return check(value, low, high)


def normalise(value: object, low: float = -1e6, high: float = 1e6) -> Reward:
    """Any result of a reward function as a `Reward` with finite Python floats.

    A bool or finite number (numpy's too) is the score, and cut to [0, 1] the acc. A mapping needs
    `score`, may have `acc` and `status`, and its other entries become `extra`. Anything else (NaN,
    None, text, a list), and a score outside [low, high] or acc outside [0, 1], has the status
    `invalid`.
    """
    return check(value, low, high).reward


def check(value: object, low: float, high: float) -> Judged:
    """`normalise` with the reason why a value is invalid."""
    try:
        return Judged(_reward(value, low, high))
    except _InvalidReward as why:
        return Judged(failed("invalid"), str(why)[:1000])


class _InvalidReward(Exception):
    pass


def _reward(value: object, low: float, high: float) -> Reward:
    status: object = "ok"
    acc: object = None
    extra: Mapping[Any, Any] = {}
    score: object = value
    if isinstance(value, Reward):
        score, acc, status, extra = value.score, value.acc, value.status, value.extra
    elif isinstance(value, Mapping):
        fields = dict(cast(Mapping[Any, Any], value))
        if "score" not in fields:
            raise _InvalidReward(f"a mapping without `score`: {_short(fields)}")
        score = fields.pop("score")
        acc = fields.pop("acc", None)
        status = fields.pop("status", "ok")
        extra = fields
    if status not in ("ok", "timeout", "error", "invalid"):
        raise _InvalidReward(f"status {_short(status)}")
    number = _number("score", score)
    if not low <= number <= high:
        raise _InvalidReward(f"score {number} is outside [{low:g}, {high:g}]")
    outcome = min(1.0, max(0.0, number)) if acc is None else _number("acc", acc)
    if not 0 <= outcome <= 1:
        raise _InvalidReward(f"acc {outcome} is outside [0, 1]")
    if status != "ok":
        return failed(status)
    return Reward(score=number, acc=outcome, extra=_extra(extra))


def _number(name: str, value: object) -> float:
    value = _unwrapped(value)
    if not isinstance(value, (bool, int, float)):
        raise _InvalidReward(f"{name} must be a number or bool, not {_short(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = inf
    if not isfinite(number):
        raise _InvalidReward(f"{name} must be finite, not {_short(value)}")
    return number


def _unwrapped(value: object) -> object:
    """A numpy scalar as its Python value; anything else as it is."""
    return cast(object, value.item()) if isinstance(value, np.generic) else value


def _extra(extra: Mapping[Any, Any]) -> Extra:
    plain: dict[str, Any] = {}
    for key, value in extra.items():
        if not isinstance(key, str):
            raise _InvalidReward(f"extra: the key {_short(key)} is not text")
        plain[_clean(key)] = _plain(key, value, 0)
    return plain


def _plain(key: str, value: object, depth: int) -> Any:
    value = _unwrapped(value)
    match value:
        case None | bool():
            return value
        case str():
            return _clean(value)
        case int() | float():
            _number(f"extra `{key}`", value)
            return value if -(2**63) <= value < 2**63 else float(value)
        case list() | tuple() if depth < 8:
            return [_plain(key, item, depth + 1) for item in cast(list[Any], value)]
        case _:
            raise _InvalidReward(f"extra `{key}` must be JSON-like, not {_short(value)}")


def _clean(text: str) -> str:
    """Lone surrogates become U+FFFD: they are no valid text and can't be stored."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _short(value: object) -> str:
    try:
        return f"{value!r:.80}" if isinstance(value, (str, int, float)) else repr(value)[:80]
    except Exception as error:  # noqa: BLE001
        # repr of a user's object, or of an integer of thousands of digits, may raise anything.
        return f"<{type(value).__name__}, repr failed: {type(error).__name__}>"
