"""Worker processes. Here is what all have in common: building an engine from a configuration, the shell
around its step thread, and the translation between messages and the engine's types. The two roles are in
`prefill` and `decode`, which know what is here and nothing of each other. The further processes of a worker
on several GPUs or hosts are in `ranks`, which knows `model`, `pool` and `runners` and nothing of cores and
shells."""
