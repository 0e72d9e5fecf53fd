"""EAGLE-3 heads: what they compute is what plain torch computes; texts are those without them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from eagle3_heads import HIDDEN, LAYERS, PlainHead, random_head, save_head
from safetensors.torch import load_file, save_file

from attention_rows import whole_sequence
from baton.attention.torch_sdpa import TorchAttention
from baton.config import DecodeConfig
from baton.engine.draft.heads import HeadDrafter
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.kvcache.kv_pool import KvLayout, KvPool, PagePool, PoolLayout
from baton.layers.batch import FINAL, HiddenTap
from baton.models.config import ModelError
from baton.models.eagle3 import load_eagle3
from baton.models.loader import load_model
from baton.rpc.address import new_incarnation
from baton.worker.decode.drafters import make_drafter
from baton.worker.engine import build_engine
from rig import CONTEXT, VOCAB, generate, make, parameters, prompts_of, save_checkpoint

DRAFTS = VOCAB // 4
FORMATS = {
    "SpecForge": ({"first": "midlayer"}, {}),
    "speculators": ({"first": "layers.0"}, {"speculators": True}),
    "speculators, normalized before": (
        {"first": "layers.0"},
        {"speculators": True, "norm_before_residual": True, "norm_before_fc": True},
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4}
    return save_checkpoint(tmp_path_factory.mktemp("target"), **sizes)


@pytest.fixture(scope="module")
def embedding(checkpoint):
    return load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]


def features_of(checkpoint, tokens, layers=LAYERS):
    """The model's hidden states, [tokens, layers * hidden], of a pass over all tokens at once."""
    model = load_model(checkpoint, torch.float32, "cpu")
    spec = model.caches[0]
    layout = KvLayout(len(model.caches), spec.heads, spec.head_dim, CONTEXT, torch.float32)
    batch = whole_sequence(tokens, TorchAttention(KvPool(layout, 1), model.heads), model.attention_options)
    batch.tap = HiddenTap(layers)
    with torch.inference_mode():
        model.forward(batch)
    return torch.cat([batch.tap.found[layer] for layer in layers], -1)


def load_logits(checkpoint, tokens):
    features, model = features_of(checkpoint, tokens, (FINAL,)), load_model(checkpoint, torch.float32, "cpu")
    with torch.inference_mode():
        logits = model.logits(features)
    return logits.clone()


def drafter_of(head, *, pages=400, budget=4096, slots=16, vocab=VOCAB):
    layout = PoolLayout.of(head.caches, 16, torch.float32)
    sizes = {"max_slots": slots, "vocab_size": vocab, "context_length": CONTEXT, "token_budget": budget}
    pool = PagePool(layout, pages, torch.device("cpu"))
    pool.raw.view(torch.float32).fill_(9.0)
    return HeadDrafter(head, pool, (TorchAttention,) * 2, **sizes)


@pytest.fixture(scope="module", params=FORMATS)
def both(request, checkpoint, embedding, tmp_path_factory):
    """Baton's head and the plain one."""
    names, options = FORMATS[request.param]
    tensors = random_head(**names, drafts=DRAFTS, vocab=VOCAB)
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 3 * HIDDEN)
        tensors["embed_tokens.weight"] = embedding.flip(0).contiguous()
        tensors["verifier_norm.weight"] = torch.ones(HIDDEN)
    path = save_head(tmp_path_factory.mktemp("head"), tensors, VOCAB, **options)
    head = load_eagle3(path, load_model(checkpoint, torch.float32, "cpu"))
    before = bool(options.get("norm_before_residual"))
    return head, PlainHead(tensors, embedding, names["first"], before_residual=before)


def test_hidden_states_of_any_layer(checkpoint):
    from transformers import AutoModelForCausalLM

    tokens = prompts_of(30)[0]
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    found = features_of(checkpoint, tokens, (0, 1, 3, FINAL)).split(HIDDEN, -1)
    for layer, states in zip((0, 1, 3, 4), found, strict=True):  # transformers' last ones are normalized
        assert torch.allclose(states, expected[layer][0], atol=2e-4, rtol=1e-4), layer


def test_logits_are_those_of_plain_torch(both, checkpoint):
    head, plain = both
    assert head.tap == LAYERS
    tokens = prompts_of(40)[0]
    features = features_of(checkpoint, tokens)[:-1]
    layout = KvLayout(1, head.caches[0].heads, head.caches[0].head_dim, CONTEXT, torch.float32)
    backend = TorchAttention(KvPool(layout, 1), head.heads)
    with torch.inference_mode():
        batch = whole_sequence(tokens[1:], backend, head.attention_options)
        states = head.forward(batch.tokens, head.enter(features), batch)
        logits = head.logits(states)
        expected = plain.forward(batch.tokens, plain.enter(features))
    assert torch.allclose(states, expected, atol=1e-4)
    assert torch.allclose(logits[:, head.tokens], plain.logits(expected), atol=1e-4)
    assert logits.isfinite().sum() == len(logits) * DRAFTS and set(head.tokens.tolist()) == set(
        range(0, VOCAB, 4)
    )


def test_chains_are_those_of_plain_torch(both, checkpoint):
    """Through the engine: prompts in several chunks, step by step behind what was accepted."""
    head, plain = both
    drafter, checked = drafter_of(head), []
    draft = drafter.draft

    def compared(sequence, most):
        found = draft(sequence, most)
        features = features_of(checkpoint, sequence.tokens)[:-1]
        checked.append(found == plain.chain(features, sequence.tokens, most))
        return found

    drafter.draft = compared
    runner, cache = make(checkpoint, "cpu", torch.float32)
    runner._tap = head.tap
    prompts, params = prompts_of(5, 37), [SamplingParams(temperature=0.0, max_tokens=8)] * 2
    generate(runner, cache, prompts, params, budget=24, overlap=False, drafter=drafter, draft_tokens=3)
    assert len(checked) >= 10 and all(checked)


@pytest.fixture(scope="module")
def plain_head(checkpoint, tmp_path_factory):
    tensors = random_head("midlayer", DRAFTS, VOCAB)
    path = save_head(tmp_path_factory.mktemp("plain"), tensors, VOCAB)
    return load_eagle3(path, load_model(checkpoint, torch.float32, "cpu"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    return run(checkpoint, prompts_of(*range(3, 33, 3)), parameters())[0]


def run(checkpoint, prompts, params, drafter=None, pages=400, **options):
    """Outputs, and the rows of decode steps."""
    runner, cache = make(checkpoint, "cpu", torch.float32, num_pages=pages)
    runner._tap = drafter.tap if drafter is not None else ()
    rows = []
    launch = runner.launch
    runner.launch = lambda plan: (
        rows.extend(row for row in plan.rows if row.tokens is None),
        launch(plan),
    )[1]
    options = {"overlap": False, "draft_tokens": 4, **options}
    return generate(runner, cache, prompts, params, drafter=drafter, **options), rows


def test_texts_are_those_without(both, checkpoint, expected):
    outputs, rows = run(checkpoint, prompts_of(*range(3, 33, 3)), parameters(), drafter_of(both[0]))
    assert outputs == expected
    assert sum(len(row.drafts) for row in rows) > 100


@pytest.mark.parametrize(
    ("limits", "options"),
    [({}, {"overlap": True}), ({"pages": 6}, {}), ({"budget": 5}, {"budget": 24}), ({"slots": 2}, {})],
)
def test_texts_are_those_without_where_room_is_little(plain_head, checkpoint, expected, limits, options):
    prompts = prompts_of(*range(3, 33, 3))
    outputs, rows = run(checkpoint, prompts, parameters(), drafter_of(plain_head, **limits), **options)
    assert outputs == expected
    assert sum(len(row.drafts) for row in rows) > 20


def test_a_broken_head_only_drafts_nothing(checkpoint, expected, tmp_path):
    tensors = random_head("midlayer", DRAFTS, VOCAB)
    tensors["fc.weight"].fill_(torch.nan)
    head = load_eagle3(
        save_head(tmp_path / "head", tensors, VOCAB), load_model(checkpoint, torch.float32, "cpu")
    )
    outputs, rows = run(checkpoint, prompts_of(*range(3, 33, 3)), parameters(), drafter_of(head))
    assert outputs == expected and not any(row.drafts for row in rows)


@pytest.mark.parametrize("pages", [400, 9])
def test_a_cached_prefix_is_found_again(plain_head, checkpoint, pages):
    """Its hidden states never come, but pages of earlier sequences have what the head made of them. Where
    these had to make room, drafts go on without, and texts stay as they are."""
    shared = prompts_of(70)[0]
    prompts = [[*shared, *own] for own in prompts_of(3, 9, 17, seed=2)] + [[9, *shared[1:]]]
    params = [SamplingParams(temperature=0.0, max_tokens=12)]
    plain = [run(checkpoint, [prompt], params)[0][0] for prompt in prompts]
    runner, cache = make(checkpoint, "cpu", torch.float32)
    drafter, found = drafter_of(plain_head, pages=pages), []
    take = drafter.slots.take

    def taken(kv, *rest, **options):
        new = take(kv, *rest, **options)
        if new is not kv and new is not None:
            found.append(new.found)
        return new

    drafter.slots.take = taken
    runner._tap = drafter.tap
    options = {"overlap": False, "drafter": drafter, "draft_tokens": 3}
    for prompt, text in zip(prompts, plain, strict=True):
        assert generate(runner, cache, [prompt], params, **options) == [text]
    assert found[:4] == [0, 4, 4, 0] if pages == 400 else found
    drafter.slots.check()


def test_prompts_share_what_room_there_is(plain_head):
    """Those that find none are lent as far as they got, or not at all; the next are lent whole."""
    drafter = drafter_of(plain_head, pages=9, slots=4)
    requests = [EngineRequest(key, tuple(prompts_of(100, seed=key)[0]), SamplingParams()) for key in range(3)]
    sequences = [request.sequences[0] for request in requests]
    for half in (50, 100):
        for sequence in sequences[:2]:
            drafter.observe(sequence, half - 50, torch.randn(50, drafter._head.values))
        drafter.fill([(sequence, half) for sequence in sequences[:2]])
    filled = [drafter.filled(sequence) for sequence in sequences[:2]]
    assert filled[0][1] == 99 and (filled[1] is None or filled[1][1] < 99)
    for block_table in filter(None, [drafter.lend(sequence) for sequence in sequences[:2]]):
        drafter.slots.cache.release(block_table, 0)
    drafter.observe(sequences[2], 0, torch.randn(100, drafter._head.values))
    drafter.fill([(sequences[2], 100)])
    assert drafter.filled(sequences[2])[1] == 99
    block_table = drafter.lend(sequences[2])
    assert len(block_table) == 7
    drafter.slots.cache.release(block_table, 0)
    drafter.slots.check()


@pytest.mark.thorough
def test_a_trained_head_is_right(tmp_path):
    """A model whose next token follows from the last one alone, and a head that has learned from its outputs
    for seconds: more than 2 tokens a step, greedy and sampled."""
    vocab = 24
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4}
    checkpoint = save_checkpoint(tmp_path / "target", vocab_size=vocab, **sizes)
    weights = load_file(checkpoint / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name:
            tensor.zero_()
    save_file(weights, checkpoint / "model.safetensors")
    prompts = torch.randint(0, vocab, (8, 3), generator=torch.Generator().manual_seed(5)).tolist()
    wide = [SamplingParams(temperature=1.5, seed=seed, max_tokens=60) for seed in range(8)]
    outputs, _ = run(checkpoint, prompts, wide)
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    features = [features_of(checkpoint, text).clone() for text in texts]
    best = [load_logits(checkpoint, text).argmax(-1) for text in texts]
    tensors = random_head("midlayer", vocab, vocab)
    for tensor in tensors.values():
        tensor.requires_grad_(True)
    plain = PlainHead(tensors, weights["model.embed_tokens.weight"], "midlayer")
    optimizer = torch.optim.Adam(tensors.values(), lr=2e-3)
    for step in range(80):
        at = step % len(texts)
        text = torch.tensor(texts[at])
        hidden, loss = plain.enter(features[at][:-1]), torch.zeros(())
        for depth in range(3):
            hidden = plain.forward(text[1 + depth :], hidden)
            loss = loss + F.cross_entropy(plain.logits(hidden), best[at][1 + depth :])
            hidden = hidden[:-1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head = load_eagle3(
        save_head(tmp_path / "head", tensors, vocab), load_model(checkpoint, torch.float32, "cpu")
    )
    for params in (
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.3, max_tokens=40),
    ):
        some, each = prompts[:4], [params] * 4
        without, _ = run(checkpoint, some, each)
        outputs, rows = run(checkpoint, some, each, drafter_of(head, vocab=vocab))
        assert outputs == without
        # The first token of each comes with its prompt.
        assert sum(map(len, outputs)) - len(outputs) > 2 * len(rows)


def test_a_worker_with_a_head(checkpoint, plain_head, tmp_path):
    path = save_head(tmp_path / "head", random_head("midlayer", DRAFTS, VOCAB), VOCAB)
    sizes = {"kv_tokens": 2048, "max_rows": 4, "transports": ("grpc",)}
    config = DecodeConfig(model=str(checkpoint), draft=str(path), device="cpu", **sizes)
    engine = build_engine(config, new_incarnation())
    try:
        drafter = make_drafter(config, engine.drafter, engine.cache)
        assert isinstance(drafter, HeadDrafter)
        prompts, params = prompts_of(20), [SamplingParams(temperature=0.0, max_tokens=12)]
        options = {"overlap": False, "drafter": drafter, "draft_tokens": 3}
        outputs = generate(engine.runner, engine.cache, prompts, params, **options)
        assert outputs == run(checkpoint, prompts, params)[0]
        assert isinstance(drafter, HeadDrafter) and drafter._step > 10 and not drafter._waiting
    finally:
        engine.close()


def test_heads_that_are_refused(checkpoint, tmp_path):
    model = load_model(checkpoint, torch.float32, "cpu")
    tensors = random_head("midlayer", DRAFTS, VOCAB)
    for change, words in (
        ({"d2t": None}, "no d2t"),
        ({"d2t": torch.full((DRAFTS,), VOCAB)}, "does not map"),
        ({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}, "tensor fc.weight has shape"),
        ({"norm.weight": None}, "lacks tensor model.norm.weight"),
    ):
        changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        with pytest.raises(ModelError, match=words):
            load_eagle3(save_head(tmp_path / "head", changed, VOCAB), model)


def test_waiting_states_keep_no_more_than_themselves(checkpoint, tmp_path):
    """They are a part of what a step has computed for all of its rows."""
    save_head(tmp_path, random_head("midlayer", DRAFTS, VOCAB), VOCAB)
    drafter = drafter_of(load_eagle3(tmp_path, load_model(checkpoint, torch.float32, "cpu")))
    sequence = EngineRequest("a", tuple(range(1, 11)), SamplingParams(max_tokens=5)).sequences[0]
    sequence.tokens.append(7)
    step = torch.zeros(4096, len(LAYERS) * HIDDEN)
    drafter.observe(sequence, 0, step[:10])
    (state,) = drafter._waiting
    assert sum(hidden.untyped_storage().nbytes() for _, hidden in state.waiting) == 10 * step.shape[1] * 4
