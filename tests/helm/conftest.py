from __future__ import annotations

import pytest
from chart import Document, Rendered, ask_helm
from value_sets import APART, REFUSED, SETS

Helm = tuple[list[Document], dict[str, Rendered]]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Findings of lint, and all renderings by name, those that must be refused too."""
    jobs = {**SETS, **{f"refused {word}": ("baton", values) for word, values in (REFUSED | APART).items()}}
    lint, rendered = ask_helm(list(jobs.values()))
    return lint, dict(zip(jobs, rendered, strict=True))


@pytest.fixture(params=list(SETS))
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    found = helm[1][request.param]
    assert not found.error, found.error
    return found
