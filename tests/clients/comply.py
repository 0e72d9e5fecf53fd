"""The suites llm-comply (https://github.com/Oaklight/llm-comply) and canitoolcall against a deployment; runs
in .venv/clients.

Arguments: the API's URL and the model's name. Prints results as JSON, a line for each of chat, responses,
messages and probe. All requests run at the same time: in one batch they cost a small part of what they cost
one by one. Every request is the suite's own, but greedy and of a bounded length: a small model may write for
ever ("Count from 1 to 5": the token that ends the answer and a line's end are 0.007 apart). Whose answer was
cut is asked again, at a low temperature.
Nothing is skipped for the sake of a model's name. canitoolcall's scenarios that expect calls require them,
because whether a model of 135 million parameters calls of its own accord says nothing about the server.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import llm_comply
import llm_comply.http as http
from canitoolcall.probe import BUILTIN_SCENARIOS, EQUIVALENCE_CHECK, ProbeReport, Scenario, probe
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestResult
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase, TestCategory
from llm_comply.tests.anthropic import ANTHROPIC_TESTS
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

SECONDS = 600
TRIES = 3
TOKENS = 150
"""Of an answer to canitoolcall."""
LONGEST = 200
"""Tokens of any other answer."""
SUITES = {
    "chat": (OPENAI_CHAT_TESTS, "openai_chat.json", "max_completion_tokens"),
    "responses": (OPEN_RESPONSES_TESTS, "openresponses.json", "max_output_tokens"),
    "messages": (ANTHROPIC_TESTS, "anthropic.json", "max_tokens"),
}


class Suite:
    """One of llm-comply's, all its cases at the same time in threads of `pool`."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, model: str, name: str) -> None:
        cases, spec, self._limit = SUITES[name]
        config = ComplianceConfig(base_url=url, api_key="none", model=model, timeout=SECONDS)
        path = Path(llm_comply.__file__).parent / "specs" / spec
        self._runner = TestRunner(config, [], SpecLoader(str(path)))
        self._running = [pool.submit(self._ask, case) for case in cases]

    def results(self) -> list[TestResult]:
        return [future.result() for future in self._running]

    def _ask(self, case: TestCase) -> TestResult:
        result = self._run(case, 0)
        for _ in range(TRIES):
            if not _cut(result):
                break
            result = self._run(case, 0.3)
        return result

    def _run(self, case: TestCase, temperature: float) -> TestResult:
        def body(config: ComplianceConfig) -> dict[str, Any]:
            made = {**case.build_request(config), "temperature": temperature}
            # What is to be refused stays as it is, and compaction has a bound of its own.
            if case.category is not TestCategory.ERROR_HANDLING and not case.endpoint.endswith("/compact"):
                # A limit of thinking must stay below that of the whole answer.
                longest = LONGEST + made.get("thinking", {}).get("budget_tokens", 0)
                made[self._limit] = min(made.get(self._limit, longest), longest)
            return made

        return self._runner.run_one(replace(case, build_request=body, skip_reason=None))


def _cut(result: TestResult) -> bool:
    """Whether a case failed because its answer became too long."""
    reasons = ("got 'length'", "got 'max_tokens'", "got 'incomplete'")
    return bool(result.errors) and all(error.endswith(reasons) for error in result.errors)


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
    # A client for each request: llm-comply's own would take connections again that have been idle for so long
    # that the server has closed them.
    http._get_client = http.Client
    with ThreadPoolExecutor(sum(len(cases) for cases, *_ in SUITES.values())) as pool:
        suites = {name: Suite(pool, url, model, name) for name in SUITES}
        print(json.dumps({"probe": probed(url, model).to_dict()["outcomes"]}))
        for name, suite in suites.items():
            print(json.dumps({name: [each.to_dict() for each in suite.results()]}))


if __name__ == "__main__":
    main()
