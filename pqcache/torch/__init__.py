"""PyTorch companion: ``from pqcache.torch import ParquetDataset, Loader, Mix, Prefetch``."""

from pqcache.reader.selection.sequences import Sequence
from pqcache.reader.selection.split import Split
from pqcache.torch.batch import Batch, Ragged
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.loader import Loader
from pqcache.torch.mix import Mix
from pqcache.torch.prefetch import Prefetch

__all__ = ["Batch", "Loader", "Mix", "ParquetDataset", "Prefetch", "Ragged", "Sequence", "Split"]
