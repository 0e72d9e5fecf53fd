"""What a gateway knows of its peers, its running requests and its model, whatever executes it: a process
(`gateway.gateway`) or a simulated one (`sim.gateway`, `sizing.gateway`). Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol

from baton.authentication.api_keys import ApiKey
from baton.authentication.resume_ticket import TicketSeal
from baton.config import GatewayConfig, served_names
from baton.gateway import admission
from baton.gateway.auto_roles import AutoRoles
from baton.gateway.cache_view import PromptPages
from baton.gateway.decode_client import DecodeClient
from baton.gateway.media_fetch import MediaFetcher
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.pictures import PictureStore
from baton.gateway.prompts import GatewaySession, prompt_for_log
from baton.gateway.request_log import EndedRequest
from baton.gateway.resume import ResumePolicy
from baton.gateway.routing import RequestRouting, Router
from baton.gateway.runtime import GatewayRuntime
from baton.gateway.split_decision import Split
from baton.gateway.token_log import TokenLog
from baton.gateway.tokenizer_client import TokenizerClient
from baton.gateway.worker_registry import WorkerRegistry
from baton.rpc.errors import BatonError, exhausted, failed_precondition, unavailable
from baton.tracing.recorder import Recorder
from baton.v1 import decode_pb2, inference_pb2, node_pb2


class RunningRequest(Protocol):
    """A request, as the gateway keeps it while it runs (request.GatewayRequest)."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> TokenLog: ...
    @property
    def api_key(self) -> ApiKey: ...
    def fail(self, error: BatonError) -> None: ...


class GatewayShell(GatewayRuntime):
    """What `request` and `decode_client` need. Used on one event loop only."""

    seal: TicketSeal | None = None
    """None: requests have no resume tickets."""

    def __init__(self, config: GatewayConfig, tokenizer: TokenizerClient) -> None:
        """Raises BatonError for values not known in `config`."""
        self.config = config
        self.tokenizer = tokenizer
        self.metrics = GatewayMetrics(config.ttft_target_seconds, config.itl_target_seconds)
        self.pictures = PictureStore(
            config.image_memory_mib * 2**20, MediaFetcher(config.media_hosts), self.metrics.image
        )
        self.recorder = Recorder(config.recorder_events, self.clock)
        self.policy = ResumePolicy(config.max_resumes, config.resume_wait_seconds)
        self.router = Router(config.routing, self.clock)
        self.nodes = WorkerRegistry(config, tokenizer, self.router, self, self._accept)
        self.auto_roles = AutoRoles(config, self.nodes, self.router, self, self.metrics)
        self.split = Split(config.split, self.metrics, self.clock)
        self._last_model: node_pb2.ModelInfo | None = None
        self._numbers = count(1)
        self._running: set[RunningRequest] = set()
        self._calls = 0
        """Calls under way that are no requests for tokens."""
        self._draining = False
        self._totals = node_pb2.Load()
        """Sums of the requests that ended."""

    # Requests.

    def next_number(self) -> int:
        return next(self._numbers)

    @property
    def running(self) -> int:
        """Requests and calls under way."""
        return len(self._running) + self._calls

    def admit(self, request: RunningRequest, start: inference_pb2.GenerateStart) -> None:
        """Raises BatonError for a request that is wrong, or that cannot be taken now.

        One that comes while no node can be reached is taken, and waits.
        """
        model = self.model_or_last()
        admission.check_start(start, self.config, model)
        self._begin(request.api_key)
        self._running.add(request)
        if self.config.log_prompts:
            self.log.info("prompt", request=request.name, prompt=prompt_for_log(start))
        if model is None:
            raise self.no_decode_node()

    def has_room(self, api_key: ApiKey) -> bool:
        """One more request may run, by the limits of this gateway and of the key."""
        return self.running < self.config.max_requests and api_key.has_room

    def _begin(self, api_key: ApiKey) -> None:
        if self._draining:
            raise unavailable("the gateway is draining", "DRAINING", 1000)
        if self.running >= self.config.max_requests:
            raise exhausted(f"{self.running} requests are running already", "TOO_MANY_REQUESTS", 1000)
        api_key.begin_request()

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
            self.rest()

    def rest(self) -> None:
        """Called when a request or call has ended: perhaps none is left."""

    def ended(
        self, request: RunningRequest, outcome: str, ended: EndedRequest, error: BatonError | None
    ) -> None:
        """outcome: finished, cancelled or failed. error: of a request that did not finish."""
        totals = self._totals
        setattr(totals, outcome, getattr(totals, outcome) + 1)
        totals.prompt_tokens += ended.prompt_tokens
        totals.cached_tokens += ended.cached_tokens
        self.metrics.image_tokens.inc(ended.image_tokens)
        totals.output_tokens += ended.output_tokens
        self.metrics.ended(outcome, ended.key, ended.prompt_tokens, ended.output_tokens, ended.seconds)
        if request in self._running:
            self._running.discard(request)
            request.api_key.end_request()
            if self.config.log_prompts:
                texts = [choice.text for choice in request.log.choices]
                self.log.info("answer", request=request.name, texts=texts)
        self.rest()

    def routing(
        self, start: decode_pb2.DecodeStart, tokens: Sequence[int], session: GatewaySession | None
    ) -> RequestRouting:
        """The routing of a request, of whose prompt `tokens` are the tokens as prefix trees know them."""
        number, prompt = start.request, PromptPages(tokens, start.namespace)
        last = (session.decode_address, session.prefill_address) if session is not None else ()
        return RequestRouting(self.router, number, prompt, *last)

    def usable_nodes(self) -> list[DecodeClient]:
        return [node for node in self.nodes.decode.values() if node.usable]

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
        """The name that clients see; empty: none has been served yet."""
        checkpoint_name = self._last_model.name if self._last_model is not None else ""
        return served_names(self.config.served_name, checkpoint_name)[0]

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
            model.ClearField("image_settings")
            if all(each.images for each in models) and self.tokenizer.model.HasField("image_settings"):
                model.image_settings.CopyFrom(self.tokenizer.model.image_settings)
        model.images = model.HasField("image_settings")
        model.context_length = min(each.context_length for each in models)
        model.grammars = all(each.grammars for each in models)
        return model

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
