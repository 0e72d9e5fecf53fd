"""Alert rules and the dashboard of deploy/observability, as Prometheus' own tool sees them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "deploy/observability"
PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: prometheus)")
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "--lint-fatal", "baton.rules.yml"),
        ("test", "rules", "baton.rules.test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(command):
    done = subprocess.run(
        [PROMTOOL, *command], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_one_that_grafana_reads():
    dashboard = json.loads((FOLDER / "grafana/baton.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & places and max(x for x, _ in cells) < 24, panel["title"]
        places |= cells
        assert all(target["expr"] for target in panel.get("targets", ()))
