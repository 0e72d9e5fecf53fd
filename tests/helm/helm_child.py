"""Renders and checks a chart with Helm's own code, in a process of its own: away from its Go runtime.

stdin: JSON {"chart": folder, "renders": [{"name", "namespace", "values"}, ...]}
stdout: JSON {"lint": findings, "renders": [{"files": {template: text}} or {"error": text}, ...]}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python


def render(chart: Any, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"files": chart.render(job["values"], name=job["name"], namespace=job["namespace"])}
    except helm_python.HelmError as error:
        return {"error": str(error)}


def main() -> None:
    asked = json.load(sys.stdin)
    with helm_python.Chart.load(asked["chart"]) as chart:
        renders = [render(chart, job) for job in asked["renders"]]
    lint = helm_python.lint(asked["chart"], strict=True)["messages"]
    json.dump({"lint": lint, "renders": renders}, sys.stdout)


if __name__ == "__main__":
    main()
