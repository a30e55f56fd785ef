"""The shipped cluster files with every placeholder filled in, for tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "configs" / "cluster"
PROVIDERS = ("aws", "gcp", "azure", "on_prem")
FILLED = {
    "YOUR_LEARNER_IP": "10.0.0.2",
    "YOUR_ROLLOUT_IP": "10.0.0.3",
    "YOUR_HEAD_IP": "10.0.0.1",
    "YOUR_SUBNETWORK": "projects/p/regions/r/subnetworks/runs",
}
"""Others become the lower-case of themselves."""


def filled(name: str) -> str:
    """The text of a shipped file, ready to be used."""
    text = (CLUSTERS / f"{name}.yaml").read_text(encoding="utf-8")
    return re.sub(
        r"YOUR_[A-Z_]*[A-Z]", lambda hit: FILLED.get(hit[0], hit[0].lower().replace("_", "-")), text
    )
