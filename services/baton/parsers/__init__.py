"""From what a model writes to its reasoning, its answer and its tool calls. Pure and incremental.

`reader.py` is how all of them read a text that comes in pieces; `tools.py` what those of tool calls share;
then each format has a file. `registry.py` finds a parser by its name.
"""
