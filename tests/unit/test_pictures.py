"""Pictures from clients: parity with transformers' processor, and what is refused, within limits."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import sys
import time
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.model_path import CheckpointError
from baton.pictures.data_uri import MOST_BYTES, from_data_uri
from baton.pictures.decoder import PictureDecoder
from baton.pictures.settings import FILE, PictureError, PictureSettings, read_settings

SETTINGS = PictureSettings(16, 2, 65536, 1024 * 1024)


@pytest.fixture(scope="module")
def decoder():
    made = PictureDecoder(SETTINGS, width=1)
    yield made
    made.close()


def picture(size, mode="RGB", seed=0):
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    return Image.frombytes(mode, size, values.tobytes())


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def processed(image):
    """What transformers makes of it: patches, and the grid."""
    half = [0.5, 0.5, 0.5]
    size = {"shortest_edge": SETTINGS.least_pixels, "longest_edge": SETTINGS.most_pixels}
    made = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size, image_mean=half, image_std=half)
    return made(image, return_tensors="np"), made


@pytest.mark.parametrize("size", [(300, 200), (33, 47), (2000, 1200)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pixels_are_those_of_transformers(decoder, size, kind):
    data = saved(picture(size), kind)
    found = decoder.decode(data)
    wanted, processor = processed(Image.open(io.BytesIO(data)).convert("RGB"))
    ours = processor(found.pixels, return_tensors="np", do_resize=False)
    assert (ours["image_grid_thw"] == wanted["image_grid_thw"]).all()
    assert (ours["pixel_values"] == wanted["pixel_values"]).all()


def test_sizes_are_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = random.Random(1)
    for _ in range(3000):
        height, width = (int(2 ** rng.uniform(0, 12.5)) for _ in range(2))
        if max(height, width) / min(height, width) > 200:
            with pytest.raises(PictureError, match="200 times"):
                SETTINGS.size(height, width)
            continue
        assert SETTINGS.size(height, width) == smart_resize(
            height, width, 32, SETTINGS.least_pixels, SETTINGS.most_pixels
        )


def test_one_pixel_or_another_setting_makes_another_digest(decoder):
    image = picture((1500, 1500))
    first = decoder.decode(saved(image))
    assert decoder.decode(saved(image)).digest == first.digest and len(first.digest) == 32
    changed = image.copy()
    r, g, b = changed.getpixel((700, 3))
    changed.putpixel((700, 3), (r ^ 1, g, b))
    assert decoder.decode(saved(changed)).digest != first.digest
    other = PictureDecoder(PictureSettings(16, 2, 65536, 512 * 512), width=1)
    assert other.decode(saved(image)).digest != first.digest
    other.close()


def test_what_is_turned_transparent_or_moves(decoder):
    image = picture((320, 160))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned = decoder.decode(saved(image, exif=exif))
    assert turned.pixels.shape[0] > turned.pixels.shape[1]
    upright = decoder.decode(saved(image.transpose(Image.Transpose.ROTATE_270)))
    assert turned.digest == upright.digest
    glass = picture((256, 256), "RGBA")
    glass.putalpha(0)
    assert (decoder.decode(saved(glass)).pixels == 255).all()
    frames = [Image.new("RGB", (256, 256), colour) for colour in ("red", "blue", "green")]
    moving = decoder.decode(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert (moving.pixels == (255, 0, 0)).all()
    for mode in ("L", "1", "P", "CMYK"):
        kind = "JPEG" if mode == "CMYK" else "PNG"
        assert decoder.decode(saved(Image.new(mode, (256, 256)), kind)).pixels.shape == (256, 256, 3)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(width, height):
    """A small file of so many pixels."""
    rows = zlib.compress(bytes(10_000_000), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gif_bomb(width, height, frames=1):
    """Frames of so many pixels each, of which a few are there; the canvas is small unless it is one frame."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    size = (width, height) if frames == 1 else (32, 32)
    header = b"GIF89a" + struct.pack("<HHBBB", *size, 0x80, 0, 0) + bytes(3) + bytes([255] * 3)
    return header + frame * frames + b";"


def webp_bomb(width, height):
    """Lossless, and nothing behind the header; 16,383 pixels are the format's most."""
    bits = (width - 1) | (height - 1) << 14
    data = b"\x2f" + struct.pack("<I", bits) + bytes(100)
    body = b"WEBPVP8L" + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width, height):
    """An extended file whose canvas has so many pixels."""
    still = saved(picture((40, 30)), "WEBP", lossless=True)[12:]
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size + still
    return b"RIFF" + struct.pack("<I", len(body)) + body


ATTACKS = {
    "png bomb": (png_bomb(60_000, 60_000), "at most 64,000,000"),
    "png of the most pixels": (png_bomb(8000, 8000), "cannot be decoded"),
    "png of most text": (
        saved(picture((30, 20)))[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80_000_000), 9)),
        "cannot be decoded|none of",
    ),
    "gif bomb": (gif_bomb(65535, 65535), "at most 64,000,000"),
    "gif frames larger than it": (gif_bomb(65535, 65535, 9), "at most 64,000,000|cannot be decoded"),
    "webp bomb": (webp_bomb(16384, 16384), "at most 64,000,000|cannot be decoded|none of"),
    "webp canvas": (webp_canvas(2**24, 2**24), "at most 64,000,000|cannot be decoded|none of"),
    "truncated webp": (saved(picture((300, 200)), "WEBP")[:3000], "cannot be decoded|none of"),
    "truncated gif": (saved(picture((300, 200)), "GIF")[:3000], "cannot be decoded"),
    "jpeg in a gif's name": (
        b"GIF89a" + saved(picture((30, 20)), "JPEG"),
        "cannot be decoded|at most|none of",
    ),
    "strip": (saved(Image.new("L", (1_000_000, 1))), "200 times"),
    "tall strip": (saved(Image.new("L", (1, 60_000))), "200 times"),
    "truncated": (saved(picture((300, 200)))[:-4000], "cannot be decoded"),
    "truncated jpeg": (saved(picture((300, 200)), "JPEG")[:9000], "cannot be decoded"),
    "empty": (b"", "none of JPEG, PNG, WEBP, GIF"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of"),
    "tiff": (saved(picture((30, 20)), "TIFF"), "none of"),
    "polyglot": (b"%!PS-Adobe-3.0\n" + saved(picture((30, 20))), "none of"),
    "archive in front": (b"PK\x03\x04" + saved(picture((30, 20))), "none of"),
    "noise": (random.Random(1).randbytes(100_000), "none of"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused_by_one_line_within_a_second(decoder, name):
    data, why = ATTACKS[name]
    decoder.decode(saved(picture((64, 64))))  # it runs
    began = time.monotonic()
    with pytest.raises(PictureError, match=why) as caught:
        decoder.decode(data)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 2
    decoder.decode(saved(picture((64, 64))))  # and goes on


def test_memory_has_a_limit(decoder):
    """A large picture is decoded; what would take more than the process may have is refused."""
    large = saved(Image.new("RGBA", (5000, 5000)))
    assert decoder.decode(large).pixels.shape == (1024, 1024, 3)
    code = "import baton.pictures.process as p; p.MEMORY_BYTES = 250 * 2**20; p.main()"
    small = PictureDecoder(SETTINGS, width=1, command=(sys.executable, "-c", code))
    with pytest.raises(PictureError, match=r"memory|decoder end|cannot be decoded"):
        small.decode(large)
    small.decode(saved(picture((64, 64))))
    small.close()


def test_time_has_a_limit_and_a_decoder_may_die():
    slow = PictureDecoder(
        SETTINGS, width=1, command=(sys.executable, "-c", "import time; time.sleep(60)"), seconds=0.5
    )
    began = time.monotonic()
    with pytest.raises(PictureError, match=r"longer than 0.5 s"):
        slow.decode(b"x")
    assert time.monotonic() - began < 10
    slow.close()
    dead = PictureDecoder(SETTINGS, width=1, command=(sys.executable, "-c", ""))
    with pytest.raises(PictureError, match="made its decoder end"):
        dead.decode(b"x")
    dead.close()


def test_data_uris_alone_are_taken():
    data = saved(picture((30, 20)))
    text = base64.b64encode(data).decode()
    assert from_data_uri(f"data:image/png;base64,{text}") == data
    assert from_data_uri(f"DATA:image/png;charset=x;BASE64,{text}") == data
    for uri in ("http://169.254.169.254/latest", "https://example.org/a.png", " HTTPS://[::1]/", "hTTp:x"):
        with pytest.raises(PictureError, match="not fetched"):
            from_data_uri(uri)
    for uri in ("file:///etc/passwd", "/etc/passwd", "", "data:", "ftp://x/y", "blob:x", "javascript:1"):
        with pytest.raises(PictureError, match="the only form"):
            from_data_uri(uri)
    with pytest.raises(PictureError, match=";base64"):
        from_data_uri("data:image/png,abc")
    with pytest.raises(PictureError, match="not valid base64"):
        from_data_uri("data:image/png;base64,%%%")
    with pytest.raises(PictureError, match="more than"):
        from_data_uri("data:image/png;base64," + "A" * (MOST_BYTES // 3 * 4 + 16))


def test_settings_are_read_or_refused(tmp_path):
    with pytest.raises(CheckpointError, match=FILE):
        read_settings(tmp_path)
    good = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 1048576}}
    (tmp_path / FILE).write_text(json.dumps({**good, "image_mean": [0.5] * 3}))
    assert read_settings(tmp_path) == SETTINGS
    for wrong, why in (
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
        ({"resample": 2}, "resample"),
        ({"patch_size": None}, "does not say"),
        ({"size": {}}, "shortest_edge"),
        ({"size": {"shortest_edge": 5, "longest_edge": 2}}, "cannot be used"),
    ):
        (tmp_path / FILE).write_text(json.dumps({**good, **wrong}))
        with pytest.raises(CheckpointError, match=why):
            read_settings(tmp_path)
