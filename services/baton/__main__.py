"""`python -m baton`: the same as `baton`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory, where in /tmp anybody may have put modules

from baton.cli.main import main

main()
