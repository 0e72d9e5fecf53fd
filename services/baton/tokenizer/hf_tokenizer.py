"""A checkpoint's tokenizer and chat template, by Hugging Face's libraries. Calls are slow: use threads."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.checkpoint_config import context_length, end_token_ids
from baton.checkpoint_limits import check_sizes, check_tokenizer, read_json
from baton.gguf_file import GgufFile
from baton.model_path import CheckpointError
from baton.pictures.settings import read_settings
from baton.rpc.errors import BatonError
from baton.rpc.logs import get_logger
from baton.rpc.validate import check_sampling
from baton.tokenizer import output_formats
from baton.tokenizer.chat_encoder import ChatEncoder, Rendered
from baton.tokenizer.chat_templates import read_templates, takes_parts
from baton.tokenizer.conversation import Conversation
from baton.tokenizer.gguf_tokenizer import read_tokenizer
from baton.tokenizer.render_limits import RenderLimits, takes_powers
from baton.tokenizer.vocabulary import UnknownDecoder, Vocabulary, read_vocabulary
from baton.v1 import common_pb2, node_pb2

_log = get_logger()
_NOT_APPLIED = (
    *("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "sequence_bias", "stop_strings"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams", "penalty_alpha", "guidance_scale"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff"),
)
"""Fields of generation_config.json that change what transformers generates, and nothing here."""
SOURCES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
"""Files that hold a vocabulary; a checkpoint needs one of them."""


class NoChatTemplate(Exception):
    """The model has no chat template."""


class TemplateFailed(Exception):
    """The chat template refused the messages; says why."""


class EncodingFailed(Exception):
    """The library cannot encode a text; says why."""


@contextmanager
def _raising(kind: type[Exception], prefix: str = "") -> Iterator[None]:
    """Whatever the library raises, as an error of this kind. Its panics (a bug, a limit of its regular
    expressions) are no Exception, and nobody else would catch them."""
    try:
        yield
    except (kind, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(prefix + _one_line(error)) from error


@dataclass(frozen=True, slots=True)
class HFTokenizer:
    """Thread-safe: nothing changes after load()."""

    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    context_length: int
    """Positions that the checkpoint was made for; 0: config.json does not say."""
    chat: bool
    _tokenizer: Any
    begin_token_id: int | None
    """The token that begins a text, or the one that separates texts; None: there is neither."""
    default_sampling: common_pb2.SamplingParams
    """What the checkpoint's generation_config.json recommends."""
    _chat_encoder: ChatEncoder | None = None
    """None: special tokens that a message's content names become those tokens."""
    images: node_pb2.ImageSettings | None = None
    """How the model wants its images; None: it takes none, or in a way that is not supported."""
    _limits: RenderLimits = field(default_factory=RenderLimits)
    _parts: bool = False
    """The template takes lists of parts, not texts."""

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. An empty text has only those that the tokenizer adds itself.

        Strings such as "<|im_end|>" in a text become the special token that they name. Raises EncodingFailed.
        """
        backend = self._tokenizer.backend_tokenizer
        # The backend, rather than the tokenizer: the latter sets padding and truncation on it at every call,
        # which fails when two threads do so at once.
        with _raising(EncodingFailed):
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    @property
    def template(self) -> str:
        """Source of the chat template that is used for tools; empty: there is none."""
        source = self._tokenizer.chat_template
        if isinstance(source, dict):  # several, by name
            source = source.get("tool_use") or source.get("default")
        return str(source or "")

    def render(
        self, conversation: Conversation, add_generation_prompt: bool, continue_final_message: bool = False
    ) -> Rendered:
        """A conversation, by the model's template in Jinja's sandbox.

        continue_final_message: the text ends with that of the last message.

        Raises NoChatTemplate, or TemplateFailed.
        """
        if not self.chat:
            raise NoChatTemplate

        def render(conversation: Conversation) -> str:
            conversation = conversation.with_parts(every=self._parts)
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in conversation.messages],
                tools=[dict(tool) for tool in conversation.tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **conversation.arguments,
            )
            return text

        def attempt(conversation: Conversation) -> Rendered:
            if self._chat_encoder is None:
                text = render(conversation)
                return Rendered(text, text, {})
            return self._chat_encoder.render(render, conversation, self.template)

        if not output_formats.knows_tools(self.template):
            conversation = conversation.without_tools()
        elif output_formats.tool_format(self.template) == "mistral":
            conversation = conversation.with_short_ids()

        def either() -> Rendered:
            try:
                return attempt(conversation)
            except TypeError:
                if not any("tool_calls" in message for message in conversation.messages):
                    raise
                return attempt(conversation.with_text_arguments())

        try:
            return self._limits.run(either)
        except Exception as error:  # anything that the template may raise: it is the checkpoint's code
            raise TemplateFailed(_one_line(error)) from error

    def encode_chats(self, rendered: Sequence[Rendered], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each. Raises EncodingFailed."""
        if self._chat_encoder is None:
            return self.encode([each.text for each in rendered], add_special_tokens)
        with _raising(EncodingFailed):
            return self._chat_encoder.encode(rendered, add_special_tokens)


def load(path: Path, *, special_tokens_in_content: bool = False) -> HFTokenizer:
    """Reads a directory's tokenizer files, config.json and generation_config.json, or a GGUF file's metadata.
    Raises CheckpointError.

    special_tokens_in_content: see TokenizerConfig.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if path.is_file():
        file = GgufFile(path)
        with _raising(CheckpointError, f"cannot read the tokenizer in {path}: "):
            tokenizer = read_tokenizer(file)
        tokens = size = len(file.metadata["tokenizer.ggml.tokens"])
        eos, context = file.end_token_ids(), file.value("*.context_length", int)
        recommended = common_pb2.SamplingParams()
        images = None
    else:
        config = read_json(path / "config.json")
        check_sizes(path / "config.json", config)
        check_tokenizer(path)
        generation_path = path / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        recommended = _default_sampling(generation_path, generation)
        tokenizer = _read_tokenizer(path)
        read_templates(path, tokenizer)
        tokens = len(tokenizer)
        images = _image_settings(path, config)
        text = config.get("text_config")  # of a model that takes more than text
        config = {**config, **(text if isinstance(text, dict) else {})}
        size = int(config.get("vocab_size") or tokens)
        eos, context = end_token_ids(path), context_length(config)
    templates = tokenizer.chat_template or ""
    for template in templates.values() if isinstance(templates, dict) else (templates,):
        if takes_powers(template):
            text = "it raises numbers to powers, which may take hours"
            raise CheckpointError(f"cannot use the chat template in {path}: {text}")
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    state = backend.decoder.__getstate__() if backend.decoder is not None else None
    special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    try:
        vocabulary = read_vocabulary(
            [backend.id_to_token(index) for index in range(tokens)],
            special,
            None if state is None else json.loads(state),
            size,
        )
    except UnknownDecoder as error:
        raise CheckpointError(f"cannot use the tokenizer in {path}: {error}") from error
    _ = vocabulary.hash  # computed here, in a thread
    limits = RenderLimits()
    return HFTokenizer(
        vocabulary=vocabulary,
        eos_token_ids=eos,
        context_length=context,
        chat=bool(tokenizer.chat_template),
        _tokenizer=tokenizer,
        begin_token_id=_begin(tokenizer, eos),
        default_sampling=recommended,
        _chat_encoder=None if special_tokens_in_content else ChatEncoder(backend, tokenizer.unk_token_id),
        images=images,
        _limits=limits,
        _parts=bool(tokenizer.chat_template) and takes_parts(tokenizer, limits),
    )


def _read_tokenizer(path: Path) -> Any:
    """Reads the tokenizer of a directory, by transformers."""
    from transformers import AutoTokenizer

    if not any(any(path.glob(pattern)) for pattern in SOURCES):
        # AutoTokenizer would silently make an empty tokenizer from config.json alone.
        raise CheckpointError(f"{path} has no tokenizer files; tokenizer.json is the one to have")
    with _raising(CheckpointError, f"cannot read the tokenizer in {path}: "):
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"{path} has no tokenizer.json, nor files that it can be made from")
    return tokenizer


def _image_settings(path: Path, config: dict[str, Any]) -> node_pb2.ImageSettings | None:
    token = config.get("image_token_id")
    if not isinstance(config.get("vision_config"), dict) or not isinstance(token, int) or token < 0:
        return None
    try:
        found = read_settings(path)
    except CheckpointError as error:
        _log.warning("requests with images are refused", why=str(error))
        return None
    return node_pb2.ImageSettings(
        patch=found.patch,
        merge=found.merge,
        least_pixels=found.least_pixels,
        most_pixels=found.most_pixels,
        token_id=token,
    )


def _begin(tokenizer: Any, eos: tuple[int, ...]) -> int | None:
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    return eos[-1] if eos else None


def _default_sampling(path: Path, generation: dict[str, Any]) -> common_pb2.SamplingParams:
    """Sampling parameters of generation_config.json; with `do_sample` false those of drawing have no
    effect. Raises CheckpointError for values that are out of range."""
    if unused := [name for name in _NOT_APPLIED if generation.get(name) not in (None, 0, 1, [], {})]:
        _log.warning("fields of generation_config.json have no effect", fields=", ".join(unused))
    params = common_pb2.SamplingParams()
    greedy = generation.get("do_sample") is False
    drawing = () if greedy else ("temperature", "top_k", "top_p", "min_p")
    for name in (*drawing, "repetition_penalty"):
        value = generation.get(name)
        if value is None:
            continue
        try:
            setattr(params, name, value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {name} is {value!r}: {_one_line(error)}") from None
    try:
        check_sampling(params, None, path.name)
    except BatonError as error:
        raise CheckpointError(f"{path}: {error.message}") from None
    return params


def _one_line(error: BaseException) -> str:
    if isinstance(error, KeyError):  # of what every tokenizer.json has
        return f"{error} is missing"
    return " ".join(str(error).split())[:300] or type(error).__name__
