# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The journey as one self-contained page."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_tools.reports._plot import Plot, svg
from mcore_tools.whole_file import write_whole

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e3e6ea }
td:last-child { font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem } svg { width: 100%; height: auto }
pre { background: #f5f6f8; padding: .8rem; overflow-x: auto; border-radius: 4px }
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Measured facts, and text the model wrote."""

    title: str
    facts: Sequence[tuple[str, str]]
    text: str = ""


def write_report(path: Path, title: str, sections: Sequence[Section], plots: Sequence[Plot], refresh_s: int | None = None) -> None:
    """Write the page, whole or not at all; it needs no network and no other file.

    Args:
        path: of the page.
        title: its heading.
        sections: below the plots.
        plots: on top.
        refresh_s: seconds after which a browser reads the page again; None for a page that stays as it is.
    """
    again = f"<meta http-equiv='refresh' content='{refresh_s}'>" if refresh_s else ""
    parts = [f"<!doctype html><html lang='en'><meta charset='utf-8'>{again}<title>{html.escape(title)}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{html.escape(title)}</h1><div class='plots'>")
    parts += [f"<figure>{svg(plot)}</figure>" for plot in plots]
    parts.append("</div>")
    for section in sections:
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in section.facts)
        text = f"<pre>{html.escape(section.text)}</pre>" if section.text else ""
        parts.append(f"<h2>{html.escape(section.title)}</h2><table>{rows}</table>{text}")
    write_whole(path, "".join(parts))
