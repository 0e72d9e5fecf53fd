"""The `baton` command: running processes (`serve`, `up`), talking to them (`generate`, `chat`) and looking at
them (`status`, `bench`, `verify`, `doctor`, `demo`). A module a command, imported only when the command runs;
`options.py` turns the configuration dataclasses into flags, `supervisor.py` keeps child processes alive."""
