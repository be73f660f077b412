"""The examples run, and the page on training shows the one it explains as it is."""

from __future__ import annotations

import importlib
import io
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.datasets import write_shop
from tests.scripts import run_ranks, run_script, run_under_torchrun
from tests.test_docs import ROOT, blocks_of, environment

EXAMPLES = ROOT / "examples"


def test_the_page_shows_the_example() -> None:
    texts = [block.text for block in blocks_of(ROOT / "docs" / "training.md") if block.kind == "python"]
    assert (EXAMPLES / "train_ddp.py").read_text().rstrip() in texts


def check_training(tmp_path: Path, ranks: int, printed: str) -> None:
    rows = 1060 + (-17 % ranks) * 64  # 17 batches; the last round is filled up with the epoch's first ones
    assert printed.splitlines() == [f"epoch {epoch}: {rows} rows" for epoch in range(2)]
    assert not (tmp_path / "ddp.json").exists()


@pytest.mark.slow
def test_training_on_ranks(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=2, files=2, rows=265)
    done = run_ranks(EXAMPLES / "train_ddp.py", str(shop), ranks=2, cwd=tmp_path, env=environment())
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr + done[1].stderr
    check_training(tmp_path, 2, "".join(rank.stdout for rank in done))


@pytest.mark.deep  # a launcher and its ranks import torch, each by itself
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_under_torchrun(tmp_path: Path, ranks: int) -> None:
    shop = write_shop(tmp_path / "shop", days=2, files=2, rows=265)
    done = run_under_torchrun([str(EXAMPLES / "train_ddp.py"), str(shop)], ranks, tmp_path, environment())
    assert done.returncode == 0, done.stderr[-3000:]
    check_training(tmp_path, ranks, done.stdout)


def make_pictures(rng: np.random.Generator, formats: Sequence[str]) -> list[bytes]:
    """Return 150 pictures of noise, in the formats in turn."""
    pictures = []
    for number in range(150):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(file, formats[number % len(formats)])
        pictures.append(file.getvalue())
    return pictures


def test_pictures_are_decoded_and_augmented_in_workers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = make_pictures(rng, ["JPEG"])
    table = pa.table({"label": rng.integers(0, 10, 150), "image": pictures})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    for words in (["--workers", "0"], ["--workers", "2", "--epochs", "2", "--read-only"]):
        done = run_script(EXAMPLES / "train_images.py", str(tmp_path), *words, cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stderr
        assert [line.split(",")[0] for line in done.stdout.splitlines()] == [
            f"epoch {epoch}: 150 pictures" for epoch in range(2 if "--epochs" in words else 1)
        ]


def test_pictures_are_decoded_on_threads_and_broken_ones_replaced(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = make_pictures(rng, ["JPEG", "PNG"])
    pictures[45] = pictures[45][:200]
    pictures[120] = b"no picture"
    table = pa.table({"label": rng.integers(0, 10, 150), "image": pictures})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    done = run_script(EXAMPLES / "decode_on_threads.py", str(tmp_path), cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    first, *failed = done.stdout.splitlines()
    assert first == "150 pictures in 3 batches, 2 broken ones replaced"
    assert sorted(line.split(":")[0] for line in failed) == [
        "a.parquet, row group 1, row 5",
        "a.parquet, row group 3, row 0",
    ]


def skip_without(name: str) -> None:
    """Skip a test where a package is not there, or does not load beside this torch."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - torchvision raises RuntimeError, torchcodec OSError
        pytest.skip(f"{name} does not load: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


@pytest.mark.parametrize("library", ["albumentations", "torchvision"])
def test_pictures_are_augmented_alike_after_a_resume(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    skip_without(library)
    rng = np.random.default_rng(0)
    pictures = make_pictures(rng, ["PNG"])
    table = pa.table({"label": rng.integers(0, 10, 150), "image": pictures})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    words = [str(tmp_path), "--library", library, "--workers", "0"]
    done = run_script(EXAMPLES / "augment_images.py", *words, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5 batches; 2 of them again after a resume, the same\n"


def test_sounds_are_decoded_on_threads(tmp_path: Path) -> None:
    skip_without("torchcodec.decoders")
    sounds = []
    for number in range(40):
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(8000)
            sound.writeframes(np.arange(800 * number, dtype=np.int16).tobytes())
        sounds.append(file.getvalue())
    sounds[7] = b"no sound"
    pq.write_table(pa.table({"sound": sounds}), tmp_path / "a.parquet", row_group_size=10)
    done = run_script(EXAMPLES / "decode_audio.py", str(tmp_path), cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("40 sounds, ")


def test_text_is_tokenized_on_threads(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    shop = write_shop(tmp_path / "shop", days=2, files=2, rows=265)
    done = run_script(EXAMPLES / "tokenize_text.py", str(shop), cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    texts, tokens = (int(part.split()[0]) for part in done.stdout.split(", "))
    assert texts == 1060
    assert tokens >= texts
