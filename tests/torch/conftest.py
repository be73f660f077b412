"""Makes the forkserver of multiprocessing import torch once, for all processes that tests start with it."""

import multiprocessing

multiprocessing.set_forkserver_preload(["pqcache.torch", "tests.torch.ranks"])
