"""The options of ParquetDataset and Mix that Cache.batches lacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pqcache.errors import UsageError
from pqcache.options import ANY, COUNT, DURATION, LIST, TRUTH, Shared, choice, python
from pqcache.reader.epoch_options import EpochArguments, EpochOptions, OrderArguments, OrderOptions
from pqcache.reader.packing import Pack
from pqcache.store.tables.data_files import FileRules
from pqcache.torch.tensors import Conversion

OnError = Literal["raise", "skip"]
STALL_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True, kw_only=True)
class IterationOptions(OrderOptions):
    """How ranks divide an epoch, and how stalls are detected."""

    pad: bool = python(
        True,
        TRUTH,
        "False: nothing is repeated, so every row comes once over all ranks, and some ranks have one batch less "
        "(batches_per_rank). For evaluation: see docs/loading.md before training on ranks.",
    )
    stall_timeout: float | None = python(
        STALL_TIMEOUT,
        DURATION,
        'Seconds, or text like "5m": if no batch comes for so long, a warning is logged with the stacks and files of '
        "the reading threads, and another when it goes on.",
        none="None: never.",
    )

    def __post_init__(self) -> None:
        if self.stall_timeout == 0:
            raise UsageError("stall_timeout=0", "every batch takes longer", "give a time, or None")
        if self.drop_last and not self.pad:
            reason = "both decide about the last round: drop_last=True leaves it out, pad=False does not fill it up"
            raise UsageError("drop_last=True and pad=False", reason, "choose one of them")
        if (self.num_replicas is None) != (self.rank is None):
            raise UsageError("num_replicas and rank", "give both or neither")

    @property
    def chosen_ranks(self) -> tuple[int, int] | None:
        """The number of ranks and this one, if they are given."""
        return None if self.num_replicas is None or self.rank is None else (self.num_replicas, self.rank)


class IterationArguments(OrderArguments, total=False):
    pad: bool
    stall_timeout: str | float | None


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(EpochOptions, IterationOptions):
    """The options of a ``ParquetDataset`` at a ``path``: which rows are read, and how they are converted."""

    path: Path
    batch_size: int | None = python(
        256, COUNT, "Rows of a batch.", none="None yields single rows, for DataLoader's batching and collate.", low=1
    )
    transform: Callable[..., Any] | None = python(
        None,
        ANY,
        "Called in the worker on each batch (or row); the loader yields its result. Generators of numpy, random and "
        "torch are seeded for it from (seed, epoch, batch index).",
    )
    transform_workers: int | None = python(
        None,
        COUNT,
        "Threads of this process (or worker) that call the transform, then as transform(batch, generator) with a "
        "numpy.random.Generator seeded in the same way, because threads share the global ones. Default: no threads.",
        low=1,
    )
    on_error: OnError = python(
        "raise",
        choice("raise", "skip"),
        '"raise", or "skip": a row for which the transform raises an error is replaced by the next good one of its '
        "batch, so that batches keep their number and size; errors() lists them all. See docs/transforms.md.",
    )
    max_errors: int | None = python(
        100, COUNT, 'With "skip", how many rows may fail in an epoch in each worker.', none="None: any number.", low=1
    )
    nulls: str | Mapping[str, Any] = python(
        "error",
        ANY,
        '"error", "mask" (adds a bool NAME_mask, True where there is a value, for each column that is nullable in '
        'schema) or {column: fill}; nulls inside a column by path, like {"user.age": 0, "tags.element": ""}.',
    )
    decimals: str | None = python(
        None,
        ANY,
        '"float64" (rounded), "unscaled" (int64 at the scale in schema) or "text" for all decimals. Default: float64 '
        "up to 15 digits, and int64 for whole numbers that fit; others raise UsageError.",
    )
    ragged: tuple[str, ...] = python((), LIST, "List columns to keep Ragged even if all their lists have one length.")
    proof: bool = python(
        False,
        TRUTH,
        "True keeps sums of the rows that you were given, in states too: proof() and 'pqcache rows --prove' then say "
        "whether an epoch had every row once. See docs/proof.md.",
    )
    as_files: bool = Shared.as_files
    all_files: bool = Shared.all_files

    def __post_init__(self) -> None:
        EpochOptions.__post_init__(self)
        IterationOptions.__post_init__(self)
        self._check_transform()
        pack, conversion = self.pack, self.conversion  # made now, as in EpochOptions
        if self.proof:
            self._check_proof()
        if not isinstance(pack, Pack):
            return
        if self.batch_size is None:
            raise UsageError("batch_size=None", "packed sequences come in batches", "give it a batch_size")
        if conversion.mask or conversion.fill:
            advice = f'leave them out with filters="{pack.column} is not null"'
            raise UsageError("nulls", "null documents cannot be packed", advice)
        if self.ragged:
            raise UsageError("ragged", "packed lists are tensors", "leave it out")

    def _check_transform(self) -> None:
        function = self.transform
        if function is not None and not callable(function):
            raise UsageError(f"transform={function!r}", "give a function that takes a batch (or row)")
        if function is None or self.transform_workers is None:
            return
        try:
            inspect.signature(function).bind(None, None)
        except ValueError:  # it has no signature
            pass
        except TypeError as error:
            raise UsageError(
                "transform_workers",
                "the transform takes no generator: threads share those of random, numpy and torch",
                "write it as transform(batch, generator), with a numpy.random.Generator; it may ignore it",
            ) from error

    def _check_proof(self) -> None:
        for name, is_given, reason in (
            ("batch_size=None", self.batch_size is None, "the rows of batches are summed"),
            ("sequence", self.sequence is not None, "a row comes in several sequences, or in none"),
            ("pack", self.pack is not None, "parts of documents come, not rows"),
            ('on_error="skip"', self.skips_errors, "rows that fail are replaced by others"),
        ):
            if is_given:
                raise UsageError(f"proof=True and {name}", reason, "leave out one of them")

    @cached_property
    def rules(self) -> FileRules:
        return replace(super().rules, as_files=self.as_files, all_files=self.all_files)

    @cached_property
    def conversion(self) -> Conversion:
        """How values become tensors."""
        return Conversion.of(self.nulls, self.decimals)

    @property
    def skips_errors(self) -> bool:
        """Whether rows for which the transform fails are replaced by others."""
        return self.transform is not None and self.on_error == "skip"


class DatasetArguments(EpochArguments, IterationArguments, total=False):
    batch_size: int | str | None
    transform: Callable[..., Any] | None
    transform_workers: int | str | None
    on_error: OnError
    max_errors: int | str | None
    nulls: str | Mapping[str, Any]
    decimals: str | None
    ragged: Sequence[str]
    proof: bool
    as_files: bool
    all_files: bool
