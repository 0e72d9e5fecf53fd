"""Prompts for `verify` and `demo`: Python's own documentation, which ships with Python."""

from __future__ import annotations

from pydoc_data.topics import topics

LENGTHS = (20, 2400, 300, 1200, 80, 3600, 600, 160)
"""Characters; short and long ones alternate so that they share batches."""


def topic_prompts(count: int) -> list[str]:
    """`count` different prompts of mixed lengths. Every fourth begins like the one before it, so that prefix
    caches take part."""
    names = sorted(topics)
    prompts: list[str] = []
    for i in range(count):
        text = " ".join(topics[names[i * 7 % len(names)]].split())
        length = LENGTHS[i % len(LENGTHS)]
        if i % 4 == 3:
            prompts.append(f"{prompts[-1]} {text}"[: len(prompts[-1]) + length])
        else:
            prompts.append(f"{i}. {text}"[:length])
    return prompts


def topic_text(name: str, characters: int) -> str:
    """The documentation from one topic on, cut after so many characters."""
    names = sorted(topics)
    start = names.index(name)
    return "\n\n".join(topics[other].strip() for other in names[start : start + 8])[:characters]
