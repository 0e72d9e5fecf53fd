"""The decode process: `core` owns requests and decides where their prompts are computed, `server` serves
Decode.Generate, one `stream` for each caller, `peers` are the prefill nodes whose pages it pulls, `overload`
predicts which requests would miss their deadlines."""
