"""Options of vLLM and SGLang by other names here. docs/operations.md has them as a table."""

from __future__ import annotations

from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    "--api-key": "--api-keys",
    "--block-size": "--page-size",
    "--chunked-prefill-size": "--token-budget",
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
    "--served-model-name": "--served-name",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--tensor-parallel-size": "--tp",
    "--tool-call-parser": "--tool-parser",
    "--tp-size": "--tp",
}
"""Their option -> Baton's."""
