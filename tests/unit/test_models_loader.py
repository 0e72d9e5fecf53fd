"""Checkpoints on disk: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from random_checkpoints import VARIANTS, check_logits, save_checkpoint
from safetensors.torch import load_file, save_file
from test_recurrent_families import VARIANTS as WITH_STATES
from transformers import AutoModelForCausalLM

from baton.checkpoint_config import context_length
from baton.config import DecodeConfig
from baton.layers.batch import Batch
from baton.layers.parameters import Parameters
from baton.layers.tensor_parallel import Shard
from baton.model_path import CheckpointError
from baton.models.body import why_not_fused
from baton.models.config import ModelError, read_config, window
from baton.models.loader import check_tensors, declared, fingerprint, load_model, read_weights, weight_bytes
from baton.models.registry import FAMILIES, build
from baton.models.tensor_files import file_names
from baton.rpc.errors import BatonError
from baton.worker.memory import check_weights, free_and_total
from baton.worker.model import quantized
from quantizers import compressed, write


@pytest.fixture
def checkpoint(tmp_path):
    save_checkpoint("qwen3", tmp_path)
    return tmp_path


def allocate(config, dtype):
    parameters = Parameters(dtype, torch.device("cpu"))
    build(config, parameters)
    return parameters


def edit_config(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps(config))


def edit_weights(path, edit):
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_shards_and_progress(tmp_path):
    save_checkpoint("llama3", tmp_path, shards=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    seen = []
    model = load_model(tmp_path, torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    reference = save_checkpoint("llama3", tmp_path / "again")
    assert model.num_parameters == sum(p.numel() for p in reference.parameters())


def write_shards(path, tensors, count):
    """Spreads the tensors over files, in an order of their own."""
    names = sorted(tensors, key=lambda name: name[::-1])
    files = [f"part-{i}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::count]}, path / file)
    index = {name: files[at % count] for at, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        file_names(tmp_path)


@pytest.mark.parametrize("count", [1, 3, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_files_gives_the_same_weights(checkpoint, count, dtype):
    single = checkpoint / "model.safetensors"
    tensors = load_file(single)
    config = read_config(checkpoint)
    parameters = allocate(config, dtype)
    single.unlink()
    write_shards(checkpoint, tensors, count)
    seen = []
    read_weights(checkpoint, parameters, lambda done, total: seen.append((done, total)))
    for name, parameter in parameters.table.items():
        assert torch.equal(parameter.target, tensors[name].to(dtype).expand_as(parameter.target)), name
    total = parameters.nbytes
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert total == weight_bytes(checkpoint, dtype)


def test_nothing_is_copied_from_a_checkpoint_with_a_wrong_tensor_in_its_last_file(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    write_shards(checkpoint, tensors, 4)
    last = load_file(checkpoint / "part-3.safetensors")
    save_file(last | {"surprise": torch.zeros(3)}, checkpoint / "part-3.safetensors")
    config = read_config(checkpoint)
    parameters = allocate(config, torch.float32)
    for parameter in parameters.table.values():
        parameter.target.fill_(7.0)
    with pytest.raises(ModelError, match=r"part-3\.safetensors holds unexpected tensor surprise"):
        read_weights(checkpoint, parameters, lambda done, total: None)
    assert all(bool((parameter.target == 7.0).all()) for parameter in parameters.table.values())


def test_weights_that_do_not_fit_are_refused_with_the_numbers(checkpoint):
    needed = weight_bytes(checkpoint, torch.float32)
    assert needed == 2 * weight_bytes(checkpoint, torch.bfloat16)
    assert needed == 4 * load_model(checkpoint, torch.float32).num_parameters + head_norm_copies(checkpoint)
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    gib = 2**30
    check_weights(10 * gib, 10 * gib, 64 * gib, 0.5, cpu)
    with pytest.raises(BatonError, match=r"take 10\.00 GiB; cpu has 9\.00 of 64\.00 GiB free; free"):
        check_weights(10 * gib, 9 * gib, 64 * gib, 0.5, cpu)
    check_weights(10 * gib, 10 * gib, 80 * gib, 0.5, gpu)
    with pytest.raises(
        BatonError, match=r"cuda:0 has 9\.00 of 80\.00 .*--memory-fraction 0\.5 allows 40\.00; "
    ):
        check_weights(10 * gib, 9 * gib, 80 * gib, 0.5, gpu)
    with pytest.raises(BatonError, match=r"has 70\.00 .*--memory-fraction 0\.1 allows 8\.00; .*, raise"):
        check_weights(10 * gib, 70 * gib, 80 * gib, 0.1, gpu)
    free, total = free_and_total(cpu)
    assert 0 < free <= total


def head_norm_copies(path):
    """Bytes of the copies of head norms that their merged weight holds beyond the checkpoint's."""
    parameters = declared(path, torch.float32).parameters.table
    return sum(4 * (parameter.target.numel() - parameter.shape.numel()) for parameter in parameters.values())


def test_of_two_copies_of_a_tensor_the_index_names_the_one(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    write_shards(checkpoint, tensors, 3)
    name = "model.norm.weight"
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in sorted(set(index.values())) if file != index[name])
    save_file(load_file(checkpoint / other) | {name: tensors[name] + 1}, checkpoint / other)
    check_tensors(checkpoint)
    parameters = allocate(read_config(checkpoint), torch.float32)
    read_weights(checkpoint, parameters, lambda done, total: None)
    assert torch.equal(parameters.table[name].target, tensors[name])
    with pytest.raises(ModelError, match=rf"{name} is in two files"):
        check_tensors(checkpoint, implementation="transformers")  # which takes any


def test_shards_without_an_index(tmp_path):
    save_checkpoint("llama3", tmp_path, shards=True)
    model = load_model(tmp_path, torch.float32)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert load_model(tmp_path, torch.float32).num_parameters == model.num_parameters
    with pytest.raises(ModelError, match=r"has shards but no model\.safetensors\.index\.json"):
        check_tensors(tmp_path, implementation="transformers")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    name = "model.norm.weight"
    for shard in shards[:2]:
        save_file(load_file(shard) | {name: torch.ones(64)}, shard)
    with pytest.raises(ModelError, match=rf"{name} is in two files, {shards[0].name} and "):
        check_tensors(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"{shards[1].name} is missing"):
        load_model(tmp_path)


def test_missing_shard(tmp_path):
    save_checkpoint("llama3", tmp_path, shards=True)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "lacks tensor model.layers.1.mlp.up_proj.weight",
        ),
        (lambda t: t.update(surprise=torch.zeros(3)), "unexpected tensor surprise"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \[3\], the configuration asks for \[64\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(4, 32)}),
            r"q_norm.weight has shape \[4, 32\], the configuration asks for \[32\]",
        ),
    ],
)
def test_wrong_tensors_are_named(checkpoint, edit, words):
    edit_weights(checkpoint, edit)
    with pytest.raises(ModelError, match=words):
        load_model(checkpoint)


def test_damaged_or_absent_files(checkpoint, tmp_path_factory):
    (checkpoint / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(checkpoint)
    with pytest.raises(ModelError, match="safetensors"):
        fingerprint(checkpoint, torch.float32)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_model(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load_model(checkpoint)
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'spiral' is not supported",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": "wide"}, "cannot be used"),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(checkpoint, changes, words):
    edit_config(checkpoint, **changes)
    with pytest.raises(ModelError, match=words) as caught:
        read_config(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("qwen3", {"partial_rotary_factor": 0.5}, "rotates 32 values of a head, not 16"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            "rotates 16 values of a head, not 24",
        ),
        ("deepseek-v3", {"head_dim": 64}, "rotates 8 values of a head, not 64"),
        ("qwen3", {"is_causal": False}, "is_causal"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, "that of a Qwen3ForCausalLM"),
        ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types has 'chunked"),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window is None"),
        ("mistral-window", {"sliding_window": -1}, "sliding_window is -1"),
        ("mistral-window", {"layer_types": ["full_attention"] * 2}, "that of a MinistralForCausalLM"),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ("gemma3", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 of the 4 experts"),
        ("deepseek-v2", {"topk_group": 1}, "3 of the 8 experts"),
        ("deepseek-v2", {"n_group": 3}, "2 of 3 groups"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v3", {"n_shared_experts": 0}, "shared_experts.gate_proj.weight is empty"),
        ("deepseek-v3", {"q_lora_rank": 0}, "q_a_layernorm.weight is empty"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    ],
)
def test_what_a_family_would_compute_otherwise_is_refused(tmp_path, variant, changes, words):
    save_checkpoint(variant, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("mixtral", {"use_sliding_window": False}),
        (
            "qwen3-moe",
            {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 16},
        ),
        ("deepseek-v2", {"rope_interleave": False}),
    ],
)
def test_fields_of_other_families_change_nothing(tmp_path, variant, changes):
    save_checkpoint(variant, tmp_path)
    edit_config(tmp_path, **changes)
    check_logits(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_sliding_window_is_used_only_below_the_context(tmp_path):
    def windows(**options):
        return {options.window for options in load_model(tmp_path, **options).attention_options}

    save_checkpoint("mistral", tmp_path)
    edit_config(tmp_path, sliding_window=64)
    assert windows() == {64}
    assert windows(context_length=64) == {None}
    edit_config(tmp_path, sliding_window=256)
    assert windows() == {None}


def test_a_family_of_ones_own_has_the_window_that_its_config_names():
    for hf, found in (
        ({"sliding_window": 16}, [16, 16]),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, [None, 16]),
        ({}, [None, None]),
    ):
        config = SimpleNamespace(architecture="OwnForCausalLM", hf=SimpleNamespace(**hf), used_length=64)
        assert [window(config, index) for index in (0, 1)] == found


def test_a_window_that_llama_does_not_have_is_ignored(tmp_path):
    save_checkpoint("llama3", tmp_path)
    edit_config(tmp_path, sliding_window=32)
    assert {options.window for options in load_model(tmp_path).attention_options} == {None}


def test_longrope_has_another_fingerprint_for_each_of_its_factors(tmp_path):
    save_checkpoint("phi3-longrope", tmp_path)
    edit_config(tmp_path, original_max_position_embeddings=64)
    variants = {length: read_config(tmp_path, length).variant for length in (32, 64, 65, None)}
    assert variants[32] == variants[64] != variants[65] == variants[None]
    assert fingerprint(tmp_path, torch.float32, "auto", variants[64]) != fingerprint(
        tmp_path, torch.float32, "auto", variants[65]
    )


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(checkpoint):
    edit_weights(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_model(checkpoint)
    edit_weights(checkpoint, lambda t: t["lm_head.weight"].mul_(1.01))
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_model(checkpoint)


def test_another_activation_than_the_familys_is_refused(checkpoint):
    edit_config(checkpoint, hidden_act="gelu_pytorch_tanh")
    with pytest.raises(ModelError, match="gelu_pytorch_tanh"):
        read_config(checkpoint)


def test_packed_weights_are_not_held_a_second_time(checkpoint):
    model = load_model(checkpoint)
    assert all(parameter.target.is_meta for parameter in model.parameters.table.values())
    assert all(linear.weight is None for linear in model.parameters.linears)


def test_weights_that_are_kept_quantized_are_part_of_the_fingerprint(checkpoint, monkeypatch):
    """A CPU computes otherwise with the same codes than a GPU, or keeps none; groups of 4 bits are larger on
    a GPU."""
    monkeypatch.setattr("baton.models.weight_plan.unsuited", lambda device, dtype: None)
    devices = torch.device("cpu"), torch.device("cuda")

    def added(path, quantization="auto"):
        config = DecodeConfig(model="demo", quantization=quantization)
        return [quantized(config, path, device, torch.bfloat16) for device in devices]

    assert added(checkpoint) == added(checkpoint, "none") == ["", ""]
    found = [text for way in ("fp8", "int8", "int4") for text in added(checkpoint, way)]
    assert len(set(found)) == 6 and "" not in found
    write(checkpoint, None, compressed("int-quantized", num_bits=8, strategy="channel"))
    kept = added(checkpoint)
    assert len(set(kept)) == 2 and "" not in kept and added(checkpoint, "none") == ["", ""]


def test_an_embedding_of_16_bits_is_kept_in_16_bits_beside_its_packed_head(checkpoint):
    edit_config(checkpoint, tie_word_embeddings=True)
    edit_weights(checkpoint, lambda t: t.pop("lm_head.weight", None))
    tokens = torch.tensor([3, 1, 4])
    exact = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"].float()
    model = load_model(checkpoint, torch.float32)
    assert torch.equal(model.embed(tokens), exact[tokens])
    before = model.embedding.dtype
    edit_weights(checkpoint, lambda t: t["model.embed_tokens.weight"].copy_(exact.bfloat16()))
    model = load_model(checkpoint, torch.float32)
    assert (before, model.embedding.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(model.embed(tokens), exact.bfloat16().float()[tokens])


def test_fingerprint(checkpoint):
    first = fingerprint(checkpoint, torch.float32)
    assert first == fingerprint(checkpoint, torch.float32) != fingerprint(checkpoint, torch.bfloat16)
    assert first != fingerprint(checkpoint, torch.float32, "dummy")
    edit_weights(checkpoint, lambda t: t["model.layers.1.mlp.up_proj.weight"].mul_(1.01))
    second = fingerprint(checkpoint, torch.float32)
    assert second != first
    edit_config(checkpoint, rms_norm_eps=1e-5)
    assert fingerprint(checkpoint, torch.float32) not in (first, second)


def test_dummy_weights_are_always_the_same_and_need_no_files(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    a, b = (load_model(checkpoint, torch.float32, load_format="dummy") for _ in range(2))
    assert torch.equal(a.embedding, b.embedding)
    tokens, positions = torch.arange(9), torch.arange(9)
    with torch.inference_mode():
        attention = SimpleNamespace(write_and_attend=lambda layer, q, k, v: q.reshape(9, -1))
        batch = Batch(tokens, positions, attention)
        logits = a.logits(a.forward(batch))
    assert 0.1 < logits.std().item() < 100
    with pytest.raises(ModelError, match="load format"):
        load_model(checkpoint, load_format="pickle")


def test_every_family_has_a_variant():
    names = AutoModelForCausalLM._model_mapping
    families = set(FAMILIES) - {"TwoHeadSizesForCausalLM"}  # only tests have it
    # Those with states have tests of their own; the unified one is Gemma 4 under another name.
    families -= {names[make].__name__ for make, _ in WITH_STATES.values()}
    families -= {"Gemma4UnifiedForCausalLM"}
    # Theirs are in test_qwen3_vl.py, with images.
    families -= {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"}
    assert {names[make].__name__ for make, _ in VARIANTS.values()} == families


def test_layers_that_predict_further_tokens_are_ignored_where_the_family_has_them(tmp_path):
    """GLM's checkpoints hold one behind the last layer."""
    for variant, number, refused in (
        ("glm4-moe", 3, False),
        ("glm4-moe", 4, True),
        ("glm4-moe", 31, True),
        ("qwen3", 2, True),
    ):
        path = tmp_path / f"{variant}-{number}"
        save_checkpoint(variant, path)
        name = f"model.layers.{number}.eh_proj.weight"
        edit_weights(path, lambda tensors, name=name: tensors.update({name: torch.zeros(2)}))
        if refused:
            with pytest.raises(ModelError, match=f"unexpected tensor {name}"):
                load_model(path)
        else:
            load_model(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_a_dtype_in_the_configuration_it_is_that_of_the_tensors(dtype, tmp_path):
    model = save_checkpoint("qwen3", tmp_path / "plain")
    model.to(getattr(torch, dtype))
    model.model.norm.float()  # a few values of another dtype
    model.save_pretrained(tmp_path)
    for name in ("dtype", "torch_dtype"):
        edit_config(tmp_path, **{name: None})
    assert read_config(tmp_path).dtype == getattr(torch, dtype)
    (tmp_path / "model.safetensors").unlink()
    assert read_config(tmp_path).dtype == torch.bfloat16  # of random weights


@pytest.mark.parametrize(
    "variant", ["gpt-oss", "glm4-moe", "phi3-longrope", "mistral-window", "qwen2-window"]
)
def test_layers_like_llamas_are_fused_on_a_gpu(variant, tmp_path):
    save_checkpoint(variant, tmp_path)
    assert why_not_fused(declared(tmp_path, torch.bfloat16)) is None
    assert "float32" in str(why_not_fused(declared(tmp_path, torch.float32)))


@pytest.mark.parametrize("variant", ["gemma3"])
def test_other_layers_are_not(variant, tmp_path):
    save_checkpoint(variant, tmp_path)
    assert "layers" in str(why_not_fused(declared(tmp_path, torch.bfloat16)))


def test_yarn_that_was_added_by_hand_extends_the_context(checkpoint):
    """As Qwen's README says to do it: max_position_embeddings stays."""
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config["rope_theta"] = 10000.0
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    file.write_text(json.dumps(config))
    assert config["max_position_embeddings"] == 256
    assert context_length(config) == read_config(checkpoint).context_length == 1024
    assert read_config(checkpoint, 700).used_length == 700
    load_model(checkpoint).layers[0].attention.rope.at(torch.tensor([1023]))


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral", "glm4-moe", "deepseek-v3"])
def test_experts_in_one_tensor_a_projection(variant, tmp_path):
    """As transformers keeps them in memory, and stores them where its conversion is left out."""
    model = save_checkpoint(variant, tmp_path)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(tmp_path, model)
    whole = declared(tmp_path).parameters.table
    ranks = [declared(tmp_path, shard=Shard(rank, 2)).parameters for rank in range(2)]
    for rank in ranks:
        parameters = Parameters(torch.float32, torch.device("cpu"), shard=rank.shard)
        build(read_config(tmp_path), parameters)
        read_weights(tmp_path, parameters, lambda done, total: None)
        assert parameters.table.keys() == rank.table.keys() <= whole.keys()


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    model = save_checkpoint("deepseek-v3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "kimi_k2"}))
    check_logits(tmp_path, model)
