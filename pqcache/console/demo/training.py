"""The trainings of the demo: with torch where it is installed, else with numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import pqcache
from pqcache.console.demo.shop import CATEGORIES, VOCABULARY

RATE = 2.0


def has_torch() -> bool:
    return find_spec("torch") is not None


def train(cache: Path, epochs: int, report: Path, after_step: Callable[[int, str], None]) -> None:
    """Train on the snapshot that is current now, whatever is published meanwhile.

    Calls ``after_step`` with the number of each step in its epoch, and with what it was. Writes the snapshot, and the
    losses and ids of each epoch, to the file ``report``.
    """
    if has_torch():
        from pqcache.torch.demo import begin
    else:
        begin = begin_with_numpy
    snapshot, batches_of, learn = begin(cache)
    losses: list[list[float]] = [[] for _ in range(epochs)]
    ids: list[list[int]] = [[] for _ in range(epochs)]
    for epoch in range(epochs):
        for step, batch in enumerate(batches_of(epoch), 1):
            ids[epoch] += np.asarray(batch["id"]).tolist()
            losses[epoch].append(learn(batch))
            after_step(step, f"epoch {epoch + 1}, step {step:>3}: loss {losses[epoch][-1]:.3f}")
    np.savez(report, snapshot=snapshot, losses=np.array(losses), ids=np.array(ids))


def begin_with_numpy(cache: Path) -> tuple[str, Callable[[int], Iterable[Any]], Callable[[Any], float]]:
    """The snapshot, the batches of an epoch, and a step of a linear classifier of the words."""
    opened = pqcache.Cache.open(cache)
    snapshot = opened.snapshot().id
    weights = np.zeros((VOCABULARY, len(CATEGORIES)))

    def batches_of(epoch: int) -> Iterable[pa.RecordBatch]:
        columns = ["id", "tokens", "category"]
        return opened.batches(columns, batch_size=128, seed=0, epoch=epoch, snapshot=snapshot)

    def learn(batch: pa.RecordBatch) -> float:
        """Change the weights of each word by the gradient of a batch, and return the loss before that."""
        tokens = batch["tokens"]  # lists of different lengths: their values, and where each begins
        words, begins = tokens.flatten().to_numpy(), tokens.offsets.to_numpy()
        lengths = np.diff(begins)
        rows, labels = np.arange(len(batch)), [CATEGORIES.index(name) for name in batch["category"].to_pylist()]
        logits = np.add.reduceat(weights[words], begins[:-1]) / lengths[:, None]
        likely = np.exp(logits - logits.max(1, keepdims=True))
        likely /= likely.sum(1, keepdims=True)
        loss = float(-np.log(likely[rows, labels]).mean())
        likely[rows, labels] -= 1
        np.add.at(weights, words, np.repeat(likely / lengths[:, None], lengths, axis=0) * -RATE)
        return loss

    return snapshot, batches_of, learn
