"""How many nodes a traffic needs: the real schedulers and hand-off cores under a virtual clock, with steps
that take the time of a measured `profile`. `lengths` and `traffic` say what arrives, `runner`, `nodes` and
`deployment` simulate one layout of nodes, `search` looks for the smallest that meets its targets, `figures`
are what is told of one. Pure, but for the files that `profile` and `traffic` read."""
