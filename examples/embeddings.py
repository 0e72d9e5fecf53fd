"""Finds the text that is nearest to a question, by embeddings. Needs `baton up`."""

import argparse

from baton.client import DEFAULT_ADDRESS, Client

TEXTS = (
    "textwrap.dedent removes common leading whitespace from every line in text.",
    "os.path.join joins one or more path segments.",
    "json.dumps serializes an object to a JSON formatted string.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="os.path.join(path) joins paths.")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the gateway's host:port")
    args = parser.parse_args()

    with Client(args.address) as client:
        question, *vectors = client.embed([args.question, *TEXTS], pooling="mean").vectors
    # Embeddings have length 1: a dot product is the cosine of their angle.
    similar = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
    for value, text in sorted(zip(similar, TEXTS, strict=True), reverse=True):
        print(f"{value:.3f}  {text}")


if __name__ == "__main__":
    main()
