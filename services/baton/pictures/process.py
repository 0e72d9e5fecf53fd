"""The process that decodes pictures, for decoder.PictureDecoder: reads them from its standard input, one
after the other, and writes what it makes of each to its standard output. It ends when its input does.

A picture: the lengths of the settings and of the picture, as 4 bytes each, little endian; both. An answer:
1 byte, 1 if there are pixels; lengths likewise; JSON ({"size": [height, width]}, or {"error": one line});
digest and pixels.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import warnings
from hashlib import sha256
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

from baton.pictures.settings import PictureError, PictureSettings

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MEMORY_BYTES = 2 * 2**30
"""Limit of this process' address space. A picture of most pixels with transparency takes about half of it."""
LENGTHS = struct.Struct("<II")
VERSION = b"baton picture 1"
"""Changes with what is made of a picture, since digests name that."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(LENGTHS.size):
        lengths = LENGTHS.unpack(header)
        settings, picture = (source.read(length) for length in lengths)
        _answer(target, settings, picture)


def _answer(target: IO[bytes], settings: bytes, picture: bytes) -> None:
    pixels = b""
    try:
        made = PictureSettings(**json.loads(settings))
        size, pixels = decode(picture, made)
        said: dict[str, Any] = {"size": size}
    except PictureError as error:
        said = {"error": str(error)}
    except ImportError:
        said = {"error": "needs Pillow here: pip install baton-serve[images]"}
    except MemoryError:
        said = {"error": "takes too much memory to decode"}
    except Exception as error:  # anything that decoders raise for arbitrary bytes
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = {"error": f"cannot be decoded: {lines[0][:200]}"}
    text = json.dumps(said).encode()
    target.write(bytes(["size" in said]) + LENGTHS.pack(len(text), len(pixels)) + text)
    target.write(pixels)
    target.flush()


def decode(data: bytes, settings: PictureSettings) -> tuple[tuple[int, int], bytes]:
    """-> height and width of the resized picture; its digest of 32 bytes and its pixels, [height, width, 3].
    Raises PictureError, and whatever Pillow does."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # `PictureSettings.size` has limits of its own
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise PictureError(f"is none of {', '.join(FORMATS)}, or is damaged") from None
    width, height = image.size
    settings.size(height, width)  # before anything is decoded
    image.load()  # of several frames the first
    ImageOps.exif_transpose(image, in_place=True)
    image = _flat(image)
    high, wide = settings.size(image.height, image.width)
    named = sha256(VERSION + repr((settings, image.size)).encode())
    rows = max(1, 2**20 // image.width)
    for top in range(0, image.height, rows):
        named.update(image.crop((0, top, image.width, min(top + rows, image.height))).tobytes())
    resized = image.resize((wide, high), Image.Resampling.BICUBIC)
    return (high, wide), named.digest() + resized.tobytes()


def _flat(image: Image) -> Image:
    """In three colours, what is transparent on white."""
    from PIL import Image as images

    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        whole = image.convert("RGBA")
        flat = images.new("RGB", image.size, (255, 255, 255))
        flat.paste(whole, mask=whole.getchannel("A"))
        return flat
    return image.convert("RGB")


if __name__ == "__main__":
    main()
