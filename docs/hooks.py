"""Makes the page of all settings from their one description, while the site is built."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- settings -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, settings()) if MARK in markdown else markdown


def settings() -> str:
    sys.path[:0] = [str(ROOT)]
    from runtime.cli import modules
    from runtime.settings.composed import composed, page

    conf = ROOT / "conf"
    programs = {
        f"{module.replace('.', '/')}.py{f' what={program.what}' if program.what else ''}": program
        for module in modules().values()
        for program in import_module(module).main.programs
    }
    return page(
        {
            name: (program.settings, composed(conf, program.config, [], more=None))
            for name, program in programs.items()
        },
        conf,
    )
