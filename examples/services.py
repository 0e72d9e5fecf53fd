"""Uses the services behind the gateway by themselves: Tokenizer, Prefill and Decode.

    (umask 077; openssl rand -hex 32 > secret)
    baton up --cluster-secret-file secret
    baton status                                # in a second terminal: where the services are
    python examples/services.py --secret-file secret --tokenizer HOST:PORT --prefill HOST:PORT \\
        --decode HOST:PORT

Every call carries the deployment's secret as the metadata `baton-cluster-secret`. Only stubs are used:
grpcio and what protoc makes of proto/ are enough.
"""

import argparse
import secrets
from collections.abc import Iterator
from pathlib import Path

import grpc

from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

SECONDS = 60.0
ME = secrets.randbits(63) + 1
"""This caller's incarnation."""
GREEDY = common_pb2.SamplingParams(temperature=0, max_tokens=24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="host:port")
    parser.add_argument("--prefill", required=True, help="host:port")
    parser.add_argument("--decode", required=True, help="host:port")
    parser.add_argument("--secret-file", type=Path, help="the deployment's cluster secret")
    args = parser.parse_args()
    secret = args.secret_file.read_text().strip() if args.secret_file else ""
    call = {"timeout": SECONDS, "metadata": (("baton-cluster-secret", secret),) if secret else ()}

    tokenizer = tokenizer_pb2_grpc.TokenizerStub(grpc.insecure_channel(args.tokenizer))
    prompt = tokenizer_pb2.EncodeInput(text="textwrap.dedent(text)")
    encoded = tokenizer.Encode(tokenizer_pb2.EncodeRequest(inputs=[prompt]), **call).results[0]
    print("prompt:", list(encoded.token_ids))

    prefill = prefill_pb2_grpc.PrefillStub(grpc.insecure_channel(args.prefill))
    for event in prompt_events(prefill.Run(prefill_requests(encoded.token_ids), **call)):
        print("prefill:", str(event).replace("\n", " "))

    decode = decode_pb2_grpc.DecodeStub(grpc.insecure_channel(args.decode))
    output: list[int] = []
    for step in decode.Generate(decode_commands(encoded.token_ids), **call):
        output += [token for delta in step.tokens for token in delta.token_ids]
        if any(event.WhichOneof("kind") in ("finished", "failed") for event in step.events):
            break
    print("decode:", output)

    sequences = [tokenizer_pb2.TokenSequence(token_ids=output)]
    print(tokenizer.Decode(tokenizer_pb2.DecodeRequest(sequences=sequences), **call).texts[0])


def prefill_requests(token_ids: list[int]) -> Iterator[prefill_pb2.PrefillRequest]:
    """The prompt's first token only; nothing is kept for a hand-off."""
    yield prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=ME))
    attempt = common_pb2.Attempt(gateway=ME, request=1)
    start = prefill_pb2.PrefillStart(attempt=attempt, token_ids=token_ids, sampling=GREEDY, keep_pages=False)
    yield prefill_pb2.PrefillRequest(start=start)


def prompt_events(
    responses: Iterator[prefill_pb2.PrefillResponse],
) -> Iterator[prefill_pb2.PrefillEvent]:
    for response in responses:
        for event in response.events:
            if event.WhichOneof("kind") != "welcome":
                yield event


def decode_commands(token_ids: list[int]) -> Iterator[decode_pb2.GenerateCommand]:
    """The decode node asks the prefill nodes of its own configuration for the prompt."""
    yield decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=ME))
    start = decode_pb2.DecodeStart(request=2, token_ids=token_ids, sampling=GREEDY)
    yield decode_pb2.GenerateCommand(start=start)


if __name__ == "__main__":
    main()
