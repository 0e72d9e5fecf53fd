"""`baton doctor`: what this machine can run, and why not."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import click
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton import __version__, cgroups
from baton.bench.machine import DRIVER
from baton.cli.console import UNLIMITED
from baton.cli.serve import DEFAULT_PORTS
from baton.rpc.address import loopback
from baton.rpc.bind import bind_problem
from baton.transport.shm import FIRST_PID_NAMESPACE, pid_namespace

Verdict = Literal["ok", "note", "absent", "bad"]
"""ok: works. note: Baton works without it, or less well. absent: needs a GPU, and there is none. bad: Baton
cannot run."""
GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    verdict: Verdict
    detail: str


def no_gpu() -> Verdict:
    """The verdict on what needs an NVIDIA GPU and does not work."""
    return "note" if any(path.exists() for path in DRIVER) else "absent"


def machine() -> Iterator[Check]:
    """Python, cores, memory, shared memory, disk."""
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Check("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Check("cores", "ok", f"{cgroups.cores()} usable of {os.cpu_count()}")
    memory, limits = psutil.virtual_memory(), cgroups.memory()
    available, total = min((memory.available, memory.total), limits or (memory.available, memory.total))
    text = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if available < GIB:
        yield Check("memory", "note", f"{text}; a deployment of the demo model takes about 1.5 GiB")
    else:
        yield Check("memory", "ok", text)
    yield _shared_memory()
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache"))
    while not cache.exists():
        cache = cache.parent
    yield Check("disk", "ok", f"{shutil.disk_usage(cache).free / GIB:.1f} GiB free for models in {cache}")


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("/dev/shm", "note", "not there; pages travel over grpc instead of shm")
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if not os.access(folder, os.W_OK):
        return Check("/dev/shm", "note", f"{text}, not writable; pages travel over grpc")
    if usage.free < GIB:
        hint = "KV pools live there: use a smaller --kv-tokens, or give a container more (--shm-size)"
        return Check("/dev/shm", "note", f"{text}; {hint}")
    return Check("/dev/shm", "ok", text)


def devices() -> Iterator[Check]:
    """torch and its GPUs."""
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "bad", f"cannot be imported ({error}); install it: pip install torch")
        return
    yield Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield Check("cpu", "ok", torch.backends.cpu.get_cpu_capability())
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "no usable NVIDIA GPU or driver" if built else "this torch is built without CUDA"
        yield Check("cuda", no_gpu(), f"{reason}; --device cpu is used")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        text = f"{torch.cuda.get_device_name(index)}, compute {capability}"
        yield Check(f"cuda:{index}", "ok", f"{text}, {free / GIB:.1f} GiB free of {total / GIB:.1f} GiB")


def attention() -> Iterator[Check]:
    """Attention backends, and the library of the fast one."""
    import torch

    from baton.attention.fa3 import mismatch
    from baton.attention.registry import BACKENDS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, backend in BACKENDS.items():
        problem = backend.available(device)
        yield Check(name, no_gpu() if problem else "ok", problem or f"works on {device}")
    if importlib.util.find_spec("sgl_kernel") is None:
        text = "not installed; only needed on NVIDIA GPUs: pip install 'baton-serve[gpu]'"
        yield Check("sgl_kernel", no_gpu(), text)
    else:
        problem = mismatch()
        yield Check("sgl_kernel", no_gpu() if problem else "ok", problem or "installed")


def transports() -> Iterator[Check]:
    """Transports of KV pages."""
    if os.access("/dev/shm", os.W_OK):
        yield Check("shm", "ok", "between processes of this host, CPU pools")
    else:
        yield Check("shm", "note", "/dev/shm is not there or not writable")
    yield Check("grpc", "ok", "anywhere")
    yield _cuda_ipc()
    yield process_id(*_inside())
    yield _nixl()


def _nixl() -> Check:
    """Makes an agent. Whether peers reach its port is not checked."""
    from baton.transport.nixl import problem

    why_not = problem()
    if why_not is not None:
        return Check("nixl", "note", f"{why_not}; between hosts pages travel over grpc")
    return Check("nixl", "ok", "between hosts, where --transports names it")


def _cuda_ipc() -> Check:
    """Exports memory of each GPU. Opening it, which takes another process, is not checked."""
    import torch

    from baton.transport import TransportError, cuda_runtime

    problem = cuda_runtime.problem()
    if problem is not None:
        return Check("cuda_ipc", no_gpu(), f"{problem}; between GPUs pages travel over grpc")
    count = torch.cuda.device_count()
    for index in range(count):
        cuda_runtime.use(torch.device("cuda", index))
        memory = torch.zeros(2**21, dtype=torch.uint8, device=f"cuda:{index}")
        try:
            cuda_runtime.export_memory(memory.data_ptr())
        except TransportError as error:
            return Check("cuda_ipc", "note", f"cuda:{index}: {error}; pages travel over grpc")
    torch.cuda.set_device(0)
    apart = [
        f"cuda:{a} and cuda:{b}"
        for a in range(count)
        for b in range(a + 1, count)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        text = f"works on each GPU, but there is no peer access between {', '.join(apart)}"
        return Check("cuda_ipc", "note", text)
    where = f"all {count} GPUs, with peer access" if count > 1 else "the one visible GPU"
    return Check("cuda_ipc", "ok", f"memory can be shared from {where}")


def _inside() -> tuple[str, dict[int, list[str]]]:
    """This process's PID namespace, and the command of each process in it."""
    commands = {}
    for process in psutil.process_iter():
        try:
            commands[process.pid] = process.cmdline()
        except psutil.Error:
            continue
    return pid_namespace(), commands


def process_id(namespace: str, commands: Mapping[int, Sequence[str]]) -> Check:
    """Whether CUDA IPC works for workers in a PID namespace of their own, as in a container: it refuses
    memory of a process with the same id in another namespace, and the first process of each has id 1."""
    if namespace == FIRST_PID_NAMESPACE:
        return Check("process ids", "ok", "unique: not in a container's PID namespace")
    if "serve" in commands.get(1, ()) and "baton.cli.entrypoint" not in commands[1]:
        text = "the worker has process id 1, like those of other containers, which CUDA IPC refuses"
        hint = "start it by 'python -Pm baton.cli.entrypoint baton serve ...', as images do, or grpc is used"
        return Check("process ids", "note", f"{text}; {hint}")
    workers = sorted(pid for pid, command in commands.items() if pid > 1 and "serve" in command)
    which = f"the worker's is {workers[0]}; " if workers else ""
    text = f"{which}CUDA IPC needs different ids in different containers; baton.cli.entrypoint chooses them"
    return Check("process ids", "ok", text)


def ports() -> Iterator[Check]:
    """Which default ports are in use."""
    for role, (grpc_port, http_port) in DEFAULT_PORTS.items():
        taken = [port for port in (grpc_port, http_port) if bind_problem(loopback(), port) is not None]
        both_ports = f"{grpc_port} and {http_port}"
        if taken:
            numbers = " and ".join(map(str, taken))
            text = f"{numbers} in use, perhaps by a running Baton; choose others: --port, --http-port"
            yield Check(role, "note", text)
        else:
            yield Check(role, "ok", f"{both_ports} are free")


def model() -> Iterator[Check]:
    """The models that need no download."""
    from baton.demo import MODELS, model_path
    from baton.model_path import PACKAGES, CheckpointError, resolve

    for name in MODELS:
        weights = model_path(name) / "model.safetensors"
        if weights.is_file():
            yield Check(name, "ok", f"{weights.stat().st_size / 2**20:.1f} MiB in {weights.parent}")
        else:
            yield Check(name, "bad", f"{weights} is missing; install Baton again")
    for name in PACKAGES:
        try:
            file = resolve(name)
        except CheckpointError as error:
            yield Check(name, "absent", str(error))
        else:
            yield Check(name, "ok", f"{file.stat().st_size / 2**20:.1f} MiB: {file}")


def served(
    name: str, implementation: str, quantization: str = "auto", kv_dtype: str = "auto", tp: int = 1
) -> Iterator[Check]:
    """Whether a model can be served here, by whose code, and what it takes; `tp`: of each rank, too."""
    import torch

    from baton.layers.cache_spec import STATE_ITEMSIZE, State
    from baton.layers.tensor_parallel import Shard
    from baton.model_path import CheckpointError, resolve
    from baton.models.config import read_config
    from baton.models.loader import cache_specs, check_tensors, indivisible, weight_bytes
    from baton.models.weight_plan import describe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        path = resolve(name)
        config = read_config(path, implementation=implementation)
        dtype = torch.float32 if device.type == "cpu" else config.dtype
        needed = partial(
            weight_bytes,
            path,
            dtype,
            implementation=implementation,
            quantization=quantization,
            device=device,
        )
        size = needed()
        left_out = check_tensors(path, None, implementation, quantization)
        how = describe(path, device, quantization, dtype)
        caches = cache_specs(config)
        shards = [needed(shard=Shard(rank, tp)) for rank in range(tp)]
    except CheckpointError as error:
        yield Check(name, "bad", str(error))
        return
    if config.implementation == "baton":
        rest = f"; left out of the checkpoint: {', '.join(left_out)}" if left_out else ""
        yield Check("architecture", "ok", f"{config.architecture}, by Baton's own code{rest}")
    else:
        reason = "asked for" if implementation == "transformers" else "Baton has none of its own for it"
        text = f"{config.architecture}, by transformers' code over paged attention, slower: {reason}"
        yield Check("architecture", "note", text)
    if how:
        yield Check("quantization", "ok", how)
    name = str(dtype).removeprefix("torch.")
    yield Check("weights", "ok", f"{size / GIB:.2f} GiB on {device.type}, computed in {name}")
    if (problem := indivisible(caches, tp, kv_dtype)) is not None:
        yield Check("kv", "bad", problem)
        return
    size_of_one = dtype.itemsize if kv_dtype == "auto" else 1
    heads = max(spec.heads for spec in caches)
    if tp > 1:
        yield _ranks(shards, Shard(0, tp).kv_heads(heads)[1], heads, device.type)
    token = sum(spec.values for spec in caches if not isinstance(spec, State)) * size_of_one
    kind = "latents" if caches[0].parts == 1 else "keys and values"
    context = (
        f"{token * config.context_length / GIB:.2f} GiB for a context of {config.context_length:,} tokens"
    )
    states = sum(spec.numbers for spec in caches if isinstance(spec, State)) * STATE_ITEMSIZE
    rest = f", and {states / 2**20:.2f} MiB a state of its recurrent layers" if states else ""
    yield Check("kv", "ok", f"{token / 1024:.1f} KiB of {kind} a token, {context}{rest}")


def _ranks(shards: Sequence[int], heads: int, of: int, device: str) -> Check:
    """shards: bytes of each rank's weights; heads: KV heads of a rank, of all `of`."""
    weights = f"up to {max(shards) / GIB:.2f} GiB of weights"
    text = f"{len(shards)}, each with {weights} and {heads} of {of} KV heads"
    if device == "cpu":
        return Check("ranks", "ok", f"{text}; they share this machine's memory")
    import torch

    count = torch.cuda.device_count()
    if count < len(shards):
        how = "lower --tp, or let them share one for a trial: --device cuda:0"
        return Check("ranks", "bad", f"{text}; each needs a GPU, and {count} can be used: {how}")
    return Check("ranks", "ok", f"{text}; a GPU each")


GROUPS: dict[str, Callable[[], Iterator[Check]]] = {
    "machine": machine,
    "devices": devices,
    "attention": attention,
    "transports": transports,
    "model": model,
    "ports": ports,
}


def run_checks(groups: Mapping[str, Callable[[], Iterator[Check]]] = GROUPS) -> Iterator[tuple[str, Check]]:
    """All findings with their sections, in order; a section that fails is a finding itself."""
    for section, checks in groups.items():
        try:
            for check in checks():
                yield section, check
        except Exception as error:  # such as a broken installation
            yield section, Check(section, "bad", f"cannot be checked: {type(error).__name__}: {error}")


MARKS = {"ok": "[green]✓[/]", "note": "[yellow]![/]", "absent": "[dim]-[/]", "bad": "[red]✗[/]"}


def _table(findings: list[tuple[str, Check]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for section, check in findings:
        if before and section != before:
            table.add_row()
        title = "" if section == before else f"[bold]{section}[/]"
        table.add_row(title, MARKS[check.verdict], escape(check.name), escape(check.detail))
        before = section
    return table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--model", help="Ask about this model alone: a directory, a GGUF file or a Hugging Face id.")
@click.option("--model-impl", default="auto", show_default=True, help="auto, baton or transformers.")
@click.option(
    "--quantization", default="auto", show_default=True, help="Weights: auto, none, fp8, int8 or int4."
)
@click.option(
    "--kv-dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "fp8_e4m3"]),
    help="Keys and values in the pool.",
)
@click.option(
    "--tp", default=1, show_default=True, type=click.IntRange(1), help="Processes that share the model."
)
def doctor(
    as_json: bool, model: str | None, model_impl: str, quantization: str, kv_dtype: str, tp: int
) -> None:
    """Say what this machine can run, and why not.

    Checks Python, memory, shared memory, torch, GPUs, attention backends, transports, the demo model and the
    default ports. Exits with 0 unless Baton cannot run here at all.

    \b
    Examples:
      baton doctor
      baton doctor --model ./my-model      whether it can be served, by whose code
      baton doctor --model ./my-model --tp 4
      baton doctor --json | jq '.checks[] | select(.verdict != "ok")'
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=UNLIMITED)
    groups = {"model": lambda: served(model, model_impl, quantization, kv_dtype, tp)} if model else GROUPS
    if as_json:
        findings = list(run_checks(groups))
    else:
        with console.status("Checking the model" if model else "Checking this machine"):
            findings = list(run_checks(groups))
    broken = [check for _, check in findings if check.verdict == "bad"]
    if as_json:
        checks = [{"section": section, **dataclasses.asdict(check)} for section, check in findings]
        click.echo(json.dumps({"version": __version__, "can_run": not broken, "checks": checks}, indent=2))
    else:
        console.print(f"Baton {__version__}", highlight=False)
        console.print(_table(findings), highlight=False)
        subject, verb = (f"Model {model}", "be served") if model else ("Baton", "run here")
        console.print(f"\n{subject} can{'not' if broken else ''} {verb}{': see ✗ above' if broken else ''}.")
    raise SystemExit(1 if broken else 0)
