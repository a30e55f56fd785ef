"""The frame of every HTML page: one file that needs no network and runs no script. Plots are SVG
images inside it, and everything that comes from a run is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from dapo_async.studies.figures import as_svg

HERE = Path(__file__).parent


class Picture(NamedTuple):
    """An image inside a page."""

    uri: str
    text: str


def picture(figure: Figure, text: str) -> Picture:
    """A figure as an image, with what it shows in words."""
    encoded = base64.b64encode(as_svg(figure)).decode()
    return Picture(f"data:image/svg+xml;base64,{encoded}", text)


def render(template: str, **content: Any) -> str:
    """The text of a page.

    Args:
        template: a file beside this one that extends `page.html.jinja`.
        content: what it names; `title` and `data` always.
    """
    style = (HERE / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(
        style=Markup(style),  # a file of ours
        style_hash=f"sha256-{digest}",
        **content,
    )
