"""Train demo-vision: a tiny Qwen3-VL checkpoint that names colour and shape of drawn figures, "a red square".

    python tools/train_demo_vision.py train OUT             # minutes on a GPU
    python tools/train_demo_vision.py evaluate HOST:PORT    # fresh drawings, asked of a gateway

transformers' modelling code is used for training only. Pictures are resized as Baton resizes them.
"""

from __future__ import annotations

import io
import json
import math
import pathlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.pictures.settings import PictureSettings

PATCH, MERGE = 16, 2
SETTINGS = PictureSettings(PATCH, MERGE, 96 * 96, 192 * 192)
CONTEXT = 2048
VOCABULARY = 384
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE, VISION_START, VISION_END, VIDEO = (
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
)
SPECIAL = [END, START, STOP, VISION_START, VISION_END, IMAGE, VIDEO]
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
SHAPES = ("square", "circle", "triangle", "star", "cross", "ring")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QUESTIONS = {
    "what": "What is this?|What do you see?|What is drawn here?|What is in the picture?",
    "colour": "Which colour is it?|What colour does it have?",
    "shape": "Which shape is it?|What shape does it have?",
    "first": "What is in the first picture?|What does the first picture show?",
    "second": "What is in the second picture?|What does the second picture show?",
}
HELLO = "Show me a picture of one figure, such as a red square, and ask me what it is."


@dataclass(frozen=True)
class Drawing:
    colour: str
    shape: str
    picture: Image.Image

    @property
    def name(self) -> str:
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} {self.shape}"


def draw(rng: random.Random) -> Drawing:
    """One figure, of any size, place and turn, on a light ground."""
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    width, height = rng.randrange(80, 360), rng.randrange(80, 360)
    ground = tuple(rng.randrange(205, 256) for _ in range(3))
    ink = tuple(max(0, min(255, value + rng.randrange(-18, 19))) for value in COLOURS[colour])
    scale = 2  # drawn larger, for smooth edges
    image = Image.new("RGB", (scale * width, scale * height), ground)
    radius = scale * min(width, height) * rng.uniform(0.22, 0.46)
    x = rng.uniform(radius, scale * width - radius)
    y = rng.uniform(radius, scale * height - radius)
    pen, turn = ImageDraw.Draw(image), rng.uniform(-0.35, 0.35)

    def points(corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Corners as angle and distance."""
        return [
            (x + radius * r * math.cos(a + turn), y + radius * r * math.sin(a + turn)) for a, r in corners
        ]

    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=ink)
    elif shape == "ring":
        pen.ellipse(box, outline=ink, width=int(radius * rng.uniform(0.22, 0.36)))
    elif shape == "cross":
        wide = rng.uniform(0.22, 0.32)
        for quarter in range(2):
            arm = [(-1, -wide), (1, -wide), (1, wide), (-1, wide)]
            corners = [(math.atan2(b, a) + quarter * math.pi / 2, min(1, math.hypot(a, b))) for a, b in arm]
            pen.polygon(points(corners), fill=ink)
    else:
        count = {"square": 4, "triangle": 3, "star": 10}[shape]
        first = math.pi / 4 if shape == "square" else -math.pi / 2
        inner = rng.uniform(0.38, 0.48) if shape == "star" else 1
        corners = [(first + 2 * math.pi * i / count, inner if i % 2 else 1) for i in range(count)]
        if shape != "star":
            corners = [(angle, 1) for angle, _ in corners]
        pen.polygon(points(corners), fill=ink)
    return Drawing(colour, shape, image.resize((width, height), Image.Resampling.LANCZOS))


@dataclass(frozen=True)
class Example:
    text: str
    """With one image token for each picture."""
    answer: str
    pictures: list[Image.Image]


def example(rng: random.Random) -> Example:
    kind = rng.choice(
        ["what"] * 4 + ["colour", "shape"] + ["first", "second"] * 2 + ["none"] * (rng.random() < 0.1)
    )
    drawings = [draw(rng) for _ in range(2 if kind in ("first", "second") else kind != "none")]
    marks = [f"{VISION_START}{IMAGE}{VISION_END}"] * len(drawings)
    if kind == "none":
        question, answer = rng.choice(["Hello", "Hi!", "What can you do?", "Who are you?"]), HELLO
    else:
        question = rng.choice(QUESTIONS[kind].split("|"))
        shown = drawings[kind == "second"]
        answer = {"colour": shown.colour, "shape": shown.shape}.get(kind, shown.name)
    parts = [*marks, question] if rng.random() < 0.7 else [question, *marks]
    return Example(
        f"{START}user\n{''.join(parts)}{STOP}\n{START}assistant\n", answer, [d.picture for d in drawings]
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [f"a {c} {s}\nan {c} {s}\n{c}\n{s}\nuser\nassistant\n" for c in COLOURS for s in SHAPES]
    made.train_from_iterator(
        [*words, *(q for each in QUESTIONS.values() for q in each.split("|")), HELLO], trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=STOP, pad_token=END, additional_special_tokens=SPECIAL
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """About 3.5 million weights."""
    id_of = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "eos_token_id": id_of(STOP),
        "bos_token_id": None,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "out_hidden_size": 192,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=id_of(IMAGE),
        video_token_id=id_of(VIDEO),
        vision_start_token_id=id_of(VISION_START),
        vision_end_token_id=id_of(VISION_END),
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def make_processor() -> Qwen2VLImageProcessorPil:
    size = {"shortest_edge": SETTINGS.least_pixels, "longest_edge": SETTINGS.most_pixels}
    half = [0.5] * 3
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size=size, image_mean=half, image_std=half
    )


class Batches:
    """Examples as the model takes them."""

    def __init__(self) -> None:
        self.tokenizer, self.processor = make_tokenizer(), make_processor()
        self.image = int(self.tokenizer.convert_tokens_to_ids(IMAGE))

    def make(self, seed: int, count: int) -> dict[str, Any]:
        rng = random.Random(seed)
        rows, labels, pictures = [], [], []
        for each in (example(rng) for _ in range(count)):
            prompt: list[int] = []
            tokens = iter(each.pictures)
            for token in self.tokenizer(each.text)["input_ids"]:
                if token != self.image:
                    prompt.append(token)
                    continue
                picture = next(tokens)
                high, wide = SETTINGS.size(picture.height, picture.width)
                pictures.append(picture.resize((wide, high), Image.Resampling.BICUBIC))
                prompt += [token] * (high * wide // SETTINGS.factor**2)
            answer = self.tokenizer(each.answer + STOP)["input_ids"]
            rows.append(prompt + answer)
            labels.append([-100] * len(prompt) + answer)
        longest = max(map(len, rows))
        pad = int(self.tokenizer.pad_token_id or 0)
        ids = np.array([row + [pad] * (longest - len(row)) for row in rows])
        made = self.processor(pictures, return_tensors="np", do_resize=False)
        return {
            "input_ids": ids,
            "attention_mask": np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
            "mm_token_type_ids": (ids == self.image).astype(np.int64),
            "labels": np.array([row + [-100] * (longest - len(row)) for row in labels]),
            "pixel_values": made["pixel_values"].astype(np.float32),
            "image_grid_thw": made["image_grid_thw"],
        }


_batches: list[Batches] = []


def _make(seed: int, count: int) -> dict[str, Any]:
    if not _batches:
        _batches.append(Batches())
    return _batches[0].make(seed, count)


def batches(steps: int, count: int, processes: int) -> Iterator[dict[str, Any]]:
    """Made ahead by other processes."""
    with ProcessPoolExecutor(processes) as pool:
        coming = [pool.submit(_make, seed, count) for seed in range(min(steps, 4 * processes))]
        for step in range(steps):
            made = coming[step].result()
            coming[step] = None  # type: ignore[call-overload]
            if len(coming) < steps:
                coming.append(pool.submit(_make, len(coming), count))
            yield made


@click.group()
def main() -> None:
    """Train demo-vision, and ask it."""


@main.command()
@click.argument("out", type=click.Path(path_type=pathlib.Path))
@click.option("--steps", default=6000, help="Batches.")
@click.option("--batch", default=64, help="Examples in one.")
@click.option("--processes", default=12, help="That draw.")
@click.option("--rate", default=1e-3, help="Highest learning rate.")
def train(out: pathlib.Path, steps: int, batch: int, processes: int, rate: float) -> None:
    """Writes the checkpoint to the directory OUT, in bfloat16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    whole = Batches()
    model = make_model(whole.tokenizer).to(device)
    click.echo(f"{sum(p.numel() for p in model.parameters()):,} weights on {device}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05)
    began = time.monotonic()
    for step, arrays in enumerate(batches(steps, batch, processes)):
        share = min(1.0, (step + 1) / 300) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * max(share, 0.01)
        given = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        labels = given.pop("labels")
        logits = model(**given).logits[:, :-1].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            wanted = labels[:, 1:] != -100
            right = ((logits.argmax(-1) == labels[:, 1:]) | ~wanted).all(1).float().mean()
            took = time.monotonic() - began
            click.echo(
                f"step {step}: loss {loss.item():.4f}, {100 * right.item():.0f} % whole answers, {took:.0f} s"
            )
    model.to(torch.bfloat16).save_pretrained(out)
    whole.tokenizer.save_pretrained(out)
    whole.processor.save_pretrained(out)
    GenerationConfig(eos_token_id=whole.tokenizer.eos_token_id, do_sample=False).save_pretrained(out)


@main.command()
@click.argument("server")
@click.option("--drawings", default=200)
@click.option("--seed", default=10**6, help="No training step has it.")
def evaluate(server: str, drawings: int, seed: int) -> None:
    """Asks the gateway at SERVER what fresh drawings show, alone and as one of two. Fails below 95 %."""
    from baton.client import Client

    rng = random.Random(seed)
    right = {"alone": 0, "one of two": 0}
    wrong: list[str] = []

    def png(drawing: Drawing) -> bytes:
        file = io.BytesIO()
        drawing.picture.save(file, "PNG")
        return file.getvalue()

    with Client(server) as client:

        def ask(kind: str, wanted: Drawing, content: list[str | bytes]) -> None:
            said = client.generate(
                messages=[{"role": "user", "content": content}], temperature=0, max_tokens=16
            )
            right[kind] += said.text.strip() == wanted.name
            if said.text.strip() != wanted.name:
                wrong.append(f"{wanted.name}: {said.text.strip()}")

        for _ in range(drawings):
            one, two = draw(rng), draw(rng)
            ask("alone", one, [png(one), rng.choice(QUESTIONS["what"].split("|"))])
            kind, wanted = rng.choice([("first", one), ("second", two)])
            ask("one of two", wanted, [png(one), png(two), rng.choice(QUESTIONS[kind].split("|"))])
    shares = {kind: count / drawings for kind, count in right.items()}
    click.echo(json.dumps({"right": shares, "drawings": drawings, "wrong": wrong[:20]}, indent=1))
    if min(shares.values()) < 0.95:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
