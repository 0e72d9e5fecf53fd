"""The hand-off of a prompt from a prefill node to a decode node: names of attempts, leases, and the two
sides' state machines (`prefill_side`, `decode_side`), which talk in plain `messages`. Pure: the shells in
prefill/ and decode/ put the messages on the wire."""
