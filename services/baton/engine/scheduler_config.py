"""What a scheduler is told about its node."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, auto


class PromptRoute(Enum):
    """Where an admitted prompt is computed."""

    LOCAL = auto()
    REMOTE = auto()
    DEFER = auto()
    """Not decided yet; ask again."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    context_length: int
    """Tokens of prompt and output together."""
    token_budget: int
    """Tokens of a step: decode rows first, prompt chunks with the rest."""
    max_rows: int
    full_step: int = sys.maxsize
    """A step in which prompts of this many tokens end takes no further prompt."""
    max_waiting: int = 1024
    policy: str = "fcfs"
    output_margin: int = 64
    """Output tokens per sequence for which pages are reserved at admission."""
    watermark: int = 0
    """Pages that admission leaves free while anything is running."""
    draft_tokens: int = 0
    """Drafts of a row, at most; 0: none."""
    draft_adaptive: bool = False
    """Whether each step chooses how many of them pay, by what they cost; else a row has all that there
    are."""
    draft_padding: bool = False
    """Whether a step with drafts computes each row as long as the longest, as CUDA graphs do."""
    draft_grammars: bool = True
    """Whether rows with a grammar may have drafts."""
    prompt_only: bool = False
    """A prefill node: a prompt's pages are kept (Phase.LEASED) once its first tokens have been sampled."""
