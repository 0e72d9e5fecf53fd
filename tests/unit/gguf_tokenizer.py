"""A tokenizer for GGUF files, and texts for it."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from baton.tokenizer.gguf_tokenizer import _QWEN2

TEXTS = [
    "the tokens of a page",
    "  two spaces\n\n\tand 2024's lines ",
    "é日本 😀 naïve",
    "<|im_start|>user<|im_end|>",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over words of Qwen's kind, with special tokens and a chat template."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["a page of a prompt, and the tokens of the answer 2024"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    return fast
