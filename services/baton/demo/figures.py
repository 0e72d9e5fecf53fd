"""Drawn figures, which demo-vision has learned to name ("a red square"), and what it may be asked of them.
Needs Pillow."""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = {
    "red": (215, 30, 35),
    "green": (30, 150, 50),
    "blue": (35, 70, 210),
    "yellow": (245, 215, 30),
    "orange": (245, 130, 20),
    "purple": (130, 40, 160),
    "black": (20, 20, 20),
    "brown": (120, 70, 30),
}
"""Red, green and blue, each 0 to 255. An ink differs a little from these."""
SHAPES = ("square", "circle", "triangle", "star", "cross", "ring")
SMALLEST, LARGEST = 64, 176
"""Pixels of a drawing's side."""
SMOOTH = 2
"""A drawing is made larger by this factor first, for smooth edges."""
QUESTIONS = {
    "what": ("What is this?", "What do you see?", "What is drawn here?", "What is in the picture?"),
    "colour": ("Which colour is it?", "What colour does it have?"),
    "shape": ("Which shape is it?", "What shape does it have?"),
    "first": ("What is in the first picture?", "What does the first picture show?"),
    "second": ("What is in the second picture?", "What does the second picture show?"),
}


@dataclass(frozen=True)
class Drawing:
    colour: str
    shape: str
    picture: Image.Image

    @property
    def name(self) -> str:
        """What demo-vision calls it: "a red square"."""
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} {self.shape}"

    def png(self) -> bytes:
        file = io.BytesIO()
        self.picture.save(file, "PNG")
        return file.getvalue()


def draw(rng: random.Random, colour: str = "", shape: str = "") -> Drawing:
    """One figure of any size, position and turn on a light ground. colour, shape: any, if empty."""
    colour, shape = colour or rng.choice(list(COLOURS)), shape or rng.choice(SHAPES)
    width, height = rng.randrange(SMALLEST, LARGEST), rng.randrange(SMALLEST, LARGEST)
    ground = tuple(rng.randrange(205, 256) for _ in range(3))
    ink = tuple(max(0, min(255, value + rng.randrange(-18, 19))) for value in COLOURS[colour])
    image = Image.new("RGB", (SMOOTH * width, SMOOTH * height), ground)
    radius = SMOOTH * min(width, height) * rng.uniform(0.28, 0.46)
    x = rng.uniform(radius, SMOOTH * width - radius)
    y = rng.uniform(radius, SMOOTH * height - radius)
    pen, turn = ImageDraw.Draw(image), rng.uniform(-0.35, 0.35)
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=ink)
    elif shape == "ring":
        pen.ellipse(box, outline=ink, width=int(radius * rng.uniform(0.24, 0.36)))
    else:
        for corners in _outlines(shape, rng):
            points = [
                (x + radius * far * math.cos(angle + turn), y + radius * far * math.sin(angle + turn))
                for angle, far in corners
            ]
            pen.polygon(points, fill=ink)
    return Drawing(colour, shape, image.resize((width, height), Image.Resampling.BOX))


def _outlines(shape: str, rng: random.Random) -> list[list[tuple[float, float]]]:
    """Polygons: each corner's angle, and its distance from the middle, 0 to 1."""
    if shape == "cross":
        wide = rng.uniform(0.22, 0.32)
        arm = [(-1, -wide), (1, -wide), (1, wide), (-1, wide)]
        return [
            [(math.atan2(b, a) + turn, min(1, math.hypot(a, b))) for a, b in arm] for turn in (0, math.pi / 2)
        ]
    count = {"square": 4, "triangle": 3, "star": 10}[shape]
    first = math.pi / 4 if shape == "square" else -math.pi / 2
    inner = rng.uniform(0.38, 0.48) if shape == "star" else 1
    return [[(first + 2 * math.pi * i / count, inner if i % 2 else 1) for i in range(count)]]
