"""Qwen3-VL and Qwen3.5 through all processes: text and images, handed off, cached, from the host tier,
resumed."""

from __future__ import annotations

import asyncio
import io
import random

import grpc.aio
import pytest
import torch
from asking import ask, greedy
from deployment import Deployment
from PIL import Image
from transformers import AutoTokenizer

from baton.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    tokenizer_pb2,
    trace_pb2,
    trace_pb2_grpc,
)
from vision_models import IMAGE_TOKEN, TOKENIZER_VOCAB, processor, save_qwen3_5, save_qwen3_vl, save_tokenizer

OUTPUT, IMAGE_OUTPUT = 12, 64
LONG_OUTPUT = 400
"""So that a node is still decoding when it is killed."""
LENGTHS = (15, 17, 40, 65, 130, 131, 132, 133)


@pytest.fixture(scope="module")
def expected(saved):
    draw, found = random.Random(7), []
    for length in LENGTHS:
        prompt = [draw.randrange(3, IMAGE_TOKEN) for _ in range(length)]
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = saved[1].generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
        )
        found.append((prompt, out[0, len(prompt) :].tolist()))
    return found


@pytest.fixture(scope="module", params=[save_qwen3_vl, save_qwen3_5], ids=["qwen3-vl", "qwen3.5"])
def saved(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("seeing") / "model"
    model = request.param(path, vocab_size=TOKENIZER_VOCAB, max_position_embeddings=1024)
    save_tokenizer(path)
    return path, model


@pytest.fixture(scope="module")
def pair(tmp_path_factory, deployments, saved):
    flags = ("--page-size", "16", "--token-budget", "32", "--max-rows", "8", "--transports", "grpc,shm")
    deployment = Deployment.split(
        tmp_path_factory.mktemp("seeing-split"),
        saved[0],
        worker=flags,
        decode=2,
        prefill_flags=("--kv-tokens", "1024", "--host-memory", "16M", "--tp", "2"),
        decode_flags=("--kv-tokens", "2048"),
    )
    deployment.add_encode()
    with deployment:
        deployments.append(deployment)
        yield deployment


async def test_tokens_are_those_of_transformers(pair, expected):
    requests = [greedy(prompt, OUTPUT) for prompt, _ in expected]
    handed_off = []
    for _ in range(3):
        results = await ask(pair.gateway.address, requests)
        assert [found.token_ids for found in results] == [tokens for _, tokens in expected]
        handed_off += [found.stats.prefill_address == pair.prefill.address for found in results]
    assert any(found.usage.cached_tokens for found in results) and any(handed_off)


def picture(size, seed):
    pixels = random.Random(seed).randbytes(3 * size[0] * size[1])
    made = io.BytesIO()
    image = Image.frombytes("RGB", size, pixels)
    image.save(made, "PNG")
    return made.getvalue(), image


def conversation(saved, *parts, seed=0, output=IMAGE_OUTPUT):
    """Text and sizes of pictures -> the message, and what transformers makes of it: its ids, and the next
    `output` tokens."""
    path, model = saved
    message, images, content = tokenizer_pb2.ChatMessage(role="user"), [], []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            message.parts.add(text=part)
            content.append({"type": "text", "text": part})
        else:
            data, image = picture(part, 100 * seed + number)
            message.parts.add(image=data)
            images.append(image)
            content.append({"type": "image"})
    made = processor()(images, return_tensors="pt")
    counts = iter((made["image_grid_thw"].prod(1) // 4).tolist())
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids = []
    for token in tokenizer(prompt, add_special_tokens=False)["input_ids"]:
        ids += [token] * (next(counts) if token == IMAGE_TOKEN else 1)
    ids = torch.tensor([ids])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **made}
    given["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    out = model.generate(**given, max_new_tokens=output, do_sample=False, eos_token_id=None, pad_token_id=0)
    return message, ids.shape[1], out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def conversations(saved):
    eight = ["Eight: ", *[(40 + 9 * n, 90 - 8 * n) for n in range(8)], "?"]
    return [
        conversation(saved, "What is ", (53, 41), " and ", (30, 90), "?", seed=1),
        conversation(saved, (64, 64), seed=2),
        conversation(saved, *eight, seed=3),
    ]


async def answer(stub, message, on_token=None, output=IMAGE_OUTPUT, **fields):
    """-> all tokens of each choice, and what the request has used."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    start = inference_pb2.GenerateStart(
        chat=tokenizer_pb2.ChatPrompt(messages=[message]), sampling=sampling, raw_output=True, **fields
    )
    tokens = {}
    async for event in stub.Stream(inference_pb2.StreamRequest(start=start), timeout=120):
        kind = event.WhichOneof("kind")
        if kind == "delta":
            tokens.setdefault(event.delta.choice, []).extend(event.delta.token_ids)
            if on_token is not None:
                await on_token(len(tokens[0]))
        elif kind == "finished":
            return tokens, event.finished
    raise AssertionError("no end")


async def test_images_through_all_processes_are_those_of_transformers(pair, conversations):
    (encoder,) = pair.of("encode")
    async with grpc.aio.insecure_channel(pair.gateway.outside) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        routes = ({"hand_off": True}, {"hand_off": False}, {"namespace": "other"})
        for number, fields in enumerate(routes):
            answers = await asyncio.gather(*(answer(stub, each[0], **fields) for each in conversations))
            for (_, length, wanted), (tokens, finished) in zip(conversations, answers, strict=True):
                assert tokens == {0: wanted} and finished.usage.prompt_tokens == length
                assert finished.usage.image_tokens
            if not number:
                assert all(finished.stats.prefill_address for _, finished in answers)
            if not number:
                traces = trace_pb2_grpc.TracesStub(channel)
                found = await traces.GetTraces(trace_pb2.GetTracesRequest(limit=3), timeout=10)
                assert not found.missing
                for trace in found.traces:
                    waits = {(phase.name, phase.role, phase.address) for phase in trace.phases}
                    assert "encode" in {name for name, _, _ in waits}
                    assert ("pull images", "prefill", pair.prefill.address) in waits
        tokens, _ = await answer(stub, conversations[0][0], n=3)
        assert tokens == dict.fromkeys(range(3), conversations[0][2])
    loads = [node.load() for node in (encoder, *pair.of("prefill"), *pair.of("decode"))]
    assert sum(load.encoded_images for load in loads) >= 11 and encoder.info().model.images
    assert all(load.encode_cost.token or load.encode_cost.fixed for load in loads)
    pair.assert_idle()


async def test_nodes_are_lost_in_the_middle_of_answers(pair, saved):
    """First the encode node, then the decode node that streams: nobody notices."""
    (encoder,) = pair.of("encode")
    encoder.kill()
    message, _, wanted = conversation(saved, "Once more ", (45, 70), "!", seed=9, output=LONG_OUTPUT)
    killed = []

    async def kill(count):
        if count >= 5 and not killed:  # a node may say a little later what it runs
            killed.extend(node for node in pair.of("decode") if node.load().running)
            for node in killed:
                node.kill()

    async with grpc.aio.insecure_channel(pair.gateway.outside) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        tokens, _ = await answer(stub, message, kill, LONG_OUTPUT, hand_off=True)
    assert tokens == {0: wanted} and killed
    pair.start_all([encoder, killed[0]])


async def test_one_pixel_makes_another_answer(pair):
    data, image = picture((80, 56), seed=9)
    red, green, blue = image.getpixel((3, 5))
    image.putpixel((3, 5), (red ^ 128, green, blue))
    made = io.BytesIO()
    image.save(made, "PNG")

    async def logprobs(file):
        message = {"role": "user", "content": ["A ", file, " B"]}
        (found,) = await ask(
            pair.gateway.address,
            [{"messages": [message], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}],
        )
        return [each.chosen.logprob for each in found.choices[0].logprobs], found.usage.cached_tokens

    first, _ = await logprobs(data)
    other, _ = await logprobs(made.getvalue())
    again, cached = await logprobs(data)
    assert again == pytest.approx(first, abs=1e-4) and cached > 30
    assert other != pytest.approx(first, abs=1e-4)
