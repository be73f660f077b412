"""PyTorch companion: ``from pqcache.torch import ParquetDataset, Mix``."""

from pqcache.reader.selection.sequences import Sequence
from pqcache.torch.batch import Batch
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.mix import Mix
from pqcache.torch.ragged import Ragged

__all__ = ["Batch", "Mix", "ParquetDataset", "Ragged", "Sequence"]
