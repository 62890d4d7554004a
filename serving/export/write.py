"""Write what a serving engine reads."""

from pathlib import Path
from typing import Any

from runtime.files import file_hash
from runtime.text import printable
from serving.export.known import Export

MARKER = "export.json"


def facts(name: str, made: Export, folder: Path, command: str) -> dict[str, Any]:
    return {
        "serving": name,
        "checked_for": made.checked,
        "files": {file: file_hash(folder / file) for file in made.files},
        "launch": made.launch,
        "left_out": made.left_out,
        "command": command,
    }


def answer(name: str, made: Export) -> str:
    """Say how to start the engine, and how much could not be carried over."""
    started = "; ".join(map(printable, made.launch)) or "as before"
    lost = f"{len(made.left_out)} things were not carried over" if made.left_out else "Nothing lost"
    return f"Start {name} (checked for {made.checked}): {started}\n{lost}; README.md says more."


def page(name: str, made: Export, command: str) -> str:
    lines = [f"- {printable(line)}." for line in made.left_out] or [
        "- Everything was carried over."
    ]
    launch = "\n".join(f"    {printable(line)}" for line in made.launch) or "    nothing"
    return "\n\n".join(
        [
            f"# Files for {name}, checked for {made.checked}",
            f"Files: {', '.join(made.files)}.",
            f"To start with:\n\n{launch}",
            "Not carried over, or said otherwise:\n\n" + "\n".join(lines),
            f"Made with: `{printable(command)}`",
        ]
    )
