"""A conversation in a session: each turn reuses the KV of the earlier ones. Needs `baton up`."""

import argparse
import sys
from collections.abc import Iterator

from baton.client import DEFAULT_ADDRESS, Client


def questions() -> Iterator[str]:
    """Lines of the user: from the keyboard, or from a pipe."""
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the gateway's host:port")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    with Client(args.address) as client, client.session() as session:
        for question in questions():
            with session.stream(messages=question, max_tokens=args.max_tokens) as turn:
                for delta in turn:
                    print(delta.text, end="", flush=True)
                usage = turn.completion().usage
            if usage is not None:
                print(f"\n  [{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached]")


if __name__ == "__main__":
    main()
