"""Compiles the grammars of a worker's requests, within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from baton.grammar.base import Backend, CompiledGrammar, GrammarBusy, GrammarError, GrammarSpec
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.trials import Trials, TrialVocabulary
from baton.model_path import CheckpointError
from baton.v1 import node_pb2

COMPILE_SECONDS = 10.0
"""A request whose grammar is not compiled by then is refused."""
LOAD_SECONDS = 60.0
"""For the vocabulary, which is loaded when the first grammar comes."""

Outcome = CompiledGrammar | GrammarError


def compile_grammar(
    grammars: GrammarCompiler,
    spec: GrammarSpec,
    done: Callable[[Outcome], None],
    spawn: Callable[[Coroutine[Any, Any, Any], str], object],
) -> None:
    """Calls `done` on the event loop, once; at once if the outcome is known."""
    future = grammars.submit(spec)
    if future.done():
        done(future.result())
    else:
        spawn(_await_grammar(grammars, future, done), "grammar")


async def _await_grammar(
    grammars: GrammarCompiler, future: Future[Outcome], done: Callable[[Outcome], None]
) -> None:
    await asyncio.wait([asyncio.wrap_future(grammars.loaded)], timeout=LOAD_SECONDS)
    await asyncio.wait([asyncio.wrap_future(future)], timeout=COMPILE_SECONDS)
    if future.done():
        done(future.result())
    elif future.running():
        done(GrammarError(f"it takes longer than {COMPILE_SECONDS:g} s to compile: make it smaller"))
    else:
        done(GrammarBusy(f"others were being compiled for {COMPILE_SECONDS:g} s: ask again later"))


def make_compiler(path: Path, model: node_pb2.ModelInfo, trials: Trials | None = None) -> GrammarCompiler:
    """path: the checkpoint. trials: where grammars are tried first; None: nowhere. The libraries and the
    vocabulary are loaded when the first grammar comes: a second or two, and memory that many workers never
    need."""

    def load() -> Backend:
        from baton.grammar.llguidance import LlguidanceBackend
        from baton.tokenizer.hf_tokenizer import load

        if not model.eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, which would end the output")
        try:
            tokenizer = load(path)
        except CheckpointError as error:
            raise GrammarError(f"the model's vocabulary is not known: {error}") from error
        vocabulary, eos = tokenizer.vocabulary, list(model.eos_token_ids)
        if trials is not None:
            special = sorted(vocabulary.special)
            trials.load(TrialVocabulary(vocabulary.tokens, special, eos, model.vocab_size))

        def encode(text: str) -> Sequence[int]:
            return tokenizer.encode([text], add_special_tokens=False)[0]

        return LlguidanceBackend(vocabulary.tokens, vocabulary.special, eos, model.vocab_size, encode)

    return GrammarCompiler(load, check=trials.check if trials is not None else None)
