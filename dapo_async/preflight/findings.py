"""What a check found: one record for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dapo_async.errors import ConfigError

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Example:
        Finding("fail", "disk", "runs has 3 GB free", "3 checkpoints of 91 GB are written",
                "free 270 GB or lower `checkpoint.keep_last`")
    """

    level: Level
    check: str
    """What was looked at, in a word or two."""
    found: str
    """What there is."""
    rule: str = ""
    """What there must be, and why."""
    change: str = ""
    """What to do about it."""

    def as_text(self) -> str:
        """For people, without a line break at the end."""
        lines = [f"{self.level:<5} {self.check}: {self.found}"]
        lines += [f"      rule: {self.rule}"] if self.rule else []
        lines += [f"      change: {self.change}"] if self.change else []
        return "\n".join(lines)

    @classmethod
    def from_error(cls, check: str, error: Exception, change: str = "") -> Finding:
        """What refused the run elsewhere, in its own words."""
        return cls("fail", check, str(error), change=change)


def fails(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "fail"]


def require(findings: Sequence[Finding]) -> None:
    """Raises:
    ConfigError: there are fails; holds them as `doctor` prints them.
    """
    bad = fails(findings)
    if bad:
        raise ConfigError("\n".join(["this can't work:", *(one.as_text() for one in bad)]))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """`{"ok": bool, "findings": [...]}` of plain values."""
    return {"ok": not fails(findings), "findings": [asdict(finding) for finding in findings]}


def size_text(size: float) -> str:
    """Bytes as text in two digits or whole units: 950 kB, 1.5 GB, 96 GB (powers of 1,000)."""
    unit = "GB" if abs(size) >= 9.95e8 else "MB" if abs(size) >= 9.95e5 else "kB"
    number = size / {"GB": 1e9, "MB": 1e6, "kB": 1e3}[unit]
    return f"{number:.0f} {unit}" if abs(number) >= 9.95 else f"{number:.2g} {unit}"
