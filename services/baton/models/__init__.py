"""Dense decoders. `registry` lists the architectures, `config` reads config.json and refuses what is not
supported, `decoder` is their shared forward pass, `weights` maps a checkpoint's tensors, `loader` loads
checkpoints to a device. Import the modules; this package imports nothing."""
