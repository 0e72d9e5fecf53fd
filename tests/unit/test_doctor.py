"""What `baton doctor` says of process ids, and `baton health` of a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from random_checkpoints import save_checkpoint
from test_recurrent_checkpoints import add
from test_recurrent_families import VARIANTS
from test_transformers_backed import ARCHITECTURES
from test_wrappers import BLOCKS, TEXT
from transformers import AutoModelForImageTextToText, Qwen3_5Config

from baton.bench.machine import DRIVER
from baton.cli.doctor import doctor, process_id, run_checks, served
from baton.cli.health import health
from baton.transport.shm import FIRST_PID_NAMESPACE, pid_namespace

ENTRY = ["python", "-m", "baton.cli.entrypoint", "baton", "serve", "decode"]
SERVE = ["python", "/opt/baton/bin/baton", "serve", "decode"]


@pytest.mark.parametrize(
    ("namespace", "commands", "verdict", "says"),
    [
        (FIRST_PID_NAMESPACE, {1: ["init"], 77: SERVE}, "ok", "unique"),
        ("pid:[4026532000]", {1: SERVE}, "note", "has process id 1"),
        ("pid:[4026532000]", {1: ENTRY, 105: SERVE}, "ok", "is 105"),
        ("pid:[4026532000]", {1: ["bash"]}, "ok", "needs different ids"),
    ],
)
def test_a_worker_that_cuda_ipc_could_not_tell_apart_is_found(namespace, commands, verdict, says):
    check = process_id(namespace, commands)
    assert check.verdict == verdict and says in check.detail


@pytest.mark.skipif(any(path.exists() for path in DRIVER), reason="there is a GPU")
def test_without_a_gpu_nothing_that_needs_one_is_a_fault():
    findings = {(section, check.name): check.verdict for section, check in run_checks()}
    absent = {name for name, verdict in findings.items() if verdict == "absent"}
    assert {("devices", "cuda"), ("transports", "cuda_ipc"), ("attention", "fa3")} <= absent
    assert findings["attention", "torch"] == "ok"


def test_the_namespace_can_be_read_here():
    assert pid_namespace().startswith("pid:[")


def test_health_of_a_process_that_is_not_there():
    result = CliRunner().invoke(health, ["127.0.0.1:1", "--seconds", "2"])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1 and "does not answer" in result.output


def test_the_command_of_a_container_is_light():
    """The probe runs every few seconds in every container: no torch, no transformers, no client, no log."""
    heavy = ("torch", "transformers", "baton.client", "structlog", "rich")
    script = f"import sys, baton.cli.health; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "[]\n"


def test_a_model_is_said_to_be_served_by_whose_code(tmp_path):
    def ask(*arguments):
        result = CliRunner().invoke(doctor, ["--json", *arguments])
        return result.exit_code, {
            check["name"]: check["detail"] for check in json.loads(result.stdout)["checks"]
        }

    code, found = ask("--model", "demo")
    assert code == 0 and found["architecture"] == "Qwen3ForCausalLM, by Baton's own code"
    _, found = ask("--model", "demo", "--model-impl", "transformers")
    assert "by transformers' code" in found["architecture"] and "asked for" in found["architecture"]
    save_checkpoint("gemma2", tmp_path, variants=ARCHITECTURES)
    code, found = ask("--model", str(tmp_path))
    assert code == 0 and "Baton has none of its own" in found["architecture"]
    code, found = ask("--model", str(tmp_path), "--model-impl", "baton")
    assert code == 1 and "not one of Baton's own" in next(iter(found.values()))


def test_what_is_left_out_and_the_size_of_states_is_said(tmp_path):
    """Of a wrapper, as Qwen3.5 is published."""
    text = {**TEXT, **VARIANTS["qwen3.5"][1]}
    config = Qwen3_5Config(text_config=text, vision_config=BLOCKS)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    add(tmp_path, {"mtp.fc.weight": torch.zeros(64, 128)})
    result = CliRunner().invoke(doctor, ["--json", "--model", str(tmp_path)])
    found = {check["name"]: check["detail"] for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 0, found
    assert found["architecture"].endswith("own code; left out of the checkpoint: mtp")
    assert "MiB a state of its recurrent layers" in found["kv"]


def test_what_becomes_of_quantized_weights_is_said(tmp_path):
    def ask(*arguments):
        result = CliRunner().invoke(doctor, ["--json", *arguments])
        return {check["name"]: check["detail"] for check in json.loads(result.stdout)["checks"]}

    save_checkpoint("qwen3", tmp_path)
    model = ("--model", str(tmp_path))
    assert "quantization" not in ask(*model)
    assert "int8 while loading" in ask(*model, "--quantization", "int8")["quantization"]
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    assert ask(*model)["quantization"] == "FP8 in blocks of 128 x 128 (fp8), dequantized while loading"
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "'bitsandbytes' are not supported" in next(iter(ask(*model).values()))


def test_a_model_divided_among_ranks():
    found = {each.name: each for each in served("demo", "auto", tp=2)}
    assert found["ranks"].verdict == "ok"
    assert re.match(
        r"2, each with up to 0\.\d+ GiB of weights and \d+ of \d+ KV heads", found["ranks"].detail
    )
    assert "ranks" not in {each.name for each in served("demo", "auto")}
    (refused,) = served("demo", "auto", tp=7)
    assert refused.verdict == "bad" and "cannot be divided among 7 ranks" in refused.detail


def test_kv_heads_of_ranks_are_those_of_the_layers_that_attend(tmp_path):
    save_checkpoint("qwen3.5", tmp_path, variants=VARIANTS)  # its first layer is recurrent
    found = {each.name: each for each in served(str(tmp_path), "auto", tp=2)}
    assert "1 of 2 KV heads" in found["ranks"].detail


@pytest.mark.parametrize(("tp", "kv_dtype"), [(2, "auto"), (1, "fp8_e4m3")])
def test_layers_that_differ_in_their_kv_heads_are_neither_divided_nor_quantized(tmp_path, tp, kv_dtype):
    save_checkpoint("gemma4", tmp_path)
    *_, last = served(str(tmp_path), "auto", kv_dtype=kv_dtype, tp=tp)
    assert last.verdict == "bad" and "layers with different numbers of KV heads" in last.detail
