"""What the chart's containers would run, as Baton itself understands it."""

from __future__ import annotations

import dataclasses
import os
import re
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chart import ROOT, Document, Rendered

from baton.cli.config_fields import ROLES, build, fields_of
from baton.cli.serve import DEFAULT_PORTS, serve
from baton.config import NodeConfig

POD_IP = "10.1.2.3"
SECRETS = {
    "our-cluster": {"secret": "x" * 32},
    "our-keys": {"keys": "y" * 32},
    "our-tls": {"tls.crt": "", "tls.key": "", "ca.crt": ""},
    "public-tls": {"tls.crt": "", "tls.key": ""},
}
"""Of others, which value sets name: keys and contents."""


def variables(container: Document) -> dict[str, str]:
    """Those with a value of their own, as the container would have them."""
    found = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    names = [each["name"] for each in container["env"]]
    assert len(names) == len(set(names)), names
    return {**image_variables(), **found}


def image_variables() -> dict[str, str]:
    """BATON_ variables of the image."""
    words = (ROOT / "docker/Dockerfile").read_text().split()
    return dict(word.split("=", 1) for word in words if word.startswith("BATON_") and "=" in word)


def settings(role: str, container: Document, monkeypatch: Any) -> NodeConfig:
    """The configuration that `baton serve` makes of the container's arguments and variables. Raises
    click.ClickException for what it does not take."""
    known = {
        "POD_IP": POD_IP,
        **{each["name"]: each["value"] for each in container["env"] if "value" in each},
    }
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], each) for each in container["args"]]
    baton, word, said, *flags = arguments
    assert (baton, word, said) == ("baton", "serve", role)
    for name in os.environ:
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    for name, value in variables(container).items():
        monkeypatch.setenv(name, value)
    port, http_port = DEFAULT_PORTS[role]
    with serve.commands[role].make_context(role, flags) as context:
        return build(ROLES[role], context.params, {"port": port, "http_port": http_port})


def secret_of(rendered: Rendered, name: str) -> dict[str, str]:
    """Keys and contents of a secret: the chart's own, or one of SECRETS."""
    own = rendered.of("Secret")
    assert (name in own) != (name in SECRETS), name
    if name in own:
        return {key: b64decode(value).decode() for key, value in own[name]["data"].items()}
    return SECRETS[name]


def mounted(rendered: Rendered, pod: Document, folder: Path) -> dict[str, str]:
    """Lays the pod's secrets out below `folder`, with the modes that the pod says. Path in the container ->
    path here."""
    (container,) = pod["spec"]["containers"]
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    found = {}
    for mount in container["volumeMounts"]:
        secret = volumes[mount["name"]].get("secret")
        if secret is None:
            continue
        assert mount["readOnly"]
        for key, content in secret_of(rendered, secret["secretName"]).items():
            path = folder / mount["name"] / key
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
            path.chmod(secret["defaultMode"])
            found[f"{mount['mountPath']}/{key}"] = str(path)
    return found


def relocated(config: Any, paths: Mapping[str, str]) -> Any:
    """The configuration with paths of the container replaced; every file that it names must be among them."""
    texts = {name: getattr(config, name) for name in fields_of(type(config))}
    files = {name: text for name, text in texts.items() if isinstance(text, str) and text.startswith("/etc/")}
    assert files.keys() <= {name for name, text in texts.items() if text in paths}, files
    return dataclasses.replace(config, **{name: paths[text] for name, text in files.items()})
