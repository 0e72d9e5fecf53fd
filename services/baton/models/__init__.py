"""Model families, dense and with experts. `config` reads config.json and refuses what is not supported,
`registry` names the module of each architecture, `decoder` is the forward pass that they share (`fused`:
on a Hopper GPU), `loader` reads checkpoints onto a device. Import the modules; this package imports
nothing."""
