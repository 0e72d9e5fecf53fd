"""Flags, environment, TOML file and defaults: names, precedence, errors."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from baton.attention.registry import BACKENDS
from baton.cli.config_fields import ROLES, as_flags, build, explicit_fields, fields_of
from baton.cli.options import config_file_option, config_options
from baton.cli.serve import DEFAULT_PORTS, MODULES, serve
from baton.cli.up import settings_by_role, up
from baton.config import DecodeConfig, GatewayConfig, NodeConfig, WorkerConfig
from baton.engine.waiting_queue import POLICIES as SCHEDULING
from baton.gateway.routing import POLICIES as ROUTING
from baton.gateway.split_decision import MODES
from baton.kvcache.eviction import POLICIES as EVICTIONS
from baton.models.config import IMPLEMENTATIONS
from baton.models.weight_plan import QUANTIZATIONS
from baton.parsers.registry import NONE, REASONING_PARSERS, TOOL_PARSERS
from baton.rpc.logs import FORMS, LEVELS
from baton.transport.registry import KINDS
from baton.worker.model import DTYPES, KV_DTYPES


def parse(role: str, *arguments: str, env: dict[str, str] | None = None) -> NodeConfig:
    """What `baton serve ROLE` would be configured with."""
    config = ROLES[role]
    found: list[NodeConfig] = []

    @click.command()
    @config_file_option(role)
    @config_options(config)
    def command(config_file: Path | None, **values: object) -> None:
        found.append(build(config, values, {}))

    result = CliRunner().invoke(command, arguments, env=env, catch_exceptions=False)
    if result.exit_code:
        raise click.UsageError(result.output)
    return found[0]


@pytest.mark.parametrize("role", ROLES)
def test_nothing_given_is_the_dataclass_default(role: str) -> None:
    assert parse(role) == ROLES[role]()


@pytest.mark.parametrize("role", ROLES)
def test_every_field_has_help(role: str) -> None:
    assert [field.name for field in fields_of(ROLES[role]).values() if not field.help] == []


def test_overridden_field_keeps_the_inherited_help() -> None:
    assert fields_of(GatewayConfig)["http_port"].help == fields_of(NodeConfig)["http_port"].help


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(
        "kv_tokens = 1\nmax_rows = 1\n[decode]\nmax_rows = 2\nwatermark = 1\n[prefill]\nmax_rows = 9\n"
    )
    config = ["--config", str(file)]
    env = {"BATON_KV_TOKENS": "3", "BATON_MAX_ROWS": "3"}
    settings = parse("decode")
    assert isinstance(settings, DecodeConfig) and settings.kv_tokens == 0
    settings = parse("decode", *config)
    assert isinstance(settings, DecodeConfig)
    assert (settings.kv_tokens, settings.max_rows, settings.watermark) == (1, 2, 1.0)
    settings = parse("decode", *config, env=env)
    assert isinstance(settings, DecodeConfig) and (settings.kv_tokens, settings.max_rows) == (3, 3)
    settings = parse("decode", *config, "--kv-tokens", "4", env=env)
    assert isinstance(settings, DecodeConfig) and (settings.kv_tokens, settings.max_rows) == (4, 3)
    settings = parse("prefill", *config)
    assert isinstance(settings, WorkerConfig) and settings.max_rows == 9


def test_a_value_equal_to_the_default_still_wins(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("max_rows = 7\ninsecure = true\nhttp_port = 5\n")
    settings = parse(
        "decode", "--config", str(file), "--max-rows", "64", "--no-insecure", "--http-port", "none"
    )
    assert isinstance(settings, DecodeConfig)
    assert (settings.max_rows, settings.insecure, settings.http_port) == (64, False, None)


@pytest.mark.parametrize(
    ("arguments", "env", "toml"),
    [
        (["--prefill", "a:1", "--prefill", "b:2"], {}, ""),
        (["--prefill", "a:1,b:2"], {}, ""),
        ([], {"BATON_PREFILL": "a:1,b:2"}, ""),
        ([], {}, 'prefill = ["a:1", "b:2"]'),
        ([], {}, '[decode]\nprefill = "a:1,b:2"'),
    ],
)
def test_lists(tmp_path: Path, arguments: list[str], env: dict[str, str], toml: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(toml)
    settings = parse("decode", "--config", str(file), *arguments, env=env)
    assert isinstance(settings, DecodeConfig) and settings.prefill == ("a:1", "b:2")


def test_an_empty_list_can_be_given() -> None:
    settings = parse("gateway", "--decode", "")
    assert isinstance(settings, GatewayConfig) and settings.decode == ()


def test_optional_bool_has_three_values() -> None:
    overlaps = [parse("decode", *flags) for flags in ([], ["--overlap"], ["--no-overlap"])]
    assert [config.overlap for config in overlaps if isinstance(config, DecodeConfig)] == [None, True, False]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("kv_token = 1", "unknown key 'kv_token'"),
        ("[decode]\nport_http = 1", "unknown key 'decode.port_http'"),
        ("[prefill]\nwatermark = 0.5", "unknown key 'prefill.watermark'"),
        ("[worker]\nport = 1", "unknown key 'worker'"),
        ('kv_tokens = "many"', "'kv_tokens' must be an integer, not 'many'"),
        ("max_rows = true", "'max_rows' must be an integer, not True"),
        ("insecure = 1", "'insecure' must be true or false, not 1"),
        ("[decode]\nprefill = [1]", "'decode.prefill' must be a list of strings"),
        (
            "prefill = 2",
            "'prefill' is a list of addresses; the number of nodes is a flag of 'baton up': --prefill",
        ),
        ("model = demo", "cannot read"),
    ],
)
def test_wrong_file_names_the_key(tmp_path: Path, toml: str, message: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(toml)
    with pytest.raises(click.UsageError) as caught:
        parse("decode", "--config", str(file))
    assert message in caught.value.message and str(file) in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("threads", -1, "must be at least 0, not -1"),
        ("request_seconds", -0.5, "must be at least 0, not -0.5"),
        ("local_prefill_tokens", -3, "must be at least 0, not -3"),
        ("handoff_seconds", float("nan"), "must be a number, not nan"),
        ("request_seconds", float("inf"), "must be a number, not inf"),
        ("watermark", 2.5, "must be from 0 to 1, not 2.5"),
        ("dtype", "half", "must be auto, float32, bfloat16 or float16, not 'half'"),
        ("transports", "shm,rdma", "must be cuda_ipc, shm, nixl or grpc, not 'rdma'"),
    ],
)
def test_a_wrong_value_names_where_it_came_from(
    tmp_path: Path, name: str, value: float | str, message: str
) -> None:
    file, flag, variable = tmp_path / "baton.toml", "--" + name.replace("_", "-"), "BATON_" + name.upper()
    file.write_text(f"{name} = {value!r}\n")
    for arguments, env, where in (
        ([flag, str(value)], {variable: "1"}, flag),
        ([], {variable: str(value)}, variable),
        (["--config", str(file)], {}, f"{file}: {name!r}"),
    ):
        with pytest.raises(click.UsageError) as caught:
            parse("decode", *arguments, env=env)
        assert caught.value.message.endswith(f"{where} {message}\n")
    with pytest.raises(click.UsageError) as caught:
        settings_by_role({"config_file": file})
    assert caught.value.message == f"{file}: {name!r} {message}"


def test_a_file_for_all_roles_is_fine_for_each(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('model = "demo"\nkv_tokens = 64\n[gateway]\nmax_requests = 3\n[tokenizer]\nthreads = 1\n')
    for role in ROLES:
        parse(role, "--config", str(file))


@pytest.mark.parametrize("role", ROLES)
def test_flags_for_a_child_round_trip(role: str) -> None:
    changed: dict[str, object] = {}
    for field in fields_of(ROLES[role]).values():
        text = field.choices[-1] if field.choices else "text"
        samples = {
            str: text,
            int: 7,
            float: 0.5,
            bool: not field.default,
            tuple: field.choices[-2:] or ("a", "b"),
        }
        changed[field.name] = None if field.name == "http_port" else samples[field.kind]
    assert parse(role, *as_flags(ROLES[role], changed)) == ROLES[role](**changed)


def test_fields_that_were_not_given_are_left_out() -> None:
    values = {"model": None, "prefill": (), "kv_tokens": 5, "other": 1}
    assert explicit_fields(DecodeConfig, values) == {"kv_tokens": 5}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_a_process_to_serve(role: str) -> None:
    assert importlib.util.find_spec(MODULES[role])


@pytest.mark.parametrize("role", ROLES)
def test_serve_shows_the_designs_ports(role: str) -> None:
    result = CliRunner().invoke(serve, [role, "--help"], terminal_width=200)
    port, http_port = DEFAULT_PORTS[role]
    assert f"[default: {port}]" in result.output and f"[default: {http_port}]" in result.output


def test_up_passes_settings_to_the_roles_that_know_them(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('model = "other"\ninsecure = true\ntransports = "shm, grpc"\n[decode]\nwatermark = 0.1\n')
    values = {"model": "m", "kv_tokens": 50, "threads": 1, "watermark": 0.5, "served_name": "s"}
    values = {**dict.fromkeys(field.name for field in dataclasses.fields(DecodeConfig)), **values}
    settings = settings_by_role({**values, "port": 1, "config_file": file})
    worker = {"model": "m", "threads": 1, "kv_tokens": 50, "insecure": True, "transports": ("shm", "grpc")}
    assert settings == {
        "gateway": {"served_name": "s", "insecure": True},
        "tokenizer": {"model": "m", "insecure": True},
        "prefill": worker,
        "decode": {**worker, "watermark": 0.5},
        "encode": {"model": "m", "threads": 1, "insecure": True, "transports": ("shm", "grpc")},
    }


@pytest.mark.parametrize(
    ("env", "toml", "named"),
    [
        ({"BATON_NNODES": "2"}, "", "BATON_NNODES"),
        ({"BATON_NODE_RANK": "1"}, "", "BATON_NODE_RANK"),
        ({"BATON_MASTER": "host:29500"}, "", "BATON_MASTER"),
        ({}, "[decode]\nnnodes = 2\n", "baton.toml: 'nnodes'"),
    ],
)
def test_up_refuses_workers_on_several_hosts(
    tmp_path: Path, env: dict[str, str], toml: str, named: str
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(toml)
    result = CliRunner().invoke(up, ["--config", str(file), "--model", str(tmp_path / "none")], env=env)
    assert f"{named} is for a worker on several hosts" in result.output and result.exit_code == 2


def test_up_takes_a_file_of_baton_serve_and_says_what_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('host = "::"\n[decode]\nport = 5\nprefill = "a:1"\n[gateway]\ndecode = "b:1"\n')
    assert settings_by_role({"config_file": file}) == {role: {} for role in ROLES}
    said = f"baton: {file}: decode, prefill: without effect, this command sets addresses itself\n"
    assert capsys.readouterr().err == said
    file.write_text("kv_tokens = 64\ndrain_seconds = 7\n")
    settings_by_role({"config_file": file})
    assert capsys.readouterr().err == ""
    assert up.make_context("up", ["--config", str(file)]).params["drain_seconds"] == 7


@pytest.mark.parametrize("key", ["etcd", "etcd_prefix", "shared", "siblings"])
def test_up_refuses_a_file_by_which_processes_find_others(tmp_path: Path, key: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(f'[gateway]\n{key} = "a:1"\n')
    with pytest.raises(click.UsageError, match=f"baton.toml: '{key}' is for 'baton serve'"):
        settings_by_role({"config_file": file})


@pytest.mark.parametrize(("page", "least"), [(None, 16), (64, 64)])
def test_up_refuses_a_pool_without_a_page(page: int | None, least: int) -> None:
    with pytest.raises(click.UsageError, match=rf"--kv-tokens must be at least one page \({least} tokens\)"):
        settings_by_role({"kv_tokens": least - 1, "page_size": page})
    assert settings_by_role({"kv_tokens": least, "page_size": page})["decode"]["kv_tokens"] == least


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("dtype", ("auto", *DTYPES)),
        ("kv_dtype", KV_DTYPES),
        ("quantization", QUANTIZATIONS),
        ("model_impl", IMPLEMENTATIONS),
        ("eviction", EVICTIONS),
        ("policy", SCHEDULING),
        ("transports", KINDS),
        ("prefill_attention", ("auto", *BACKENDS)),
        ("decode_attention", ("auto", *BACKENDS)),
        ("routing", ROUTING),
        ("split", MODES),
        ("tool_parser", ("auto", NONE, *TOOL_PARSERS)),
        ("reasoning_parser", ("auto", NONE, *REASONING_PARSERS)),
        ("log_level", LEVELS),
        ("log_format", FORMS),
    ],
)
def test_the_choices_are_what_the_processes_know(name: str, known: Iterable[str]) -> None:
    fields = {**fields_of(GatewayConfig), **fields_of(DecodeConfig)}
    assert sorted(fields[name].choices) == sorted(known)


def test_up_takes_one_host_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NNODES", "1")
    monkeypatch.setenv("BATON_NODE_RANK", "0")
    assert settings_by_role({})["decode"] == {}


@pytest.mark.parametrize(
    "name",
    [
        "prefill",
        "decode",
        "tokenizer",
        "advertise",
        "shared",
        "shared_http",
        "siblings",
        "etcd",
        "etcd_prefix",
    ],
)
def test_up_refuses_the_variables_of_processes_that_find_each_other(tmp_path: Path, name: str) -> None:
    variable = f"BATON_{name.upper()}"
    result = CliRunner().invoke(up, ["--model", str(tmp_path / "none")], env={variable: "a:1"})
    assert f"{variable} is for 'baton serve'" in result.output and result.exit_code == 2
    result = CliRunner().invoke(up, ["--model", str(tmp_path / "none")], env={variable: ""})
    assert "baton serve" not in result.output


def test_up_takes_the_variables_that_its_help_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("host", "port", "http_port", "drain_seconds", "kv_tokens"):
        monkeypatch.setenv(f"BATON_{name.upper()}", "7")
    found = up.make_context("up", []).params
    wanted = {"host": "7", "port": 7, "http_port": 7, "drain_seconds": 7.0, "kv_tokens": 7}
    assert {name: found[name] for name in wanted} == wanted


def test_what_one_role_takes_of_a_flag_all_roles_do_that_have_it() -> None:
    """`baton up` gives a flag to all of them."""
    known = [field for config in ROLES.values() for field in fields_of(config).values() if field.choices]
    several: dict[str, set[tuple[str, ...]]] = {}
    for field in known:
        several.setdefault(field.name, set()).add(field.choices)
    assert [name for name, choices in several.items() if len(choices) > 1] == []
