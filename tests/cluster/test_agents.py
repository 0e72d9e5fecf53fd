"""The programs of docs/agents.md against `baton up`: a tool call, an MCP tool, and a full context.

Each runs once, as it is installed but for what docs/agents.md says. The model goes on to the next step of its
script only where the conversation holds what the last one gave: its last answer says that all were taken.
Skipped without the programs: make .venv/agents
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from forking import forks
from PIL import Image
from polling import wait
from process import ENVIRONMENT
from scripted_model import IMAGE, Rule, call, save_scripted

from ports import free_port

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / ".venv" / "agents"
SECONDS = 400
CONTEXT = 40960
"""Tokens: room for any program's own instructions and tools, and for what Claude Code adds
after a summary."""
PARTS = 16
"""Files that fill it: 10 kB each, about 3,100 tokens."""
QUESTION = "Which word is in note.txt, and how is the weather in Oslo?"
LONG = QUESTION + " Then read all parts."
KNOWN = "The word is quartz, and it is sunny in Oslo."
SUMMARIZED = "The summary says that all was read."
SHORTENED = "The beginning was left out, and so I end here."
pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(not AGENTS.exists(), reason="no agents: make .venv/agents (needs npm)"),
]


def shell(when: str, command: str) -> list[Rule]:
    """A call of whichever tool runs commands."""
    arguments: dict[str, dict[str, Any]] = {
        "exec_command": {"cmd": command},
        "Bash": {"command": command, "description": "Look"},
        "bash": {"command": command, "description": "Look"},
        "run_commands": {"commands": [command]},
    }
    return [Rule(f"'{name}' in names and {when}", call(name, **given)) for name, given in arguments.items()]


WEATHER = ("mcp__weather__get_weather", "weather_get_weather", "weather__get_weather")
"""As Codex and Claude Code, opencode, and cline name the same tool."""
RULES = [
    Rule("'SUMMARY-7' in seen.text", SUMMARIZED),
    Rule("not names and 'commit message' in seen.text", "chore: another word"),
    Rule("'Change the word' in seen.asked", "note.txt\n```\nthe word is granite\n```\n"),
    Rule(
        " or ".join(
            f"'{words}' in seen.asked"
            for words in ("CONTEXT CHECKPOINT", "etailed summary", "nchored summary")
        ),
        "<summary>\nSUMMARY-7: the word and the weather are known.\n</summary>",
    ),
    Rule("'cat part-2' in seen.text and 'quartz' not in seen.told", SHORTENED),
    Rule("'sunny' in seen.told and 'read all parts' not in seen.text", KNOWN),
    *(
        rule
        for part in range(PARTS)
        for rule in shell(
            f"'sunny' in seen.told and 'cat part-{part}' not in seen.text", f"cat part-{part}.txt"
        )
    ),
    Rule("'sunny' in seen.told", "I have read all parts that there are."),
    *(Rule(f"'{name}' in names and 'quartz' in seen.told", call(name, city="Oslo")) for name in WEATHER),
    Rule(
        "'ToolSearch' in names and 'quartz' in seen.told",
        call("ToolSearch", query=f"select:{WEATHER[0]}", max_results=1),
    ),
    *shell("'note.txt' in seen.asked", "cat note.txt"),
    Rule("true", "I see no tool that I could use here, and so I say hello."),
]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `baton up`."""
    folder = tmp_path_factory.mktemp("agents")
    with up(folder, save_scripted(folder / "model", RULES, CONTEXT)) as url:
        yield url


@contextlib.contextmanager
def up(folder: Path, model: Path) -> Iterator[str]:
    """The URL of `baton up` with this model."""
    port = free_port()
    flags = ["--model", str(model), "--served-name", "mine,claude-*", "--clamp-max-tokens"]
    flags += ["--port", "0", "--http-port", str(port), "--threads", "1", "--kv-tokens", "65536"]
    printed = folder / "up.log"
    with printed.open("wb") as output:
        process = forks(**ENVIRONMENT).start_command(
            ["up", *flags, "--log-dir", str(folder)],
            stdout=output,
            stderr=output,
            environment={**os.environ, **ENVIRONMENT},
        )
    try:
        wait(lambda: "Ctrl-C stops" in printed.read_text() or process.poll() is not None, "up")
        assert process.poll() is None, printed.read_text()
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, printed.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


class Place(NamedTuple):
    """Where a program runs: a home and a git repository of its own, and no network but the loopback."""

    home: Path
    work: Path
    url: str

    def run(self, *command: str, given: str = "", code: int = 0, **environment: str) -> str:
        """What it printed. command: a program of .venv/agents, its arguments. code: its exit status."""
        path = os.pathsep.join(
            str(each) for each in (AGENTS / "node_modules" / ".bin", AGENTS / "aider" / "bin")
        )
        nowhere = "http://127.0.0.1:9"
        done = subprocess.run(
            command,
            cwd=self.work,
            env={
                "PATH": path + os.pathsep + os.environ["PATH"],
                "HOME": str(self.home),
                "LANG": "C.UTF-8",
                **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "npm_config_registry"), nowhere),
                "NO_PROXY": "127.0.0.1",
                **environment,
            },
            input=given,
            timeout=SECONDS,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    @property
    def weather(self) -> list[str]:
        """The MCP server's command."""
        return [sys.executable, str(ROOT / "tests" / "clients" / "weather_server.py"), str(self.calls)]

    @property
    def calls(self) -> Path:
        return self.home / "calls"

    def weather_was_asked_once(self) -> None:
        assert self.calls.read_text() == '{"city": "Oslo"}\n'


@pytest.fixture
def place(tmp_path: Path, baton: str) -> Place:
    return make_place(tmp_path, baton)


def make_place(tmp_path: Path, url: str) -> Place:
    made = Place(tmp_path / "home", tmp_path / "work", url)
    made.home.mkdir()
    made.work.mkdir()
    (made.work / "note.txt").write_text("the word is quartz\n")
    for part in range(PARTS):
        line = f"a prefill node keeps all pages under a lease until they are read by another one: {part}"
        text = "".join(f"{number}: {line}\n" for number in range(110))
        (made.work / f"part-{part}.txt").write_text(text)
    for command in ("init -q", "config user.email a@example.com", "config user.name A"):
        subprocess.run(["git", *command.split()], cwd=made.work, check=True)
    return made


def objects(printed: str) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_codex(place: Place):
    """It summarizes before the context is full, as its configuration says how large that is."""
    (place.home / ".codex").mkdir()
    command, *arguments = place.weather
    (place.home / ".codex" / "config.toml").write_text(f"""
model = "mine"
model_provider = "baton"
model_context_window = {CONTEXT}
[model_providers.baton]
name = "Baton"
base_url = "{place.url}/v1"
wire_api = "responses"
[mcp_servers.weather]
command = {json.dumps(command)}
args = {json.dumps(arguments)}
default_tools_approval_mode = "approve"
""")
    items = [each["item"] for each in objects(place.run("codex", "exec", "--json", LONG)) if "item" in each]
    assert [each["text"] for each in items if each["type"] == "agent_message"] == [SUMMARIZED]
    place.weather_was_asked_once()


def test_claude_code(place: Place):
    """It finds the MCP tool by its tool search, and summarizes after the error of a full context."""
    server = {"command": place.weather[0], "args": place.weather[1:]}
    (place.work / "mcp.json").write_text(json.dumps({"mcpServers": {"weather": server}}))
    printed = place.run(
        *("claude", "-p", "--output-format", "json", "--mcp-config", "mcp.json"),
        *("--allowedTools", WEATHER[0], "Bash", "--", LONG),
        ANTHROPIC_BASE_URL=place.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="claude-mine",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert objects(printed)[-1]["result"] == SUMMARIZED
    place.weather_was_asked_once()


def test_opencode(place: Place):
    """Its configuration names no limit: it asks for more output than the context holds, and gets less. It
    summarizes after the error of a full context, goes on, and exits with 1 because of that error."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Baton",
        "options": {"baseURL": f"{place.url}/v1"},
        "models": {"mine": {"name": "mine"}},
    }
    settings = {
        "model": "baton/mine",
        "provider": {"baton": provider},
        "mcp": {"weather": {"type": "local", "command": place.weather}},
    }
    (place.work / "opencode.json").write_text(json.dumps(settings))
    printed = place.run(
        *("opencode", "run", "--format", "json", LONG),
        code=1,
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    texts = [each["part"]["text"] for each in objects(printed) if each["type"] == "text"]
    assert texts[-1] == SUMMARIZED
    place.weather_was_asked_once()


def test_cline(place: Place):
    """It leaves out the beginning after an error that says that the context is full."""
    try:
        url = f"{place.url}/v1"
        place.run("cline", "auth", "-p", "openai-compatible", "-k", "none", "-m", "mine", "-b", url)
        place.run("cline", "mcp", "add", "weather", "--yes", "--", *place.weather)
        results = objects(place.run("cline", "--json", LONG))
    finally:
        # The process that it leaves running.
        for record in place.home.glob(".cline/data/locks/hub/*.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    assert results[-1]["type"] == "run_result" and results[-1]["text"] == SHORTENED
    place.weather_was_asked_once()


def test_aider(place: Place):
    """It calls no tools, but writes files. It says that the context is full; without the files it goes on."""
    parts = [f"part-{part}.txt" for part in range(PARTS)]
    ask = "Change the word in note.txt"
    printed = place.run(
        *("aider", "--model", "openai/mine", "--no-check-update", "--yes-always", "note.txt", *parts),
        given=f"{ask}\n/drop {' '.join(parts)}\n{ask}\n",
        OPENAI_API_BASE=f"{place.url}/v1",
        OPENAI_API_KEY="none",
        AIDER_ANALYTICS="false",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    assert "exceeds the" in printed or "token limit" in printed, printed
    assert (place.work / "note.txt").read_text() == "the word is granite\n"
    said = subprocess.run(
        ["git", "log", "-1", "--format=%s"], cwd=place.work, capture_output=True, text=True, check=True
    )
    assert said.stdout == "chore: another word\n"


def test_langchain(place: Place):
    """Its clients of three APIs: a forced call, a chosen one, and its own error of a full context."""
    python = str(AGENTS / "langchain" / "bin" / "python")
    program = ROOT / "tests" / "clients" / "langchain_tools.py"
    for made in objects(place.run(python, str(program), place.url, QUESTION)):
        ((api, found),) = made.items()
        assert found["calls"] == [
            ["bash", {"command": "cat note.txt", "description": "Look"}],
            ["weather_get_weather", {"city": "Oslo"}],
        ]
        assert found["answer"] == KNOWN
        assert {*found["full"]} == {"whole", "streamed"}, (api, found["full"])


def test_screenshots(tmp_path: Path):
    """A program's own tool reads a picture; what it gives back is an image that the model is shown."""
    screen = tmp_path / "work" / "screen.png"
    readers = {"Read": "file_path", "read": "filePath"}  # of Claude Code, of opencode
    rules = [
        Rule(f"'{IMAGE}' in seen.text", "I have seen the screen."),
        *(
            Rule(f"'{name}' in names and 'screen.png' in seen.asked", call(name, **{key: str(screen)}))
            for name, key in readers.items()
        ),
        Rule("true", "I have no tool that reads."),
    ]
    folder = tmp_path / "up"
    folder.mkdir()
    with up(folder, save_scripted(folder / "model", rules, CONTEXT, sees=True)) as url:
        place = make_place(tmp_path, url)
        Image.new("RGB", (64, 40), "purple").save(screen)
        printed = place.run(
            *(
                "claude",
                "-p",
                "--output-format",
                "json",
                "--allowedTools",
                "Read",
                "--",
                "Look at screen.png",
            ),
            ANTHROPIC_BASE_URL=place.url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL="claude-mine",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        assert objects(printed)[-1]["result"] == "I have seen the screen."
        seen = images(url)
        assert seen
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Baton",
            "options": {"baseURL": f"{place.url}/v1"},
            "models": {
                "mine": {"name": "mine", "modalities": {"input": ["text", "image"], "output": ["text"]}}
            },
        }
        settings = {"model": "baton/mine", "provider": {"baton": provider}}
        (place.work / "opencode.json").write_text(json.dumps(settings))
        printed = place.run(
            *("opencode", "run", "--format", "json", "Look at screen.png"),
            OPENCODE_DISABLE_AUTOUPDATE="1",
            OPENCODE_DISABLE_MODELS_FETCH="1",
        )
        texts = [each["part"]["text"] for each in objects(printed) if each["type"] == "text"]
        assert texts[-1] == "I have seen the screen."
        assert images(url) > seen


def images(url: str) -> float:
    """How many the gateway has taken."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    taken = [line for line in lines if line.startswith("baton_gateway_images_total")]
    return sum(float(line.split()[-1]) for line in taken if "refused" not in line)
