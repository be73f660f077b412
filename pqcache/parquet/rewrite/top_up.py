"""What guessing has left of a row group beside columns with a dictionary, filled with further rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from pqcache.parquet.binary_views import without_views
from pqcache.parquet.rewrite.concat_chunks import Chunk, Part
from pqcache.parquet.rewrite.extend_dictionary import extended, is_text_like, may_be_mixed, with_dictionary
from pqcache.parquet.rewrite.row_group_builder import MAX_ROWS, PAGE_HEADER, Encoded, Encoder, Group, Slice
from pqcache.parquet.rewrite.row_queue import Pending
from pqcache.parquet.rewrite.source_reader import Piece
from pqcache.parquet.sizes import Floats

_WORTH_A_TAIL, _MARGIN, _MAX_TAILS = 0.008, 0.1, 2  # of a row group: what is left


def with_tail(
    group: Group,
    whole: Encoded,
    encoder: Encoder,
    pending: Pending,
    k: Floats,
    limit: float,
    max_bytes: int,
) -> tuple[Encoded, list[Slice]]:
    """Fill what ``group`` leaves of ``limit`` bytes; return ``whole`` with longer dictionaries, and the rows added.

    ``whole`` are its columns with a dictionary, ``k`` is what rows are guessed to take, and at most ``max_bytes``
    decoded ones are held.
    """
    found, most = list[Slice](), sys.maxsize
    held, rows = group.held, group.rows
    headers = 2 * PAGE_HEADER * len(encoder.form.tops)
    room = limit - group.size - sum(part.size for _, part in whole)
    while group.whole and room > max(_WORTH_A_TAIL * limit, 3 * headers) and most and len(found) < _MAX_TAILS:
        pending.fill(room, k, MAX_ROWS - rows, max_bytes - held)
        if not pending.rows or held + pending.queue[0].nbytes > max_bytes or rows >= MAX_ROWS:
            break
        goal = (1 - _MARGIN) * room - headers
        count = pending.cut(goal, k, min(most, MAX_ROWS - rows), max_bytes - held)
        pieces = pending.drop(count)
        before = encoder.encoded
        known = [piece for part in [*group.slices, *found] for piece in part.pieces]
        longer = _longer(group.whole, known, whole, pieces, encoder)
        if longer is None:
            pending.back(pieces)
            break
        parts = encoder.parts(pieces, group.sliced)
        size = sum(part.size for _, part in [*parts, *longer[0], *longer[1]]) - sum(part.size for _, part in whole)
        if size <= room:
            encoder.again += encoder.encoded - before - size
            whole = longer[0]
            found.append(Slice(count, size, [*parts, *longer[1]], pieces))
            held, rows, room = held + sum(piece.nbytes for piece in pieces), rows + count, room - size
            continue
        encoder.again += encoder.encoded - before
        pending.back(pieces)
        most = min(count - 1, int((1 - _MARGIN) * count * room / size))
    return whole, found


def _longer(
    columns: Sequence[int], before: Sequence[Piece], whole: Encoded, pieces: Sequence[Piece], encoder: Encoder
) -> tuple[Encoded, Encoded] | None:
    """Return ``whole`` and what follows it for the rows of ``pieces``: longer dictionaries, or plain pages."""
    texts = [n for n in columns if is_text_like(encoder.types[n])]
    plain = [n for n in columns if n not in texts]
    if not all(map(may_be_mixed, (encoder.types[n] for n in plain))):
        return None
    first, last = dict[int, Chunk](), list[tuple[list[int], Part]]()
    if texts:
        known = without_views(pa.concat_tables([piece.table.select(texts) for piece in before]))
        added = without_views(pa.concat_tables([piece.table.select(texts) for piece in pieces]))
        longer = [with_dictionary(*pair) for pair in zip(added.columns, known.columns, strict=True)]
        fields = [field.with_type(column.type) for field, column in zip(added.schema, longer, strict=True)]
        table = pa.table(longer, schema=pa.schema(fields))
        new = encoder.part(table)
        encoder.note_dictionaries(table, list(encoder.dictionaries))
        old = {leaf: chunk for leaves, part in whole for leaf, chunk in zip(leaves, part.chunks, strict=True)}
        for leaf, chunk in zip(encoder.leaves(texts), new.chunks, strict=True):
            if (both := extended(old[leaf], chunk)) is None:
                encoder.again += new.size
                return None
            first[leaf] = both[0]
            last.append(([leaf], Part(new.rows, [both[1]])))
    last += encoder.parts(pieces, plain, encodings=replace(encoder.encodings, dictionary=()))
    changed = [
        (leaves, Part(part.rows, [first.get(leaf, c) for leaf, c in zip(leaves, part.chunks, strict=True)]))
        for leaves, part in whole
    ]
    return changed, last
