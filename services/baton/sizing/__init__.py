"""How many nodes a traffic needs. The real schedulers and hand-off cores run under a virtual clock; steps
take the time of a measured `profile`. `traffic` makes the requests, `nodes`, `gateway` and `simulation`
simulate one layout of nodes, and `search` finds the smallest that meets the targets."""
