"""The order of an epoch is what it has always been, where the window is the same."""

from __future__ import annotations

import json
from pathlib import Path

from tests.epoch import golden


def test_the_order_is_that_of_saved_states(tmp_path: Path) -> None:
    assert golden.measured(tmp_path) == json.loads(golden.FILE.read_text())
