"""Make tokens of text while reading, on threads, with the package ``tokenizers``.

    python examples/tokenize_text.py CACHE --column title

The tokenizer is trained on the first batches of the column itself, so nothing is downloaded. A text that is read in
many epochs is cheaper to tokenize once: write the tokens to the table, and pack them (docs/packing.md).
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pqcache.torch import Loader, ParquetDataset
from pqcache.torch.batch import Ragged


def trained(cache: str, column: str, size: int = 500) -> Tokenizer:
    """Return a byte-level BPE tokenizer, trained on some text of the column."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    dataset = ParquetDataset(cache, columns=[column], batch_size=256)
    texts = (batch[column].to_list() for batch in itertools.islice(dataset, 20))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Tokenize:
    """Adds ``tokens``, a Ragged, to a batch. The lists of a batch are encoded by one call, which holds no lock."""

    def __init__(self, tokenizer: Tokenizer, column: str) -> None:
        self.tokenizer, self.column = tokenizer, column

    def __call__(self, batch: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        encoded = self.tokenizer.encode_batch(batch[self.column].to_list())
        ends = np.cumsum([0, *(len(text) for text in encoded)])
        tokens = np.fromiter(itertools.chain.from_iterable(text.ids for text in encoded), np.int64, int(ends[-1]))
        batch["tokens"] = Ragged(torch.from_numpy(tokens), torch.from_numpy(ends))
        return batch


def main() -> None:
    """Read the command line, train a tokenizer and read an epoch."""
    parser = argparse.ArgumentParser(description="Tokenize a text column of a cache.")
    parser.add_argument("cache")
    parser.add_argument("--column", default="title")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    tokenizer = trained(options.cache, options.column)
    dataset = ParquetDataset(
        options.cache,
        columns=[options.column],
        batch_size=64,
        transform=Tokenize(tokenizer, options.column),
        transform_workers=options.threads,
    )
    rows = tokens = 0
    for batch in Loader(dataset):
        padded = batch["tokens"].to_padded()  # (rows, longest)
        assert tokenizer.decode(batch["tokens"][0].tolist()) == batch[options.column][0]
        rows, tokens = rows + len(padded), tokens + len(batch["tokens"].values)
    print(f"{rows} texts, {tokens} tokens")


if __name__ == "__main__":
    main()
