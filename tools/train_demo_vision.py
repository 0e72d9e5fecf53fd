"""Train demo-vision: a tiny Qwen3-VL checkpoint that names colour and shape of drawn figures, "a red square".

    python tools/train_demo_vision.py train OUT                # minutes on a GPU, half an hour on a core
    python tools/train_demo_vision.py show HOST:PORT OUT.png   # fresh drawings with a gateway's answers

`train` writes what it has every few hundred steps; called again, it goes on from there. On one machine the
same steps give the same weights, in however many calls. transformers' modelling code is used for training
only. Pictures are resized as Baton resizes them.
"""

from __future__ import annotations

import json
import math
import pathlib
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.demo.figures import COLOURS, LARGEST, QUESTIONS, SHAPES, Drawing, draw
from baton.pictures.settings import PictureSettings

PATCH, MERGE = 8, 2
SETTINGS = PictureSettings(PATCH, MERGE, 32 * 32, 48 * 48)
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
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
HELLO = "Show me a picture of one figure, such as a red square, and ask me what it is."
WARM_UP = 200
"""Steps."""
FALL = 0.25
"""Share of all steps at the end in which the learning rate falls to nothing."""
EASY = 1000
"""Steps at the beginning that show one picture each."""
SAVE_EVERY = 250
"""Steps."""
FRESH = 10**6
"""Seeds from here on belong to no training step."""
LOWEST = 0.95
"""Share of fresh drawings that must be named right."""
MOST_BYTES = 12 * 10**6
"""Of the checkpoint."""
ONE = ("what", "what", "colour", "shape")
ANY = (*ONE * 4, *("what", "first", "second") * 6, "none")
"""Kinds of examples, each as often as it is seen."""


@dataclass(frozen=True)
class Example:
    text: str
    """With one image token for each picture."""
    answer: str
    pictures: list[Image.Image]


def example(rng: random.Random, kinds: Sequence[str]) -> Example:
    """kinds: of QUESTIONS, or "none"; one of these."""
    kind = rng.choice(kinds)
    drawings: list[Drawing] = []
    if kind == "none":
        question, answer = rng.choice(["Hello", "Hi!", "What can you do?", "Who are you?"]), HELLO
    else:
        drawings = [draw(rng) for _ in range(2 if kind in ("first", "second") else 1)]
        question = rng.choice(QUESTIONS[kind])
        shown = drawings[kind == "second"]
        answer = {"colour": shown.colour, "shape": shown.shape}.get(kind, shown.name)
    marks = [f"{VISION_START}{IMAGE}{VISION_END}"] * len(drawings)
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
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = [f"a {c} {s}\nan {c} {s}\n{c}\n{s}\nuser\nassistant\n" for c in COLOURS for s in SHAPES]
    made.train_from_iterator([*words, *(q for each in QUESTIONS.values() for q in each), HELLO], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=STOP, pad_token=END, additional_special_tokens=SPECIAL
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Under a million weights."""
    id_of = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "eos_token_id": id_of(STOP),
        "bos_token_id": None,
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 96,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 36,
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


def patches(picture: Image.Image) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[patches, 3 * 2 frames * PATCH * PATCH], as `make_processor` makes them of a resized picture."""
    values = np.asarray(picture, np.float32) / 127.5 - 1
    rows, columns = picture.height // SETTINGS.factor, picture.width // SETTINGS.factor
    values = values.reshape(rows, MERGE, PATCH, columns, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.repeat(values.reshape(-1, 3, 1, PATCH, PATCH), 2, 2).reshape(-1, 6 * PATCH * PATCH)


class Batches:
    """Examples as the model takes them."""

    def __init__(self) -> None:
        self.tokenizer, self.processor = make_tokenizer(), make_processor()
        self.image = int(self.tokenizer.convert_tokens_to_ids(IMAGE))

    def make(self, seed: int, count: int, kinds: Sequence[str]) -> dict[str, Any]:
        """kinds: as those of `example`."""
        rng = random.Random(seed)
        rows, labels, pictures = [], [], []
        for each in (example(rng, kinds) for _ in range(count)):
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
        return {
            "input_ids": ids,
            "attention_mask": np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
            "mm_token_type_ids": (ids == self.image).astype(np.int64),
            "labels": np.array([row + [-100] * (longest - len(row)) for row in labels]),
            "pixel_values": np.concatenate([patches(each) for each in pictures]),
            "image_grid_thw": np.array([[1, p.height // PATCH, p.width // PATCH] for p in pictures]),
        }


_batches: list[Batches] = []


def _make(step: int, count: int) -> dict[str, Any]:
    if not _batches:
        _batches.append(Batches())
    return _batches[0].make(step, count, ONE if step < EASY else ANY)


@contextmanager
def batches(first: int, steps: int, count: int, processes: int) -> Iterator[Iterator[dict[str, Any]]]:
    """Those of steps from `first` on, made ahead by other processes; 0 processes: by this one."""
    if not processes:
        yield (_make(step, count) for step in range(first, steps))
        return
    with ProcessPoolExecutor(processes) as pool:

        def made() -> Iterator[dict[str, Any]]:
            coming: list[Future[dict[str, Any]]] = []
            for step in range(first, steps + 4 * processes):
                if step < steps:
                    coming.append(pool.submit(_make, step, count))
                if step >= first + 4 * processes:
                    yield coming.pop(0).result()

        yield made()
        pool.shutdown(wait=True, cancel_futures=True)


class Training:
    """The model, and what its training needs to go on: kept in one file beside the checkpoint."""

    def __init__(self, out: pathlib.Path, rate: float, device: torch.device) -> None:
        torch.manual_seed(0)
        self.whole, self.out, self.rate, self.device = Batches(), out, rate, device
        self.model = make_model(self.whole.tokenizer).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05
        )
        self.step = 0
        self._file = out.with_name(out.name + ".training.safetensors")
        if self._file.exists():
            self._load()

    def learn(self, arrays: dict[str, Any], steps: int) -> tuple[float, float]:
        """One of `steps` steps -> the loss, and the share of examples whose whole answer was right."""
        share = min(1.0, (self.step + 1) / WARM_UP, (steps - self.step) / (FALL * steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * share
        logits, labels = self._logits(arrays)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item(), self._right(logits, labels)

    def right(self, kind: str, count: int) -> float:
        """The share of fresh examples whose whole answer is right."""
        with torch.no_grad():
            return self._right(*self._logits(self.whole.make(FRESH, count, [kind])))

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": value for name, value in self.model.named_parameters()}
        names = {value: name for name, value in self.model.named_parameters()}
        for value, state in self.optimizer.state.items():
            tensors |= {f"{key}.{names[value]}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        beside = self._file.with_suffix(".new")
        save_file(copies, beside, {"step": str(self.step)})
        beside.replace(self._file)
        rounded = make_model(self.whole.tokenizer)
        rounded.load_state_dict(self.model.state_dict())
        rounded.to(torch.bfloat16).save_pretrained(self.out)
        self.whole.tokenizer.save_pretrained(self.out)
        self.whole.processor.save_pretrained(self.out)
        end = self.whole.tokenizer.eos_token_id
        GenerationConfig(eos_token_id=end, do_sample=False).save_pretrained(self.out)

    def _load(self) -> None:
        with safe_open(self._file, "pt") as file:
            self.step = int(file.metadata()["step"])
            with torch.no_grad():
                for name, value in self.model.named_parameters():
                    value.copy_(file.get_tensor(f"model.{name}"))
                    self.optimizer.state[value] = {
                        "step": torch.tensor(float(self.step)),
                        **{
                            key: file.get_tensor(f"{key}.{name}").to(self.device)
                            for key in ("exp_avg", "exp_avg_sq")
                        },
                    }

    def _logits(self, arrays: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """[examples, tokens, vocabulary], and the labels [examples, tokens] that they should foretell."""
        given = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        labels = given.pop("labels")[:, 1:]
        return self.model(**given).logits[:, :-1].float(), labels

    @staticmethod
    def _right(logits: torch.Tensor, labels: torch.Tensor) -> float:
        return ((logits.argmax(-1) == labels) | (labels == -100)).all(1).float().mean().item()


@click.group()
def main() -> None:
    """Train demo-vision, and ask it."""


@main.command()
@click.argument("out", type=click.Path(path_type=pathlib.Path))
@click.option("--steps", default=6000, help="Batches, of all calls.")
@click.option("--minutes", default=math.inf, help="The longest that this call trains; another goes on.")
@click.option("--batch", default=64, help="Examples in one.")
@click.option("--processes", default=1, help="That draw; 0: none but this one.")
@click.option("--rate", default=2e-3, help="Highest learning rate.")
def train(out: pathlib.Path, steps: int, minutes: float, batch: int, processes: int, rate: float) -> None:
    """Writes the checkpoint to the directory OUT, in bfloat16, and what training needs to go on beside it.
    Fails if all steps are done and fresh drawings are not named right."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(out, rate, device)
    click.echo(f"{sum(p.numel() for p in training.model.parameters()):,} weights on {device}")
    began = time.monotonic()
    with batches(training.step, steps, batch, processes) as coming:
        for arrays in coming:
            loss, right = training.learn(arrays, steps)
            step, took = training.step, time.monotonic() - began
            if step % 50 == 0 or step == steps:
                click.echo(f"step {step}: loss {loss:.4f}, {100 * right:.0f} % right, {took:.0f} s")
            late = took > 60 * minutes
            if step % SAVE_EVERY == 0 or step == steps or late:
                training.save()
            if late:
                break
    shares = {kind: training.right(kind, 200) for kind in QUESTIONS}
    size = sum(file.stat().st_size for file in out.iterdir())
    click.echo(json.dumps({"step": training.step, "bytes": size, "right": shares}, indent=1))
    if size > MOST_BYTES or (training.step >= steps and min(shares.values()) < LOWEST):
        raise SystemExit(1)


@main.command()
@click.argument("server")
@click.argument("file", type=click.Path(path_type=pathlib.Path))
@click.option("--seed", default=FRESH + 1, help="No training step has it.")
def show(server: str, file: pathlib.Path, seed: int) -> None:
    """Writes six fresh drawings as one PNG, with what the gateway at SERVER says below each of them."""
    from baton.client import Client

    rng = random.Random(seed)
    cell, line = LARGEST + 8, 24
    page = Image.new("RGB", (6 * cell, cell + line), "white")
    with Client(server) as client:
        for column in range(6):
            drawing = draw(rng)
            content: list[str | bytes] = [drawing.png(), QUESTIONS["what"][0]]
            said = client.generate(
                messages=[{"role": "user", "content": content}], temperature=0, max_tokens=16
            ).text
            click.echo(f"{drawing.name}: {said}")
            left, picture = column * cell, drawing.picture
            page.paste(picture, (left + (cell - picture.width) // 2, (cell - picture.height) // 2))
            pen, font = ImageDraw.Draw(page), ImageFont.load_default(16)
            pen.text((left + cell // 2, cell), said, "black", font, anchor="ma")
    page.save(file, optimize=True)


if __name__ == "__main__":
    main()
