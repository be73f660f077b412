"""Ways to damage a file that is read-only."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit in place; a negative offset counts from the end. Doing it twice mends the file."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset, 0 if offset >= 0 else 2)
        position = file.tell()
        byte = file.read(1)[0] ^ (1 << bit)
        file.seek(position)
        file.write(bytes([byte]))
    path.chmod(0o444)


def truncate(path: Path, size: int) -> None:
    """Cut a file off."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(size)
    path.chmod(0o444)
