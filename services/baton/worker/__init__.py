"""What prefill and decode nodes have in common: building an engine from a configuration, the shell around its
step thread, and the translation between messages and the engine's types."""
