"""The gateway: the public gRPC service and the OpenAI HTTP API in front of tokenizer and decode nodes.

`server.py` is the process, `gateway.py` its state, `requests.py` one request from `start` to its terminal
event. The pure core does no I/O: `token_log.py` (a request's output, stop strings), `attempts.py` (at which
decode node a request runs), `routing.py` (which nodes), `handoff_cost.py` (split or local), `prompts.py`
(sessions), `admission.py` (checks before any work starts). `inference.py` serves gRPC. `http_api.py` serves
the OpenAI API, which `openai_protocol.py`, `openai_answers.py` and `openai_errors.py` translate to the
messages of baton.v1.Inference and back. `authentication.py` checks callers and their limits.
"""
