"""`python -m baton.cli.worker_check WORKERS`: whether workers would start. Commands that start them ask it
in a process of its own: they run as long as the workers do, and load no torch."""

from __future__ import annotations

import json
import sys

import torch

from baton.cli.config_fields import build
from baton.config import WorkerConfig
from baton.model_path import CheckpointError, resolve
from baton.models.config import read_config
from baton.models.loader import check_tensors
from baton.models.weight_plan import weight_plan


def _check_model(config: WorkerConfig) -> None:
    """Raises CheckpointError for one that cannot be served."""
    path = resolve(config.model)
    read_config(path, config.context_length or None, config.model_impl)
    if config.load_format != "dummy":
        check_tensors(path, config.context_length or None, config.model_impl, config.quantization)
    head = config.quantize_head and config.quantization != "fp8"  # with that only GPUs quantize it
    weight_plan(path, torch.device("meta"), config.quantization, head, config.load_format)


def _check_all(config: WorkerConfig) -> None:
    """What the worker itself checks first. Raises CheckpointError; exits with a line for all else."""
    from baton.attention.registry import NoBackend  # here: imports that take a second
    from baton.rpc.errors import BatonError
    from baton.worker.checks import checked

    try:
        checked(config)
    except (BatonError, NoBackend) as error:
        sys.exit(str(error))


def main(workers: str) -> None:
    """JSON: of each worker its model's name, fields of its WorkerConfig, and whether more than the model is
    checked. Exits with 1 after a line on stderr that says what is wrong."""
    for name, fields, more in json.loads(workers):
        config = build(WorkerConfig, fields, {})
        try:
            _check_model(config)
            if more:
                _check_all(config)
        except CheckpointError as error:
            sys.exit(f"model {name!r}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
