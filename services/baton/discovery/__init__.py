"""Which nodes there are: the gateway finds them (`finder`) by a static list, by DNS names (`dns`) or in etcd
(`etcd`), where workers register."""
