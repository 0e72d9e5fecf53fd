"""Prints what pyproject.toml requires, one line each, with the extras that are named: what an image needs
before the package itself, so that a change in the code does not install all of it again."""

import sys
import tomllib
from pathlib import Path

path, *extras = sys.argv[1:]
project = tomllib.loads(Path(path).read_text())["project"]
print(*project["dependencies"], sep="\n")
for extra in extras:
    print(*project["optional-dependencies"][extra], sep="\n")
