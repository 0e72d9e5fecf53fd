"""Who may call a process, and what a caller shows: secrets, keys, certificates and tickets.

`cluster.py` is for the processes of a deployment (secret, mutual TLS), `api_keys.py` for clients of a
gateway, `gateway.py` checks both there, `interceptor.py` at every gRPC server. `client_credentials.py` is the
client's side, `private_files.py` reads what only its user may see, `resume_ticket.py` seals what a client
keeps of a request. `api` reads HTTP's headers, and `cli` finds the secrets of deployments on this machine.
"""
