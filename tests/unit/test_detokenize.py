"""Incremental detokenization equals the tokenizer's own decoding, however the token stream is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from baton.tokenizer import vocabulary as vocabulary_module
from baton.tokenizer.detokenize import Detokenizer, decode
from baton.tokenizer.vocabulary import UnknownDecoder, Vocabulary, read_vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? I'm sure they've seen 12,345 of them.",
    "naïve café — “quoted” … e\u0301 n\u0303, 你好,世界。日本語のテキスト 한국어 кириллица עברית",
    "😀 👩‍👩‍👧 🇩🇪 👍🏽 \t\n  indented\n\ndef f(x):\n    return x + 1",
] * 3
SPECIAL = [AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True)]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def byte_fallback():
    """As Llama 2: unknown characters become tokens of single bytes; one leading space is stripped."""
    pieces = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    characters = sorted({c for text in CORPUS[:1] for c in text if c != " "} | {"▁", "é"})
    vocab = {
        piece: index for index, piece in enumerate([*pieces, *characters, "▁t", "▁th", "▁the", "▁▁", "ox"])
    }
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("o", "x")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    )
    return tokenizer


def no_decoder():
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))


FAMILIES = {}
for make in (byte_level, byte_fallback, unigram, word_piece, no_decoder):
    made = make()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken("<tool call>", special=False), AddedToken("é!", special=False)])
    FAMILIES[make.__name__] = made


def vocabulary_of(tokenizer):
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else None
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    return read_vocabulary(tokens, special, None if state is None else json.loads(state))


VOCABULARIES = {name: vocabulary_of(tokenizer) for name, tokenizer in FAMILIES.items()}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [
                "👩‍👩‍👧",
                "🇩🇪",
                "e\u0301",
                "漢字",
                "  ",
                "\ufffd",
                "▁",
                "\x00",
                "<s>",
                "<tool call>",
                "é!",
                " n't",
            ]
        ),
        st.sampled_from(CORPUS[0].split()),
    ),
    max_size=8,
).map(lambda parts: " ".join(parts))


def in_pieces(vocabulary, ids, cuts, skip=True, context=()):
    """Feeds ids cut at `cuts`; checks each delta on the way."""
    stream = Detokenizer(vocabulary, context, skip)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    deltas = [stream.feed(ids[a:b]) for a, b in pairwise(bounds)]
    return deltas, stream.finish()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=30), skip=st.booleans())
def test_text_comes_back(family, text, cuts, skip):
    tokenizer, vocabulary = FAMILIES[family], VOCABULARIES[family]
    ids = tokenizer.encode(text).ids
    deltas, rest = in_pieces(vocabulary, ids, cuts, skip)
    assert "".join(deltas) + rest == tokenizer.decode(ids, skip_special_tokens=skip)
    assert rest == ""  # whole characters went in: nothing may be held back at the end
    # (A byte-level decoder takes the added token "é!" for bytes of its alphabet; so does the library's own.)
    if "\ufffd" not in text and "é!" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("family", ["byte_level", "unigram", "word_piece", "no_decoder"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_at_all(family, data, skip):
    """Random ids: broken characters, special tokens in the middle, undefined ids."""
    tokenizer, vocabulary = FAMILIES[family], VOCABULARIES[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=60))
    cuts = data.draw(st.lists(st.integers(0, 60), max_size=60))
    deltas, rest = in_pieces(vocabulary, ids, cuts, skip)
    assert "".join(deltas) + rest == tokenizer.decode(ids, skip_special_tokens=skip)
    assert len(rest) <= 1


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.one_of(st.text(min_size=1, max_size=4), st.binary(min_size=1, max_size=4)), max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=60),
)
def test_byte_level_reads_invalid_bytes_as_utf8_decoders_do(parts, cuts):
    vocabulary = VOCABULARIES["byte_level"]
    raw = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    token_of = {
        piece: index for index, piece in enumerate(vocabulary.tokens) if piece is not None and len(piece) == 1
    }
    ids = [token_of[bytes([byte])] for byte in raw]
    deltas, rest = in_pieces(vocabulary, ids, cuts)
    assert "".join(deltas) + rest == raw.decode("utf-8", "replace") == FAMILIES["byte_level"].decode(ids)


@settings(max_examples=200, deadline=None)
@given(
    runs=st.lists(
        st.one_of(
            st.text(alphabet="é😀漢", min_size=1, max_size=4).map(str.encode),
            st.sampled_from([b"\xff", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80\x80"]),
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 60), max_size=60),
)
def test_byte_fallback_runs_of_one_kind(runs, cuts):
    """The family's decoder looks at a run of byte tokens as a whole; a wholly valid and a wholly invalid run
    are the same to a decoder that does not wait for the run's end."""
    tokenizer, vocabulary = FAMILIES["byte_fallback"], VOCABULARIES["byte_fallback"]
    ox = tokenizer.token_to_id("ox")
    ids = [token for run in runs for token in (*(tokenizer.token_to_id(f"<0x{b:02X}>") for b in run), ox)]
    deltas, rest = in_pieces(vocabulary, ids, cuts)
    assert "".join(deltas) + rest == tokenizer.decode(ids)


def test_half_a_character_is_held_back_and_no_longer():
    vocabulary = VOCABULARIES["byte_level"]
    token_of = {
        piece: index for index, piece in enumerate(vocabulary.tokens) if piece is not None and len(piece) == 1
    }
    stream = Detokenizer(vocabulary)
    assert [stream.feed([token_of[bytes([b])]]) for b in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.feed([token_of[b"\xf0"], token_of[b"\x9f"]]) == ""
    assert stream.feed([token_of[b"a"]]) == "\ufffda"
    assert stream.feed([token_of[b"\xff"]] * 5) == "\ufffd" * 5  # never held: no character starts so
    assert stream.feed([token_of[b"\xe2"], token_of[b"\x82"]]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "unigram", "word_piece"])
def test_context_yields_no_text_but_counts_as_before(family):
    tokenizer, vocabulary = FAMILIES[family], VOCABULARIES[family]
    ids = tokenizer.encode("the quick dog").ids
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        stream = Detokenizer(vocabulary, context=ids[:cut])
        text = stream.feed(ids[cut:]) + stream.finish()
        assert tokenizer.decode(ids[:cut]) + text == whole


def test_context_that_ends_inside_a_character():
    vocabulary = VOCABULARIES["byte_level"]
    token_of = {
        piece: index for index, piece in enumerate(vocabulary.tokens) if piece is not None and len(piece) == 1
    }
    first, *others = (token_of[bytes([byte])] for byte in "😀".encode())
    assert Detokenizer(vocabulary, context=[first]).feed(others) == "😀"


def test_special_tokens_are_skipped_or_literal():
    tokenizer, vocabulary = FAMILIES["byte_level"], VOCABULARIES["byte_level"]
    ids = tokenizer.encode("<s>fox<tool call><|im_end|>").ids
    assert decode(vocabulary, ids) == "fox<tool call>"
    assert decode(vocabulary, ids, skip_special_tokens=False) == "<s>fox<tool call><|im_end|>"


def test_own_bytes():
    for family, token, expected in [
        ("byte_level", "Ġ", b" "),
        ("byte_level", "Ã", b"\xc3"),
        ("byte_level", "<|im_end|>", b"<|im_end|>"),
        ("byte_fallback", "<0xE2>", b"\xe2"),
        ("byte_fallback", "▁the", b" the"),
        ("unigram", "▁", b" "),
        ("unigram", "<s>", b"<s>"),
    ]:
        assert VOCABULARIES[family].bytes_of(FAMILIES[family].token_to_id(token)) == expected, (family, token)
    assert VOCABULARIES["unigram"].bytes_of(10**6) == b""


def test_a_decoder_of_another_form_is_refused():
    for decoder in (
        decoders.CTC(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    ):
        with pytest.raises(UnknownDecoder):
            read_vocabulary(["a"], frozenset(), json.loads(decoder.__getstate__()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vocabulary_travels_in_parts(family, monkeypatch):
    monkeypatch.setattr(vocabulary_module, "PART_TOKENS", 64)
    made = VOCABULARIES[family]
    made = Vocabulary(
        [*made.tokens, None, b""], [*made.first_tokens, None, b"x"], made.special, made.byte_fallback, 999
    )
    parts = list(made.parts())
    assert len(parts) == -(-len(made.tokens) // 64)
    copy = Vocabulary.of(parts)
    assert copy == made and copy.hash == made.hash
    with pytest.raises(ValueError, match="parts of a vocabulary"):
        Vocabulary.of(parts[1:])


def test_the_hash_is_of_everything():
    made = [
        Vocabulary(tokens, first, frozenset(special), fallback, size)
        for tokens in ([b"ab", b"c"], [b"a", b"bc"], [b"abc", None], [b"abc", b""])
        for first in (tokens, [b"x", b"y"])
        for special in ((), (1,))
        for fallback in (False, True)
        for size in (2, 3)
    ]
    assert len({each.hash for each in made}) == len(made)
