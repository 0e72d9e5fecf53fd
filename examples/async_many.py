"""Many prompts at once over one connection. Needs `baton up`."""

import argparse
import asyncio
import time

from baton.client import DEFAULT_ADDRESS, AsyncClient, BatonError

BEGINNINGS = [
    "The string methods",
    "A class definition",
    "The for statement",
    "An exception is",
    "Modules are",
]


async def ask(client: AsyncClient, number: int, max_tokens: int) -> int:
    prompt = BEGINNINGS[number % len(BEGINNINGS)]
    try:
        answer = await client.generate(prompt, max_tokens=max_tokens, seed=number, timeout=120)
    except BatonError as error:
        print(f"{number:3}  failed: {error.code.name}: {error.message}")
        return 0
    print(f"{number:3}  {(prompt + answer.text)!r:.90}")
    return len(answer.token_ids)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the gateway's host:port")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    started = time.perf_counter()
    async with AsyncClient(args.address) as client:
        tokens = await asyncio.gather(*(ask(client, i, args.max_tokens) for i in range(args.requests)))
    seconds = time.perf_counter() - started
    total = sum(tokens)
    print(f"{args.requests} requests, {total} tokens in {seconds:.1f} s: {total / seconds:.0f} tokens/s")


if __name__ == "__main__":
    asyncio.run(main())
