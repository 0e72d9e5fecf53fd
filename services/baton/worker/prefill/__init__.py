"""The prefill process: `server` is the shell that serves Prefill.Run and page bytes, `core` drives the
prefill side of the hand-off from the step loop."""
