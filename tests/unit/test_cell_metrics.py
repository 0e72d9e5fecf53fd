"""What a gateway's workers do together, as one model server."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from baton.gateway.cell_metrics import CellCollector, CellLoad, cell_load
from baton.gateway.routing import Router
from baton.rpc.metrics import LoadCollector
from baton.v1 import cache_pb2, common_pb2, node_pb2


def test_loads_of_decode_nodes_that_serve_are_added():
    now = [100.0]
    router, nodes = Router("cache", lambda: now[0]), SimpleNamespace(decode={})
    layout = common_pb2.Layout(groups=[common_pb2.KvGroup(), common_pb2.KvGroup()])
    for address, usable in (("h:1", True), ("h:2", True), ("h:3", False)):
        nodes.decode[address] = SimpleNamespace(usable=usable, info=node_pb2.NodeInfo(layout=layout))
        load = node_pb2.Load(waiting=3, prefilling=1, handing_off=2, running=4, available_pages=10)
        load.pages.total = 80
        router.update(address, cache_pb2.CacheUpdate(snapshot=True, page_size=16, load=load))
    assert cell_load(nodes, router, now[0]) == CellLoad(6, 14, 80, 20, 16)
    assert cell_load(nodes, router, now[0] + 60) == CellLoad(), "old reports say nothing"


def test_a_part_of_the_pools_is_in_use():
    registry = CollectorRegistry()
    CellCollector(lambda: CellLoad(waiting=6, running=14, pages=80, available=20, page_size=16), registry)
    assert registry.get_sample_value("vllm:kv_cache_usage_perc") == 0.75
    assert registry.get_sample_value("vllm:num_requests_waiting") == 6
    labels = {"block_size": "16", "num_gpu_blocks": "80"}
    assert registry.get_sample_value("vllm:cache_config_info", labels) == 1


def test_a_node_says_which_part_of_its_pool_is_in_use():
    """Pages of a pool are those of all its groups; of the available ones each group has as many."""
    layout = common_pb2.Layout(groups=[common_pb2.KvGroup(), common_pb2.KvGroup()])
    load, registry = node_pb2.Load(available_pages=10), CollectorRegistry()
    load.pages.total = 80
    registry.register(LoadCollector(lambda: "decode", lambda: load, lambda: node_pb2.NodeInfo(layout=layout)))
    assert registry.get_sample_value("baton_kv_usage", {"role": "decode"}) == 0.75
    load.pages.total = 0
    assert registry.get_sample_value("baton_kv_usage", {"role": "decode"}) == 0, "a tokenizer has no pool"


def test_an_encode_nodes_pool_holds_no_keys_and_values():
    load, registry = node_pb2.Load(), CollectorRegistry()
    load.pages.total = 80
    registry.register(LoadCollector(lambda: "encode", lambda: load, node_pb2.NodeInfo))
    assert registry.get_sample_value("baton_kv_usage", {"role": "encode"}) == 0


def test_without_a_worker_that_serves_there_is_no_room():
    """Else a picker takes a gateway that has lost its workers for the idlest of all."""
    registry = CollectorRegistry()
    CellCollector(CellLoad, registry)
    assert registry.get_sample_value("vllm:kv_cache_usage_perc") == 1
