"""The programs of examples/ run against a deployment, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deployment import Deployment

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """What the program prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_services(tmp_path: Path):
    with Deployment.split(tmp_path, "demo").close_to_strangers("s" * 64, "k" * 32) as closed:
        flags = [f"--{role}={closed.of(role)[0].address}" for role in ("tokenizer", "prefill", "decode")]
        said = run("services.py", "--secret-file", str(tmp_path / "secret"), *flags)
        expected = closed.client().generate("textwrap.dedent(text)", temperature=0, max_tokens=24)
        closed.assert_idle()
    lines = said.splitlines()
    assert any(line.startswith("prefill: ") and "finished" in line for line in lines)
    assert f"decode: {expected.token_ids}" in lines
    assert said.endswith(expected.text + "\n")


def test_embeddings(demo: Deployment):
    said = run("embeddings.py", "--address", demo.gateway.address).splitlines()
    assert len(said) == 3 and said == sorted(said, reverse=True)
    assert "os.path.join" in said[0]
