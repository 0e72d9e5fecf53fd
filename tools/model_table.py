"""Which architectures of the installed transformers Baton serves, by whose code: lists in docs/models.md.

    python tools/model_table.py --write docs/models.md
    python tools/model_table.py --only llama,qwen3_vl

Of each architecture a small random checkpoint is made from its configuration's defaults. `baton doctor`'s
checks say whether it can be served; what they accept is loaded, and its logits in chunks over a paged pool
are compared with those of transformers. Each is asked in a process of its own, which may die. Exits with 1,
and names them, if any answer is wrong, differs from doctor's verdict, or is none (an exception, a death, no
time).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

LAYERS = 12
VOCABULARY = 256
EXPERTS = 16
WINDOW = 8
TOKENS = 24
"""Of the sequence that is compared: more than a window, and several chunks."""
TRIES = ((16, True, False), (8, True, False), (8, True, True), (8, False, False))
"""What widths are divided by, whether there are fewer layers, and whether rotations in sections, which some
models' code takes for granted, get narrow ones: the first that transformers can make."""
SECONDS = 300.0
MEMORY = 6 * 2**30
"""By which a process may grow."""
_FORKS = threading.Lock()
LIMIT = 1e-3
"""Largest difference of logits, as a part of the largest; the median over all tokens."""
BEGIN, END = "<!-- made by tools/model_table.py -->\n", "<!-- end -->\n"
OWN, THEIRS = "Baton's own code", "transformers' code"
REFUSED, UNCOMPARED, FAULT = "refused", "not compared", "FAULT"
_WIDTH = re.compile(
    r"hidden_size.*|.*intermediate_size.*|(.*_)?(dim|rank|width)|d_(model|ff|kv|inner)|.*ffn_.*dim.*|n_embd|n_inner"
    r"|(.*_)?hidden_size|mamba_d_head|mrope_section"
)
_COUNT_OF_EXPERTS = re.compile(r"(n|num|moe_num)(_local|_routed)?_experts|num_experts")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size")


class Verdict(NamedTuple):
    """Who serves an architecture, and why nobody does."""

    by: str
    why: str = ""


def architectures() -> Iterator[tuple[str, str]]:
    """(model type, architecture) of all language models, with or without images."""
    from transformers.models.auto import modeling_auto

    found = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    for kind, names in sorted(found.items()):
        yield kind, names if isinstance(names, str) else names[0]


def smaller(config: Mapping[str, Any], factor: int, fewer_layers: bool) -> dict[str, Any]:
    """A configuration, and those inside it, with narrow layers, few of them, and few tokens and experts."""
    layers = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), 0)
    fewer = min(layers, LAYERS) if fewer_layers else layers
    made: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            value = smaller(value, factor, fewer_layers)
        elif isinstance(value, list) and layers > 1 and len(value) == layers:
            value = [_narrow(name, each, factor) for each in value[:fewer]]
        elif isinstance(value, list):
            value = [_narrow(name, each, factor) for each in value]
        elif name in _LAYERS:
            value = min(value, fewer) if value else value
        elif name == "num_kv_shared_layers":
            value = min(value or 0, fewer // 2)
        else:
            value = _narrow(name, value, factor)
        made[name] = value
    return made


def _narrow(name: str, value: Any, factor: int) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _WIDTH.fullmatch(name):
        return value // factor if value % factor == 0 else value
    if "vocab_size" in name:
        return min(value, VOCABULARY)
    if name.endswith(("_token_id", "_token_index", "_token_ids")) and value >= VOCABULARY:
        return VOCABULARY - 1 - value % 32
    if _COUNT_OF_EXPERTS.fullmatch(name):
        return min(value, EXPERTS)
    return min(value, WINDOW) if name in _WINDOWS else value


def _add_sections(text: dict[str, Any]) -> None:
    """As Qwen's: an eighth of the head for time, three sixteenths each for height and width."""
    half = (text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]) // 2
    part = 3 * half // 8
    text["rope_parameters"] = {
        **(text.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}),
        "mrope_section": [half - 2 * part, part, part],
    }


def default_config(kind: str) -> Any:
    """Some name a vision tower for a language model of another width."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    vision = getattr(config, "vision_config", None)
    if hasattr(vision, "out_hidden_size"):
        vision.out_hidden_size = config.get_text_config().hidden_size
    return config


def small_model(kind: str, architecture: str, folder: Path) -> Any:
    """A model of transformers with random weights, saved in `folder`. Raises what its code does if it cannot
    be made."""
    import transformers

    first: Exception | None = None
    plain = default_config(kind)
    for factor, fewer, sections in TRIES:
        try:
            narrow = smaller(plain.to_dict(), factor, fewer)
            text = narrow.get("text_config", narrow)
            if kind.startswith("qwen3_vl"):  # whose code has sections that its configuration does not name
                narrow["vision_config"]["num_heads"] = 2
            if sections or kind.startswith("qwen3_vl"):
                _add_sections(text)
            config = type(plain).from_dict(narrow)
            config.architectures = [architecture]
            torch.manual_seed(0)
            make = getattr(transformers, architecture)._from_config
            model = make(config, attn_implementation="eager").eval()
            _randomize(model)
            reference(model)
            model.save_pretrained(folder)
            return model
        except Exception as error:  # of an arbitrary model's code
            first = first or error
    assert first is not None
    raise first


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Neither norms of 1 nor biases of 0, which would hide that they are not applied."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dim() < 2:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
        else:
            parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))


def prompt() -> torch.Tensor:
    return torch.arange(3, 3 + TOKENS)


@torch.inference_mode()
def reference(model: Any) -> torch.Tensor:
    """-> [tokens, vocab]"""
    logits: torch.Tensor = model(input_ids=prompt()[None], use_cache=False).logits
    return logits[0].float()


def verdict(kind: str, architecture: str, folder: Path) -> Verdict:
    from baton.model_path import CheckpointError
    from baton.models.config import first_line, read_config
    from baton.models.loader import cache_specs, check_tensors, load_model

    if refusal := refused_by_configuration(kind, architecture, folder):
        return refusal
    try:
        model = small_model(kind, architecture, folder)
    except Exception as error:
        try:
            cache_specs(read_config(folder))
        except CheckpointError as problem:
            return Verdict(REFUSED, str(problem))
        return Verdict(UNCOMPARED, f"doctor accepts it, no small model could be made: {first_line(error)}")
    try:
        check_tensors(folder)
    except CheckpointError as error:
        return Verdict(REFUSED, str(error))
    own = read_config(folder).implementation == "baton"
    expected = reference(_loaded(model, folder))
    try:
        differs = difference(load_model(folder, torch.float32), expected)
    except CheckpointError as error:
        return Verdict(REFUSED, f"{error} (found when it is loaded)")
    if not differs <= LIMIT:
        return Verdict(FAULT, f"its logits differ from those of transformers by {differs:.1e} of the largest")
    return Verdict(OWN if own else THEIRS)


def refused_by_configuration(kind: str, architecture: str, folder: Path) -> Verdict | None:
    """What doctor says of the configuration's defaults, before it asks the model's code."""
    from baton.model_path import CheckpointError
    from baton.models.config import read_config

    try:
        config = default_config(kind)
        config.architectures = [architecture]
        config.save_pretrained(folder)
    except Exception as error:  # some need arguments
        return Verdict(REFUSED, f"no default configuration: {type(error).__name__}")
    try:
        read_config(folder)
    except CheckpointError as error:
        return Verdict(REFUSED, str(error))
    return None


def _loaded(model: Any, folder: Path) -> Any:
    return type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def difference(model: Any, expected: torch.Tensor) -> float:
    from baton.attention.registry import resolve
    from baton.models.transformers_backend import TransformersModel
    from baton.worker.attention_check import check_attention, paged_logits, relative
    from baton.worker.model import kv_layout

    features = frozenset[str]().union(*(options.features for options in model.attention_options))
    backend, _ = resolve("auto", torch.device("cpu"), features=features)
    layout = kv_layout(model, 16, model.config.used_length)
    if isinstance(model, TransformersModel):
        check_attention(model, layout, backend, backend)
    return relative(paged_logits(model, layout, prompt(), backend, backend), expected).median().item()


def ask(kind: str, architecture: str, seconds: float = SECONDS) -> Verdict:
    """In a process of its own."""
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_answer, args=(kind, architecture, sender))
    with _FORKS:
        process.start()
    sender.close()
    try:
        if not wait([receiver, process.sentinel], seconds):
            return Verdict(FAULT, f"no answer after {seconds:.0f} s")
        with contextlib.suppress(EOFError):
            if receiver.poll():
                return Verdict(*receiver.recv())
        process.join()
        return Verdict(FAULT, f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _answer(kind: str, architecture: str, sender: Connection) -> None:
    from baton.models.config import first_line

    limit = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.environ["HF_HUB_OFFLINE"] = "1"
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            found = verdict(kind, architecture, Path(folder))
        except BaseException as error:  # a fault, whatever it is
            found = Verdict(FAULT, f"{type(error).__name__}: {first_line(error)}")
        sender.send(tuple(found))


def short(why: str) -> str:
    """The reason without what all such lines have in common."""
    for end in ("; Baton's own are", "; supported are"):
        why = why.split(end)[0]
    return why.split(" is not supported: ")[-1].split(" cannot be used: ")[-1].split("ForCausalLM: ")[-1]


def grouped(answered: Iterable[tuple[str, Verdict]]) -> Iterator[str]:
    """Lines of a list: the architectures of each verdict together, those that are served first."""
    groups: dict[str, dict[str, None]] = {OWN: {}, THEIRS: {}}
    answered = list(answered)
    compared = {architecture for architecture, found in answered if found.by in (OWN, THEIRS)}
    for architecture, found in answered:
        if found.by == UNCOMPARED and architecture in compared:
            continue  # by another of its model types
        why = "" if found.by == REFUSED else short(found.why).split(": ")[0]  # doctor says why
        groups.setdefault(f"{found.by}: {why}" if why else found.by, {})[architecture] = None
    for words, names in groups.items():
        if names:
            listed = str(len(names)) if words == REFUSED else ", ".join(f"`{name}`" for name in names)
            line = f"- **{words}**: {listed}"
            yield from textwrap.wrap(line, 140, subsequent_indent="  ", break_long_words=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="a page with the lists between two marks")
    parser.add_argument("--only", default="", help="these model types, with commas between them")
    parser.add_argument("--jobs", type=int, default=1, help="architectures that are asked at a time")
    options = parser.parse_args()
    import transformers
    import transformers.models.llava.modeling_llava  # once, before processes are forked

    import baton.worker.model  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # threads do not survive a fork
    only = set(filter(None, options.only.split(",")))
    asked = [each for each in architectures() if not only or each[0] in only]
    answered: list[tuple[str, Verdict]] = []
    faults = []
    with ThreadPoolExecutor(options.jobs) as threads:
        answers = threads.map(lambda each: ask(*each), asked)
        for (kind, architecture), found in zip(asked, answers, strict=True):
            answered.append((architecture, found))
            print(f"{architecture} ({kind}): {found.by}: {short(found.why)}".removesuffix(": "), flush=True)
            if found.by == FAULT:
                faults.append(kind)
    if options.write:
        text = options.write.read_text()
        before, _, rest = text.partition(BEGIN)
        version = f"transformers {transformers.__version__}:\n\n"
        options.write.write_text(
            before + BEGIN + version + "\n".join(grouped(answered)) + "\n" + END + rest.partition(END)[2]
        )
    if faults:
        sys.exit(f"{len(faults)} faults: {', '.join(faults)}")


if __name__ == "__main__":
    main()
