"""Compiles the grammars of a worker's requests, within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from baton.grammar.base import CompiledGrammar, GrammarBusy, GrammarError, GrammarSpec
from baton.grammar.compiler import GrammarCompiler

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
