"""Reads rows in the order of the files, for ``shuffle=False``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

from pqcache.reader.columns.batch_layout import BatchLayout, GatheredBatches
from pqcache.reader.columns.column_data import cut, join
from pqcache.reader.columns.column_forms import ColumnForm
from pqcache.reader.meter import GATHER
from pqcache.reader.order.epoch_order import Order
from pqcache.reader.shuffle.scatter import Done, ReadContext, Rows

_MOST_BATCHES = 1000  # planned at a time


def in_file_order(
    context: ReadContext[Done], order: Order, batches: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, Done]]:
    """Yield (number, finished batch) for each (number, batch): rows ``batch * batch_size`` onwards.

    Row groups are decoded once and kept for as long as the coming batches need them, ``context.ahead`` of them in
    advance.
    """
    coming: deque[tuple[int, list[tuple[int, int, int]]]] = deque()
    needed: Counter[int] = Counter()
    loading: dict[int, Future[Rows]] = {}
    wanted = iter(batches)
    more = True
    while True:
        while more and (len(needed) <= context.ahead + 1 or not coming) and len(coming) < _MOST_BATCHES:
            try:
                number, batch = next(wanted)
            except StopIteration:
                more = False
                break
            start = batch * order.batch_size
            spans = order.spans(start, min(start + order.batch_size, order.rows))
            runs = list(zip(*(part.tolist() for part in spans), strict=True))
            coming.append((number, runs))
            for row_group, _, _ in runs:
                needed[row_group] += 1
                if row_group not in loading:
                    rows = int(order.counts[row_group])
                    loading[row_group] = context.submit_read(row_group, context.load, row_group, 0, rows)
        if not coming:
            return
        number, runs = coming.popleft()
        loaded = {group: context.result(loading[group]) for group, _, _ in runs}
        with context.meter.timed(GATHER):
            parts = [[cut(column, low, high) for column in loaded.pop(group)] for group, low, high in runs]
            rows = sum(high - low for _, low, high in runs)
            columns = dict(enumerate(_joined(parts, context.forms)))
            (finished,) = context.finish(GatheredBatches((rows,), BatchLayout(()), [], [columns]))
        for row_group, _, _ in runs:
            needed[row_group] -= 1
            if not needed[row_group]:
                del needed[row_group], loading[row_group]
        yield number, finished


def _joined(parts: Sequence[Rows], forms: Sequence[ColumnForm]) -> Rows:
    """Return the rows of all parts, one after the other."""
    return [join([part[i] for part in parts], form) for i, form in enumerate(forms)]
