"""Usage tells of drafts and tiers in the dialects that have no field for them; without these it has none."""

from __future__ import annotations

from types import SimpleNamespace

from baton.api.anthropic_api import MessagesAnswer
from baton.api.responses_answers import usage_of
from baton.api.usage_details import add_usage_details, usage_details
from baton.v1 import common_pb2, inference_pb2


def finished(**fields):
    return inference_pb2.Finished(usage=inference_pb2.Usage(prompt_tokens=9, output_tokens=5, **fields))


def test_drafts_where_there_were_any():
    drafts = {"drafted_tokens": 7, "accepted_drafts": 3}
    for fields, expected in ((drafts, drafts), ({}, None)):
        assert usage_of(finished(**fields)).get("baton") == expected
        answer = MessagesAnswer(SimpleNamespace(prompt_tokens=9, name="a"), "model")
        (delta, _) = answer.end(finished(**fields))
        assert delta["usage"].get("baton") == expected and answer.whole()["usage"].get("baton") == expected


def test_tiers_where_cached_tokens_were_elsewhere_than_in_the_pool():
    tiers = common_pb2.CachedTiers(host_tokens=3, disk_tokens=1, peer_tokens=2)
    with_tiers = finished(cached_tokens=8, cached_tiers=tiers)
    expected = {"cached_tokens": {"gpu": 2, "host": 3, "disk": 1, "peer": 2}}
    assert usage_of(with_tiers)["baton"] == expected
    answer = MessagesAnswer(SimpleNamespace(prompt_tokens=9, name="a"), "model")
    answer.end(with_tiers)
    assert answer.whole()["usage"]["baton"] == expected
    total = inference_pb2.Usage()
    for each in (with_tiers, with_tiers, finished(cached_tokens=1)):
        add_usage_details(total, each.usage)
    assert usage_details(total) == {"cached_tokens": {"gpu": 5, "host": 6, "disk": 2, "peer": 4}}
    assert "baton" not in usage_of(finished(cached_tokens=8))


def test_image_tokens_where_there_were_images():
    seen = finished(image_tokens=6)
    assert usage_of(seen)["baton"] == {"image_tokens": 6}
    answer = MessagesAnswer(SimpleNamespace(prompt_tokens=9, name="a"), "model")
    answer.end(seen)
    assert answer.whole()["usage"]["baton"] == {"image_tokens": 6}
    total = inference_pb2.Usage()
    for each in (seen, seen, finished()):
        add_usage_details(total, each.usage)
    assert usage_details(total) == {"image_tokens": 12}
