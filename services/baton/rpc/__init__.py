"""What every process does the same way over gRPC and HTTP, and nothing of the engine.

Server: `node.py` runs a process (bind, load, serve, drain, stop), `bind.py` its ports,
`interceptors.py` what happens before a servicer, `outbox.py` the server's side of a
stream, `health.py`, `metrics.py`, `http_server.py`. Client: `channel.py`, `client_stream.py` one call,
`link.py` a stream that reconnects. Both: `errors.py` (one exception, and its Status), `validate.py`
(parameter checks), `tasks.py`, `logs.py`, `address.py`. Import the modules; this file imports none of them.
"""
