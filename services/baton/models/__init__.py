"""Dense decoders. `config` lists the architectures, reads config.json and refuses what is not supported,
`decoder` is their shared forward pass (`fused`: on a Hopper GPU), `loader` reads checkpoints onto a device.
Import the modules; this package imports nothing."""
