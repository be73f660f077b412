"""The options of ``pqcache rows``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console.help import OUTPUT, SELECTION, VIEW

State = Annotated[
    Path,
    typer.Option(
        "--state",
        metavar="FILE",
        readable=False,
        help="A JSON file with a state that the training saved: json.dumps(loader.state_dict()).",
        rich_help_panel=SELECTION,
    ),
]
BatchNumber = Annotated[
    int,
    typer.Option(
        "--batch",
        metavar="N",
        help="The number of the batch in its epoch, counted over all ranks: batch.index.",
        rich_help_panel=SELECTION,
    ),
]
Epoch = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="The epoch of the batch. Default: that of the state.", rich_help_panel=SELECTION
    ),
]
SplitText = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="KEY:LOW:HIGH",
        help="The split of the training, like user:0.0:0.9; :SALT may follow. No KEY for single rows.",
        rich_help_panel=SELECTION,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column of weights of the training.", rich_help_panel=SELECTION),
]
Balance = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column that the training balances.", rich_help_panel=SELECTION),
]
SampleShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="The share of the rows that the training samples: its sample=.", rich_help_panel=SELECTION
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", help="The rows that the training takes at most: its limit=.", rich_help_panel=SELECTION),
]
PackText = Annotated[
    str | None,
    typer.Option(
        "--pack",
        metavar="COLUMN:LENGTH",
        help="How the training packs, like tokens:4096; fields follow the column, as in tokens,labels:4096, and "
        ":best_fit the length.",
        rich_help_panel=SELECTION,
    ),
]
Values = Annotated[bool, typer.Option("--sample", help="Read the rows, and show their values.", rich_help_panel=VIEW)]
ValueColumns = Annotated[
    str | None,
    typer.Option("--columns", metavar="A,B,...", help="Only the values of these columns.", rich_help_panel=VIEW),
]
RowsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object per row.", rich_help_panel=OUTPUT)]
