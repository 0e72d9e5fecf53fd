import pytest
import torch


def pytest_collection_modifyitems(items):
    """Everything here needs a Hopper GPU and sgl_kernel."""
    from baton.attention.fa3 import Fa3Attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = Fa3Attention.available(device)
    if problem is not None:
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=f"GPU tests: {problem}"))
