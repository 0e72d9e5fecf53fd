"""A model that sees: images of all APIs become tokens, and pixels that workers fetch."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import random
import re
import struct
import time
import zlib
from contextlib import nullcontext

import grpc
import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from gateway_rig import Stream, gateway, tokenizer
from openai import AsyncOpenAI
from PIL import Image
from scripted_decode import STOP, ScriptedDecode, saying

from baton.authentication.cluster import HEADER, ClusterAuthentication, ClusterCredentials
from baton.cli.main import cli
from baton.client import AsyncClient
from baton.config import GatewayConfig
from baton.gateway.media_fetch import MediaFetcher
from baton.gateway.pictures import PictureStore
from baton.gateway.pictures_server import PicturesServer
from baton.rpc.channel import open_channel
from baton.v1 import inference_pb2, pictures_pb2, pictures_pb2_grpc, tokenizer_pb2
from vision_models import IMAGE_TOKEN, TOKENIZER_VOCAB, processor, save_vision_config

VISION_START, VISION_END = IMAGE_TOKEN + 2, IMAGE_TOKEN + 3


def file(size=(40, 24), seed=0, kind="PNG"):
    pixels = random.Random(seed).randbytes(3 * size[0] * size[1])
    made = io.BytesIO()
    Image.frombytes("RGB", size, pixels).save(made, kind)
    return made.getvalue()


def resized(data):
    """Its pixels as the model wants them, and rows and columns of its tokens, by transformers."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    _, high, wide = processor()(image, return_tensors="np")["image_grid_thw"][0]
    size = (int(wide) * 4, int(high) * 4)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC)), int(high) // 2, int(wide) // 2


def uri(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat_part(data):
    return {"type": "image_url", "image_url": {"url": uri(data), "detail": "high"}}


def input_part(data):
    return {"type": "input_image", "image_url": uri(data), "detail": "auto"}


def block(data):
    text = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("seeing")
    save_vision_config(path)
    return str(path)


@pytest.fixture
async def rig(model):
    script = saying([40], [0], finish=STOP)
    options = {"context": 1000, "vocab_size": TOKENIZER_VOCAB, "images": True}
    async with (
        ScriptedDecode(script, **options) as node,
        tokenizer(model=model) as address,
        gateway(node, tokenizer_address=address) as made,
    ):
        made.decode = node
        async with httpx.AsyncClient(trust_env=False, base_url=made.http, timeout=30) as made.client:
            yield made
        await made.idle()


async def fetched(start, digest):
    async with open_channel(start.pictures) as channel:
        call = pictures_pb2_grpc.PicturesStub(channel).Fetch(pictures_pb2.PictureRequest(digest=digest))
        pieces = [piece async for piece in call]
    data = b"".join(piece.data for piece in pieces)
    assert all(len(piece.data) <= 2**20 for piece in pieces)
    return np.frombuffer(data, np.uint8).reshape(pieces[0].height, pieces[0].width, 3)


def check_spans(start, files):
    """The start's images are these, in order, each between the marks that the template writes."""
    assert len(start.images) == len(files)
    for image, data in zip(start.images, files, strict=True):
        _, rows, columns = resized(data)
        assert (image.rows, image.columns, len(image.digest)) == (rows, columns, 32)
        end = image.start + rows * columns
        assert set(start.token_ids[image.start : end]) == {IMAGE_TOKEN}
        assert start.token_ids[image.start - 1] == VISION_START and start.token_ids[end] == VISION_END
    assert list(start.token_ids).count(IMAGE_TOKEN) == sum(each.rows * each.columns for each in start.images)


ONE, TWO = file(), file((90, 33), seed=1)


def result_of_responses(*images):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = [{"type": "input_text", "text": "Look: "}, *map(input_part, images)]
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    return {"input": [{"role": "user", "content": "Go."}, call, result]}


def result_of_messages(*images):
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [*map(block, images)]}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"max_tokens": 5, "messages": [{"role": "user", "content": "Go."}, *turns]}


def tool_message(*images):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "c", "content": [*map(chat_part, images)]})
    return {"messages": [{"role": "user", "content": "Go."}, *turns]}


def chat(*images):
    content = [{"type": "text", "text": "Look: "}, *map(chat_part, images), {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": content}]}


BODIES = {
    "chat": ("/v1/chat/completions", chat),
    "tool message": ("/v1/chat/completions", tool_message),
    "responses": (
        "/v1/responses",
        lambda *images: {"input": [{"role": "user", "content": [*map(input_part, images)]}]},
    ),
    "output": ("/v1/responses", result_of_responses),
    "messages": (
        "/v1/messages",
        lambda *images: {"max_tokens": 5, "messages": [{"role": "user", "content": [*map(block, images)]}]},
    ),
    "tool result": ("/v1/messages", result_of_messages),
}


async def test_images_of_all_apis_become_tokens_and_pixels(rig):
    seen = []

    async def during(running):
        for image in running.start.images:
            seen.append(await fetched(running.start, image.digest))
        await saying([40], [0], finish=STOP)(running)

    rig.decode.script = during
    for name, (path, body) in BODIES.items():
        seen.clear()
        answer = await rig.client.post(path, json={"model": "scripted", **body(ONE, TWO, ONE)})
        assert answer.status_code == 200, (name, answer.text)
        start = rig.decode.starts[-1]
        check_spans(start, [ONE, TWO, ONE])
        assert start.images[0].digest == start.images[2].digest != start.images[1].digest
        for pixels, data in zip(seen, [ONE, TWO, ONE], strict=True):
            assert (pixels == resized(data)[0]).all(), name
        usage = answer.json()["usage"]
        counted = usage.get("prompt_tokens", usage.get("input_tokens"))
        assert counted == len(start.token_ids), name
    metrics = re.sub(r'model="[^"]*",?', "", (await rig.client.get("/metrics")).text)
    assert 'baton_gateway_images_total{outcome="decoded"} 2.0' in metrics
    assert 'baton_gateway_images_total{outcome="kept"} 16.0' in metrics
    tokens = sum(rows * columns for _, rows, columns in map(resized, [ONE, TWO, ONE]))
    assert f"baton_gateway_image_tokens_total{{}} {6.0 * tokens}" in metrics


async def test_the_openai_package_sends_images_unchanged(rig):
    async with AsyncOpenAI(base_url=f"{rig.http}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, chat_part(ONE)]}]
        await client.chat.completions.create(model="scripted", messages=messages)
        check_spans(rig.decode.starts[-1], [ONE])
        items = [{"role": "user", "content": [input_part(TWO), {"type": "input_text", "text": "What?"}]}]
        await client.responses.create(model="scripted", input=items)
        check_spans(rig.decode.starts[-1], [TWO])


async def test_pictures_are_for_the_deployment_alone():
    """A server of its own, whatever API keys the gateway has: with the cluster's secret."""
    secret = "0123456789abcdef"
    authentication = ClusterAuthentication(ClusterCredentials(secret=secret))
    store = PictureStore(2**20, MediaFetcher(()))
    server = PicturesServer(GatewayConfig(), authentication, store)
    address = await server.address("")
    assert address == await server.address("")

    async def asked(metadata):
        request = pictures_pb2.PictureRequest(digest=bytes(32))
        async with open_channel(address, metadata=metadata) as channel:
            call = pictures_pb2_grpc.PicturesStub(channel).Fetch(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            return caught.value.code()

    assert await asked(()) is grpc.StatusCode.UNAUTHENTICATED
    assert await asked((("authorization", "Bearer key"),)) is grpc.StatusCode.UNAUTHENTICATED
    assert await asked(((HEADER, secret),)) is grpc.StatusCode.NOT_FOUND
    await server.stop()
    store.close()


async def test_counts_are_those_of_the_prompt(rig):
    for path, body in BODIES.values():
        await rig.client.post(path, json={"model": "scripted", **body(ONE, TWO)})
        prompt = list(rig.decode.starts[-1].token_ids)
        if path == "/v1/messages":
            asked = {"model": "scripted", **body(ONE, TWO)}
            del asked["max_tokens"]
            counted = await rig.client.post("/v1/messages/count_tokens", json=asked)
            assert counted.json() == {"input_tokens": len(prompt)}
        elif path == "/v1/chat/completions":
            found = await rig.client.post("/tokenize", json={"model": "scripted", **body(ONE, TWO)})
            assert found.json()["tokens"] == prompt


async def test_images_that_do_not_fit_say_so(rig):
    large = file((8 * 30, 8 * 30), seed=3)
    answer = await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(*[large] * 20)})
    said = answer.json()["error"]
    assert answer.status_code == 400 and said["code"] == "context_length_exceeded"
    assert "images up to here take" in said["message"] and said["param"].endswith(".image_url")
    assert not rig.decode.starts


WRONG = {
    "chat": ("messages[0].content[1].image_url", chat_part),
    "tool message": ("messages[2].content[0].image_url", chat_part),
    "responses": ("input[0].content[0].image_url", input_part),
    "output": ("input[2].output[1].image_url", input_part),
    "messages": ("messages[0].content[0].source", block),
    "tool result": ("messages[2].content[0].content[0].source", block),
}


async def test_errors_name_the_image_whatever_is_wrong(rig):
    """In all APIs: the second image, whose field the error names."""
    address = {"http:": "http://127.0.0.1/a.png", "host": "https://example.org/a.png", "file:": "file:///x"}
    kinds = {
        "no data": (b"", "at least 1|none of|must not be empty|needs"),
        "none": (b"%PDF-1.7", "none of JPEG, PNG"),
        "cut": (ONE[:200], "cannot be decoded"),
        "bomb": (bomb(60_000, 60_000), "at most 64,000,000"),
        "strip": (strip(), "200 times"),
        **{name: (url, "not fetched|no data URI|--media-hosts") for name, url in address.items()},
        "base64": ("data:image/png;base64,!!!", "not valid base64"),
        "no base64": ("data:image/png,abc", "without ;base64"),
    }
    for name, (path, body) in BODIES.items():
        place = re.sub(r"\[(\d)\](?=[^\[]*$)", lambda at: f"[{int(at[1]) + 1}]", WRONG[name][0])
        for kind, (wrong, why) in kinds.items():
            asked = body(ONE, wrong if isinstance(wrong, bytes) else MARK)
            if isinstance(wrong, str):
                asked = marked(asked, wrong)
            answer = await rig.client.post(path, json={"model": "scripted", **asked})
            said = answer.json()["error"]
            assert answer.status_code == 400, (name, kind, answer.text)
            assert said["message"].startswith(place), (name, kind, said)
            assert re.search(why, said["message"]) and "\n" not in said["message"], (name, kind, said)
            assert said.get("param", place).startswith(place), (name, kind, said)
    assert not rig.decode.starts


MARK = b"the image that is wrong"


def marked(body, url):
    """The body with an address, or what may be one, in the place of MARK's image."""
    if isinstance(body, list):
        return [marked(each, url) for each in body]
    if not isinstance(body, dict):
        return url if body == uri(MARK) else body
    if body == block(MARK):
        return {"type": "image", "source": {"type": "url", "url": url}}
    return {key: marked(each, url) for key, each in body.items()}


async def test_errors_name_the_image(rig):
    cut = ONE[:200]
    for name, (path, body) in BODIES.items():
        for stream in (False, True):
            asked = {"model": "scripted", **body(cut, ONE), "stream": stream}
            answer = await rig.client.post(path, json=asked)
            said = answer.json()["error"]
            place = WRONG[name][0]
            assert answer.status_code == 400, (name, answer.text)
            assert said["message"].startswith(f"{place} cannot be decoded: "), (name, said)
            assert said.get("param", place) == place
    for url, why in {
        "http://127.0.0.1/a.png": "not fetched",
        "file:///etc/passwd": "no data URI",
        "data:image/png;base64,AA": "not valid base64",
        "https://example.org/a.png": "--media-hosts",
    }.items():
        part = {"type": "image_url", "image_url": {"url": url}}
        asked = {"model": "scripted", "messages": [{"role": "user", "content": [part]}]}
        answer = await rig.client.post("/v1/chat/completions", json=asked)
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and said.startswith("messages[0].content[0].image_url "), said
        assert why in said
    assert not rig.decode.starts


def conversation(*parts, role="user"):
    made = [{"text": part} if isinstance(part, str) else {"image": part} for part in parts]
    return tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role=role, parts=made)])


async def test_grpc_takes_bytes_and_sessions_keep_digests(rig):
    stream = Stream(rig)
    await stream.start("a", chat=conversation("What is ", ONE, "?"), session="s")
    events = await stream.until_end("a")
    first = rig.decode.starts[-1]
    check_spans(first, [ONE])
    tokens = first.images[0].rows * first.images[0].columns
    assert events[-1].finished.usage.image_tokens == tokens
    await stream.start("b", chat=conversation("And ", TWO), session="s")
    await stream.until_end("b")
    second = rig.decode.starts[-1]
    check_spans(second, [ONE, TWO])
    assert list(second.token_ids[: len(first.token_ids)]) == list(first.token_ids)
    await stream.start("c", chat=conversation("Well"), session="s")
    await stream.until_end("c")
    check_spans(rig.decode.starts[-1], [ONE, TWO])
    # What nobody holds makes room; the session says so, rather than to answer without the image.
    rig.node.gateway.pictures.memory.make_room(2**30)
    await stream.start("d", chat=conversation("Still?"), session="s")
    failed = (await stream.until_end("d"))[-1].failed
    assert failed.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert "chat.messages[0].parts[1]: the image is kept here no more" in failed.message


async def test_a_digest_names_what_the_same_caller_has_sent(rig):
    named = tokenizer_pb2.ChatPrompt()
    named.CopyFrom(conversation("x", ONE))
    named.messages[0].parts[1].image_digest = hashlib.sha256(ONE).digest()

    async def ask(chat, namespace=""):
        start = inference_pb2.GenerateStart(chat=chat, namespace=namespace)
        return await rig.stub.Complete(inference_pb2.CompleteRequest(start=start))

    with pytest.raises(grpc.aio.AioRpcError, match="kept here no more"):
        await ask(named)
    await ask(conversation("x", ONE), "mine")
    await ask(named, "mine")
    check_spans(rig.decode.starts[-1], [ONE])
    with pytest.raises(grpc.aio.AioRpcError, match="kept here no more"):
        await ask(named, "another")


async def test_stored_responses_go_on_with_their_images(rig):
    body = {"model": "scripted", **BODIES["responses"][1](ONE), "instructions": "Be brief."}
    first = (await rig.client.post("/v1/responses", json=body)).json()
    assert first["store"]
    more = {"model": "scripted", "input": "And?", "previous_response_id": first["id"]}
    answer = await rig.client.post("/v1/responses", json=more)
    assert answer.status_code == 200, answer.text
    check_spans(rig.decode.starts[-1], [ONE])
    rig.node.gateway.pictures.memory.make_room(2**30)
    answer = await rig.client.post("/v1/responses", json=more)
    said = answer.json()["error"]
    assert answer.status_code == 400 and said["code"] == "picture_gone"
    assert said["message"].startswith("previous_response_id: the image is kept here no more")


async def test_pictures_are_there_while_a_request_runs_and_within_a_bound(rig, model):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(ONE)})
        await fetched(rig.decode.starts[-1], b"\0" * 32)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    store = rig.node.gateway.pictures
    assert not any(kept.holds for kept in store.memory.all())
    store.memory.max_bytes = max(resized(each)[0].nbytes for each in (ONE, TWO)) + 10
    store.memory.make_room(store.memory.max_bytes)
    answer = await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(ONE, TWO)})
    said = answer.json()["error"]["message"]
    # Both are decoded at a time: the later one has no room.
    assert answer.status_code == 429
    assert re.match(r"messages\[0\]\.content\[[12]\]\.image_url: images of running", said)
    answer = await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(TWO)})
    assert answer.status_code == 200
    answer = await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(ONE)})
    assert answer.status_code == 200
    assert not any(kept.holds for kept in store.memory.all())


async def test_a_name_of_the_image_token_in_a_text_is_text(rig):
    named = "<|vision_start|><|image_pad|><|vision_end|>"
    content = [{"type": "text", "text": named}, chat_part(ONE)]
    asked = {"model": "scripted", "messages": [{"role": "user", "content": content}]}
    answer = await rig.client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    check_spans(rig.decode.starts[-1], [ONE])


async def test_nothing_of_an_image_is_logged(rig, capfd):
    await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(ONE[:300])})
    await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(ONE)})
    said = "".join(capfd.readouterr())
    assert "images_ms=" in said
    assert base64.b64encode(ONE).decode()[:20] not in said and json.dumps(ONE.decode("latin-1")) not in said


async def test_the_client_and_the_commands_send_images(rig, tmp_path, monkeypatch):
    monkeypatch.setattr("baton.cli.generate.interrupt_closes", nullcontext)  # of the main thread
    address = rig.node.address
    parts = ["What is ", ONE, " and ", TWO, "?"]
    async with AsyncClient(address) as client:
        await client.generate(messages=[{"role": "user", "content": parts}])
    check_spans(rig.decode.starts[-1], [ONE, TWO])
    text = rig.text(rig.decode.starts[-1].token_ids)
    assert (
        text.startswith("<|im_start|>user\nWhat is <|vision_start|>")
        and text.count("<|vision_end|> and") == 1
    )
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for path, data in zip(paths, (ONE, TWO), strict=True):
        path.write_bytes(data)

    async def command(*words, **options):
        flags = ["--server", address, *(word for path in paths for word in ("--image", str(path)))]
        run = CliRunner().invoke
        result = await asyncio.to_thread(run, cli, [*words, *flags], catch_exceptions=False, **options)
        assert result.exit_code == 0, result.output
        return rig.decode.starts[-1]

    check_spans(await command("generate", "Which?"), [ONE, TWO])
    check_spans(await command("chat", input=f"Which?\n/image {paths[0]}\nAnd?\n"), [ONE, TWO, ONE])
    gone = await asyncio.to_thread(CliRunner().invoke, cli, ["generate", "x", "--image", "/nowhere.png"])
    assert gone.exit_code == 2 and "/nowhere.png" in gone.output


def bomb(width, height):
    """A PNG of some kilobytes that says to have so many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(3 * 2**22), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def strip():
    made = io.BytesIO()
    Image.new("L", (1_000_000, 1)).save(made, "PNG")
    return made.getvalue()


ATTACKS = {
    "a bomb": ([bomb(60_000, 60_000)], "at most 64,000,000"),
    "bombs of the most pixels": ([bomb(8000, 8000)] * 40, "cannot be decoded|truncated"),
    "a strip": ([strip()], "200 times as long"),
    "1,000 images": ([ONE] * 1000, "more than 256 images"),
    "large noise": ([random.Random(1).randbytes(8 * 2**20)], "none of JPEG"),
    "an archive behind": ([b"PK\x03\x04" + ONE], "none of JPEG"),
}


@pytest.mark.times
@pytest.mark.alone
async def test_attacks_are_refused_and_delay_nobody(rig):
    """The gateway's event loop, which the test shares, goes on."""
    await rig.client.post("/v1/chat/completions", json={"model": "scripted", **chat(ONE)})
    bodies = {
        name: json.dumps({"model": "scripted", **chat(*files)}).encode()
        for name, (files, _) in ATTACKS.items()
    }
    gaps = []

    async def beat():
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.002)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    beating = asyncio.create_task(beat())
    for name, body in bodies.items():
        gaps.clear()
        began = time.monotonic()
        headers = {"content-type": "application/json"}
        answer = await rig.client.post("/v1/chat/completions", content=body, headers=headers)
        took, worst = time.monotonic() - began, max(gaps)
        said = answer.json()["error"]["message"]
        print(f"{name}: {took:.2f} s, loop {1000 * worst:.0f} ms: {said[:100]}")
        assert answer.status_code == 400 and re.search(ATTACKS[name][1], said), (name, said)
        assert took < 10 and worst < 0.1, (name, took, worst)
    beating.cancel()
