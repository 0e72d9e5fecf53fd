"""Workers of several ranks, on one GPU, two or four: tokens and pages, hand-offs, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from lockstep import Lockstep, Recorded
from test_families import FAMILIES
from test_grammars import EveryThird
from test_latent import V3
from test_recurrent_on_gpu import FAMILIES as RECURRENT
from test_recurrent_on_gpu import assert_nearly_greedy
from test_runner import assert_greedy, greedy

from rig import generate, prompts_of, save_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from checkpoints import VOCABULARY, make_model, save
from deployment import Deployment

from baton.config import WorkerConfig
from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError
from baton.worker.engine import Engine, build_engine
from baton.worker.ranks.runner import RanksLost

PAGE = 64
LENGTHS = (5, 63, 130, 1, 64, 200)
PLACES = [
    pytest.param("cuda:0", id="one-gpu"),
    pytest.param(
        "cuda",
        id="two-gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two GPUs"),
    ),
]
"""Where both ranks are."""
SIZES = [
    *(pytest.param(*place.values, 2, id=place.id, marks=place.marks) for place in PLACES),
    pytest.param(
        "cuda",
        4,
        id="four-gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="there are fewer than four GPUs"),
    ),
]
"""Where the ranks are, and how many."""
OPTIONS = {"kv_tokens": 4096, "page_size": PAGE, "max_rows": 8, "token_budget": 128, "context_length": 512}
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    logit_bias={3: 1.0},
    logprobs=5,
    prompt_logprobs=5,
    max_tokens=12,
)
END_SECONDS = 15.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def engine_of(path: Path, tp: int, dtype: str, place: str = "cuda:0", **options):
    config = WorkerConfig(model=str(path), device=place, dtype=dtype, tp=tp, **{**OPTIONS, **options})
    engine = build_engine(config, new_incarnation())
    try:
        yield engine
    finally:
        engine.close()


def runner_of(engine: Engine):
    return getattr(engine.runner, "_runner", engine.runner)


def pages_of(engine: Engine) -> torch.Tensor:
    """uint8 [pages, page_bytes]: whole pages."""

    async def read() -> list[bytes]:
        reader = engine.pages.reader()
        return [bytes(await reader.read(page)) for page in range(engine.pool.num_pages)]

    return torch.stack([torch.frombuffer(bytearray(page), dtype=torch.uint8) for page in asyncio.run(read())])


@pytest.mark.parametrize(("place", "size"), SIZES)
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_float32_tokens_and_pages_are_those_of_one_rank(checkpoint, attention, place, size):
    """In CUDA graphs, and by the runner without them; prompts in chunks beside decode rows, and then from the
    prefix tree; sampled, penalized, with log-probabilities, with grammars."""
    prompts = prompts_of(*LENGTHS)
    params = greedy(len(prompts), 16)
    params[1] = params[4] = EVERYTHING
    grammars = [EveryThird() if i in (0, 2) else None for i in range(len(prompts))]
    names = {"prefill_attention": attention, "decode_attention": attention}
    found = {}
    for tp in (1, size):
        with engine_of(checkpoint, tp, "float32", place, **names) as engine:
            assert runner_of(engine).kernels == (attention == "auto")
            first, again = (
                generate(engine.runner, engine.cache, prompts, params, budget=128, grammars=grammars)
                for _ in range(2)
            )
            found[tp] = first, again, pages_of(engine)
    for run in (0, 1):
        assert found[size][run] == found[1][run]
    # Of page 0 the start has written what no sequence sees, in any order.
    one, several = (pages[1:].view(torch.float32) for _, _, pages in (found[1], found[size]))
    assert one.shape == several.shape and (one != 0).float().mean() > 0.1
    print("largest difference", (one - several).abs().max(), "of", one.abs().max())
    assert (one - several).abs().max() < 1e-3


@pytest.fixture
def untried(monkeypatch):
    """What these tests are to show: see `check_tried`, which goes once they have passed."""
    monkeypatch.setattr("baton.worker.checks.check_tried", lambda *_: None)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("place", "size"), SIZES[:2])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_recurrent_layers_are_divided(tmp_path, family, place, size):
    """In float32 by modules: prompts in chunks beside decode rows, and then from snapshots."""
    path = save_checkpoint(tmp_path, **RECURRENT[family])
    prompts = prompts_of(*LENGTHS)
    params = greedy(len(prompts), 16)
    found = {}
    for tp in (1, size):
        with engine_of(path, tp, "float32", place) as engine:
            assert runner_of(engine).kernels
            found[tp] = [generate(engine.runner, engine.cache, prompts, params, budget=128) for _ in range(2)]
    for run in (0, 1):
        assert different(path, prompts, found[size][run], found[1][run]) <= 1


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("place", "size"), SIZES[:2])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_recurrent_layers_of_several_ranks_run_fused(tmp_path, family, place, size):
    path = save_checkpoint(tmp_path, **RECURRENT[family])
    prompts = prompts_of(*LENGTHS)
    with engine_of(path, size, "bfloat16", place) as engine:
        outputs = generate(engine.runner, engine.cache, prompts, greedy(len(prompts), 16), budget=128)
        outputs += generate(engine.runner, engine.cache, prompts[:1], greedy(1, 16))
    assert_nearly_greedy(path, [*prompts, prompts[0]], outputs)


@pytest.mark.usefixtures("untried")
def test_pages_with_states_of_other_numbers_of_ranks_are_refused(tmp_path):
    path = save_checkpoint(tmp_path, **RECURRENT["qwen3.5"])
    layouts = []
    for tp in (1, 2):
        with engine_of(path, tp, "bfloat16") as engine:
            layouts.append(engine.layout)
    assert layouts[0] != layouts[1]


def different(path, prompts, ours, theirs) -> int:
    """How many outputs differ; each first from a token on where float32 has a near tie."""
    from rig import reference_logits

    count = 0
    for prompt, our, their in zip(prompts, ours, theirs, strict=True):
        if our == their:
            continue
        count += 1
        at = next(i for i, (a, b) in enumerate(zip(our, their, strict=True)) if a != b)
        logits = reference_logits(path, prompt + our[:at])[-1]
        margin = abs(logits[our[at]] - logits[their[at]]).item()
        print("differs from token", at, "on, margin", round(margin, 4))
        assert margin <= 0.15, (our, their)
    return count


MODELS = {
    "64": {},
    "128": {"head_dim": 128, "num_key_value_heads": 1, "tie_word_embeddings": True},  # a head that both hold
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "glm4-moe": FAMILIES["glm4-moe"],
    "gpt-oss": FAMILIES["gpt-oss"],
    "gemma3": FAMILIES["gemma3"],
    "deepseek-v3": V3,
}


@pytest.mark.parametrize(("place", "size"), SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_is_that_of_parts_added_in_one_process(tmp_path, monkeypatch, name, place, size):
    """bfloat16, in CUDA graphs: tokens, log-probabilities, and keys and values of all layers. Of one rank's
    tokens, whose sums are taken in another order, only near ties become others."""
    path = save_checkpoint(tmp_path, **MODELS[name])
    prompts, params = prompts_and_params()
    free = [0, 2, 3, 5]
    found = in_lockstep(path, place, monkeypatch, prompts, params, size)
    if name in ("64", "128", "qwen2"):
        assert_greedy(path, [prompts[i] for i in free], [found[i] for i in free], 0.3)
    else:
        # Rounding changes which experts a token uses, on one rank as on two.
        assert_as_near_as_one_rank(path, prompts, params, found, free)


def prompts_and_params():
    prompts = prompts_of(*LENGTHS)
    params = [dataclasses.replace(each, max_tokens=64) for each in greedy(len(prompts))]
    params[1] = params[4] = EVERYTHING
    params[0] = params[3] = dataclasses.replace(params[0], logprobs=3)
    return prompts, params


def in_lockstep(path, place, monkeypatch, prompts, params, size=2, **options):
    """The tokens of `size` ranks, once all results and pages are those of the ranks as threads."""
    with engine_of(path, size, "bfloat16", place, **options) as engine:
        runner = runner_of(engine)
        assert runner.kernels and None not in (runner.graphs, runner.chunk_graphs)
        ours, reference = Recorded(engine.runner), Lockstep(path, engine, monkeypatch)
        theirs = Recorded(reference)
        found = generate(ours, engine.cache, prompts, params, budget=128)
        assert found == generate(theirs, reference.cache, prompts, params, budget=128)
        for one, other in zip(ours.results, theirs.results, strict=True):
            assert one == other
        pages = pages_of(engine)
        want = reference.pages(pages.shape[1])
        # Of page 0 the start has written what no sequence sees.
        assert torch.equal(pages[1:], want[1:]) and pages[1:].any()
    return found


def assert_as_near_as_one_rank(path, prompts, params, found, free, **options):
    """To float32 of the same checkpoint."""
    with engine_of(path, 1, "bfloat16", **options) as engine:
        alone = generate(engine.runner, engine.cache, prompts, params, budget=128)
    one, two = (gaps(path, prompts, outputs, free) for outputs in (alone, found))
    print("further from float32 than 0.3, one rank and two:", one, two)
    assert two <= one + 0.04


def gaps(path, prompts, outputs, which) -> float:
    """The share of tokens whose logits are more than 0.3 below float32's largest."""
    from rig import reference_logits

    found = []
    for i in which:
        logits = reference_logits(path, prompts[i] + outputs[i])[len(prompts[i]) - 1 : -1]
        found.append(logits.amax(1) - logits.gather(1, torch.tensor(outputs[i])[:, None]).squeeze(1))
    return (torch.cat(found) > 0.3).float().mean().item()


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "gpt-oss", "deepseek-v3"])
def test_float32_tokens_and_pages_of_families_are_those_of_one_rank(tmp_path, family, ep):
    """In CUDA graphs: windows, of which pages are given up, sinks, latents, and mixtures with them."""
    if ep and family in ("mistral-window", "gemma3"):
        pytest.skip("no experts")
    path = save_checkpoint(tmp_path, **(V3 if family == "deepseek-v3" else FAMILIES[family]))
    prompts = prompts_of(*LENGTHS)
    found = {}
    for tp in (1, 2):
        with engine_of(path, tp, "float32", ep=ep and tp > 1) as engine:
            assert runner_of(engine).kernels
            params = greedy(len(prompts), 16)
            first = generate(engine.runner, engine.cache, prompts, params, budget=128)
            again = generate(engine.runner, engine.cache, prompts, params, budget=128)
            found[tp] = first, again, pages_of(engine)
    one, two = (pages[1:].view(torch.float32) for _, _, pages in (found[1], found[2]))
    print(family, "largest difference", (one - two).abs().max(), "of", one.abs().max())
    for run in (0, 1):
        assert found[2][run] == found[1][run]
    assert (one - two).abs().max() < 1e-3


def test_both_ranks_together_take_the_promised_part_of_the_gpu(checkpoint):
    before, total = torch.cuda.mem_get_info()
    with engine_of(checkpoint, 2, "bfloat16", kv_tokens=0, memory_fraction=0.1) as engine:
        print("in all", (before - torch.cuda.mem_get_info()[0]) / total)
        pools = 2 * engine.pool.raw.nbytes / total
        assert 0.07 < pools < 0.1, pools
        prompts = prompts_of(*LENGTHS)
        found = generate(engine.runner, engine.cache, prompts, greedy(len(prompts)), budget=128)
        assert_greedy(checkpoint, prompts, found, 0.3)


def test_more_ranks_than_gpus_are_refused(checkpoint):
    config = WorkerConfig(model=str(checkpoint), device="cuda", tp=1 + torch.cuda.device_count())
    with pytest.raises(BatonError, match="lower it, or let the ranks share one"):
        build_engine(config, 1)


def step(engine, number=1):
    inits = (SlotInit(0, SamplingParams(temperature=0.0), 0, (), ()),)
    row = PlanRow(0, (5, 6, 7), 0, ((0,),), (0,))
    return engine.runner.read(engine.runner.launch(StepPlan(number, (row,), inits)))


@pytest.mark.parametrize(("count", "size"), [(100, 2), (100, 3), (2**20, 3)])
def test_a_rank_that_gave_up_is_waited_for_in_vain(count, size):
    """Else the others would add what is left of an earlier round. In one shot and two."""
    told_when_it_gave_up(count, size)  # compiles: else the others would be late, too
    first, *others = told_when_it_gave_up(count, size)
    assert first and all(others)


def told_when_it_gave_up(count: int, size: int) -> list[bool]:
    """Rank 0 waits twice, alone, and once more when the others do, which have each other."""
    from baton.layers.kernels.all_reduce import AllReduce, buffer_bytes

    memory = [torch.zeros(buffer_bytes(size), dtype=torch.uint8, device="cuda:0") for _ in range(size)]
    told = [torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(size)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in memory], device="cuda:0")
    ranks = [AllReduce(rank, memory[rank], addresses, told[rank], seconds=0.01) for rank in range(size)]
    numbers = [torch.ones(count, device="cuda:0") for _ in ranks]
    streams = [torch.cuda.Stream() for _ in ranks]
    for _ in range(2):
        ranks[0].sum(numbers[0])
    torch.cuda.synchronize()
    assert told[0].item() == 1
    for rank, x, stream in zip(ranks, numbers, streams, strict=True):
        with torch.cuda.stream(stream):
            rank.sum(x)
    torch.cuda.synchronize()
    return [each.item() == 1 for each in told]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_step_without_the_other_rank_ends(checkpoint, monkeypatch, by, place):
    monkeypatch.setattr("baton.worker.ranks.leader.COLLECTIVE_SECONDS", 10.0)
    with engine_of(checkpoint, 2, "bfloat16", place) as engine:
        step(engine)
        (follower,) = engine.ranks.followers.processes.values()
        follower.send_signal(by)
        if by == signal.SIGKILL:
            follower.wait()
        started = time.monotonic()
        with pytest.raises(RanksLost, match="another rank is lost"):
            step(engine, 2)
        print("ended after", time.monotonic() - started)
        assert time.monotonic() - started < 60
    assert follower.poll() is not None


# --- as processes of their own ------------------------------------------------------------------------


WORKER = ("--kv-tokens", "4096", "--token-budget", "128", "--max-rows", "4")
WORKER += ("--page-size", str(PAGE), "--context-length", "512")
HANDED_OFF = (63, 64, 65, 200)


@dataclasses.dataclass
class Workers:
    place: str
    kind: str
    deployment: Deployment
    path: Path
    pairs: dict
    decode: list


@pytest.fixture(scope="module", params=PLACES)
def place(request):
    return request.param


SIZES_OF_MODEL = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8}
KINDS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "pages in FP8": ("--dtype", "bfloat16", "--kv-dtype", "fp8_e4m3"),
}


@pytest.fixture(scope="module", params=KINDS)
def workers(request, place, tmp_path_factory):
    path = save(make_model("qwen3", **SIZES_OF_MODEL), tmp_path_factory.mktemp("qwen3"))
    deployment = Deployment(tmp_path_factory.mktemp("ranks"), path)
    flags = (*WORKER, *KINDS[request.param], "--device", place)
    prefill = [deployment.add_worker("prefill", *flags, "--tp", str(tp)) for tp in (1, 2)]
    decode = [deployment.add_worker("decode", *flags, "--tp", str(tp)) for tp in (1, 2)]
    gateways = {"one": deployment.add_gateway([decode[0]])}
    gateways["1 to 2"] = deployment.add_gateway([decode[1]], [prefill[0]])
    gateways["2 to 1"] = deployment.add_gateway([decode[0]], [prefill[1]])
    gateways["2 to 2"] = deployment.add_gateway([decode[1]], [prefill[1]])
    for worker in prefill + decode:
        worker.forked = False  # CUDA may have been looked for before the fork
    with deployment:
        yield Workers(place, request.param, deployment, path, gateways, decode)


def ask(gateway, prompts, **options):
    from baton.client import Client

    with Client(gateway.address) as client:
        return [
            client.generate(token_ids=each, temperature=0.0, max_tokens=24, ignore_eos=True, **options)
            for each in prompts
        ]


def test_pages_are_handed_off_between_different_numbers_of_ranks(workers):
    kind, deployed = workers.kind, workers
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in HANDED_OFF]
    tokens = {}
    for name, gateway in deployed.pairs.items():
        completions = ask(gateway, prompts, namespace=name)
        tokens[name] = [completion.choices[0].token_ids for completion in completions]
        if name != "one":
            for length, completion in zip(HANDED_OFF, completions, strict=True):
                assert completion.stats.transport == "cuda_ipc", name
                assert completion.stats.pulled_pages == -(-length // PAGE)
                assert completion.stats.handoff_retries == 0
        if kind == "float32":
            assert tokens[name] == tokens["one"], name
        elif kind == "bfloat16":
            assert_greedy(deployed.path, prompts, tokens[name], 0.3)
    if kind != "pages in FP8":
        count = {name: different(deployed.path, prompts, tokens[name], tokens["one"]) for name in tokens}
        print("different outputs", kind, count)
    else:
        wrong = {name: gaps(deployed.path, prompts, tokens[name], range(len(prompts))) for name in tokens}
        print("further from float32 than 0.3", wrong)
        assert all(share <= wrong["one"] + 0.1 for share in wrong.values())
    deployed.deployment.assert_idle()


def test_pages_come_back_from_host_memory_to_all_ranks(place, tmp_path):
    """Prompts in rotation, of which the pool has room for two: the second round's are copied back."""
    path = save(make_model("qwen3", **SIZES_OF_MODEL), tmp_path / "model")
    deployment = Deployment(tmp_path / "tier", path)
    flags = (*WORKER, "--kv-tokens", "1024", "--dtype", "float32", "--device", place)
    ranks = ("--tp", "2", "--host-memory", "256M")
    decode = [deployment.add_worker("decode", *flags, *more) for more in ((), ranks)]
    gateways = [deployment.add_gateway([worker]) for worker in decode]
    for worker in decode:
        worker.forked = False  # CUDA may have been looked for before the fork
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, VOCABULARY, (400,), generator=generator).tolist() for _ in range(6)]
    with deployment:
        plain, tier = ([ask(gateway, prompts) for _ in range(2)] for gateway in gateways)
        said = [[each.choices[0].token_ids for each in answers] for answers in (*plain, *tier)]
        assert said[0] == said[1] == said[2] == said[3]
        print("tokens from host memory", [each.usage.host_tokens for each in tier[1]])
        assert all(each.usage.host_tokens >= 384 - 2 * PAGE for each in tier[1])
        assert not any(each.usage.cached_tokens for each in plain[1])
        deployment.assert_idle()


@pytest.mark.parametrize("killed", ["follower", "rank 0"])
def test_a_worker_ends_with_one_of_its_ranks(workers, killed):
    """Beside nothing else that takes memory of the GPU: what is back is seen in what is free."""
    worker = workers.decode[1]
    told = worker.info().ranks
    second = "cuda:1" if workers.place == "cuda" else "cuda:0"
    assert [rank.device for rank in told] == ["cuda:0", second]
    gc.collect()
    torch.cuda.empty_cache()
    used = torch.cuda.mem_get_info(second)[0]
    ranks = {"follower": psutil.Process(told[1].pid), "rank 0": psutil.Process(told[0].pid)}
    started = time.monotonic()
    ranks[killed].kill()
    _, left = psutil.wait_procs([ranks["follower"]], END_SECONDS)
    while worker.alive and time.monotonic() - started < END_SECONDS:
        time.sleep(0.01)
    print(killed, "ended after", time.monotonic() - started)
    assert not worker.alive and not left
    time.sleep(1.0)
    back = torch.cuda.mem_get_info(second)[0] - used
    print("memory back, MiB", back / 2**20)
    assert back > 2**28, "context and pool of the follower are gone"
    assert not [path for path in worker.segments() if path.exists()]
    worker.start()
    worker.wait_ready()
