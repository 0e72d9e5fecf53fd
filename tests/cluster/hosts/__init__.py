"""Machines for tests: network namespaces (`host`), cables between them that can be slow, bad or cut
(`cables`), and a deployment whose processes run on them (`lan`). Needs root and iproute2."""
