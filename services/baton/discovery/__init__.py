"""The gateway finds its nodes (`finder`) in a static list, by DNS names (`dns`) or in etcd (`etcd`), where
workers register."""
