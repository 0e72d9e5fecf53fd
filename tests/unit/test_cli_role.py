"""What `baton role` asks of a deployment before it changes a node."""

from __future__ import annotations

import pytest

from baton.cli.node_reports import NodeReport
from baton.cli.role import check_change
from baton.rpc.errors import BatonError
from baton.v1 import node_pb2


def report(role, address, context, health="SERVING"):
    info = node_pb2.NodeInfo(role=role, model=node_pb2.ModelInfo(context_length=context))
    return NodeReport(role, address, info, health=health)


@pytest.mark.parametrize(
    ("context", "others", "refused"),
    [
        (512, (4096, 2048), True),
        (2048, (4096, 2048), False),
        (4096, (2048,), False),
        (512, (512, 4096), False),
    ],
)
def test_a_worker_of_a_smaller_pool_decodes_only_by_force(context, others, refused):
    """The gateway accepts what each decode node can hold."""
    reports = [report("prefill", "h:1", context), report("prefill", "h:2", 4096)]
    reports += [report("decode", f"h:{10 + i}", other) for i, other in enumerate(others)]
    reports.append(NodeReport("decode", "h:20"))
    check_change(reports, "h:1", "decode", force=True)
    if not refused:
        check_change(reports, "h:1", "decode", force=False)
        return
    with pytest.raises(BatonError) as error:
        check_change(reports, "h:1", "decode", force=False)
    assert error.value.message == (
        "h:1 holds at most 512 tokens of prompt and output, 2048 are accepted now; --force makes it a decode "
        "node anyway, and longer requests are refused"
    )
