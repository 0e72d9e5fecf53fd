"""The gateway: the public gRPC service, and what HTTP (`api`) does with requests, in front of tokenizer and
decode nodes.

`gateway.py` is its state, `request.py` one request from `start` to its terminal event. The pure core does no
I/O: `token_log.py` (a request's output), `resume.py` (at which decode node a request runs), `routing.py`
(which nodes), `split_decision.py` (split or local), `prompts.py` (sessions), `admission.py` (checks before
any work starts). `grpc_inference.py` serves gRPC, `decode_client.py` and `tokenizer_client.py` are its peers,
`worker_registry.py` the workers that there are. `tool_grammars.py` enforces tool calls.
"""
