"""Which start of the machine this is: what was written before the last one may be lost in part."""

from __future__ import annotations

from pathlib import Path

_LENGTH = 16


def boot_id() -> str:
    """Return 16 characters that differ after the next start of the machine; empty where the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    return text.strip().replace("-", "")[:_LENGTH]
