"""Generates the Python stubs of `proto/baton/v1` into `services/baton/v1`.

Runs as a build hook of hatchling (wheel, sdist and editable installs alike), and by hand as
`python tools/build_stubs.py`. The folder is named after the proto package because protoc writes
`from baton.v1 import ...` into what it generates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "services" / "baton" / "v1"


def generate(root: Path = ROOT) -> None:
    """Runs protoc; raises RuntimeError when it fails."""
    from grpc_tools import protoc

    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / "__init__.py").write_text('"""Stubs generated from proto/baton/v1; do not edit."""\n')
    out = root / "services"
    sources = sorted(str(path) for path in (root / "proto" / "baton" / "v1").glob("*.proto"))
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
        raise RuntimeError("protoc failed on proto/baton/v1 (its messages are above)")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand where hatchling is not installed
    pass
else:

    class StubsBuildHook(BuildHookInterface[Any]):
        """Puts the stubs in place before files are collected."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            generate(Path(self.root))


if __name__ == "__main__":
    generate()
    print(f"wrote {TARGET}", file=sys.stderr)
