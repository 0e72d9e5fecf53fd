"""The tokenizer process: loads a checkpoint's tokenizer in a thread and serves it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc.aio

from baton import model_path
from baton.config import TokenizerConfig
from baton.discovery.etcd import Registration, register
from baton.rpc.address import new_incarnation
from baton.rpc.errors import failed_precondition
from baton.rpc.node import run_node
from baton.tokenizer import hf_tokenizer, output_formats
from baton.tokenizer.service import TokenizerService
from baton.tracing.recorder import Recorder
from baton.v1 import node_pb2, tokenizer_pb2, tokenizer_pb2_grpc

SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name


class TokenizerNode:
    """The tokenizer process, as run_node runs it."""

    role = "tokenizer"

    def __init__(self, config: TokenizerConfig) -> None:
        self.address = ""
        self._config = config
        self._incarnation = new_incarnation()
        self._registration: Registration | None = None
        self._threads = ThreadPoolExecutor(max(1, config.threads), thread_name_prefix="vocabulary")
        self.recorder = Recorder(config.recorder_events)
        self._service = TokenizerService(self._threads, self.recorder)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self._service, server)
        return [SERVICE]

    async def start(self, address: str) -> None:
        self.address = address

        def load() -> hf_tokenizer.HFTokenizer:
            path = model_path.resolve(self._config.model, model_path.TOKENIZER_FILES)
            return hf_tokenizer.load(path, special_tokens_in_content=self._config.special_tokens_in_content)

        loop = asyncio.get_running_loop()
        try:
            self._service.tokenizer = await loop.run_in_executor(self._threads, load)
        except model_path.CheckpointError as error:
            raise failed_precondition(str(error), "CHECKPOINT") from error
        self._registration = register(self._config, self.role, self._incarnation, address)

    async def drain(self, seconds: float) -> int:
        """Refuses new calls; token streams of running calls continue."""
        self._service.draining = True
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        # Polled, because requests end in many places, and 50 ms do not matter when draining.
        while self._service.load().requests and clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return self._service.load().requests

    async def stop(self) -> None:
        if self._registration is not None:
            await self._registration.close()
        await self._service.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def info(self) -> node_pb2.NodeInfo:
        info = node_pb2.NodeInfo(incarnation=self._incarnation)
        loaded = self._service.tokenizer
        if loaded is not None:
            info.model.name = model_path.model_name(self._config.model)
            info.model.context_length = loaded.context_length
            info.model.vocab_size = loaded.vocabulary.size
            info.model.eos_token_ids.extend(loaded.eos_token_ids)
            info.model.chat = loaded.chat
            if loaded.chat:
                info.model.tool_format = output_formats.tool_format(loaded.template)
                info.model.reasoning_format = output_formats.reasoning_format(loaded.template)
                info.model.template_variables.extend(output_formats.variables(loaded.template))
            if loaded.begin_token_id is not None:
                info.model.begin_token_id = loaded.begin_token_id
            if loaded.default_sampling.ByteSize():
                info.model.default_sampling.CopyFrom(loaded.default_sampling)
            if loaded.images is not None:
                info.model.image_settings.CopyFrom(loaded.images)
            info.model.vocabulary_hash = loaded.vocabulary.hash
        return info

    def load(self) -> node_pb2.Load:
        return self._service.load()


async def serve(
    config: TokenizerConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the tokenizer until it is stopped; see run_node for exit codes and `stop`."""
    if stop is None and "torch" not in sys.modules:
        # In a separate process: transformers imports torch if it can, which would cost a second and some
        # hundred MB here. None in sys.modules makes the import fail.
        sys.modules["torch"] = None  # type: ignore[assignment]
    return await run_node(TokenizerNode(config), config, ready=ready, stop=stop)
