"""Make a model directory without weights: config.json of a shape and a tokenizer.

    python tools/make_shape.py 8b ./qwen3-8b
    baton up --model ./qwen3-8b --load-format dummy

The weights are then random, and always the same: fit to measure speed, not to read answers.
"""

from __future__ import annotations

import pathlib

import click

from baton.bench.shapes import SHAPES, write_shape


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("folder", type=click.Path(file_okay=False, path_type=pathlib.Path))
def main(shape: str, folder: pathlib.Path) -> None:
    """Make FOLDER a model directory of a SHAPE, for --load-format dummy."""
    write_shape(shape, folder)
    click.echo(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


if __name__ == "__main__":
    main()
