"""Small pictures of the shop's categories, drawn with numpy and written as PNG: a demo needs no imaging library."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

SIDE = 48  # pixels
_SIGNATURE = b"\x89PNG\r\n\x1a\n"

Pixels = npt.NDArray[np.float64]


class _Canvas:
    """Pixels on which shapes are filled, in units of ``size`` around a centre."""

    def __init__(self, pixels: Pixels, centre: tuple[float, float], size: float) -> None:
        self.pixels = pixels
        rows, columns = np.mgrid[0:SIDE, 0:SIDE]
        self.x, self.y = (columns - centre[0]) / size, (rows - centre[1]) / size

    def box(self, left: float, top: float, right: float, bottom: float, colour: Any) -> None:
        """Fill a rectangle."""
        inside = (self.x >= left) & (self.x <= right) & (self.y >= top) & (self.y <= bottom)
        self.pixels[inside] = colour

    def disc(self, x: float, y: float, radius: float, colour: Any) -> None:
        """Fill a circle."""
        self.pixels[np.hypot(self.x - x, self.y - y) <= radius] = colour

    def triangle(self, top: float, bottom: float, width: float, colour: Any) -> None:
        """Fill a triangle that stands on its base."""
        height = (self.y - top) / (bottom - top)
        self.pixels[(height >= 0) & (height <= 1) & (abs(self.x) <= width * height)] = colour


def draw(category: str, rng: np.random.Generator) -> bytes:
    """Return a PNG of a thing of a category before a textured wall."""
    wall = rng.normal(0, 14, (SIDE, SIDE, 1)) + rng.uniform(90, 220, 3)
    wall += np.linspace(-25, 25, SIDE)[:, None, None] * rng.uniform(-1, 1) + rng.normal(0, 3, (SIDE, SIDE, 3))
    x, y = rng.uniform(18, 30, 2)
    canvas = _Canvas(wall, (float(x), float(y)), rng.uniform(8, 15))
    colour = rng.uniform(0, 255, 3)
    _draw_thing(category, canvas, colour, colour / 3)
    return encode(np.clip(canvas.pixels, 0, 255).astype(np.uint8))


def _draw_thing(category: str, canvas: _Canvas, colour: Pixels, dark: Pixels) -> None:
    if category == "backpack":
        canvas.box(-0.8, -1, 0.8, 1.1, colour)
        canvas.box(-0.5, 0.2, 0.5, 0.8, dark)
    elif category == "chair":
        canvas.box(-0.7, -1.2, -0.4, 1.2, colour)
        canvas.box(-0.7, 0, 0.8, 0.3, colour)
        canvas.box(0.6, 0.3, 0.8, 1.2, dark)
    elif category == "jacket":
        canvas.triangle(-1.6, 0.9, 1.3, colour)
        canvas.box(-0.6, -0.9, 0.6, 1.1, colour)
        canvas.box(-0.05, -0.9, 0.05, 1.1, dark)
    elif category == "lamp":
        canvas.triangle(-1.3, 0, 1, (250, 240, 170))
        canvas.box(-0.1, 0, 0.1, 1.3, dark)
    elif category == "mug":
        canvas.disc(0.7, 0.1, 0.5, colour)
        canvas.box(-0.8, -0.6, 0.5, 0.8, colour)
    else:
        canvas.box(-0.3, -1.5, 0.3, 1.5, dark)
        canvas.disc(0, 0, 0.9, colour)
        canvas.disc(0, 0, 0.7, (245, 245, 245))


def encode(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return pixels (height, width, 3) as a PNG whose rows are not filtered."""
    height, width, _ = pixels.shape
    rows = np.hstack([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def stamp(png: bytes, text: str) -> bytes:
    """Return a PNG with a comment in front of its pixels: another valid file at the price of a copy."""
    at = len(_SIGNATURE) + 25  # behind the header
    return png[:at] + _chunk(b"tEXt", b"Comment\0" + text.encode()) + png[at:]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
