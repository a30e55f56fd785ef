"""One simulated cell, a process that `runner` starts:
`python -m dapo_async.studies.ablation.simulated_cell CONFIG PROFILE`. It leaves what a real run
would, config, metrics and summary, and the profile.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dapo_async import config as configs
from dapo_async.config import Config
from dapo_async.errors import ConfigError, RunError
from dapo_async.run_folder import RunFolder
from dapo_async.studies.ablation.out_folder import PROFILE_FILE
from dapo_async.studies.profile import Profile, dump_profile, load_profile
from dapo_async.studies.simulator import simulate


def main() -> None:
    """Exit codes and messages are those of `dapo-async`."""
    config, profile = (Path(argument) for argument in sys.argv[1:])
    try:
        run(configs.load(config), load_profile(profile))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def run(config: Config, profile: Profile) -> None:
    """Simulate into the run's folder.

    Raises:
        RunError: the run would end badly.
        ConfigError: its folder can't be written or is in use.
    """
    folder = RunFolder(config)
    try:
        # Before anything else, so that it never passes for a trained run.
        (folder.path / PROFILE_FILE).write_text(dump_profile(profile), encoding="utf-8")
        found = simulate(config, profile)
        for row in found.metrics:
            folder.append_json("metrics.jsonl", row)
        folder.write_json("summary.json", found.summary)
    except OSError as error:
        raise ConfigError(f"the run folder {folder.path} can't be written: {error}") from None
    finally:
        folder.close()


if __name__ == "__main__":
    main()
