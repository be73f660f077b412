"""The trainings of the demo: with torch where it is installed, else with numpy.

python -m pqcache.console.demo.training CACHE --epochs 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import pqcache
from pqcache.console.demo.shop import CATEGORIES, VOCABULARY

BATCH, RATE = 128, 2.0
Seen = tuple[str, list[float], list[int]]  # of an epoch: the snapshot, the loss of each step, the ids in their order


def has_torch() -> bool:
    """Return whether torch is installed."""
    return find_spec("torch") is not None


def train(
    cache: Path,
    epochs: int = 2,
    log: Callable[[str], None] = print,
    after_step: Callable[[int], None] | None = None,
) -> Iterator[Seen]:
    """Train on the snapshot that is current now, whatever is published meanwhile; yield what each epoch was.

    ``after_step`` is called with the number of each step of an epoch when it is done.
    """
    if has_torch():
        from pqcache.torch.demo import train as train_with_torch

        return train_with_torch(cache, epochs, log=log, after_step=after_step)
    return train_with_numpy(cache, epochs, log, after_step)


def train_with_numpy(
    cache: Path, epochs: int, log: Callable[[str], None], after_step: Callable[[int], None] | None
) -> Iterator[Seen]:
    """Train a linear classifier of the words, by the batches that ``Cache.batches`` returns."""
    opened = pqcache.Cache.open(cache)
    snapshot = opened.snapshot().id
    steps = -(-pqcache.inspect(cache).rows // BATCH)
    weights = np.zeros((VOCABULARY, len(CATEGORIES)))
    for epoch in range(epochs):
        losses: list[float] = []
        ids: list[int] = []
        batches = opened.batches(["id", "tokens", "category"], batch_size=BATCH, seed=0, epoch=epoch, snapshot=snapshot)
        for step, batch in enumerate(batches, 1):
            losses.append(_descend(weights, batch))
            ids += batch["id"].to_pylist()
            if step % 25 == 0 or step == 1:
                log(f"epoch {epoch + 1}, step {step:>3} of {steps}: loss {losses[-1]:.3f}")
            if after_step is not None:
                after_step(step)
        log(f"epoch {epoch + 1}: mean loss {sum(losses) / len(losses):.3f}, {len(ids):,} rows")
        yield snapshot, losses, ids


def _descend(weights: npt.NDArray[np.float64], batch: pa.RecordBatch) -> float:
    """Change the weights of each word by the gradient of a batch, and return the loss before that."""
    tokens = batch["tokens"]  # lists of different lengths: their values, and where each begins
    words, begins = tokens.flatten().to_numpy(), tokens.offsets.to_numpy()
    lengths = np.diff(begins)
    rows, labels = np.arange(len(batch)), np.array([CATEGORIES.index(name) for name in batch["category"].to_pylist()])
    logits = np.add.reduceat(weights[words], begins[:-1]) / lengths[:, None]
    likely = np.exp(logits - logits.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    loss = float(-np.log(likely[rows, labels]).mean())
    likely[rows, labels] -= 1
    np.add.at(weights, words, np.repeat(likely / lengths[:, None], lengths, axis=0) * -RATE)
    return loss


def save(done: list[Seen], report: Path) -> None:
    """Write what was seen, for those who want to check."""
    np.savez(
        report,
        snapshot=done[0][0],
        losses=np.array([losses for _, losses, _ in done]),
        ids=np.array([ids for _, _, ids in done]),
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train a small model on the shop's offers.")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--report", type=Path, help="an .npz file for the losses and the ids of all rows seen")
    options = parser.parse_args()
    done = list(train(options.cache, options.epochs))
    if options.report:
        save(done, options.report)


if __name__ == "__main__":
    main()
