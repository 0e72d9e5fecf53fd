"""The gateway finds its nodes (`finder`) in a static list, in a file (`address_file`), by DNS names (`dns`)
or in etcd (`etcd`), where workers register."""
