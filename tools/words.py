"""Lists words that the project does not use, where it used one: python tools/words.py [PATH...]

One thing has one name, and it is the field's: see CONTRIBUTING.md. Each retired word has its replacement here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

RETIRED = {  # the word with its forms: what to write
    "bring|brings|bringing|brought|bringer": "download, fetch",
    "hand|hands": "chunk, share",
    "card|cards": "chunk",
    "room|rooms": "space, budget, module",
    "deal|deals|dealt|dealing": "scatter, share, divide",
    "guess|guesses|guessed|guessing": "estimate",
    "told": "say, report",
    "grave": "trash",
    "goes round|go round|going round": "is reused",
    "sparing|sparingly": "low_memory",
    "stay|stays|stayed|staying": "keep, remain",
    "sliced": "split",
}
_PATTERN = re.compile(rf"(?<![A-Za-z])({'|'.join(RETIRED)})(?![A-Za-z])", re.IGNORECASE)
_SKIPPED = ("benchmarks/HISTORY.md", "CHANGELOG.md", "LICENSE", "tools/words.py", "constraints.txt")
_MADE = [f"{ROOT}/{name}" for name in ("build", "dist")]


def files_below(paths: list[str]) -> Iterator[Path]:
    """Yield the files at or below ``paths`` but those that are made: hidden, built or installed."""
    for path in map(ROOT.joinpath, paths):
        if path.is_file():
            yield path
        for directory, below, names in os.walk(path):
            below[:] = sorted(
                name
                for name in below
                if not name.startswith((".", "__pycache__")) and f"{directory}/{name}" not in _MADE
            )
            yield from (Path(directory, name) for name in sorted(names))


def found(paths: list[str]) -> list[str]:
    """Return ``file:line: word: text`` for each use of a retired word."""
    lines = []
    for path in files_below(paths):
        name = os.path.relpath(path, ROOT)
        if name in _SKIPPED or path.suffix not in (".py", ".md", ".toml", ".mdoc", ".1", ".5", ".sh"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in _PATTERN.finditer(line):
                lines.append(f"{name}:{number}: {match[0]}: {line.strip()}")
    return lines


if __name__ == "__main__":
    lines = found(sys.argv[1:] or ["."])
    print("\n".join(lines))
    sys.exit(bool(lines))
