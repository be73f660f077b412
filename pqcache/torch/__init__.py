"""PyTorch companion: ``from pqcache.torch import ParquetDataset, Loader, Mix, Prefetch``."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError("pqcache.torch needs torch: pip install 'pqcache[torch]'", name="torch") from None

from pqcache.reader.selection.sequences import Sequence
from pqcache.reader.selection.split import Split
from pqcache.torch.batch import Batch, Ragged
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.loader import Loader
from pqcache.torch.mix import Mix
from pqcache.torch.prefetch import Prefetch

__all__ = ["Batch", "Loader", "Mix", "ParquetDataset", "Prefetch", "Ragged", "Sequence", "Split"]
