"""A worker.core.CoreShell that keeps what its core tells it."""

from __future__ import annotations


class Shell:
    def __init__(self, send=lambda step, outputs, effects: None):
        self.send, self.retired, self.observed = send, [], 0

    def retire(self, step):
        self.retired.append(step)

    def want_images(self, request, images):
        raise AssertionError("no request here has images")

    def observe(self):
        self.observed += 1
