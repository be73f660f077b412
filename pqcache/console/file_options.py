"""The options that say which files and partitions of a source are taken; sync remembers its own."""

from __future__ import annotations

from typing import Annotated

import typer

from pqcache.console.help import SELECTION

Newest = Annotated[
    str | None,
    typer.Option(
        metavar="N|SIZE|free",
        help="* Fetch only the newest partitions that fit, by their values: N of them, SIZE bytes at the source, or "
        "what the disk of the cache has free. Older ones that are left out do not count as deleted. '' fetches all.",
        rich_help_panel=SELECTION,
    ),
]
PartitionTypes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=TYPE,...",
        help="* Types of partition columns: int, float, date, timestamp or text. '' infers them again. Default: int if "
        "all values of the first sync are integers without leading zeros, else text; kept from then on.",
        rich_help_panel=SELECTION,
    ),
]
AsFiles = Annotated[
    bool | None,
    typer.Option(
        "--as-files/--no-as-files",
        help="* Take the Parquet files of a Delta, Iceberg, Hudi or transactional Hive table, of a Spark stream, or of "
        "several tables, as they are, also those that a table does not count. Default: such a source is refused.",
        rich_help_panel=SELECTION,
    ),
]
AllFiles = Annotated[
    bool | None,
    typer.Option(
        "--all-files/--no-all-files",
        help="* Take every file that is not hidden, whatever its name. Default: those that are Parquet by their suffix "
        "or, without a suffix, by their content.",
        rich_help_panel=SELECTION,
    ),
]
Version = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="* Take this version of a Delta table, or the snapshot of an Iceberg table with this ID; '' for the "
        "newest again. Default: the newest.",
        rich_help_panel=SELECTION,
    ),
]
AsOf = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="* Take the version that a Delta or Iceberg table had at this time, like 2026-11-01T04:00:00Z; '' for the "
        "newest again.",
        rich_help_panel=SELECTION,
    ),
]
OnceAsFiles = Annotated[
    bool,
    typer.Option(
        "--as-files",
        help="Take the Parquet files of a Delta, Iceberg, Hudi or transactional Hive table, of a Spark stream, or of "
        "several tables, as they are.",
        rich_help_panel=SELECTION,
    ),
]
OnceAllFiles = Annotated[
    bool,
    typer.Option(
        "--all-files", help="Take every file that is not hidden, whatever its name.", rich_help_panel=SELECTION
    ),
]
