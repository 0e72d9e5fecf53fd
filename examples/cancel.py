"""Three ways to stop a request early; each frees what it held, in all processes. Needs `baton up`."""

import argparse
import asyncio

from baton.client import DEFAULT_ADDRESS, AsyncClient, BatonError


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the gateway's host:port")
    args = parser.parse_args()

    async with AsyncClient(args.address) as client:
        async with client.stream("Once more, the", max_tokens=400, ignore_eos=True) as stream:
            async for _ in stream:
                if len(stream.so_far.token_ids) >= 5:
                    break
        print(f"left after {len(stream.so_far.token_ids)} tokens: {stream.so_far.text!r}")

        running = asyncio.create_task(client.generate("And again, the", max_tokens=400, ignore_eos=True))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.wait({running})
        print(f"task cancelled: {running.cancelled()}")

        try:
            await client.generate("Too late, the", max_tokens=400, ignore_eos=True, timeout=0.05)
        except BatonError as error:
            print(f"timed out: {error.code.name}: {error.message}")


if __name__ == "__main__":
    asyncio.run(main())
