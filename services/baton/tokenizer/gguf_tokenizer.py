"""The tokenizer in a GGUF file, as Hugging Face's `tokenizers` runs it.

Behaves as llama.cpp's (src/llama-vocab.cpp: names of pre-tokenizers and what they do) and, for these models,
as the tokenizer.json that the file was made from. transformers' own conversion is not used: 5.17 splits all
texts of an architecture in one way, 5.23 does not know SmolLM's, and both need torch.
"""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from baton.checkpoint_limits import check_added_tokens
from baton.gguf_file import BYTE, CONTROL, UNUSED, USER_DEFINED, GgufFile
from baton.model_path import CheckpointError
from baton.rpc.logs import get_logger

_log = get_logger()

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
"""A mark belongs to its letter."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CASED = (
    r"(?:(?![\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\uab68\x{10570}-\x{105bc}"
    r"\x{16e40}-\x{1df1e}])[\p{Lu}\p{Ll}\p{Lt}])"
)
"""Letters that DeepSeek's first models take for such."""
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_DEEPSEEK = (r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_MARKS}+", r"\s+$", _CJK, r"\p{N}")
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("glm4", "chatglm-bpe", "lfm2", "falcon-h1", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("default", ""), _DEFAULT),
}
"""tokenizer.ggml.pre: what words are; each expression splits what the ones before have left whole."""
_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Models that split text like GPT-2, and every digit by itself."""
_BEGIN = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "tekken")
"""A text begins with the token for its beginning unless the file says otherwise."""
_WHOLE_WORDS = (*_BEGIN, "gpt-4o", "llama4")
"""A word that is a token becomes it, whatever the merges say."""
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 after which spaces count."""


def read_tokenizer(file: GgufFile) -> Any:
    """A transformers tokenizer, with the file's chat template. Raises CheckpointError."""
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = file.value("tokenizer.ggml.tokens", list)
    types: list[int] = file.value("tokenizer.ggml.token_type", list, [1] * len(tokens))
    kind = file.value("tokenizer.ggml.model", str)
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens and {len(types)} token types")
    check_added_tokens(file.path, sum(type in (CONTROL, USER_DEFINED) for type in types))
    vocabulary = {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
    if kind == "gpt2":
        tokenizer, begin = _byte_level(file, vocabulary)
    elif kind == "llama":
        tokenizer, begin = _sentence_piece(file, vocabulary, types), True
    else:
        raise CheckpointError(f"{file.path}: tokenizer {kind!r} is not supported; supported are gpt2, llama")
    named = {
        name: tokens[id]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if 0 <= (id := file.value(f"tokenizer.ggml.{key}_token_id", int, -1)) < len(tokens)
    }
    _add_ends(tokenizer, vocabulary, named, file, begin)
    phi3 = kind == "llama" and file.metadata.get("general.architecture") == "phi3"
    special, plain = [], []
    for token, type in zip(tokens, types, strict=True):
        strip = phi3 and token not in _NOT_STRIPPED
        if type == CONTROL:
            special.append(AddedToken(token, normalized=False, special=True, rstrip=strip))
        elif type == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, rstrip=strip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        chat_template=file.value("tokenizer.chat_template", str, "") or None,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in named.items()},
    )


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether it begins texts with a token by default."""
    pre = file.value("tokenizer.ggml.pre", str, "")
    if not pre:
        _log.warning(
            "the file names no pre-tokenizer; words are split as llama.cpp does then", file=file.path
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _SPLITS:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITS[pre]]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    elif pre in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported; "
            f"supported are {', '.join(filter(None, sorted((*_SPLITS, *_GPT2, *_DIGITS))))}"
        )
    if _SPLITS.get(pre) in ((_QWEN2,), (_QWEN35,)):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _BEGIN


def _sentence_piece(file: GgufFile, vocabulary: dict[str, int], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours whose union is a token, those are joined first whose union has
    the highest score. As merges: every way to make a token of two others, highest score first."""
    scores = file.value("tokenizer.ggml.scores", list)
    if len(scores) != len(types):
        raise CheckpointError(f"{file.path} has {len(types)} token types and {len(scores)} scores")
    apart = (CONTROL, USER_DEFINED, BYTE)
    merges = [
        (token[:cut], token[cut:], scores[id])
        for token, id in vocabulary.items()
        if types[id] not in apart
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: -merge[2])
    unknown = file.value("tokenizer.ggml.unknown_token_id", int, 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for left, right, _ in merges],
            unk_token=next((token for token, id in vocabulary.items() if id == unknown), None),
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.value("tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _add_ends(
    tokenizer: Tokenizer, vocabulary: dict[str, int], named: dict[str, str], file: GgufFile, begin: bool
) -> None:
    """Tokens that begin and end every text."""
    template = ["$A"]
    if file.value("tokenizer.ggml.add_bos_token", bool, begin) and "bos" in named:
        template.insert(0, named["bos"])
    if file.value("tokenizer.ggml.add_eos_token", bool, False) and "eos" in named:
        template.append(named["eos"])
    ends = [(token, vocabulary[token]) for token in sorted({*template} - {"$A"})]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    elif file.value("tokenizer.ggml.model", str) == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
