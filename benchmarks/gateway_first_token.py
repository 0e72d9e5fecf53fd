"""Time to the first token of one stream through an idle gateway, over gRPC: token ids, then text.

    python benchmarks/gateway_first_token.py --requests 600

A tokenizer, a gateway and a decode node that only gives out tokens (`gateway_load/source.py`), one step each
0.5 ms, so that the gateway and its messages are most of what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import grpc
from gateway_cost import Process, character, program, read_line

from baton.v1 import inference_pb2, inference_pb2_grpc

WARM_UP = 50
TEXT = "The quick brown fox"


def first_token(stub: inference_pb2_grpc.InferenceStub, prompt: str) -> float:
    """Seconds from the call to the first text."""
    start = inference_pb2.GenerateStart(id="r")
    if prompt == "text":
        start.text = TEXT
    else:
        start.tokens.token_ids.extend(range(5, 21))
    start.sampling.max_tokens = 4
    start.sampling.ignore_eos = True
    began, found = time.perf_counter(), 0.0
    for event in stub.Generate(iter([inference_pb2.GenerateRequest(start=start)]), timeout=30):
        if not found and event.delta.text:
            found = time.perf_counter() - began
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=600, help="of each kind of prompt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = Process("tokenizer", "tokenizer", ["--model", "demo"], folder)
        tokenizer.start()
        try:
            tokenizer.wait_ready()
            measure(tokenizer, folder, args.requests)
        finally:
            tokenizer.kill()


def measure(tokenizer: Process, folder: Path, requests: int) -> None:
    vocabulary, token = str(tokenizer.info().model.vocab_size), str(character(tokenizer))
    steps = ("--step-seconds", "0.0005", "--message-seconds", "0")
    with program("source", *steps, "--vocabulary", vocabulary, "--token", token) as source:
        flags = ["--tokenizer", tokenizer.address, "--decode", read_line(source, "ready")]
        gateway = Process("gateway", "gateway-0", [*flags, "--log-level", "warning"], folder)
        gateway.start()
        try:
            gateway.wait_ready()
            with grpc.insecure_channel(gateway.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                for prompt in ("token ids", "text"):
                    for _ in range(WARM_UP):
                        first_token(stub, prompt)
                    times = [1000 * first_token(stub, prompt) for _ in range(requests)]
                    print(f"{prompt}: median {statistics.median(times):.2f} ms")
        finally:
            gateway.kill()


if __name__ == "__main__":
    main()
