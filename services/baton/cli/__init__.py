"""The `baton` command. Each command has a module, imported only when the command runs. `options.py` turns the
configuration dataclasses into flags; `deployment.py` and `supervisor.py` run a deployment's processes."""
