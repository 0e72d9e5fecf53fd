"""Prints the requirements of pyproject.toml and of the given extras, one per line. An image installs them
before the package, so that a change in the code does not install them again."""

import sys
import tomllib
from pathlib import Path

path, *extras = sys.argv[1:]
project = tomllib.loads(Path(path).read_text())["project"]
print(*project["dependencies"], sep="\n")
for extra in extras:
    print(*project["optional-dependencies"][extra], sep="\n")
