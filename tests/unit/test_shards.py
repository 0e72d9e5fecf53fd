"""Models divided among ranks give the tokens of one rank: all families, with pages of every KV group."""

from __future__ import annotations

import pytest
import torch
from random_checkpoints import (
    VARIANTS,
    Driver,
    check_greedy,
    largest_difference,
    random_prompts,
    save_checkpoint,
    saved_on_demand,
)
from thread_ranks import ThreadCommunicator, ThreadGroup

from baton.engine.plan import StepPlan
from baton.layers.parameters import Parameters
from baton.layers.quantization import cpu
from baton.layers.quantization.cpu import Dequantized
from baton.layers.quantization.weight_method import QuantizedWeight
from baton.layers.tensor_parallel import NO_CUTS, ONE_RANK, Shard
from baton.model_path import CheckpointError
from baton.models.config import read_config
from baton.models.loader import load_model, read_weights, weight_bytes
from baton.models.registry import build
from baton.models.tensor_files import SafetensorsFile
from baton.models.weight_plan import weight_plan
from gguf_models import write_gguf
from quantizers import awq, compressed, fp8, fp8_blocks, gptq, write


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return saved_on_demand(tmp_path_factory)


def run(driver, prompts, outputs):
    """Prompts in two chunks one after the other, then all decode together."""
    tracks = [driver.add(slot, prompt, outputs) for slot, prompt in enumerate(prompts)]
    for track, prompt in zip(tracks, prompts, strict=True):
        half = len(prompt) // 2
        if half:
            driver.step([driver.chunk(track, half)])
        driver.step([driver.chunk(track, len(prompt) - half, sample=True)], [driver.init(track)])
    for _ in range(outputs - 1):
        driver.step([driver.decode(track) for track in tracks])
    driver.finish()
    if len(driver.pool.layout.groups) == 1 and len(tracks) > 1:
        fork(driver, tracks[1], prompts[1])
    return tracks


def fork(driver, track, prompt):
    """A copy of a sequence's last page, which it goes on writing, as a second choice has it."""
    full = len(prompt) // 16 * 16
    copy = driver.add(7, prompt, 16, cached=track, prefix=full)
    copy.computed = len(prompt) - 1
    pairs = [(track.tables[0][full // 16], copy.tables[0][full // 16])]
    driver.step([driver.chunk(copy, 1, sample=True)], [driver.init(copy)], pairs)
    for _ in range(3):
        driver.step([driver.decode(copy)])
    driver.finish()
    assert copy.tokens == track.tokens[: len(copy.tokens)]


class FollowerDriver(Driver):
    """Makes the same steps; its runner has no results."""

    def _record(self, logits):
        assert logits.shape[1] == 0
        return logits.new_zeros(len(logits), 1)

    def step(self, rows, inits=(), copies=()):
        self.number += 1
        self.runner.launch(StepPlan(self.number, tuple(rows), tuple(inits), tuple(copies)))


def of_ranks(path, size, prompts, outputs, ep=False, **options):
    """Rank 0's driver and tracks. All ranks share a pool. `options`: of `load_model`."""
    storage = memoryview(bytearray(2**23))

    def rank(shard, communicator):
        make = FollowerDriver if shard.rank else Driver
        driver = make(path, shard=shard, communicator=communicator, storage=storage, **options)
        return driver, run(driver, prompts, outputs)

    return ThreadGroup(size, ep=ep).run(rank)[0]


def divisible(variant, size):
    overrides = VARIANTS[variant][1]
    alike = "num_global_key_value_heads" not in overrides  # others are refused: test_two_head_sizes.py
    return alike and overrides.get("num_attention_heads", 4) % size == 0


CASES = [(variant, size) for variant in VARIANTS for size in (2, 4) if divisible(variant, size)]


@pytest.mark.parametrize(("variant", "size"), [*CASES, ("smollm", 3)])
def test_logits_and_greedy_tokens_equal_transformers(checkpoints, variant, size):
    equal_transformers(*checkpoints(variant), size)


MIXTURES = ["mixtral", "qwen3-moe", "glm4-moe", "deepseek-v3", "gpt-oss"]


@pytest.mark.parametrize(("variant", "size"), [*((variant, 2) for variant in MIXTURES), ("mixtral", 4)])
def test_so_they_do_with_whole_experts_on_each_rank(checkpoints, variant, size):
    equal_transformers(*checkpoints(variant), size, ep=True)


def equal_transformers(path, model, size, **options):
    prompts = random_prompts(5, 33, 70, 1)
    _, tracks = of_ranks(path, size, prompts, 8, **options)
    for track, prompt in zip(tracks, prompts, strict=True):
        assert largest_difference(model, track) < 1e-4
        check_greedy(model, prompt, track.tokens[len(prompt) :])


STORED = {
    "int8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "4-bits": compressed("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=32),
    "gptq": gptq(symmetric=False),
    "gptq-desc-act": gptq(desc_act=True, symmetric=False),
    "awq": awq(),
    "fp8-blocks": fp8_blocks((40, 48)),
}
WIDE = {"intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
"""A rank's inputs of each projection are whole groups of 32."""


def difference(path, size, ep=False, **options):
    """Between logits of one rank and of several, at most."""
    prompts = random_prompts(40)
    (one,), (_, (several,)) = (
        run(Driver(path, **options), prompts, 6),
        of_ranks(path, size, prompts, 6, ep, **options),
    )
    assert one.logits.keys() == several.logits.keys()
    return max((one.logits[at] - several.logits[at]).abs().max().item() for at in one.logits)


@pytest.fixture
def exact(monkeypatch):
    """Products that differ in speed alone: one rank would choose one that rounds more."""
    monkeypatch.setattr(cpu, "FOUR_BITS", (Dequantized,))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_quantized_checkpoints_are_cut_as_they_are_stored(tmp_path, name, variant, exact):
    make, overrides = VARIANTS[variant]
    variants = {variant: (make, {**overrides, **WIDE})}
    write(tmp_path, save_checkpoint(variant, tmp_path, variants=variants), STORED[name])
    assert difference(tmp_path, 2) < 1e-4
    if variant == "qwen3-moe":
        assert difference(tmp_path, 2, ep=True) < 1e-4


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_quantized_while_loading_as_on_one_rank(tmp_path, quantization, exact):
    """A row's scale is that of the whole row, not of a rank's part."""
    make, overrides = VARIANTS["llama-yarn"]
    save_checkpoint("llama-yarn", tmp_path, variants={"llama-yarn": (make, {**overrides, **WIDE})})
    assert difference(tmp_path, 2, quantization=quantization) < 1e-4


@pytest.mark.parametrize(("quantization", "inner"), [("int8", 48), ("int4", 96)])
def test_what_is_quantized_on_one_rank_is_not_left_plain_on_several(tmp_path, quantization, inner):
    """Their pages would differ, and their fingerprints not."""
    make, overrides = VARIANTS["llama3"]
    save_checkpoint(
        "llama3", tmp_path, variants={"llama3": (make, {**overrides, "intermediate_size": inner})}
    )
    weight_bytes(tmp_path, torch.float32, quantization=quantization)
    with pytest.raises(CheckpointError, match=rf"down_proj: {inner // 2} columns a rank .* lower --tp"):
        weight_bytes(tmp_path, torch.float32, quantization=quantization, shard=Shard(0, 2))


KEPT = {
    "fp8": fp8(static=False, rows=True),
    "fp8-blocks": fp8_blocks((128, 128)),
    "int8": STORED["int8"],
    "awq": STORED["awq"],
}
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 128}
LATENT_BLOCKS = {**BLOCKS, "head_dim": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 96, "v_head_dim": 64}
"""Each of two ranks holds whole blocks of 128 x 128."""


def kept(path, shard, quantization):
    """In this host's memory, as a GPU keeps it: what stays quantized, by name, and where it is cut."""
    plan = weight_plan(path, torch.device("cuda"), quantization)
    parameters = Parameters(torch.bfloat16, torch.device("cpu"), plan=plan, shard=shard)
    build(read_config(path), parameters)
    read_weights(path, parameters, lambda done, total: None)
    found = {name: (each.target, each.cut) for name, each in parameters.table.items()}
    return {name: pair for name, pair in found.items() if isinstance(pair[0], QuantizedWeight)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*KEPT, "online fp8", "online int8", "online int4"])
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_what_a_gpu_keeps_of_a_shard_is_part_of_the_whole(tmp_path, monkeypatch, name, variant):
    """Codes and scales."""
    monkeypatch.setattr("baton.models.weight_plan.unsuited", lambda device, dtype: None)
    make, overrides = VARIANTS[variant]
    sizes = LATENT_BLOCKS if variant == "deepseek-v3" else BLOCKS
    model = save_checkpoint(variant, tmp_path, variants={variant: (make, {**overrides, **sizes})})
    if name in KEPT:
        write(tmp_path, model, KEPT[name])
    quantization = name.removeprefix("online ") if name not in KEPT else "auto"
    whole = kept(tmp_path, ONE_RANK, quantization)
    assert len(whole) >= (14 if variant == "qwen3" else 8)
    assert any(".experts." in own for own in whole) == (variant != "qwen3")
    for ep in (False, True) if variant != "qwen3" else (False,):
        names = set()
        for rank in range(2):
            shard = kept(tmp_path, Shard(rank, 2, ep=ep), quantization)
            names |= set(shard)
            for own, (weight, cut) in shard.items():
                values = whole[own][0].unpacked().dequantize()
                assert torch.equal(weight.unpacked().dequantize(), values if cut is None else cut.of(values))
        assert names == set(whole)


@pytest.mark.parametrize(("name", "inner"), [("fp8-blocks", 768), ("awq", 320)])
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_a_gpu_refuses_to_take_blocks_apart(tmp_path, monkeypatch, variant, name, inner):
    """Of four ranks each has 192 or 80 inner values, or 64 of an expert, and its heads whole."""
    monkeypatch.setattr("baton.models.weight_plan.unsuited", lambda device, dtype: None)
    make, overrides = VARIANTS[variant]
    sizes = {**overrides, **BLOCKS, "intermediate_size": inner, "moe_intermediate_size": inner}
    model = save_checkpoint(variant, tmp_path, variants={variant: (make, sizes)})
    write(tmp_path, model, KEPT[name])
    kept(tmp_path, ONE_RANK, "auto")
    with pytest.raises(CheckpointError, match=r"(mlp|experts)\..*: 4 ranks take blocks apart .* lower --tp"):
        kept(tmp_path, Shard(3, 4), "auto")


@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_random_weights_in_place_of_stored_ones_are_cut_as_those_are(tmp_path, monkeypatch, variant):
    """Nobody asked that they be quantized. Of two ranks each has half of a group."""
    make, overrides = VARIANTS[variant]
    sizes = {**overrides, **BLOCKS, "intermediate_size": 160, "moe_intermediate_size": 160}
    write(
        tmp_path,
        save_checkpoint(variant, tmp_path, variants={variant: (make, sizes)}),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    )
    two = Shard(0, 2)
    stored, random = (
        weight_bytes(tmp_path, torch.float32, load_format=how, shard=two) for how in ("auto", "dummy")
    )
    assert stored == random
    load_model(tmp_path, torch.float32, load_format="dummy", shard=two, communicator=NOBODY)
    monkeypatch.setattr("baton.models.weight_plan.unsuited", lambda device, dtype: None)
    if variant == "qwen3":
        with pytest.raises(CheckpointError, match=r"down_proj.*: 2 ranks take blocks apart .* lower --tp"):
            weight_bytes(tmp_path, device=torch.device("cuda"), load_format="dummy", shard=two)


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("llama3", "Q4_1"), ("qwen3-moe", "Q8_0"), ("gpt-oss", "MXFP4"), ("deepseek-v3", "Q8_0")],
)
def test_gguf_files(tmp_path, variant, kind, exact):
    make, overrides = VARIANTS[variant]
    wide = {"moe_intermediate_size": 32, "norm_topk_prob": True} if variant == "qwen3-moe" else {}
    reference = save_checkpoint(
        variant, tmp_path / "plain", variants={variant: (make, {**overrides, **wide})}
    )
    path = write_gguf(tmp_path / "model.gguf", reference, kind, old=False)
    assert difference(path, 2) < 1e-4
    if variant != "llama3":
        assert difference(path, 2, ep=True) < 1e-4


def test_each_rank_has_its_experts_alone_and_whole(checkpoints):
    def sizes(**how):
        return [weight_bytes(path, torch.float32, shard=Shard(rank, 2, **how)) for rank in (0, 1)]

    path, _ = checkpoints("qwen3-moe")
    assert sizes(ep=True) == sizes()
    model = load_model(path, torch.float32, shard=Shard(1, 2, ep=True), communicator=NOBODY)
    whole = load_model(path, torch.float32)
    ours, all_of_them = (each.layers[1].feed_forward.experts for each in (model, whole))
    assert ours.first == ours.count == all_of_them.count // 2
    assert torch.equal(ours.gate_up, all_of_them.gate_up[ours.first :])


def test_experts_that_cannot_be_divided_are_named(checkpoints):
    for variant, size, text in (
        ("llama3", 2, "--ep divides a mixture's experts, and this model has none"),
        ("gpt-oss", 4, "6 experts cannot be divided among 4 ranks"),
    ):
        with pytest.raises(CheckpointError, match=text):
            weight_bytes(checkpoints(variant)[0], torch.float32, shard=Shard(0, size, ep=True))


def test_a_rank_allocates_and_reads_its_part_alone(checkpoints, monkeypatch):
    """What is whole on each rank: norms and, in this model, nothing else."""
    path, _ = checkpoints("llama3")
    read = []
    plain = SafetensorsFile.read

    def counted(self, names, whole, cuts=NO_CUTS, kept=()):
        for name, start, tensor in plain(self, names, whole, cuts, kept):
            read.append(tensor.nbytes)
            yield name, start, tensor

    monkeypatch.setattr(SafetensorsFile, "read", counted)
    load_model(path, torch.float32, shard=Shard(1, 4), communicator=NOBODY)
    assert sum(read) == weight_bytes(path, torch.float32, shard=Shard(1, 4))
    norms = 4 * 64 * 5
    whole = weight_bytes(path, torch.float32) - norms
    # Two KV heads, of which each of the four ranks holds one.
    twice = 4 * 2 * 2 * 64 * 32
    assert sum(read) - norms == (whole + twice) // 4


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, "4 attention heads cannot be divided among 3 ranks; use --tp with a divisor of them"),
        (8, "4 attention heads cannot be divided among 8 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(checkpoints, size, words):
    path, _ = checkpoints("llama3")
    with pytest.raises(CheckpointError, match=words):
        weight_bytes(path, torch.float32, shard=Shard(0, size))


def test_code_of_transformers_and_fp8_while_loading_are_refused(checkpoints):
    path, _ = checkpoints("llama3")
    for options in ({"implementation": "transformers"}, {"quantization": "fp8"}):
        with pytest.raises(CheckpointError, match="--tp"):
            load_model(path, torch.float32, shard=Shard(0, 2), communicator=NOBODY, **options)


NOBODY = ThreadCommunicator(ThreadGroup(1), 0)
"""Where nothing is computed."""
