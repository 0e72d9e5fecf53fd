"""Requests whose prompts cannot be computed before contents of their images have come. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.engine.image_spans import ImageContent, ImageSpan, with_contents, without_contents
from baton.engine.request import EngineRequest, RecordEvent, SequencePhase
from baton.tracing.recorder import EventKind

WantImages = Callable[[EngineRequest, tuple[ImageSpan, ...]], None]
"""Gets a request that is to be computed here, and its images whose contents it lacks. It waits, and may be
overtaken, until `ImageWaits.here`."""


def want_none(request: EngineRequest, images: tuple[ImageSpan, ...]) -> None:
    raise AssertionError("nobody has images here")


class ImageWaits:
    def __init__(self, want: WantImages, record: RecordEvent) -> None:
        self._want, self._record = want, record

    def over(self, request: EngineRequest, start: int) -> bool:
        """Whether contents of all images are here that have tokens from `start` on; else they are asked
        for."""
        missing = tuple(each for each in request.images if each.end > start and each.content is None)
        if missing:
            request.awaits_images = True
            self._record(request, EventKind.IMAGES_BEGUN, len(missing), 0)
            self._want(request, missing)
        return not missing

    def here(self, request: EngineRequest, contents: Mapping[bytes, ImageContent]) -> None:
        """What was asked for, by digest."""
        request.awaits_images = False
        request.images = with_contents(request.images, contents)
        self._record(request, EventKind.IMAGES_ENDED, len(contents), 0)


def forget_images(request: EngineRequest) -> None:
    """Lets contents of images go once no choice computes its prompt any more: one that is retracted asks for
    them again."""
    computing = (SequencePhase.WAITING, SequencePhase.PROMPT)
    if request.images and not any(sequence.phase in computing for sequence in request.sequences):
        request.images = without_contents(request.images)
