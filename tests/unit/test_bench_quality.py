"""`baton bench quality` on the demo model, against transformers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner
from random_checkpoints import random_prompts, save_checkpoint
from transformers import AutoModelForCausalLM

from baton.bench.quality import WINDOW, Scores, python_documentation, score, windows
from baton.cli.bench_quality import quality
from baton.config import WorkerConfig
from baton.demo import model_path
from baton.layers.quantization.weight_method import quantize


def scores(model, texts):
    with torch.inference_mode():
        logits = [model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for tokens in texts]
    found = Scores([], [])
    for each, tokens in zip(logits, texts, strict=True):
        found.logprobs.extend(each[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].tolist())
        found.greedy.extend(each.argmax(1).tolist())
    return found


@pytest.mark.thorough
def test_perplexity_and_greedy_tokens_are_those_of_transformers(tmp_path):
    file = tmp_path / "quality.json"
    words = (
        "--model",
        "demo",
        "--quantization",
        "int8",
        "--windows",
        "2",
        "--threads",
        "1",
        "--json",
        str(file),
    )
    result = CliRunner().invoke(quality, list(words))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    texts = windows(model_path(), python_documentation(), 2)
    assert [len(each) for each in texts] == [WINDOW, WINDOW] and texts[0] != texts[1]
    plain = scores(model, texts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() == 2:
                parameter.copy_(quantize(parameter, 8, parameter.shape[1]).dequantize())
    rounded = scores(model, texts)
    assert math.isclose(found["reference_perplexity"], plain.perplexity, rel_tol=1e-4)
    assert math.isclose(found["perplexity"], rounded.perplexity, rel_tol=1e-3)
    assert abs(found["greedy_kept"] - rounded.kept(plain)) <= 2 / found["tokens"]
    assert found["tokens"] == 2 * (WINDOW - 1)


def test_the_change_and_its_standard_error():
    """Of two windows, whose tokens lose 0.1 and 0.3 on average."""
    losses = [0.1] * (WINDOW - 1) + [0.2, 0.4] * ((WINDOW - 2) // 2) + [0.3]
    reference = Scores([-2.0] * len(losses), [0] * len(losses))
    own = Scores([-2.0 - loss for loss in losses], [0] * len(losses))
    change, error = own.change(reference)
    assert change == pytest.approx(math.exp(0.2) - 1) == own.perplexity / reference.perplexity - 1
    assert error == pytest.approx(math.exp(0.2) * 0.1)  # of 0.1 and 0.3: sqrt(0.02 / 2)
    half = WINDOW - 1
    assert math.isnan(Scores(own.logprobs[:half], []).change(Scores(reference.logprobs[:half], []))[1])


@pytest.mark.thorough
def test_of_one_window_no_standard_error_is_printed():
    result = CliRunner().invoke(quality, ["--quantization", "int8", "--windows", "1", "--threads", "1"])
    assert result.exit_code == 0 and "%" in result.output and "±" not in result.output


def test_a_text_that_is_too_short_is_refused(tmp_path):
    text = tmp_path / "text"
    text.write_text("short")
    result = CliRunner().invoke(quality, ["--text", str(text)])
    assert result.exit_code == 1 and "need 4096" in result.output


def test_a_model_whose_layers_see_windows(tmp_path):
    """It has several page tables."""
    model = save_checkpoint("gemma3", tmp_path)
    texts = [tokens[:100] for tokens in random_prompts(100, 100)]
    config = WorkerConfig(model=str(tmp_path), threads=1, kv_tokens=2048, device="cpu")
    found, expected = score(config, texts, lambda: None), scores(model, texts)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert found.greedy == expected.greedy
