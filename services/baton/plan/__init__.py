"""How many nodes a traffic needs: the real schedulers and hand-off cores under a virtual clock, with steps
that take the time of a measured `profile`. `traffic` says what arrives, `nodes`, `gateway` and
`simulation` simulate one layout of nodes, `search` looks for the smallest that meets its targets.
Pure, but for the files that `profile` and `traffic` read."""
