"""Dense decoders. `registry` knows the architectures, `config` reads config.json and refuses what is not
computed, `decoder` is the one forward pass they share, `weights` says which tensors a checkpoint holds,
`loader` finds checkpoints and brings them to a device. Import the modules; this package imports nothing."""
