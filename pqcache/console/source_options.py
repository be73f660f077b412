"""The options of sync that say what to do where the source is not what it was."""

from __future__ import annotations

from typing import Annotated

import typer

from pqcache.console.help import SAFETY

SkipBad = Annotated[
    bool | None,
    typer.Option(
        "--skip-bad/--no-skip-bad",
        help="* Keep the old version of a partition whose new files are damaged, unreadable or have other types, and "
        "publish the rest, with exit code 5. Default: nothing is published then.",
        rich_help_panel=SAFETY,
    ),
]
TimeUnits = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN=UNIT,...",
        help="* Let the times of a column be in s, ms, us or ns, if all of them fit. '' for the unit that they have "
        "had. Default: the finest of the first night, and files in a finer unit are refused.",
        rich_help_panel=SAFETY,
    ),
]
IgnoreCase = Annotated[
    bool | None,
    typer.Option(
        "--ignore-case/--no-ignore-case",
        help="* Take columns, fields of structs and partition keys whose names differ only in case in different files "
        "as one, under the first spelling. Default: they clash.",
        rich_help_panel=SAFETY,
    ),
]
NewSource = Annotated[
    bool,
    typer.Option(
        "--new-source",
        help="Make the cache a copy of another source than before, as when a table has moved. Default: another source "
        "is refused.",
        rich_help_panel=SAFETY,
    ),
]
