"""Measured step costs that workers keep in a file (`--step-cost`), so that a restart need not measure.

A line a measurement, in JSON: `for` is all that decides what a step costs, `step` the StepCost. Lines are
only added, each by one write, so that workers which start together can share a file.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import baton
from baton.cgroups import processor
from baton.rpc.logs import get_logger
from baton.step_cost import StepCost

if TYPE_CHECKING:
    from baton.worker.engine import Engine

_log = get_logger()


def cost_key(engine: Engine) -> dict[str, Any]:
    """What decides what the engine's steps cost, as JSON has it."""
    config, model, device = engine.config, engine.model_info, engine.device
    return {
        "baton": baton.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": model.fingerprint,
        "dtype": model.dtype,
        "quantization": [config.quantization, config.quantize_head],
        "ranks": [config.tp, config.ep, config.nnodes],
        "attention": engine.attention,
        "sizes": [config.token_budget, config.max_rows, engine.layout.page_size, engine.pool.num_pages],
        "context": model.context_length,
        "overlap": engine.overlap,
    }


def read_kept(path: Path, key: dict[str, Any]) -> StepCost | None:
    """The newest cost kept for this key; None: there is none. What cannot be read is logged."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("kept step costs cannot be read: measuring", path=str(path), error=error.strerror)
        return None
    for number in range(len(lines), 0, -1):
        try:
            line = json.loads(lines[number - 1])
            if line["for"] != key:
                continue
            cost = StepCost(**{name: float(value) for name, value in line["step"].items()})
            if not all(math.isfinite(each) and each >= 0 for each in astuple(cost)) or not any(astuple(cost)):
                raise ValueError("no costs")
            return cost
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            _log.warning("a line of kept step costs is damaged: left out", path=str(path), line=number)
    return None


def keep(path: Path, key: dict[str, Any], cost: StepCost) -> None:
    """Adds it. A file that cannot be written is logged."""
    line = json.dumps({"for": key, "step": asdict(cost)})
    try:
        with path.open("a+b", buffering=0) as file:
            whole = file.seek(0, 2) == 0 or (file.seek(-1, 2), file.read(1))[1] == b"\n"
            file.write(f"{'' if whole else chr(10)}{line}\n".encode())
    except OSError as error:
        _log.warning("step costs cannot be kept", path=str(path), error=error.strerror)
