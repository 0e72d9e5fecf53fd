"""One prompt, streamed to the terminal. Needs a running deployment: `baton up`."""

import argparse

from baton.client import DEFAULT_ADDRESS, Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The list methods make it very easy to")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the gateway's host:port")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    with Client(args.address) as client, client.stream(args.prompt, max_tokens=args.max_tokens) as stream:
        print(args.prompt, end="")
        for delta in stream:
            print(delta.text, end="", flush=True)
        answer = stream.completion()

    assert answer.usage is not None and answer.stats is not None
    print(f"\n\n{answer.usage.output_tokens} tokens, first after {answer.stats.ttft * 1000:.0f} ms", end="; ")
    print(f"seed {answer.seed}, ended by {answer.finish_reason}")


if __name__ == "__main__":
    main()
