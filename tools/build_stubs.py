"""Generates the Python stubs of `proto/baton/v1` and `proto/baton/etcd` into `services/baton`.

Runs as a build hook of hatchling (wheel, sdist and editable installs alike), and by hand as
`python tools/build_stubs.py`. A folder is named after its place in proto/ because protoc writes
`from baton.v1 import ...` into what it generates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("v1", "etcd")
"""Below proto/baton and services/baton."""


def generate(root: Path = ROOT) -> None:
    """Runs protoc; raises RuntimeError when it fails."""
    from grpc_tools import protoc

    out = root / "services"
    sources: list[str] = []
    for folder in FOLDERS:
        target = out / "baton" / folder
        target.mkdir(parents=True, exist_ok=True)
        (target / "__init__.py").write_text(
            f'"""Stubs generated from proto/baton/{folder}; do not edit."""\n'
        )
        sources += sorted(str(path) for path in (root / "proto" / "baton" / folder).glob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{root / 'proto'}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed on proto/baton (its messages are above)")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand where hatchling is not installed
    pass
else:

    class StubsBuildHook(BuildHookInterface[Any]):
        """Puts the stubs in place before files are collected."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            generate()


if __name__ == "__main__":
    generate()
    print("wrote", *(ROOT / "services" / "baton" / folder for folder in FOLDERS), file=sys.stderr)
