"""Which nodes there are: the gateway finds them (`finder`) by a static list, by DNS names (`dns`) or in etcd
(`etcd`), where workers write themselves down (`registration`). `members` is the pure part: what is known of
one role's nodes, and what changed."""
