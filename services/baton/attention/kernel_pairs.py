"""Which sglang-kernel fits which torch: its wheels are built for one torch release each."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_PAIRS = {"2.11": ("0.4.4",), "2.13": ("0.4.7", "0.4.8"), "2.14": ("0.4.9", "0.4.10")}
"""By torch release; 0.4.4 by trial, the others by what their metadata requires."""


def mismatch(torch_version: str | None = None, kernel_version: str | None = None) -> str | None:
    """One line that says what to install if the two installed (or given) versions do not fit; None if they
    fit, if the torch release is unknown here, or if either is not installed."""
    try:
        torch_version = torch_version or version("torch")
        kernel_version = kernel_version or version("sglang-kernel")
    except PackageNotFoundError:
        return None
    release = ".".join(torch_version.split(".")[:2])
    fitting = _PAIRS.get(release)
    if fitting is None or kernel_version in fitting:
        return None
    return (
        f"sglang-kernel {kernel_version} is not built for torch {torch_version}; "
        f"pip install sglang-kernel=={fitting[-1]}"
    )
