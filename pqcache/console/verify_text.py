"""Prints the report of ``verify``: what was checked, what differs from the source, and what was repaired."""

from __future__ import annotations

from pqcache.console.terminal import print_line
from pqcache.store.verify.command import VerifyReport
from pqcache.units import format_count, format_seconds, format_size

_SHOWN = 20  # files of a list


def print_verify(report: VerifyReport) -> None:
    """Print what was checked and what differs; damage was printed when it was found."""
    for name, reason in report.unread.items():
        print_line(f"not compared: column {name}: {reason}")
    for path in (report.changed or ())[:_SHOWN]:
        print_line(f"changed at the source: {path}")
    if len(report.changed or ()) > _SHOWN:
        print_line(f"changed at the source: … {len(report.changed or ()) - _SHOWN:,} more")
    for item in report.skipped:
        what = "its old version is kept" if item["kept"] else "left out"
        print_line(f"not as at the source: partition {item['partition']}: {what}: {item['reason']}")
    checked = "every page" if report.deep else "sizes, footers and index"
    held = f"{format_count(report.files, 'file')}, {format_count(report.rows, 'row')}, {format_size(report.bytes)}"
    text = f"{report.snapshot}: {checked} of {held} checked in {format_seconds(report.seconds)}"
    if report.deep and report.unrecorded:
        text += f"; {format_count(report.unrecorded, 'file')} without a recorded checksum"
    damaged = format_count(len({item.path for item in report.damage}), "damaged file")
    if report.repaired is not None:
        _print_repaired(report)
        text += f"; {damaged} repaired, {report.repaired} is current"
    print_line(f"{text}; {damaged if report.damage else 'no damage'}" if report.repaired is None else text)


def _print_repaired(report: VerifyReport) -> None:
    """Print which files were repaired, and how."""
    left = {item.path for item in report.left}
    paths = sorted({item.path for item in report.damage} - left)
    for path in paths[:_SHOWN]:
        print_line(f"repaired: {path}, {'built' if path.startswith('_pqcache/') else 'fetched'} again")
    if len(paths) > _SHOWN:
        print_line(f"repaired: … {len(paths) - _SHOWN:,} more")
