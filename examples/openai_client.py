"""The official `openai` client, unchanged (pip install openai). Needs `baton up`."""

import argparse

try:
    from openai import OpenAI
except ImportError:
    raise SystemExit("this example needs OpenAI's client: pip install openai") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8000", help="the gateway's HTTP host:port")
    args = parser.parse_args()

    client = OpenAI(base_url=f"http://{args.address}/v1", api_key="not-needed")
    model = client.models.list().data[0].id

    completion = client.completions.create(model=model, prompt="The import statement", max_tokens=24)
    print(f"completion: {completion.choices[0].text!r}")

    print("chat: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a tuple?"}],
        max_completion_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} prompt and {chunk.usage.completion_tokens} output tokens")


if __name__ == "__main__":
    main()
