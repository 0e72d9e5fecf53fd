"""guidellm and lm-eval against a deployment, offline: a load test, and a task by log-probabilities.

Skipped without the environment that they live in: make .venv/evals
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.demo import model_path

BIN = Path(__file__).parents[2] / ".venv" / "evals" / "bin"
SECONDS = 500
pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(not (BIN / "lm_eval").exists(), reason="no harnesses: make .venv/evals"),
]
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
PROGRAM = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

folder, options, samples = sys.argv[1:]
tasks = TaskManager(include_path=folder, include_defaults=False)
found = simple_evaluate("local-completions", options, tasks=["local_choices"], task_manager=tasks)
with open(samples, "w") as file:
    json.dump(found["samples"]["local_choices"], file, default=str)
"""
"""What `lm_eval run` does, but for the 14,000 files of its own tasks: 15 s of a processor."""
DOCUMENTS: list[dict[str, Any]] = [
    {"prompt": "import os\nprint(os.path.", "choices": ["join(a, b))", "zebra apple)"], "answer": 0},
    {"prompt": "The function textwrap.dedent removes", "choices": [" common leading", "(((("], "answer": 0},
    {"prompt": "class Stack:\n    def __init__(self", "choices": ["):\n", " elephant"], "answer": 0},
    {"prompt": "Zürich 🚀 is", "choices": [" a string.", " 東京"], "answer": 0},
]


def run(folder: Path, *command: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | offline
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        timeout=SECONDS,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | {"OPENAI_API_KEY": "none"},
    )
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-2000:])
    return done.stdout


def by_transformers() -> list[list[float]]:
    """Of each document's choices: the log-probability after the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    found = []
    for document in DOCUMENTS:
        start = len(tokenizer.encode(document["prompt"]))
        sums = []
        for choice in document["choices"]:
            ids = torch.tensor([tokenizer.encode(document["prompt"] + choice)])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, ids[0, 1:, None])[start - 1 :]
            sums.append(float(own.sum()))
        found.append(sums)
    return found


def test_lm_eval_finds_the_log_probabilities_of_transformers(demo: Deployment, tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS), encoding="utf-8")
    (tmp_path / "local_choices.yaml").write_text(TASK.format(data=data))
    url = f"http://{demo.gateway.http}/v1/completions"
    options = f"model=demo,base_url={url},tokenizer={model_path()},num_concurrent=2,max_retries=1"
    samples = tmp_path / "samples.json"
    run(tmp_path, "python", "-c", PROGRAM, str(tmp_path), options, str(samples))
    answers = sorted(json.loads(samples.read_text()), key=lambda each: each["doc_id"])
    found = [[float(response[0][0]) for response in each["resps"]] for each in answers]
    expected = by_transformers()
    assert len(found) == len(DOCUMENTS)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert [each["acc"] for each in answers] == [float(a == max(a, b)) for a, b in expected]


def test_guidellm_measures_a_run(demo: Deployment, tmp_path: Path):
    report = tmp_path / "report.json"
    run(
        tmp_path,
        *("guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target=http://{demo.gateway.http},model=demo"),
        *("--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=9"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12"),
        *("--tokenizer", f"kind=huggingface_auto,model={model_path()}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests, state = benchmark["requests"], benchmark["scheduler_state"]
    assert not requests["errored"], [each["info"]["error"] for each in requests["errored"]]
    # On a busy machine guidellm may drop what it got of the last requests; it has counted them.
    assert (state["successful_requests"], state["errored_requests"], state["cancelled_requests"]) == (9, 0, 0)
    assert requests["successful"] and all(each["output_tokens"] == 12 for each in requests["successful"])
    measured = benchmark["metrics"]["time_to_first_token_ms"]["successful"]
    assert measured["mean"] > 0
