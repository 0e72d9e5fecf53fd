"""Good messages, for others to go wrong from. Small ones: most of what is made of them is run."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.v1 import (
    cache_pb2,
    common_pb2,
    decode_pb2,
    embed_pb2,
    inference_pb2,
    node_pb2,
    prefill_pb2,
    tokenizer_pb2,
    trace_pb2,
)

SAMPLING = common_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
RICH = common_pb2.SamplingParams(
    max_tokens=6, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=7,
    logprobs=2, prompt_logprobs=1, stop_token_ids=[4], logit_bias={5: 1.5},
)  # fmt: skip
PROMPT = list(range(5, 60))
TALK = tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role="user", content="hello")])
NAME = common_pb2.Attempt(gateway=1, request=2)
OWN = 7
"""An incarnation that stands for the one of the process that is asked."""


def _generate(**fields: Any) -> Message:
    start = inference_pb2.GenerateStart(id="a", sampling=SAMPLING, **fields)
    return inference_pb2.GenerateRequest(start=start)


def _prefill(**fields: Any) -> Message:
    return prefill_pb2.PrefillRequest(**fields)


_TOKENS = inference_pb2.TokenPrompt(token_ids=PROMPT)
_WITH_STOP = common_pb2.SamplingParams(max_tokens=8, stop=["a", "the"], seed=3)
_RUN = prefill_pb2.PrefillStart(attempt=NAME, token_ids=PROMPT, sampling=SAMPLING)
_FIRST_ONLY = prefill_pb2.PrefillStart(attempt=NAME, token_ids=PROMPT, sampling=RICH, keep_pages=False)
_CACHED = prefill_pb2.CachedPrompt(attempt=NAME, token_ids=PROMPT)

_EMBED: list[Message] = [
    embed_pb2.EmbedPrompts(prompts=[{"token_ids": PROMPT}, {"token_ids": [9]}], dimensions=3),
    embed_pb2.EmbedPrompts(prompts=[{"token_ids": PROMPT}], pooling=embed_pb2.POOLING_MEAN, namespace="n"),
]
_REFLECTION: list[Message] = [
    reflection_pb2.ServerReflectionRequest(list_services=""),
    reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Node"),
]

SEEDS: dict[str, list[Message]] = {
    "Inference/Generate": [
        _generate(text="hello"),
        _generate(chat=TALK, n=2),
        _generate(tokens=_TOKENS, session="s", namespace="n"),
        inference_pb2.GenerateRequest(
            start=inference_pb2.GenerateStart(id="b", text="the pages of a prompt", sampling=_WITH_STOP)
        ),
        inference_pb2.GenerateRequest(cancel=inference_pb2.GenerateCancel(id="a")),
        inference_pb2.GenerateRequest(
            resume=inference_pb2.GenerateResume(
                start=inference_pb2.GenerateStart(id="r", text="the pages of a prompt", sampling=_WITH_STOP),
                ticket="gAAAAABn",
                choices=[inference_pb2.ReceivedChoice(token_ids=[1, 2], text_characters=3)],
            )
        ),
    ],
    "Inference/Complete": [
        inference_pb2.CompleteRequest(start={"text": "hello", "sampling": SAMPLING, "n": 2}),
        inference_pb2.CompleteRequest(start={"tokens": _TOKENS, "sampling": RICH}),
    ],
    "Inference/Stream": [
        inference_pb2.StreamRequest(start={"id": "a", "chat": TALK, "sampling": SAMPLING}),
        inference_pb2.StreamRequest(start={"text": "the pages", "sampling": _WITH_STOP}),
    ],
    "Inference/Embed": [
        inference_pb2.EmbedRequest(inputs=[{"text": "hello"}, {"tokens": _TOKENS}], dimensions=4),
        inference_pb2.EmbedRequest(
            inputs=[{"text": "the pages"}], pooling=embed_pb2.POOLING_MEAN, priority=3
        ),
    ],
    "Inference/ListModels": [inference_pb2.ListModelsRequest()],
    "Tokenizer/Encode": [
        tokenizer_pb2.EncodeRequest(inputs=[{"text": "the pages"}, {"chat": TALK}]),
    ],
    "Tokenizer/Decode": [tokenizer_pb2.DecodeRequest(sequences=[{"token_ids": PROMPT}, {}])],
    "Tokenizer/Detokenize": [
        tokenizer_pb2.DetokenizeRequest(items=[{"id": 1, "context": [5, 6], "token_ids": [7, 8]}]),
        tokenizer_pb2.DetokenizeRequest(items=[{"id": 1, "token_ids": [9]}, {"id": 2, "token_ids": [200]}]),
        tokenizer_pb2.DetokenizeRequest(items=[{"id": 1, "finish": True, "token_bytes_of": [9]}]),
    ],
    "Tokenizer/Vocabulary": [tokenizer_pb2.VocabularyRequest()],
    "Decode/Generate": [
        decode_pb2.GenerateCommand(
            start=decode_pb2.DecodeStart(request=1, token_ids=PROMPT, sampling=SAMPLING)
        ),
        decode_pb2.GenerateCommand(
            start=decode_pb2.DecodeStart(request=2, token_ids=PROMPT[:5], sampling=RICH, delivered=2)
        ),
        decode_pb2.GenerateCommand(cancel=decode_pb2.DecodeCancel(request=1)),
        decode_pb2.GenerateCommand(
            several={"commands": [{"cancel": {"request": 1}}, {"heartbeat": {}}, {"pause": {"request": 1}}]}
        ),
    ],
    "Prefill/Run": [
        _prefill(start=_RUN),
        _prefill(start=_FIRST_ONLY),
        _prefill(cancel=prefill_pb2.PrefillCancel(attempt=NAME)),
        _prefill(several={"requests": [{"start": _FIRST_ONLY}, {"cancel": {"attempt": NAME}}]}),
        _prefill(release=prefill_pb2.LeaseRelease(attempt=NAME)),
        _prefill(heartbeat=prefill_pb2.Heartbeat()),
    ],
    "Decode/Embed": _EMBED,
    "Decode/TakeLog": [decode_pb2.TakeLogRequest(gateway=1, request=1)],
    "Prefill/Embed": _EMBED,
    "PageSource/Fetch": [prefill_pb2.FetchRequest(id=1, page_ids=[0, 1])],
    "Cache/Lend": [
        _prefill(cached=_CACHED),
        _prefill(cancel=prefill_pb2.PrefillCancel(attempt=NAME)),
        _prefill(several={"requests": [{"cached": _CACHED}, {"release": {"attempt": NAME}}]}),
        _prefill(heartbeat=prefill_pb2.Heartbeat()),
    ],
    "Cache/Watch": [
        cache_pb2.WatchRequest(),
        cache_pb2.WatchRequest(incarnation=OWN, sequence=3),
        cache_pb2.WatchRequest(sequence=2**64 - 1),
    ],
    "Node/GetInfo": [node_pb2.GetInfoRequest()],
    "Node/GetLoad": [node_pb2.GetLoadRequest()],
    "Node/Watch": [
        node_pb2.WatchNodeRequest(interval_ms=100, max_cells=7),
        node_pb2.WatchNodeRequest(interval_ms=2**64 - 1),
        node_pb2.WatchNodeRequest(max_cells=2**32 - 1),
    ],
    "Node/Recent": [
        trace_pb2.RecentRequest(requests=[trace_pb2.RequestName(gateway=1, request=2)]),
        trace_pb2.RecentRequest(requests=[trace_pb2.RequestName()] * 4097),
    ],
    "Traces/GetTraces": [
        trace_pb2.GetTracesRequest(ids=["0000000000000001-1", "-", ""]),
        trace_pb2.GetTracesRequest(limit=2**32 - 1, slowest=True),
        trace_pb2.GetTracesRequest(limit=256),
    ],
    "Node/Drain": [node_pb2.DrainRequest(timeout_ms=1)],
    "Node/SetRole": [node_pb2.SetRoleRequest(role="prefill", timeout_ms=1)],
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _REFLECTION,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _REFLECTION,
    "grpc.health.v1.Health/Check": [health_pb2.HealthCheckRequest(service="baton.v1.Node")],
    "grpc.health.v1.Health/Watch": [health_pb2.HealthCheckRequest()],
}
"""Path of a method -> messages."""

_COMMON = {"model": "model", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {**_COMMON, "prompt": "hello"},
        {**_COMMON, "prompt": [PROMPT], "stream": True, "logprobs": 2, "echo": True},
    ],
    "/v1/chat/completions": [
        {**_COMMON, "messages": [{"role": "user", "content": "hello"}]},
        {
            **_COMMON,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "stream": True,
        },
    ],
    "/v1/responses": [
        {"model": "model", "input": "hello", "max_output_tokens": 4},
        {
            "model": "model",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "b"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "max_output_tokens": 4,
            "stream": True,
        },
    ],
    "/v1/messages": [
        {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]},
        {
            "model": "model",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "a"}],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}]},
            ],
            "tools": [{"name": "f", "input_schema": {}}],
            "stream": True,
        },
    ],
    "/v1/embeddings": [
        {"model": "model", "input": ["hello", "the pages"], "encoding_format": "base64"},
        {"model": "model", "input": [PROMPT], "dimensions": 3, "pooling": "mean", "normalize": False},
    ],
    "/v1/score": [{"model": "model", "text_1": "hello", "text_2": ["the pages", "of a prompt"]}],
    "/v1/rerank": [{"model": "model", "query": "pages", "documents": ["the pages", "a list"], "top_n": 1}],
}
"""Path -> bodies. The model's name is the test checkpoint's."""
