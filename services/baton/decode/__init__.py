"""The decode process: `core` owns requests and decides where their prompts are computed, `server` is the
shell that serves Decode.Generate to `callers`, `peers` are the prefill nodes it pulls from."""
