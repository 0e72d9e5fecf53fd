"""Tokenizers of GGUF files are those of the models that the files were made from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from gguf import GGUFWriter
from gguf_tokenizer import TEXTS, make_tokenizer
from random_checkpoints import save_checkpoint

from baton.gguf_file import GgufFile
from baton.models.config import read_config
from baton.tokenizer.conversation import Conversation
from baton.tokenizer.gguf_tokenizer import read_tokenizer
from baton.tokenizer.hf_tokenizer import load as load_tokenizer
from gguf_models import write_gguf


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_the_tokenizer_and_chat_template_are_the_files(tokenizer, tmp_path):
    reference = save_checkpoint("qwen3", tmp_path / "plain")
    path = write_gguf(tmp_path / "model.gguf", reference, "F32", tokenizer, "qwen2")
    tokenizer.save_pretrained(tmp_path / "plain")
    ours, theirs = load_tokenizer(path), load_tokenizer(tmp_path / "plain")
    assert ours.encode(TEXTS, True) == theirs.encode(TEXTS, True)
    assert ours.chat and ours.context_length == theirs.context_length == 256
    assert ours.eos_token_ids == (0, 2) == read_config(path).eos_token_ids
    said = Conversation([{"role": "user", "content": "the <|im_end|> page"}])
    pairs = [(each, each.render(said, True)) for each in (ours, theirs)]
    assert pairs[0][1].text == pairs[1][1].text
    assert pairs[0][0].encode_chats([pairs[0][1]], False) == pairs[1][0].encode_chats([pairs[1][1]], False)
    assert ours.vocabulary.tokens == theirs.vocabulary.tokens
    assert ours.vocabulary.special == theirs.vocabulary.special


def test_the_tokenizer_needs_no_torch(tokenizer, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", save_checkpoint("qwen3", tmp_path / "plain"), "F32", tokenizer)
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from baton.tokenizer.hf_tokenizer import load\n"
        "print(load(Path(sys.argv[1])).encode(['a page'], True)[0])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == tokenizer("a page")["input_ids"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        (None, ["It", "'", "s", "Ġ", "202", "4", "ĠHelloWorld"]),  # llama.cpp's default
        ("default", ["It", "'", "s", "Ġ", "202", "4", "ĠHelloWorld"]),
        ("gpt-2", ["It", "'s", "Ġ2024", "ĠHelloWorld"]),
        ("smollm", ["It", "'s", "Ġ", "2", "0", "2", "4", "ĠHelloWorld"]),
        ("llama-bpe", ["It", "'s", "Ġ", "202", "4", "ĠHelloWorld"]),
        ("qwen2", ["It", "'s", "Ġ", "2", "0", "2", "4", "ĠHelloWorld"]),
        ("tekken", ["It", "'s", "Ġ", "2", "0", "2", "4", "ĠHello", "World"]),
        ("gpt-4o", ["It's", "Ġ", "202", "4", "ĠHello", "World"]),
        ("glm4", ["It", "'s", "Ġ", "202", "4", "ĠHelloWorld"]),
        ("lfm2", ["It", "'s", "Ġ", "202", "4", "ĠHelloWorld"]),
        ("qwen35", ["It", "'s", "Ġ", "2", "0", "2", "4", "ĠHelloWorld"]),
        ("deepseek-v3", ["It", "'s", "Ġ", "202", "4", "ĠHelloWorld"]),
        ("deepseek-llm", ["It", "'", "s", "Ġ", "2", "0", "2", "4", "ĠHelloWorld"]),
        ("deepseek-coder", ["It", "'", "s", "Ġ", "2", "0", "2", "4", "ĠHelloWorld"]),
    ],
)
def test_words_are_those_of_the_pre_tokenizer(pre, words, tokenizer, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", save_checkpoint("qwen3", tmp_path / "p"), "F32", tokenizer, pre)
    backend = read_tokenizer(GgufFile(path)).backend_tokenizer
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("It's 2024 HelloWorld")] == words


def test_marks_belong_to_letters_in_qwen35(tokenizer, tmp_path):
    model = save_checkpoint("qwen3", tmp_path / "p")
    for pre, count in (("qwen2", 3), ("qwen35", 1)):
        path = write_gguf(tmp_path / f"{pre}.gguf", model, "F32", tokenizer, pre)
        backend = read_tokenizer(GgufFile(path)).backend_tokenizer
        assert len(backend.pre_tokenizer.pre_tokenize_str(" नमस्ते")) == count


def test_letters_of_deepseeks_first_models(tokenizer, tmp_path):
    """Chinese, and alphabets that they do not take for letters, are apart from words."""
    path = write_gguf(
        tmp_path / "m.gguf", save_checkpoint("qwen3", tmp_path / "p"), "F32", tokenizer, "deepseek-llm"
    )
    split = read_tokenizer(GgufFile(path)).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    text = "page 页面Жա\uff01"
    assert [text[slice(*at)] for _, at in split(text)] == ["page", " ", "页面", "Ж", text[8], "\uff01"]


def test_spaces_after_special_tokens_of_phi3(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "<|user|>", "<|endoftext|>", "<|end|>"]
    writer = GGUFWriter(tmp_path / "phi3.gguf", "phi3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0, 0.0, 0.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 4, 3, 3])
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = read_tokenizer(GgufFile(tmp_path / "phi3.gguf"))
    ids = tokenizer("<|user|>\n a<|end|> a<|endoftext|> a")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|user|>",
        "▁a",
        "<|end|>",
        "▁a",
        "<|endoftext|>",
        "▁",
        "▁a",
    ]


def test_a_message_of_gpt_oss_does_not_end_the_answer(tokenizer, tmp_path):
    reference = save_checkpoint("qwen3", tmp_path / "plain")
    file = GgufFile(write_gguf(tmp_path / "model.gguf", reference, "F32", tokenizer))
    file.metadata["tokenizer.ggml.tokens"] = ["a", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"]
    file.metadata["tokenizer.ggml.token_type"] = [1, 3, 3, 3, 3]
    file.metadata["tokenizer.ggml.eos_token_id"] = 1
    assert file.end_token_ids() == (1, 3, 4)
    file.metadata["tokenizer.ggml.tokens"][3] = "<|calls|>"
    assert file.end_token_ids() == (1, 2, 4)


@pytest.mark.parametrize(("prefix", "begin"), [(True, True), (False, False)])
def test_sentence_piece(prefix, begin, tmp_path):
    """By hand: the neighbours whose union has the highest score are joined first."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -20.0, "bc": -10.0, "▁a": -15.0, "▁abc": -30.0}
    writer = GGUFWriter(tmp_path / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, *words])
    writer.add_token_scores([0.0] * len(pieces) + list(words.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    if not begin:
        writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = read_tokenizer(GgufFile(tmp_path / "spm.gguf"))
    start = [*(["<s>"] if begin else []), *(["▁abc"] if prefix else ["a", "bc"])]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("abc aé</s>")["input_ids"])
    assert tokens == [*start, "▁a", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer("abc a")["input_ids"], skip_special_tokens=True) == "abc a"
