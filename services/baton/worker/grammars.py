"""The grammars of a worker: its model's vocabulary, from the checkpoint's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.grammar.base import Backend, GrammarError
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.trials import Trials, TrialVocabulary
from baton.model_path import CheckpointError
from baton.v1 import node_pb2


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
