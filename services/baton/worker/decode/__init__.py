"""The decode role: `core` owns requests, `prompt_routing` decides where their prompts are computed, and
`remote_prefill` has prefill nodes compute them and fetches the pages. `shell` is what the node does with
messages, one `stream` for each caller, `peers` are the prefill nodes, `server` serves Decode.Generate."""
