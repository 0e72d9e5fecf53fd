"""The suites llm-comply (https://github.com/Oaklight/llm-comply) and canitoolcall against a deployment; runs
in .venv/clients.

Arguments: the API's URL and the model's name. Prints results as JSON, a line for each of chat, responses,
messages and probe. All requests run at the same time: in one batch they cost a small part of what they cost
one by one. Every request is the suite's own, but greedy: a small model that samples may write for ever.
Nothing is skipped for the sake of a model's name. canitoolcall's scenarios that expect calls require them,
because whether a model of 135 million parameters calls of its own accord says nothing about the server.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import llm_comply
from canitoolcall.probe import BUILTIN_SCENARIOS, EQUIVALENCE_CHECK, ProbeReport, Scenario, probe
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestResult
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase
from llm_comply.tests.anthropic import ANTHROPIC_TESTS
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

SECONDS = 300
TRIES = 3
TOKENS = 150
"""Of an answer to canitoolcall: the model may go on with a list for ever."""
SUITES = {
    "chat": (OPENAI_CHAT_TESTS, "openai_chat.json"),
    "responses": (OPEN_RESPONSES_TESTS, "openresponses.json"),
    "messages": (ANTHROPIC_TESTS, "anthropic.json"),
}


def greedy(case: TestCase) -> TestCase:
    build = case.build_request
    return replace(case, build_request=lambda config: {**build(config), "temperature": 0}, skip_reason=None)


def comply(pool: ThreadPoolExecutor, url: str, model: str, name: str) -> list[Future[TestResult]]:
    cases, spec = SUITES[name]
    config = ComplianceConfig(base_url=url, api_key="none", model=model, timeout=SECONDS)
    path = Path(llm_comply.__file__).parent / "specs" / spec
    runner = TestRunner(config, [], SpecLoader(str(path)))
    return [pool.submit(runner.run_one, greedy(case)) for case in cases]


def calling(scenario: Scenario) -> Scenario:
    body = {**scenario.extra_body, "max_tokens": TOKENS}
    wanted = scenario.expect.tool_names and scenario.tool_choice == "auto"
    return replace(scenario, extra_body=body, tool_choice="required" if wanted else scenario.tool_choice)


def probed(url: str, model: str) -> ProbeReport:
    """Once more where an answer and its stream differ, as the suite advises: with other rows beside them a
    near tie of two tokens may fall either way."""
    scenarios = [calling(scenario) for scenario in BUILTIN_SCENARIOS]
    for _ in range(TRIES):
        report = probe(url, model, scenarios=scenarios, timeout_s=SECONDS, concurrency=2 * len(scenarios))
        if all(each.status == "pass" for each in report.outcomes if each.check == EQUIVALENCE_CHECK):
            break
    return report


def main() -> None:
    url, model = sys.argv[1:]
    with ThreadPoolExecutor(sum(len(cases) for cases, _ in SUITES.values())) as pool:
        running = {name: comply(pool, url, model, name) for name in SUITES}
        print(json.dumps({"probe": probed(url, model).to_dict()["outcomes"]}))
        for name, results in running.items():
            print(json.dumps({name: [each.result().to_dict() for each in results]}))


if __name__ == "__main__":
    main()
