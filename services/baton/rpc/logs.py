"""Structured log lines on stderr: key=value, or JSON.

Prompts, texts and tokens are logged only with --log-prompts: code that logs an error never logs the request
or variables.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


FORMS = ("text", "json")


class _Stderr:
    """Writes finished lines. The reader may close the pipe; logging must not fail then."""

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
        except (OSError, ValueError):
            return

    debug = info = warning = error = critical = msg


def configure(role: str, level: str = "info", form: str = "text", name: str = "") -> None:
    """Sets up this process's log, libraries' own loggers included (theirs from warnings up).

    Every line carries `role`, and `name` where one is given. form: text or json. Raises ValueError for an
    unknown level or form.
    """
    if level not in LEVELS:
        raise ValueError(f"--log-level: unknown log level {level!r}: use one of {', '.join(LEVELS)}")
    if form not in FORMS:
        raise ValueError(f"--log-format: unknown format {form!r}: use one of {', '.join(FORMS)}")

    def origin(_logger: Any, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        event.setdefault("role", role)
        if name:
            event.setdefault("name", name)
        return event

    shared: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        origin,
    ]
    rendering: list[structlog.types.Processor]
    if form == "json":
        # Not structlog's own dict_tracebacks: it shows the variables of each frame, prompts among them.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        rendering = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    else:
        rendering = [
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(
                key_order=["timestamp", "level", "role", "event"], drop_missing=True, bool_as_flag=False
            ),
        ]
    # Bypasses `logging`, which halves the cost of a line per request at the gateway.
    structlog.configure(
        processors=[*shared, *rendering],
        logger_factory=lambda *_: _Stderr(),
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        cache_logger_on_first_use=True,
    )
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, *rendering])
    )
    handler.addFilter(_ours)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def _ours(record: logging.LogRecord) -> bool:
    """gRPC logs some faults of peers as errors of this process, with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ == "ExecuteBatchError":
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
        record.msg, record.args = "a peer has left while it was being sent to", ()
    # gRPC quotes metadata that is not UTF-8 in full: it may be a damaged secret.
    return not (isinstance(error, UnicodeDecodeError) and record.name.startswith("grpc."))


def is_configured() -> bool:
    return bool(structlog.is_configured())


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """May be made before `configure`; earlier lines go where structlog sends them."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
