"""PyTorch companion: ``from pqcache.torch import ParquetDataset``."""

from pqcache.torch.batch import Batch
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.ragged import Ragged

__all__ = ["Batch", "ParquetDataset", "Ragged"]
