"""How long a vision tower takes for images on a GPU, beside its FLOPs: random weights, Qwen3-VL's sizes.

    python benchmarks/vision_speed.py --out DIR

FLOPs are those of the products and of attention, nothing padded; the floor is 779 TFLOP/s, what a Hopper GPU
reaches in a large product of bfloat16. Prints a line for one image of a megapixel and for eight; with
--profile the kernels of one. Writes DIR/vision_speed.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig

from baton.bench.machine import machine, versions
from baton.models.vision import load_tower

FLOPS = 779e12


def flops(vision: Any, patches: int) -> float:
    """Of one image."""
    hidden, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
    layer = patches * (4 * hidden**2 + 2 * hidden * vision.intermediate_size) + 2 * patches**2 * hidden
    tokens = patches // vision.spatial_merge_size**2
    mergers = 1 + len(vision.deepstack_visual_indexes)
    merge = tokens * (merged**2 + merged * vision.out_hidden_size) * mergers
    return 2.0 * (vision.depth * layer + merge)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's height and width")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    config = Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"], vision_config={"out_hidden_size": 4096}
    )
    device, vision = torch.device(options.device), config.vision_config
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tower = load_tower(Path(folder), torch.bfloat16, device, "dummy")
    image = torch.randint(0, 256, (options.side, options.side, 3), dtype=torch.uint8)
    found = []
    for count in (1, 8):
        times = []
        for _ in range(options.repeats + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            tower.encode([image] * count)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        floor = count * flops(vision, (options.side // vision.patch_size) ** 2) / FLOPS
        ms = statistics.median(times[2:]) * 1e3
        line = {"images": count, "ms": ms, "floor_ms": floor * 1e3, "ratio": ms / floor / 1e3}
        found.append(line)
        print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            tower.encode([image])
            torch.cuda.synchronize()
        print(
            profiler.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=80)
        )
    report = {"machine": machine(), "versions": versions(""), "vision": found}
    (options.out / "vision_speed.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
