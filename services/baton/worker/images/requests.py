"""What a worker's requests lack of their images is fetched here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.engine.image_spans import ImageSpan
from baton.engine.request import EngineRequest
from baton.rpc.channel import Dial
from baton.rpc.errors import BatonError, without_frames
from baton.rpc.logs import get_logger
from baton.worker.core import FetchedImages, NoImages
from baton.worker.engine import Engine
from baton.worker.images.choice import EncodeChoice
from baton.worker.images.contents import ImageContents
from baton.worker.images.encoder_client import Asker, EncoderClient
from baton.worker.shell import WorkerShell


class ImageRequests:
    """On the event loop."""

    def __init__(self, node: WorkerShell[Any], contents: ImageContents, choice: EncodeChoice) -> None:
        self._node, self.contents, self.choice = node, contents, choice
        self.log = get_logger()

    @classmethod
    def of_engine(cls, node: WorkerShell[Any], engine: Engine, dial: Dial) -> ImageRequests:
        assert engine.images is not None
        images = engine.images
        choice = EncodeChoice(engine.encoding)
        images.counters.timed = choice.local.add
        encoders = EncoderClient(
            dial, images.tower, engine.tower, engine.device, engine.kinds, node.recorder, choice
        )
        return cls(node, ImageContents(images.tower, images.cache, dial, node.spawn, encoders), choice)

    def want(self, request: EngineRequest, images: Sequence[ImageSpan]) -> None:
        """See worker.core.CoreShell.want_images."""
        self._node.spawn(self._answer(request, images), "images")

    async def _answer(self, request: EngineRequest, images: Sequence[ImageSpan]) -> None:
        outcome: FetchedImages
        assert request.image_source is not None
        try:
            left = request.deadline - self._node.clock()
            asker = Asker(self._node.name_of(request), request.trace)
            outcome = await self.contents.of(images, request.image_source, left, asker)
        except BatonError as error:
            outcome = NoImages(error.code.name, error.reason, error.message)
            without_frames(
                error
            )  # which hold contents of other images: nobody waits for a garbage collection
        except Exception as error:
            self.log.exception("images not fetched")
            outcome = NoImages("INTERNAL", "IMAGES_FAILED", f"{type(error).__name__}: {error}")
        self._node.steps.call(lambda core, now: core.images_fetched(request, outcome))
