"""The hand-off of a prompt from a prefill node to a decode node: leases, and the state machines of the two
sides (`prefill_side`, `decode_side`), which exchange plain `messages`. Pure: the shells of the workers
send the messages."""
