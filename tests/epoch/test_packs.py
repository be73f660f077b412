"""Several rows as one sample: sequences, and documents that are packed, against the rows and tokens of the files."""

from __future__ import annotations

import itertools
from ast import literal_eval
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from pqcache import Pack, Sequence, TokenBatches
from pqcache.torch import ParquetDataset
from tests.epoch.cases import values
from tests.epoch.forms import Row, bare, values_for
from tests.epoch.reading import Reader, differences
from tests.epoch.tables import INSIDE, PLACE, Source
from tests.reader.selection.test_sequences import brute_force

DATASET, ARROW, WORKERS = Reader(nulls="none"), Reader("Cache.batches", nulls="none"), Reader("Loader", 2, "none")
STEPS: dict[str, Any] = {"weight": -1, "list of string": [0, 2], "label": 1}
SPECS: list[tuple[Sequence, dict[str, Any]]] = [
    (Sequence(3, order_by="ts", max_gap=1, columns_at=STEPS), {}),
    (Sequence(2, order_by="weight", group_by=("user", "hour"), stride=2), {"filters": "label > 0"}),
    (Sequence(4, order_by="id", group_by="user", stride=4), {"shuffle": False}),
]
COLUMNS = ["id", "tensor", "list", "list of string", "dictionary", "weight", "label", "user", "day"]


def sequences(source: Source, spec: Sequence, is_kept: Any) -> list[list[int]]:
    """Return the rows of each sequence by their numbers, in the order in which they are without shuffling."""
    rows, found = values(source, spec.order_by, *spec.groups, "label"), []
    for group in source.groups:
        of_group = [{**rows[number], "id": number, "kept": is_kept(rows[number])} for number in group]
        found += brute_force(of_group, spec, max(1, len(of_group)))
    return found


@pytest.mark.parametrize(
    ("number", "reader"),
    [(0, DATASET), (0, ARROW), (1, WORKERS), (1, ARROW), (2, DATASET)],
    ids=["by time", "by time, arrow", "grouped, workers", "grouped, arrow", "in order"],
)
def test_sequences(narrow: Source, kinds: Source, number: int, reader: Reader) -> None:
    (spec, options), source, names = SPECS[number], narrow, COLUMNS
    if number == 0:  # of every kind without nulls
        source = kinds
        names = [n for n in kinds.rows.column_names if not kinds.rows[n].null_count and n not in INSIDE]
    is_arrow = reader.way == "Cache.batches"
    columns = [bare(source.rows[n]).to_pylist() if is_arrow else values_for(source.rows[n], n, {}) for n in names]
    expected: list[Row] = []
    for numbers in sequences(source, spec, lambda row: "filters" not in options or row["label"] > 0):
        row = []
        for name, column in zip(names, columns, strict=True):
            steps = [column[numbers[step]] for step in spec.steps(name)]
            several = steps if is_arrow else _together(steps)
            row.append(repr(several if spec.axis(name) is not None else steps[0]))
        expected.append(tuple(row))
    assert len(expected) > 20
    batches, _ = reader.read(source, names, sequence=spec, batch_size=8, **options)
    found = [row for batch in batches for row in batch.rows]
    assert not differences(found, expected)
    if not options.get("shuffle", True) and not reader.workers:
        assert found == expected


def _together(steps: list[Any]) -> Any:
    """Structs of a sequence as tensors have them: a dict of what each field has at all steps."""
    if not isinstance(steps[0], dict):
        return steps
    return {name: _together([step[name] for step in steps]) for name in steps[0]}


LENGTH = 24


def check_packed(source: Source, rows: list[Row], strategy: str) -> None:
    """Check sequences of tokens, marks, and what tells documents apart: each token once, beside its mark."""
    ids = source.rows["id"].to_pylist()
    documents = dict(zip(ids, source.rows["tokens"].to_pylist(), strict=True))
    marks = dict(zip(ids, source.rows["marks"].to_pylist(), strict=True))
    seen: Counter[int] = Counter()
    for tokens, mark, numbers, places in (map(literal_eval, row) for row in rows):
        assert len(tokens) == len(mark) == len(numbers) == len(places) == LENGTH
        starts = [at for at, place in enumerate(places) if place == 0]
        assert starts[0] == 0
        for number, (begin, end) in enumerate(itertools.pairwise([*starts, LENGTH]), 1):
            piece = tokens[begin:end]
            assert places[begin:end] == list(range(end - begin))
            if numbers[begin] == 0:  # padding, which is the end
                assert (end, set(piece), set(mark[begin:end])) == (LENGTH, {-1}, {-2})
                assert set(numbers[begin:end]) == {0}
                continue
            assert set(numbers[begin:end]) == {number}
            document, at = divmod(piece[0], PLACE)
            assert piece == documents[document][at : at + len(piece)]
            assert mark[begin:end] == marks[document][at : at + len(piece)]
            if strategy == "best_fit":
                assert at % LENGTH == 0
                assert len(piece) == min(LENGTH, len(documents[document]) - at)
            seen.update(piece)
    assert set(seen.values()) == {1}
    assert seen.keys() == {token for document in documents.values() for token in document}


@pytest.mark.parametrize(
    ("strategy", "reader"),
    [("concat", DATASET), ("concat", ARROW), ("best_fit", DATASET), ("best_fit", WORKERS)],
    ids=str,
)
def test_packed_documents(narrow: Source, strategy: Any, reader: Reader) -> None:
    pack = Pack(
        "tokens",
        LENGTH,
        strategy=strategy,
        fields=["marks"],
        padding={"tokens": -1, "marks": -2},
        ids=["document_ids", "position_ids"],
    )
    orders = []
    for epoch in range(1 if reader.workers else 2):
        batches, _ = reader.read(narrow, None, epoch=epoch, pack=pack, batch_size=3)
        assert {len(batch.rows) for batch in batches[:-1]} == {3}
        rows = [row for batch in batches for row in batch.rows]
        check_packed(narrow, rows, strategy)
        if strategy == "concat":
            tokens = [sum(len(narrow.rows["tokens"][number]) for number in group) for group in narrow.groups]
            assert len(rows) == sum(-(-count // LENGTH) for count in tokens)
        orders.append(rows)
    assert len(orders) == 1 or orders[0] != orders[1]


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
def test_ends_of_packed_documents(narrow: Source, strategy: Any) -> None:
    for batch in ParquetDataset(narrow.path, pack=Pack("tokens", LENGTH, strategy=strategy), batch_size=5):
        ends = batch["cu_seqlens"]
        assert ends.dtype == batch["position_ids"].dtype == batch["document_ids"].dtype == torch.int32
        starts = np.flatnonzero(batch["position_ids"].reshape(-1).numpy() == 0)
        assert ends.tolist() == [*starts, batch["tokens"].numel()]
        assert batch["tokens"].dtype == torch.int32


@pytest.mark.parametrize("reader", [Reader(), Reader("Cache.batches"), Reader("Loader", 2, "mask")], ids=str)
def test_batches_by_tokens(narrow: Source, reader: Reader) -> None:
    columns = reader.columns(narrow, None)
    pack = TokenBatches("tokens", tokens_per_batch=60, most_rows=9)
    batches, _ = reader.read(narrow, columns, pack=pack)
    assert not differences([row for batch in batches for row in batch.rows], reader.expected(narrow, columns))
    group_of = {number: at for at, group in enumerate(narrow.groups) for number in group}
    numbers = {repr(id): number for number, id in enumerate(narrow.rows["id"].to_pylist())}
    lengths = narrow.rows["tokens"].to_pylist()
    for batch in batches:
        of_batch = [numbers[row[columns.index("id")]] for row in batch.rows]
        assert len({group_of[number] for number in of_batch}) == 1
        assert len(of_batch) * max(len(lengths[number]) for number in of_batch) <= 60
        assert len(of_batch) <= 9
