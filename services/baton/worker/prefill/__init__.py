"""The prefill role: `core` computes prompts for holders and lends them the pages, `shell` is what it does
with messages, `server` serves Prefill.Run and page bytes."""
