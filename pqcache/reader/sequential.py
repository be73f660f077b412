"""Reads rows in the order of the files, for ``shuffle=False``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

from pqcache.reader.batch_layout import BatchLayout, GatheredBatch
from pqcache.reader.columns import ColumnForm, cut, join
from pqcache.reader.order.order import Order
from pqcache.reader.shuffle.scatter import Done, ReadContext, Rows


def joined(parts: Sequence[Rows], forms: Sequence[ColumnForm]) -> Rows:
    """Return the rows of all parts, one after the other."""
    return [join([part[i] for part in parts], form) for i, form in enumerate(forms)]


def in_sequence(
    source: ReadContext[Done], order: Order, batches: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, Done]]:
    """Yield unshuffled batches, finished: for each (number, batch) that rows ``batch * batch_size`` onwards.

    Row groups are decoded once for as long as the coming batches need them, ``source.ahead`` of them in advance.
    """
    coming: deque[tuple[int, list[tuple[int, int, int]]]] = deque()
    needed: Counter[int] = Counter()
    loading: dict[int, Future[Rows]] = {}
    wanted = iter(batches)
    more = True
    while True:
        while more and (len(needed) <= source.ahead + 1 or not coming) and len(coming) < 1000:
            try:
                number, batch = next(wanted)
            except StopIteration:
                more = False
                break
            start = batch * order.batch_size
            spans = order.span(start, min(start + order.batch_size, order.rows))
            runs = list(zip(*(part.tolist() for part in spans), strict=True))
            coming.append((number, runs))
            for group, _, _ in runs:
                needed[group] += 1
                if group not in loading:
                    loading[group] = source.threads.submit(source.load, group, 0, int(order.counts[group]))
        if not coming:
            return
        number, runs = coming.popleft()
        parts = [[cut(c, low, high) for c in loading[group].result()] for group, low, high in runs]
        for group, _, _ in runs:
            needed[group] -= 1
            if not needed[group]:
                del needed[group], loading[group]
        rows = sum(high - low for _, low, high in runs)
        columns = dict(enumerate(joined(parts, source.forms)))
        yield number, source.finish(GatheredBatch(rows, BatchLayout(()), [], columns))
