"""The gateway's state: its peers, its running requests, its problems and model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol

from baton.config import GatewayConfig, served_names
from baton.gateway import admission
from baton.gateway.authentication import ApiKey
from baton.gateway.cache_view import PromptPages
from baton.gateway.decode_client import DecodeClient
from baton.gateway.embedding_client import EmbeddingClient
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.probe import Prober
from baton.gateway.prompts import GatewaySession, prompt_for_log
from baton.gateway.request_log import RequestLog
from baton.gateway.resume import ResumePolicy
from baton.gateway.routing import RequestRouting, Router
from baton.gateway.split_decision import Split
from baton.gateway.token_log import TokenLog
from baton.gateway.tokenizer_client import TokenizerClient
from baton.gateway.traces import Traces
from baton.gateway.worker_registry import WorkerRegistry
from baton.parsers.registry import check_names
from baton.rpc.address import new_incarnation
from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, exhausted, failed_precondition, unavailable
from baton.rpc.logs import get_logger
from baton.rpc.tasks import wait_at_most
from baton.tracing.recorder import Recorder
from baton.v1 import inference_pb2, node_pb2

_log = get_logger()


class RunningRequest(Protocol):
    """A request, as the gateway keeps it while it runs (requests.Request)."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> TokenLog: ...
    @property
    def api_key(self) -> ApiKey: ...
    def fail(self, error: BatonError) -> None: ...


class Gateway:
    """Used on one event loop only."""

    def __init__(self, config: GatewayConfig, dial: Dial = open_channel) -> None:
        """dial: opens connections to the tokenizer and decode nodes. Raises BatonError for values not known
        in `config`."""
        self.config = config
        check_names(config)
        self.incarnation = new_incarnation()
        self.metrics = GatewayMetrics(config.ttft_target_seconds, config.itl_target_seconds)
        self.recorder = Recorder(config.recorder_events)
        self.policy = ResumePolicy(config.max_resumes, config.resume_wait_seconds)
        self.tokenizer = TokenizerClient(config.resume_wait_seconds, dial)
        self.router = Router(config.routing)
        self.nodes = WorkerRegistry(config, self.tokenizer, self.router, self._make_decode, dial)
        self.request_log = RequestLog()
        self.traces = Traces(self.incarnation, self.recorder, dial)
        self.split = Split(config.split, self.metrics)
        self.embedder = EmbeddingClient(config, self.nodes, self.tokenizer, dial)
        self._last_model: node_pb2.ModelInfo | None = None
        self._prober = Prober(self.hops, self.next_number, config.probe_every, self._probed)
        self._dial = dial
        self._numbers = count(1)
        self._running: set[RunningRequest] = set()
        self._calls = 0
        """Calls under way that are no requests for tokens."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._totals = node_pb2.Load()
        """Sums of the requests that ended."""

    # Life.

    def start(self) -> None:
        """Begins to connect; unreachable peers are retried."""
        self.nodes.start()
        if self.config.probe_every > 0:
            self._prober.start()

    def _probed(self, outcome: str, seconds: float) -> None:
        self.metrics.probes.labels(outcome).inc()
        self.metrics.probe_seconds.set(seconds)

    async def wait_until_usable(self, seconds: float) -> bool:
        """Waits at most `seconds` for the tokenizer and one decode node; logs what it waits for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        next_word = loop.time() + 2.0
        while self.missing():
            now = loop.time()
            if now >= deadline:
                return False
            if now >= next_word:
                _log.info("waiting", peers="; ".join(self.missing()))
                next_word = now + 5.0
            await asyncio.sleep(0.02)
        return True

    def missing(self) -> list[str]:
        """Why no request can be served now; empty: requests are served."""
        missing = self.nodes.missing()
        return [*missing, *self.nodes.places] if missing else []

    def problems(self) -> list[node_pb2.Problem]:
        """Current problems. A lost decode node stops nothing while another one is left."""
        problems = []
        if not self.tokenizer.connected:
            text = f"no tokenizer is reachable ({', '.join(self.tokenizer.nodes) or 'none is known'})"
            problems.append(
                node_pb2.Problem(reason="TOKENIZER_UNAVAILABLE", message=text, stops_serving=True)
            )
        lost = self.nodes.unusable()
        if lost or not self.nodes.decode:
            none_left = len(lost) == len(self.nodes.decode)
            reason = "NO_DECODE_NODE" if none_left else "DECODE_LOST"
            text = f"decode nodes that cannot be used: {'; '.join(lost)}"
            problems.append(node_pb2.Problem(reason=reason, message=text, stops_serving=none_left))
        failures = self._prober.failures
        if failures:
            hops = [
                f"{decode}{f' from {prefill}' if prefill else ''}: {text}"
                for (decode, prefill), text in failures.items()
            ]
            text = f"probes failed at {'; '.join(hops)}"
            all_failed = failures.keys() >= {(node.address, prefill) for node, prefill in self.hops()}
            problems.append(node_pb2.Problem(reason="PROBE_FAILED", message=text, stops_serving=all_failed))
        return problems

    @property
    def healthy(self) -> bool:
        return not self._draining and not any(problem.stops_serving for problem in self.problems())

    async def drain(self, seconds: float) -> int:
        """Refuses new requests and waits at most `seconds` for running ones; returns the number of those
        left."""
        self._draining = True
        await wait_at_most(seconds, self._idle)
        return self._in_use

    async def stop(self) -> None:
        """Fails running requests and disconnects from all peers. Idempotent."""
        self._draining = True
        self._prober.close()
        for request in list(self._running):
            request.fail(unavailable("the gateway is stopping", "STOPPING", 1000))
        await self.embedder.close()
        await self.nodes.close()
        await self.traces.close()
        self.request_log.close()

    # Requests.

    def next_number(self) -> int:
        return next(self._numbers)

    def admit(self, request: RunningRequest, start: inference_pb2.GenerateStart) -> None:
        """Raises BatonError for a request that is wrong, or that cannot be taken now.

        One that comes while no node can be reached is taken, and waits.
        """
        model = self.model_or_last()
        admission.check_start(start, self.config, model)
        self._begin(request.api_key)
        self._running.add(request)
        if self.config.log_prompts:
            _log.info("prompt", request=request.name, prompt=prompt_for_log(start))
        if model is None:
            raise self.no_decode_node()

    @property
    def _in_use(self) -> int:
        """Requests and calls that count against the limit."""
        return len(self._running) + self._calls

    def has_room(self, api_key: ApiKey) -> bool:
        """One more request may run, by the limits of this gateway and of the key."""
        return self._in_use < self.config.max_requests and api_key.has_room

    def _begin(self, api_key: ApiKey) -> None:
        if self._draining:
            raise unavailable("the gateway is draining", "DRAINING", 1000)
        if self._in_use >= self.config.max_requests:
            raise exhausted(f"{self._in_use} requests are running already", "TOO_MANY_REQUESTS", 1000)
        api_key.begin_request()
        self._idle.clear()

    @contextmanager
    def call(self, api_key: ApiKey) -> Iterator[None]:
        """Counts a call that is no request for tokens. Raises BatonError if none can be taken now."""
        self._begin(api_key)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            api_key.end_request()
            self._rest()

    def _rest(self) -> None:
        if not self._running and not self._calls:
            self._idle.set()

    def forget(self, request: RunningRequest, outcome: str) -> None:
        """The request has ended."""
        totals = self._totals
        setattr(totals, outcome, getattr(totals, outcome) + 1)
        totals.prompt_tokens += len(request.log.prompt_ids)
        totals.cached_tokens += request.log.cached_tokens
        totals.output_tokens += request.log.output_tokens
        if request in self._running:
            self._running.discard(request)
            request.api_key.end_request()
            if self.config.log_prompts:
                _log.info(
                    "answer", request=request.name, texts=[choice.text for choice in request.log.choices]
                )
        self._rest()

    def refused(
        self,
        api: str,
        reason: str,
        field: str | None,
        client: str,
        key: str = "",
        *,
        message: str = "",
        **more: object,
    ) -> None:
        """A client's message or call became no request. client: its address. key: the API key's name.
        message: what it was told."""
        self.metrics.refused(api, reason)
        named = {"key": key} if key else {}
        self.request_log.refused(api, reason, field, message, client=client, **named, **more)

    def routing(
        self, number: int, tokens: Sequence[int], namespace: str, session: GatewaySession | None
    ) -> RequestRouting:
        """The routing of the request with this number."""
        prompt = PromptPages(tokens, namespace)
        last = (session.decode_address, session.prefill_address) if session is not None else ()
        return RequestRouting(self.router, number, prompt, *last)

    def usable_nodes(self) -> list[DecodeClient]:
        return [node for node in self.nodes.decode.values() if node.usable]

    def hops(self) -> list[tuple[DecodeClient, str]]:
        """Pairs that requests may use: a decode node and a prefill node's address ("" if there are none)."""
        return [(node, prefill) for node in self.usable_nodes() for prefill in self.nodes.prefill or ("",)]

    def no_decode_node(self) -> BatonError:
        nodes = "; ".join(self.nodes.unusable())
        return unavailable(f"no decode node can be reached ({nodes})", "NO_DECODE_NODE", 1000)

    # What is served.

    def model(self) -> node_pb2.ModelInfo:
        """The model, as clients see it. Raises BatonError while no decode node has been reached."""
        model = self._model()
        if model is None:
            raise self.no_decode_node()
        return model

    def model_or_last(self) -> node_pb2.ModelInfo | None:
        """The model; while no decode node can be reached, the one that was served last, if any."""
        self._last_model = self._model() or self._last_model
        return self._last_model

    @property
    def model_name(self) -> str:
        """As clients see it; empty: none has been served yet."""
        own = self._last_model.name if self._last_model is not None else ""
        return served_names(self.config.served_name, own)[0]

    def _model(self) -> node_pb2.ModelInfo | None:
        models = list(self.nodes.models())
        if not models:
            return None
        model = node_pb2.ModelInfo()
        model.CopyFrom(models[0])
        model.name, *aliases = served_names(self.config.served_name, model.name)
        model.aliases.extend(aliases)
        if self.tokenizer.model is not None:
            model.chat = self.tokenizer.model.chat
            config, template = self.config, self.tokenizer.model
            model.tool_format = template.tool_format if config.tool_parser == "auto" else config.tool_parser
            model.reasoning_format = (
                template.reasoning_format if config.reasoning_parser == "auto" else config.reasoning_parser
            )
            model.template_variables.extend(self.tokenizer.model.template_variables)
            if self.tokenizer.model.HasField("begin_token_id"):
                model.begin_token_id = self.tokenizer.model.begin_token_id
            model.ClearField("default_sampling")
            if self.config.generation_config == "auto" and self.tokenizer.model.HasField("default_sampling"):
                model.default_sampling.CopyFrom(self.tokenizer.model.default_sampling)
            model.vocabulary_hash = self.tokenizer.model.vocabulary_hash
        model.context_length = min(each.context_length for each in models)
        model.grammars = all(each.grammars for each in models)
        return model

    def _make_decode(self, address: str) -> DecodeClient:
        silence = self.config.silence_seconds
        return DecodeClient(address, self.incarnation, silence, self._accept, self._dial)

    def _accept(self, info: node_pb2.NodeInfo) -> None:
        """Refuses a node that is no decode node or serves another model than the others."""
        if info.role != "decode" or not info.HasField("model"):
            raise failed_precondition(f"{info.address} is no decode node but {info.role or 'unknown'}")
        tokenizer = self.tokenizer.model
        if tokenizer is not None and tokenizer.vocab_size != info.model.vocab_size:
            raise failed_precondition(
                f"decode node {info.address} has a vocabulary of {info.model.vocab_size} tokens, the "
                f"tokenizer one of {tokenizer.vocab_size}: start all with the same model",
                "MODEL_MISMATCH",
            )
        model = self._model()
        if model is not None and model.fingerprint != info.model.fingerprint:
            raise failed_precondition(
                f"decode node {info.address} serves another model than the others: start all with the same",
                "MODEL_MISMATCH",
            )

    def info(self) -> node_pb2.NodeInfo:
        info = node_pb2.NodeInfo(role="gateway", incarnation=self.incarnation)
        model = self._model()
        if model is not None:
            info.model.CopyFrom(model)
        info.peers.extend(self.nodes.describe())
        return info

    def load(self) -> node_pb2.Load:
        load = node_pb2.Load(
            problems=self.problems(),
            draining=self._draining,
            requests=len(self._running) + self._calls,
            running=sum(node.requests for node in self.nodes.decode.values()),
        )
        load.MergeFrom(self._totals)
        return load
