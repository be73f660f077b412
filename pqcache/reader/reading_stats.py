"""What reading a dataset takes and what has arrived of it, as values: what ``stats()`` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from pqcache.reader.arriving.wanted_order import without_repeats
from pqcache.reader.meter import MeterCounts
from pqcache.reader.read_plan import ReadPlan

Limit = Literal["trainer", "start", "storage", "decode", "gather", "transform", "transfer"]

_FEW = 0.05  # of the time: a trainer that waits for less is not limited by its data
_IDLE = 0.25  # of the time of workers: they have made batches before the trainer wants them
_MOST = 0.5  # of the time that the trainer waits
_BLOCKED = 0.5  # of the time to decode
_FROM_DISK = 0.1  # of the bytes that are decoded


@dataclass(frozen=True, kw_only=True)
class ReadingStats:
    """What was read, and what it took; times add up over threads and workers, so they may exceed the trainer's.

    Attributes:
        epoch: the number of the epoch; None for all epochs together.
        batches: batches made, including those that the trainer has not taken yet; 0 if rows are yielded.
        rows: rows (or sequences) made.
        bytes: bytes of their columns in memory.
        seconds: of the trainer, from the start of its iterations to their ends, or to now; None if unknown, as with
            workers of a plain DataLoader.
        waited_seconds: that the trainer waited for its next batch, including the transform if it makes the batches
            itself. None if ``seconds`` is None.
        start_seconds: of these, until a worker began.
        read_wait_seconds: that those who make batches waited for decoded rows.
        arrival_wait_seconds: of these, for bytes of a first copy that had not arrived.
        decode_seconds: reading and decoding row groups.
        decode_blocked_seconds: of these, waiting for a disk, a core or the interpreter.
        gather_seconds: putting rows into their order, and into batches of tensors.
        transform_seconds: in the transform.
        send_seconds: packing batches in workers and unpacking them in the trainer, which makes the tensors if there is
            no transform.
        transfer_seconds: moving batches to the ``device`` of a Loader, or waiting until a Prefetch has packed them; a
            copy that runs beside the training is not waited for.
        worker_seconds: of workers while they made batches.
        worker_idle_seconds: of workers that had made all the batches they prepare in advance.
        row_groups: row groups (or pieces) decoded.
        row_group_bytes: bytes of their columns in the files.
        disk_bytes: bytes read from a disk; the others were in the page cache.
        ready_batches: batches made and not yet used, on average; None if that was not sampled.
        limited_by: what to speed up first: "trainer" (it hardly waits for data), "start" (of worker processes),
            "storage", "decode", "gather", "transform" or "transfer" (from workers, and to a device); None before
            anything was read.
    """

    epoch: int | None = None
    batches: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: float | None = None
    waited_seconds: float | None = None
    start_seconds: float = 0.0
    read_wait_seconds: float = 0.0
    arrival_wait_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_blocked_seconds: float = 0.0
    gather_seconds: float = 0.0
    transform_seconds: float = 0.0
    send_seconds: float = 0.0
    transfer_seconds: float = 0.0
    worker_seconds: float = 0.0
    worker_idle_seconds: float = 0.0
    row_groups: int = 0
    row_group_bytes: int = 0
    disk_bytes: int = 0
    ready_batches: float | None = None
    limited_by: Limit | None = None

    @property
    def waited_share(self) -> float | None:
        """The share of its time, from 0 to 1, that the trainer waited; None if unknown."""
        return None if self.waited_seconds is None or not self.seconds else self.waited_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ArrivalStats:
    """What has arrived of a dataset; all 0 if it was complete when opened.

    Attributes:
        total_bytes: of all its files.
        arrived_bytes: of these.
        wanted_bytes: of the row groups and columns that are read.
        wanted_arrived_bytes: of these.
        waited_seconds: that this process, and workers it forked, waited for bytes to arrive.
    """

    total_bytes: int = 0
    arrived_bytes: int = 0
    wanted_bytes: int = 0
    wanted_arrived_bytes: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """What a dataset has done, in all threads and workers of this rank; ``dataset.stats()`` returns it.

    Attributes:
        epoch: of the present epoch, or the latest.
        total: of all epochs.
        memory_bytes: that decoded rows, and all else that Arrow holds, take now in all living processes.
        memory_peak_bytes: the peak of each of these processes, added up.
        memory_limit_bytes: the dataset's ``memory``.
        arrivals: what has arrived of a first copy.
        datasets: of a Mix, the numbers of each of its datasets by name; waiting is the mix's. With ``within_batch``
            each counts its parts of the mix's batches.
    """

    epoch: ReadingStats = field(default_factory=ReadingStats)
    total: ReadingStats = field(default_factory=ReadingStats)
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    arrivals: ArrivalStats = field(default_factory=ArrivalStats)
    datasets: Mapping[str, DatasetStats] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        found = asdict(replace(self, datasets={}))
        return found | {"datasets": {name: stats.to_dict() for name, stats in self.datasets.items()}}


def dataset_stats(counts: MeterCounts, plan: ReadPlan, limit: int | None, transform_threads: int = 1) -> DatasetStats:
    return DatasetStats(
        epoch=reading_stats(counts.of_epoch, counts.epoch, transform_threads),
        total=reading_stats(counts.total, None, transform_threads),
        memory_bytes=sum(counts.arrow.values()),
        memory_peak_bytes=counts.peak,
        memory_limit_bytes=limit or 0,
        arrivals=_arrivals(plan),
    )


def _arrivals(plan: ReadPlan) -> ArrivalStats:
    arrivals, index = plan.data.arrivals, plan.data.index
    if arrivals is None:
        return ArrivalStats()
    row_groups = without_repeats(plan.row_groups)
    sizes = index.stored(plan.columns_read)[row_groups]
    return ArrivalStats(
        total_bytes=arrivals.total_bytes,
        arrived_bytes=arrivals.arrived_bytes,
        wanted_bytes=int(sizes.sum()),
        wanted_arrived_bytes=int(sizes[arrivals.arrived(row_groups)].sum()),
        waited_seconds=arrivals.waited_seconds,
    )


def mix_stats(
    own: MeterCounts,
    datasets: Mapping[str, DatasetStats],
    parts: Iterable[MeterCounts],
    within_batch: bool = False,
) -> DatasetStats:
    """The numbers of a mix: the trainer's from its ``own`` meter, the others from its datasets.

    ``within_batch``: the mix builds its batches from several datasets', and counts them itself.
    """
    total, epoch, peak = dict(own.total), dict(own.of_epoch), 0
    arrow: dict[int, int] = {}  # of each process, whatever it reads
    for counts in parts:
        for sums, more in ((total, counts.total), (epoch, counts.of_epoch)):
            for name, number in more.items():
                sums[name] += number
        peak += counts.peak
        arrow |= {process: max(size, arrow.get(process, 0)) for process, size in counts.arrow.items()}
    if within_batch:
        total["batches"], epoch["batches"] = own.total["batches"], own.of_epoch["batches"]
    arrivals = [stats.arrivals for stats in datasets.values()]
    return DatasetStats(
        epoch=reading_stats(epoch, own.epoch),
        total=reading_stats(total, None),
        memory_bytes=sum(arrow.values()),
        memory_peak_bytes=peak,
        memory_limit_bytes=sum(stats.memory_limit_bytes for stats in datasets.values()),
        arrivals=ArrivalStats(
            **{item.name: sum(getattr(stats, item.name) for stats in arrivals) for item in fields(ArrivalStats)}
        ),
        datasets=dict(datasets),
    )


def reading_stats(counts: Mapping[str, int], epoch: int | None, transform_threads: int = 1) -> ReadingStats:
    seconds = {name: number / 1e9 for name, number in counts.items()}
    is_known = counts["seconds"] > 0
    samples = counts["ready_samples"]
    found = ReadingStats(
        epoch=epoch,
        batches=counts["batches"],
        rows=counts["rows"],
        bytes=counts["bytes"],
        seconds=seconds["seconds"] if is_known else None,
        waited_seconds=seconds["waited"] if is_known else None,
        start_seconds=seconds["start"],
        read_wait_seconds=seconds["read_wait"],
        arrival_wait_seconds=seconds["arrival_wait"],
        decode_seconds=seconds["decode"],
        decode_blocked_seconds=seconds["decode_blocked"],
        gather_seconds=seconds["gather"] + seconds["tensors"],
        transform_seconds=seconds["transform"],
        send_seconds=seconds["send"] + seconds["receive"],
        transfer_seconds=seconds["transfer"],
        worker_seconds=seconds["busy"],
        worker_idle_seconds=seconds["idle"],
        row_groups=counts["row_groups"],
        row_group_bytes=counts["row_group_bytes"],
        disk_bytes=counts["disk_bytes"],
        ready_batches=counts["ready"] / samples if samples else None,
    )
    return replace(found, limited_by=_limit_of(found, seconds, transform_threads))


def _limit_of(stats: ReadingStats, seconds: Mapping[str, float], transform_threads: int) -> Limit | None:
    """What to make faster first; ``seconds`` are the counters by name.

    Batches are made in turn by waiting for decoded rows, making tensors and calling the transform. The longest of these
    limits the dataset.
    """
    if not stats.rows:
        return None
    share, working = stats.waited_share, seconds["busy"] + seconds["idle"]
    much = _MOST * (stats.waited_seconds or float("inf"))
    if share is not None and share < _FEW:
        return "trainer"
    if share is None and seconds["idle"] > _IDLE * working:
        return "trainer"
    if stats.start_seconds > much:
        return "start"
    if seconds["receive"] + seconds["transfer"] > much:
        return "transfer"
    waits: dict[Limit, float] = {
        "storage": seconds["arrival_wait"],
        "decode": seconds["read_wait"] - seconds["arrival_wait"],
        "gather": seconds["tensors"],
        "transform": seconds["transform"] / transform_threads,
        "transfer": seconds["send"],
    }
    first: Limit = max(waits, key=lambda name: waits[name])
    if first != "decode":
        return first
    if seconds["gather"] > seconds["decode"]:
        return "gather"
    from_disk = stats.disk_bytes > _FROM_DISK * stats.row_group_bytes
    return "storage" if from_disk and seconds["decode_blocked"] > _BLOCKED * seconds["decode"] else "decode"
