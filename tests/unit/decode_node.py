"""A decode core without prefill nodes, driven turn by turn, with a clock of its own."""

from __future__ import annotations

from core_shell import Shell
from hash_runner import HashRunner

from baton.config import DecodeConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_loop import StepPipeline
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.worker.decode.core import DecodeCore
from baton.worker.decode.types import FailedOutput, Key

STEP = 0.02
PAGES, SIZE, ROWS = 400, 4, 8


class Runner(HashRunner):
    """Raises the errors of `fail`, one a step; None: that step succeeds."""

    def __init__(self, where="launch"):
        super().__init__(PAGES, SIZE, ROWS)
        self.fail = []
        self._where = where

    def _raise(self, where):
        error = self.fail.pop(0) if where == self._where and self.fail else None
        if error is not None:
            raise error

    def launch(self, plan):
        self._raise("launch")
        return super().launch(plan)

    def read(self, launched_step):
        result = super().read(launched_step)
        self._raise("read")
        return result


class Node:
    """Each step takes STEP seconds, and `stall` more once."""

    def __init__(self, max_rows=4, runner=None, silence=10.0):
        self.now, self.stall, self.outputs = 0.0, 0.0, []
        self.runner = runner or Runner()
        config = SchedulerConfig(context_length=512, token_budget=64, max_rows=max_rows)
        cache = KvCacheManager(PageAllocator(PAGES), PrefixTree(SIZE))
        self.core = DecodeCore(
            cache,
            config,
            DecodeConfig(fallback_tokens=64, handoff_seconds=silence, pull_seconds=10.0),
            Shell(lambda step, outputs, effects: self.outputs.extend(output for _, output in outputs)),
        )
        self.pipeline = StepPipeline(self.core, self.runner, False, lambda: self.now)

    def start(self, number, max_tokens=100, seconds=60.0, failed_steps=0, announce=False):
        params = SamplingParams(max_tokens=max_tokens, seed=number)
        prompt = tuple(range(number, number + 8))
        key, deadline = Key("caller", number), self.now + seconds
        request = EngineRequest(key, prompt, params, deadline=deadline, failed_steps=failed_steps)
        self.core.start(key, 1, 0, request, (), self.now, announce=announce)

    def run(self, turns):
        for _ in range(turns):
            due = self.pipeline.begin()
            if due is not None:
                self.now += STEP + self.stall
                self.stall = 0.0
                self.pipeline.finish(due)

    @property
    def refused(self):
        return [o for o in self.outputs if isinstance(o, FailedOutput) and o.reason == "WOULD_MISS_DEADLINE"]
