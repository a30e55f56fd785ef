"""The folder of one run: made once, locked by its process, holding everything the run leaves."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from dapo_async import config as configs
from dapo_async.config import Config
from dapo_async.errors import ConfigError
from dapo_async.metrics import read_jsonl

log = logging.getLogger("dapo_async")


class RunFolder:
    """`<run.dir>/<run.name>/`: config.yaml, metrics.jsonl, samples.jsonl, spans.jsonl,
    summary.json, report.png, tensorboard/, checkpoints/, checkpoint/.

    Args:
        resume: leave what is there until it is known what to do with it: `begin` or `go_on` comes
            next.

    Raises:
        ConfigError: another process uses it, it holds an earlier run and `run.overwrite` is off,
            files in it were left by no run, or it can't be written.
    """

    def __init__(self, config: Config, resume: bool = False) -> None:
        self._config = config
        self.path = Path(config.run.dir) / config.run.name
        self._lost_lines = 0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"the run folder {self.path} can't be made: {error}") from None
        try:
            # The lock goes with the process, so one that was killed leaves none behind.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise ConfigError(f"the run folder {self.path} is in use by {owner}") from None
        if resume:
            return
        try:
            self.begin(config.run.overwrite)
        except ConfigError:
            self.close()
            raise

    def begin(self, overwrite: bool) -> None:
        """Make it the folder of a new run. Raises ConfigError, as the constructor."""
        try:
            self._clear(overwrite)
            self._sign()
        except OSError as error:
            raise ConfigError(f"the run folder {self.path} can't be written: {error}") from None

    def go_on(self, step: int) -> None:
        """Make it the folder of a run that goes on after `step`: samples of later steps go.
        (metrics.jsonl is cut by who writes it.)

        Raises:
            ConfigError: it can't be written.
        """
        try:
            samples = self.path / "samples.jsonl"
            if samples.is_file():
                lines = samples.read_text(encoding="utf-8", errors="replace").splitlines()
                kept = [line for line in lines if 0 <= _step_of(line) <= step]
                aside = self.path / ".samples.tmp"
                aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
                aside.replace(samples)
            self._sign()
        except OSError as error:
            raise ConfigError(f"the run folder {self.path} can't be written: {error}") from None

    def progress(self) -> int:
        """The last step that its metrics tell of; 0 for none."""
        try:
            rows = read_jsonl(self.path / "metrics.jsonl")
        except OSError:
            return 0
        return max((row["step"] for row in rows), default=0)

    def _sign(self) -> None:
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()
        (self.path / "config.yaml").write_text(configs.dump(self._config), encoding="utf-8")

    def _refuse_foreign(self) -> None:
        """Before anything is touched: `run.overwrite` must never delete what no run has left."""
        names = {entry.name for entry in self.path.iterdir()}
        if names - {".lock"} and not {".lock", "config.yaml"} <= names:
            raise ConfigError(
                f"the folder {self.path} holds files that no run has left; choose another "
                "`run.dir` or `run.name`"
            )

    def _clear(self, overwrite: bool) -> None:
        old = [entry for entry in self.path.iterdir() if entry.name != ".lock"]
        # Last what tells the folder for a run's, in case this is interrupted.
        old.sort(key=lambda entry: entry.name == "config.yaml")
        if old and not overwrite:
            raise ConfigError(
                f"the run folder {self.path} holds an earlier run; choose another `run.name` or "
                "set `run.overwrite: true`"
            )
        for entry in old:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all."""
        aside = self.path / f".{name}.tmp"
        aside.write_text(json.dumps(content, indent=2, default=float) + "\n", encoding="utf-8")
        aside.replace(self.path / name)

    def append_json(self, name: str, content: dict[str, Any]) -> None:
        """Add a line to a file; one that can't be written is lost, and the run goes on."""
        line = json.dumps(content, ensure_ascii=False, default=float) + "\n"
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if self._lost_lines == 0:
                log.warning("%s can't be written: %s; the run goes on", self.path / name, error)
            self._lost_lines += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, with the owner's name not yet written
            self._lock.close()


def _step_of(line: str) -> int:
    """Of a line of samples.jsonl; -1 for a broken one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return -1
