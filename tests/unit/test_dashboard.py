"""The dashboard of deploy/observability, read by Grafana's own types: what they do not know they drop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

FILE = Path(__file__).parents[2] / "deploy/observability/grafana/baton.json"


def dropped(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths of what is not in `read`, or is another value there."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            if key in read:
                yield from dropped(value, read[key], f"{path}.{key}")
            elif value not in ("", [], {}):
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, pair in enumerate(zip(given, read, strict=True)):
            yield from dropped(*pair, f"{path}[{index}]")
    elif given != read:
        yield path


def read(dashboard: Any) -> Any:
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def test_grafana_knows_every_field_of_the_dashboard():
    dashboard = json.loads(FILE.read_text())
    assert len(dashboard["panels"]) > 20
    assert list(dropped(dashboard, read(dashboard))) == []


def test_a_field_that_it_does_not_know_is_noticed():
    dashboard = json.loads(FILE.read_text())
    dashboard["panels"][1]["options"]["colorMod"] = "value"
    dashboard["panels"][3]["targets"][0]["exp"] = "1"
    assert list(dropped(dashboard, read(dashboard))) == [
        ".panels[1].options.colorMod",
        ".panels[3].targets[0].exp",
    ]
