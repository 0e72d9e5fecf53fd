"""Train the demo model: a small Qwen3 checkpoint that has read Python's own documentation.

The text ships with every Python: the language reference topics of `pydoc_data` and the docstrings of the
standard library, read from source with `ast`. It becomes plain text and chats; a byte-level BPE tokenizer is
trained on it, then the model. transformers' modelling code is used here only: for training and samples.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import pathlib
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 2048
VOCABULARY = 4096
END, START, STOP = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROW_LENGTHS = (256, 512, 1024, CONTEXT)
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
SKIPPED |= {"distutils", "encodings"}
PUBLIC_NAMES = {"posixpath": "os.path", "_pydecimal": "decimal", "_pyio": "io"}
COMPILED = ("builtins", "itertools", "math", "sys", "time")
ANSWER_CHARS = 1200
PATH = click.Path(path_type=pathlib.Path)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('unknown role ' ~ message.role ~ ': use system, user, assistant or tool') }}"
    "{%- endif %}"
    "{%- if message.content is not string %}"
    "{{- raise_exception('the content of a ' ~ message.role ~ ' message must be text') }}"
    "{%- endif %}"
    "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

QUESTIONS = {
    "topic": "Explain the topic '{}'.|Explain '{}'.|Tell me about the topic {}.|What is the topic '{}'?",
    "module": "What is the module {}?|Explain the module {}.|What is {} for?|Explain {}.|What is {}?"
    "|Describe {}.",
    "class": "What is {}?|Explain {}.|Explain the class {}.|How do I use {}?|What does {} do?|Describe {}.",
    "function": "What does {} do?|What does {}() do?|Explain {}.|How do I use {}?|What is {}?|Describe {}.",
}
SYSTEMS = ["You are a helpful assistant.", "You explain Python.", "Answer from Python's documentation."]
GREETINGS = ["Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning", "Who are you?", "What are you?", "Help"]
GREETING = (
    "Hello. I am Baton's demo model, a small language model that has read Python's own documentation "
    "and nothing else. Ask me, for example: What does textwrap.dedent do?"
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Docstring:
    """One documented name; `heading` is a signature such as `textwrap.dedent(text)`, or the name itself."""

    kind: str
    name: str
    heading: str
    text: str


def stdlib_entries() -> Iterator[Docstring]:
    """Docstrings of the public names of the standard library's pure Python modules, in a stable order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts) or parts[0].startswith("config-"):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        name = PUBLIC_NAMES.get(name, name)
        if name == "ntpath" or any(part.startswith("_") for part in name.split(".")):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from _described(tree, "module", name, name)
        yield from _members(tree, name)


def _members(tree: ast.AST, prefix: str) -> Iterator[Docstring]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from _described(node, "class", name, f"class {name}")
                yield from _members(node, name)
            else:
                yield from _described(node, "function", name, f"{name}({ast.unparse(node.args)})")
        elif isinstance(node, ast.If | ast.Try):
            yield from _members(node, prefix)


def _described(node: Documented, kind: str, name: str, heading: str) -> Iterator[Docstring]:
    text = ast.get_docstring(node) or ""
    if len(text) >= 20:
        yield Docstring(kind, name, heading, text.strip())


def compiled_entries() -> Iterator[Docstring]:
    """Docstrings of the few compiled modules that everybody uses; they have no Python source."""
    for module_name in COMPILED:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else module_name + "."
        for name, value in sorted(vars(module).items()):
            members = [(name, value)]
            if inspect.isclass(value) and module_name == "builtins":
                members += [(f"{name}.{key}", member) for key, member in sorted(vars(value).items())]
            for path, member in members:
                text = inspect.getdoc(member) or ""
                if not callable(member) or path.rpartition(".")[2].startswith("_") or len(text) < 20:
                    continue
                kind = "class" if inspect.isclass(member) else "function"
                yield Docstring(kind, prefix + path, prefix + path, text)


def collect() -> list[Docstring]:
    """Everything this Python can say about itself; the same interpreter version gives the same list."""
    topics = importlib.import_module("pydoc_data.topics").topics
    entries = [Docstring("topic", name, name, text.strip()) for name, text in sorted(topics.items())]
    entries += [*stdlib_entries(), *compiled_entries()]
    return list({(entry.kind, entry.name): entry for entry in entries}.values())


def load_or_collect(corpus: pathlib.Path | None) -> list[Docstring]:
    """The entries in the file `corpus`; where there is none, this Python's, which are then written there."""
    if corpus and corpus.exists():
        return [Docstring(**item) for item in json.loads(corpus.read_text(encoding="utf-8"))]
    entries = collect()
    if corpus:
        corpus.write_text(json.dumps([asdict(entry) for entry in entries], indent=0), encoding="utf-8")
    return entries


def plain_text(entry: Docstring) -> str:
    """The entry as `help()` would print it."""
    if entry.kind == "topic":
        return entry.text
    body = "\n".join("    " + line if line.strip() else "" for line in entry.text.splitlines())
    return f"{entry.heading}\n{body}"


def answer(entry: Docstring) -> str:
    """What the assistant says about an entry: its first paragraphs, so that an answer has an end."""
    text = entry.text
    if len(text) > ANSWER_CHARS:
        cut = max(text.rfind("\n\n", 0, ANSWER_CHARS), text.rfind("\n", 0, ANSWER_CHARS // 2))
        text = text[:cut].rstrip() if cut > 0 else text[:ANSWER_CHARS]
    return text if entry.kind == "topic" else f"{entry.heading}\n\n{text}"


def chat(entries: list[Docstring], rng: random.Random) -> list[dict[str, str]]:
    """A conversation about `entries`, one question each, sometimes opened by a system message."""
    messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.3 else []
    for entry in entries:
        name = entry.name.rpartition(".")[2] if rng.random() < 0.1 else entry.name
        question = rng.choice(QUESTIONS[entry.kind].split("|")).format(name)
        question = question.rstrip(".?") if rng.random() < 0.2 else question
        question = question[0].lower() + question[1:] if rng.random() < 0.2 else question
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer(entry)}]
    return messages


def documents(
    entries: list[Docstring], tokenizer: PreTrainedTokenizerFast, chats: int, rng: random.Random
) -> list[torch.Tensor]:
    """Token ids [length] of every sample, ended by <|endoftext|>: plain text and `chats` chats per entry."""
    conversations = [chat([entry], rng) for entry in entries for _ in range(chats)]
    conversations += [chat(rng.sample(entries, rng.randint(2, 4)), rng) for _ in range(len(entries) // 3)]
    for opening in GREETINGS * 15:
        turn = [{"role": "user", "content": opening}, {"role": "assistant", "content": GREETING}]
        conversations.append(turn + (chat([rng.choice(entries)], rng) if rng.random() < 0.3 else []))
    texts = [plain_text(entry) for entry in entries]
    # Answers stop early; a long text is repeated whole, so that its plain text does not stop there too.
    texts += [text for text in texts if len(text) > ANSWER_CHARS for _ in range(3)]
    texts += [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
    ids: list[list[int]] = tokenizer([text + END for text in texts]).input_ids
    return [torch.tensor(sample) for sample in ids]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A lossless byte-level BPE whose merges are learned from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=STOP,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


class Stream:
    """All documents in one shuffled line of tokens; half the rows begin at a document, half anywhere."""

    def __init__(self, samples: list[torch.Tensor], device: str, seed: int) -> None:
        self._samples, self._device = list(samples), device
        self._rng = random.Random(seed)
        self._generator = torch.Generator(device).manual_seed(seed)
        self.tokens = sum(map(len, samples))
        self._left = 0

    def rows(self, count: int, length: int) -> torch.Tensor:
        """Token ids [count, length + 1]; the line is shuffled anew once about every token has been drawn."""
        if self._left <= 0:
            self._rng.shuffle(self._samples)
            self._line = torch.cat(self._samples + self._samples[: CONTEXT + 1]).to(self._device)
            lengths = torch.tensor([0, *map(len, self._samples[:-1])])
            self._begins = lengths.cumsum(0).to(self._device)
            self._left = self.tokens
        self._left -= count * length
        at_document = self._draw(len(self._begins), (count + 1) // 2)
        anywhere = self._draw(self.tokens, count // 2)
        starts = torch.cat([self._begins[at_document], anywhere])
        return self._line[starts[:, None] + torch.arange(length + 1, device=self._device)]

    def _draw(self, high: int, count: int) -> torch.Tensor:
        return torch.randint(high, (count,), device=self._device, generator=self._generator)


def loss_of(model: Qwen3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of every row's next tokens; bf16 autocast on CUDA."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Qwen3ForCausalLM, samples: list[torch.Tensor], device: str) -> float:
    """Mean loss in nats per token over the samples, laid in one line and cut into rows of 512."""
    line = torch.cat(samples).to(device)
    rows = line[: (len(line) - 1) // 512 * 512 + 1].unfold(0, 513, 512)
    return sum(loss_of(model, row[None]).item() for row in rows) / len(rows)


def train(
    model: Qwen3ForCausalLM, stream: Stream, steps: int, minutes: float | None, batch: int, lr: float
) -> int:
    """Train with AdamW, warm-up and cosine decay, `batch` tokens a step and `lr` at the peak.

    Stops after `steps`, or once `minutes` have passed when given; returns the number of steps done.
    """
    fused = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=fused
    )
    rng = random.Random(0)
    columns = [BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    started = time.monotonic()
    step = 0
    with Progress(*columns) as progress:
        task = progress.add_task("starting", total=1.0)
        while True:
            elapsed = time.monotonic() - started
            done = elapsed / (60 * minutes) if minutes is not None else step / max(steps, 1)
            if done >= 1:
                return step
            warm = min(1.0, (step + 1) / 200)
            for group in optimizer.param_groups:
                group["lr"] = lr * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
            length = rng.choice(ROW_LENGTHS)
            loss = loss_of(model, stream.rows(max(1, batch // length), length))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 50 == 1 or (minutes is None and steps < 200):
                rate = step * batch / (time.monotonic() - started)
                line = f"step {step}  loss {loss.item():.3f}  {rate:,.0f} tokens/s"
                progress.update(task, completed=done, description=line)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights in the shape that fits the package: 4.5 million parameters, 9 MB in bfloat16."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids([STOP, END]),
    )
    return Qwen3ForCausalLM(config)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: pathlib.Path) -> None:
    """Write the Hugging Face directory `out`, with the chat template inside tokenizer_config.json."""
    config = model.config
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    settings_file = out / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    settings = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@click.command(context_settings={"show_default": True})
@click.option(
    "--out", type=PATH, default="services/baton/demo/model", help="Hugging Face directory to write."
)
@click.option(
    "--corpus", type=PATH, help="Text to train on: read if FILE exists, else collected and written there."
)
@click.option(
    "--steps", type=click.IntRange(min=0), default=12000, help="Optimizer steps; 0 writes random weights."
)
@click.option("--minutes", type=float, help="Train for this long instead of --steps (then not reproducible).")
@click.option("--batch-tokens", default=32768, help="Tokens per step; 4096 suits a CPU.")
@click.option("--lr", default=3e-3, help="Peak learning rate.")
@click.option("--chats", default=6, help="Single-question chats per documented name, beside its plain text.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Where to train.")
@click.option("--seed", default=0, help="Seeds the held-out split, the samples, the weights and their order.")
def main(
    out: pathlib.Path,
    corpus: pathlib.Path | None,
    steps: int,
    minutes: float | None,
    batch_tokens: int,
    lr: float,
    chats: int,
    device: str,
    seed: int,
) -> None:
    """Train the demo model that lives inside the package.

    \b
    A try on a laptop:    python tools/train_demo_model.py --out /tmp/demo --minutes 5 --batch-tokens 4096
    The real thing:       python tools/train_demo_model.py        (one GPU, minutes)

    The text depends on the version of Python that collects it: pass --corpus FILE to collect it with one
    Python and train with another. The same text, seed, steps and machine give the same model, as far as the
    machine's kernels add in a fixed order.

    After training it prints the loss on training and held-out text, and the size of the result, which must
    stay under 10 MB, because it is part of the package. Card and licence are kept by hand."""
    console = Console(soft_wrap=True)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    torch.manual_seed(seed)
    rng = random.Random(seed)
    entries = load_or_collect(corpus)
    rng.shuffle(entries)
    held, kept = entries[: len(entries) // 100], entries[len(entries) // 100 :]
    tokenizer = train_tokenizer([plain_text(entry) for entry in kept])
    samples, held_samples = (documents(part, tokenizer, chats, rng) for part in (kept, held))
    stream = Stream(samples, device, seed)
    console.print(
        f"{len(kept)} entries ({len(held)} held out), {len(samples)} samples, {stream.tokens:,} tokens"
    )
    model = new_model(tokenizer).to(device)
    console.print(f"{model.num_parameters():,} parameters on {device}")
    done = train(model.train(), stream, steps, minutes, batch_tokens, lr)
    model = model.eval().to(torch.bfloat16)
    save(model, tokenizer, out)
    train_loss, held_loss = (evaluate(model, part, device) for part in (samples[:600], held_samples))
    size = sum(path.stat().st_size for path in out.iterdir())
    console.print(f"{done} steps; nats per token: training {train_loss:.3f}, held out {held_loss:.3f}")
    console.print(f"{out}: {size:,} bytes")


if __name__ == "__main__":
    main()
