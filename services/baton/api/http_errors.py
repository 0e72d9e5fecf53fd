"""Errors as HTTP responses, in the form of the API whose path was asked."""

from __future__ import annotations

import math
from typing import Any

from fastapi.responses import JSONResponse

from baton.api import openai_errors
from baton.api.field_names import ANTHROPIC_PATH
from baton.api.openai_errors import CONTEXT_CODE, ApiError

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def response(error: ApiError, path: str) -> JSONResponse:
    """path: of the request."""
    anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil((error.retry_after_ms or 1000) / 1000)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = anthropic_body(error) if anthropic else openai_errors.body(error)
    return JSONResponse(body, status_code=error.status, headers=headers)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """In Anthropic's form. Clients read the figures of a full context out of its text."""
    message = error.message
    if error.code == CONTEXT_CODE and error.metadata:
        figures = [int(error.metadata[name]) for name in ("prompt_tokens", "max_tokens", "context_length")]
        prompt, output, context = figures
        message = f"prompt is too long: {prompt} tokens > {min(context, prompt - 1)} maximum"
        if prompt < context:
            message = f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}"
            message += ", decrease input length or `max_tokens` and try again"
    kind = "invalid_request_error" if error.status < 499 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": message}}
