"""What every process does the same way over gRPC: errors and their Status, channels, the outbox that merges
instead of growing, a client's end of a stream, the reconnecting link, parameter checks, logs, metrics, doors
(who may call), and the shell that runs a node (`baton.rpc.node`). Nothing here knows the engine. Import the
modules; this file imports none of them.
"""
