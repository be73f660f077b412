"""An empty torchvision: MosaicML imports it for its own datasets, and its wheels need another torch than the CPU one.

Importing this module puts it in place.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch.utils.data


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return torch.utils.data.Dataset


for _name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
    sys.modules[_name] = _module = types.ModuleType(_name)
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
    _module.__getattr__ = _anything  # type: ignore[method-assign]
