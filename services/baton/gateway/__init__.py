"""The gateway: the public gRPC service and the HTTP APIs of OpenAI and Anthropic in front of tokenizer and
decode nodes.

`server.py` is the process, `gateway.py` its state, `requests.py` one request from `start` to its terminal
event. The pure core does no I/O: `token_log.py` (a request's output, stop strings), `attempts.py` (at which
decode node a request runs), `routing.py` (which nodes), `handoff_cost.py` (split or local), `prompts.py`
(sessions), `admission.py` (checks before any work starts). `inference.py` serves gRPC. `http_api.py` serves
HTTP: each API has a file of its routes (`…_api.py`), one that reads its requests into the messages of
baton.v1.Inference (`…_protocol.py`), and one that makes its answers of them (`…_answers.py`); `openapi.py`
describes them all. `parsers/` reads tool calls and reasoning in what models write, `tool_grammars.py`
enforces them. `authentication.py` checks callers and their limits.
"""
