"""Options of vLLM and SGLang by other names here. docs/operations.md has them as a table."""

from __future__ import annotations

from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    "--allowed-origins": "--cors-origins",
    "--api-key": "--api-keys",
    "--api-server-count": "--gateways",
    "--block-size": "--page-size",
    "--chunked-prefill-size": "--token-budget",
    "--data-parallel-size": "--decode",
    "--dp-size": "--decode",
    "--enable-expert-parallel": "--ep",
    "--ep-size": "--ep",
    "--gpu-memory-utilization": "--memory-fraction",
    "--kv-cache-dtype": "--kv-dtype",
    "--max-model-len": "--context-length",
    "--max-num-batched-tokens": "--token-budget",
    "--max-num-seqs": "--max-rows",
    "--max-running-requests": "--max-rows",
    "--max-total-tokens": "--kv-tokens",
    "--mem-fraction-static": "--memory-fraction",
    "--model-path": "--model",
    "--schedule-policy": "--policy",
    "--scheduling-policy": "--policy",
    "--served-model-name": "--served-name",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--tensor-parallel-size": "--tp",
    "--tool-call-parser": "--tool-parser",
    "--tp-size": "--tp",
}
"""Their option -> Baton's."""
NOT_NEEDED: Mapping[str, str] = {
    "--chat-template": "the model's own is used",
    "--enable-auto-tool-choice": "tools need no option",
    "--enable-chunked-prefill": "it is always on",
    "--enable-prefix-caching": "it is always on",
    "--trust-remote-code": "no code of a checkpoint is run",
}
"""Their option -> what holds here without it."""
