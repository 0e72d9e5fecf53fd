"""The gateway: the public gRPC service and the OpenAI HTTP API in front of tokenizer and decode nodes.

`server.py` is the process, `gateway.py` what it owns, `requests.py` one request from `start` to its
terminal event. The pure core does no I/O: `token_log.py` (what a request has produced, and what of that its
client has seen), `stop.py` (stop strings), `routing.py` (which nodes), `session.py` (turns that continue
one token sequence), `admission.py` (what is refused before any work starts). `inference.py` and
`http_api.py` are two faces of the same requests: the HTTP API (`openai_protocol.py`, `openai_answers.py`,
`openai_errors.py`) translates to the messages of baton.v1.Inference and back. `authentication.py` says who
may ask, and how much.
"""
