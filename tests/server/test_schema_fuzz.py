"""Requests made from the OpenAPI document, right and wrong: no 5xx, replies as documented."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.process import ServerProcess, eventually

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import CHECKS, load_all_checks  # noqa: E402

load_all_checks()
positive_data_acceptance = CHECKS.get_one("positive_data_acceptance")


EXAMPLES = 30
WORK = ("/v1/chat/completions", "/v1/completions")
FACTS = ("/v1/models", "/v1/models/{name}", "/health", "/version", "/v1/speculation")
CASES = [(path, mode) for path in WORK for mode in GenerationMode]
CASES += [(path, GenerationMode.POSITIVE) for path in FACTS]  # nothing in them can be wrong


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_a_generated_request_is_answered_as_documented(
    server: ServerProcess, path: str, mode: GenerationMode
) -> None:
    schema: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    (operation,) = [o.ok() for o in schema.get_all_operations() if o.ok().path == path]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def hold(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)
            case.body["stream"] = len(str(case.body)) % 2 == 0
        response = case.call(timeout=60)
        # Ranges are the engine's: the document has types, so what fits it may still be refused.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    hold()
    eventually(server.is_idle)
